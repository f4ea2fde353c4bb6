"""The block pool against a model of it, and its corners one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from carousel.engine.block_pool import BlockPool, blocks_for, extend_hashes
from carousel_kernels.layout import BLOCK_SIZE


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, salt)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with prompts of few families, share, fill, name and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[tuple[list[int], list[bytes]]] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 5 * BLOCK_SIZE))
    def arrive(self, family: int, length: int) -> None:
        tokens = [family] * length
        hashes = hashes_of(tokens)
        cached = self.pool.find(hashes[: (length - 1) // BLOCK_SIZE])
        fresh_needed = blocks_for(length) - len(cached)
        if fresh_needed + self.pool.num_revived(cached) > self.pool.num_available:
            return
        self.pool.share(cached)
        fresh = self.pool.allocate(fresh_needed)
        assert fresh is not None
        assert not set(fresh) & set(cached)
        self.tables.append((cached + fresh, hashes))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        table, hashes = data.draw(st.sampled_from(self.tables))
        for block, name in zip(table, hashes, strict=False):
            self.pool.name(block, name)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        self.pool.release(table)

    @rule(count=st.integers(0, 13))
    def too_many_change_nothing(self, count: int) -> None:
        before = self.pool.num_available
        blocks = self.pool.allocate(count)
        if count > before:
            assert blocks is None
        else:
            assert blocks is not None
            self.pool.release(blocks)
        assert self.pool.num_available == before

    @rule()
    def forget_everything(self) -> None:
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def holds(self) -> None:
        self.pool.check(table for table, _ in self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    table = pool.allocate(blocks_for(len(tokens)))
    assert table is not None
    for block, name in zip(table, hashes_of(tokens), strict=False):
        pool.name(block, name)
    return table


def test_a_released_prefix_is_found_until_its_blocks_are_needed() -> None:
    pool = BlockPool(4)
    tokens = list(range(3 * BLOCK_SIZE))
    table = filled(pool, tokens)
    pool.release(table)
    assert pool.find(hashes_of(tokens)) == table
    assert pool.num_cached == 3
    taken = pool.allocate(2)
    assert taken is not None
    # The blank block goes first, then the tail of the prefix: its head still serves others.
    assert pool.find(hashes_of(tokens)) == table[:2]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(3)
    first, second, third = ([i] * BLOCK_SIZE for i in range(3))
    for tokens in (first, second, third):
        pool.release(filled(pool, tokens))
    revived = pool.find(hashes_of(first))
    pool.share(revived)
    pool.release(revived)
    pool.allocate(1)
    assert pool.find(hashes_of(first))
    assert not pool.find(hashes_of(second))
    assert pool.find(hashes_of(third))


def test_hashes_name_whole_prefixes_and_respect_salts() -> None:
    same_block_other_parent = hashes_of([1] * BLOCK_SIZE + [2] * BLOCK_SIZE)[1]
    assert same_block_other_parent != hashes_of([3] * BLOCK_SIZE + [2] * BLOCK_SIZE)[1]
    assert hashes_of([1] * BLOCK_SIZE, "a") != hashes_of([1] * BLOCK_SIZE, "b")
    assert len(hashes_of([1] * (BLOCK_SIZE - 1))) == 0


def test_hashes_extend_in_place_as_tokens_come() -> None:
    tokens = [i % 7 for i in range(5 * BLOCK_SIZE + 3)]
    hashes: list[bytes] = []
    for end in range(1, len(tokens) + 1):
        extend_hashes(hashes, tokens[:end])
    assert hashes == hashes_of(tokens)


def test_the_check_notices_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="lost"):
        pool.check([])


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks: got 0"):
        BlockPool(0)
