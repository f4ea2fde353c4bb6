"""KV blocks: who holds which, which are free, and which full ones can be found again by their content.

A full block is named by a chained hash, ``H(parent's hash, its 16 tokens)``, rooted in a salt, so that a hash names a
whole prefix and not only 16 tokens (the scheme that vLLM introduced as automatic prefix caching). A block that nobody
references keeps its content and its name until it is taken for something else, least recently used first.

Every block is in exactly one state: *free* (no content worth keeping), *cached* (content named in the index, no
reference) or *referenced*. ``free + cached + referenced == all`` always; :meth:`BlockPool.check` proves it in tests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from carousel_kernels.layout import BLOCK_SIZE


def root_hash(salt: str = "") -> bytes:
    """The parent of every first block: prompts share prefixes only under equal salts."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], salt: str = "") -> None:
    """Append to ``hashes`` the names of the full blocks of ``token_ids`` that it lacks, in place."""
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(len(hashes) * BLOCK_SIZE, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = array("q", token_ids[start : start + BLOCK_SIZE]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        hashes.append(parent)


def blocks_for(num_tokens: int) -> int:
    """Blocks that ``num_tokens`` tokens occupy."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """All KV blocks of one engine. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: got {num_blocks}, allowed: an integer >= 1")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # A stack: the block freed last is taken first, so a lightly loaded engine touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_touched = 0  # the blocks from this one on were never used
        self.sharing = 0
        """Changes whenever one more or one less sequence holds a block that several hold."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can give out now."""
        return len(self._free) + len(self._cached)

    def contents(self) -> tuple[list[int], list[bytes | None]]:
        """References and name of each block up to the last that was ever used. Copies."""
        return self._references[: self._num_touched], self._names[: self._num_touched]

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks for writing, or None, and take nothing, if there are not enough."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
                if block >= self._num_touched:
                    self._num_touched = block + 1
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._index[name]
            self._names[block] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of ``hashes``. References nothing: see :meth:`share`."""
        blocks = []
        for name in hashes:
            block = self._index.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_revived(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody references now: sharing them takes them away from :meth:`allocate`."""
        return sum(1 for block in blocks if not self._references[block])

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` have only one reference: releasing that one makes them available."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def held(self, table: Iterable[int], whole: int) -> int:
        """What a table holds, in parts of which a block has ``whole``: of a block with ``k`` references a ``k``-th."""
        references = self._references
        return sum(whole // references[block] for block in table)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks`` (from :meth:`find`, with no allocation in between)."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            else:
                self.sharing += 1
            self._references[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """Say that ``block`` is full, computed, and holds the prefix ``name``. From now on it is never written again.

        When another block already holds that prefix the first one keeps the name; this one just stays anonymous.
        """
        if self._names[block] is None and name not in self._index:
            self._names[block] = name
            self._index[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of a sequence's ``blocks``.

        The last block goes first, so that of a prefix the tail is forgotten before the head that others may share.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                self.sharing += 1
                continue
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def clear_cache(self) -> int:
        """Forget every unreferenced prefix; returns how many blocks that freed."""
        count = len(self._cached)
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._free.append(block)
        return count

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the invariants against the block tables of all live sequences.

        Raises:
            AssertionError: a block is lost, held twice in one table, counted wrongly, or shared while writable.
        """
        held: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            held.update(table)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        assert not (free | cached) & set(held), "a block is given out and available"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        for block in range(self.num_blocks):
            assert self._references[block] == held[block], f"block {block}: {self._references[block]} != {held[block]}"
            if held[block] > 1 or block in cached:
                assert self._names[block] is not None, f"block {block} is shared or cached without a name"
        for name, block in self._index.items():
            assert self._names[block] == name, f"the index names block {block} wrongly"
