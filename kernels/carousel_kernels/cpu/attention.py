"""Paged attention out of library calls, without a compiler.

Decodes are bound by memory, so their keys and values are never copied: the scores are a sparse matrix product over the
cache as it lies (one CSR row per query head, its columns the rows of the cache that the head sees), the outputs a
weighted embedding bag over the same columns. Prompt chunks are bound by arithmetic: their blocks are gathered once and
multiplied densely, in tiles of query rows that touch only the keys they see. All arithmetic is in float32: a cache of
another type is widened as it is read, which costs more than a cache twice as large.

What depends only on the layout (columns, masks, tiles, buffers) is a plan, kept on the layout: built once per step,
used by every layer.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

__all__ = ["paged_attention"]

# Sequences share a softmax call when padding them to one length wastes fewer (query head, token) pairs than this: a
# pair costs about 7 ns, a call about 4 us.
_MERGE_PAIRS = 600

# Query tokens per tile of a prompt chunk: large enough for the matrix product, small enough that a causal tile skips
# most of the keys it does not see and that its scores stay in cache.
_TILE = 64


@functools.cache
def _accept_sparse_tensors() -> None:
    """PyTorch announces once per process that CSR tensors are in beta; make it do so here, unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: BatchLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    plans: dict[object, _Plan] | None = layout.plan
    if plans is None:
        plans = layout.plan = {}
    key = (sliding_window, q.shape[1], k_cache.shape, k_cache.dtype)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _Plan.build(q.shape[1], k_cache, layout, sliding_window)
    decodes = layout.num_decodes
    if plan.prompts is None and plan.decodes is not None:
        return plan.decodes.run(q, k_cache, v_cache, scale, softcap).to(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype)
    if plan.decodes is not None:
        out[:decodes] = plan.decodes.run(q[:decodes], k_cache, v_cache, scale, softcap)
    if plan.prompts is not None:
        plan.prompts.run(q, k_cache, v_cache, out, scale, softcap)
    return out


@dataclass(slots=True)
class _DecodePlan:
    """For sequences with one new token each; rows are (sequence, query head) pairs, sequences in ``order``."""

    order: torch.Tensor | None
    """int64 [S], which sequence each row group belongs to; None for the batch's own order."""
    inverse: torch.Tensor | None
    blocks: torch.Tensor | None
    """int64, blocks to widen to float32 before use, when the cache has another type; None to use the cache itself."""
    scores: torch.Tensor
    """float32 CSR [S * Hq, tokens * Hkv]: a stored element for each cache row that a head sees, then padding."""
    values: torch.Tensor
    columns: torch.Tensor
    bag_starts: torch.Tensor
    mask: torch.Tensor
    """float32 [stored elements], 0 or, for padding, -inf."""
    weights: torch.Tensor
    groups: list[tuple[torch.Tensor, torch.Tensor]]
    """Views of (scores, weights) as [rows, padded length], which together cover all stored elements."""

    @staticmethod
    def build(num_heads: int, k_cache: torch.Tensor, layout: BatchLayout, window: int | None) -> _DecodePlan:
        count, num_kv = layout.num_decodes, k_cache.shape[2]
        contexts = layout.context_lens_host[:count]
        seen = contexts if window is None else [min(c, window) for c in contexts]
        max_waste = _MERGE_PAIRS // num_heads
        order = list(range(count)) if len(_groups(seen, max_waste)) == 1 else _balanced_order(seen)
        tables = layout.block_tables[:count].long()
        blocks, num_rows = None, k_cache.shape[0] * BLOCK_SIZE * num_kv
        if k_cache.dtype != torch.float32:
            blocks = torch.cat([tables[s, : -(-contexts[s] // BLOCK_SIZE)] for s in range(count)])
            tables = _renumbered(tables, contexts)
            num_rows = blocks.numel() * BLOCK_SIZE * num_kv
        kv_head = torch.arange(num_heads).div(num_heads // num_kv, rounding_mode="floor").view(1, -1, 1)
        columns: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        shapes: list[tuple[int, int]] = []
        for members in _groups([seen[s] for s in order], max_waste):
            rows = torch.tensor(order[members])
            lengths = torch.tensor([seen[s] for s in order[members]]).unsqueeze(1)
            ends = torch.tensor([contexts[s] for s in order[members]]).unsqueeze(1)
            width = int(lengths.max())
            step = torch.arange(width)
            # Padding repeats the last token: its row is at hand, and finite.
            token = (ends - lengths + step).minimum(ends - 1)
            slot = tables[rows].gather(1, token // BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE
            columns.append((slot.unsqueeze(1) * num_kv + kv_head).view(-1))
            mask = torch.zeros(len(rows), width).masked_fill_(step >= lengths, float("-inf"))
            masks.append(mask.unsqueeze(1).expand(-1, num_heads, -1).reshape(-1))
            shapes.append((len(rows) * num_heads, width))
        widths = torch.tensor([w for n, w in shapes for _ in range(n)])
        starts = torch.zeros(len(widths) + 1, dtype=torch.int64)
        torch.cumsum(widths, 0, out=starts[1:])
        _accept_sparse_tensors()
        scores = torch.sparse_csr_tensor(
            starts,
            torch.cat(columns),
            torch.zeros(int(starts[-1])),
            size=(count * num_heads, num_rows),
            check_invariants=False,
        )
        values, weights = scores.values(), torch.empty(int(starts[-1]))
        sizes = [n * w for n, w in shapes]
        groups = [
            (a.view(shape), b.view(shape))
            for a, b, shape in zip(torch.split(values, sizes), torch.split(weights, sizes), shapes, strict=True)
        ]
        sorted_already = order == list(range(count))
        order_tensor = None if sorted_already else torch.tensor(order)
        inverse = None if order_tensor is None else order_tensor.argsort()
        return _DecodePlan(
            order_tensor,
            inverse,
            blocks,
            scores,
            values,
            scores.col_indices(),
            starts[:-1],
            torch.cat(masks),
            weights,
            groups,
        )

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        count, num_heads, dim = q.shape
        if self.blocks is not None:
            k_cache = k_cache.index_select(0, self.blocks).float()
            v_cache = v_cache.index_select(0, self.blocks).float()
        if self.order is not None:
            q = q.index_select(0, self.order)
        queries = q.reshape(count * num_heads, dim).float()
        keys = k_cache.view(-1, dim).t()
        values = self.values
        if softcap is None:
            values.copy_(self.mask)
            torch.sparse.sampled_addmm(self.scores, queries, keys, alpha=scale, out=self.scores)
        else:
            values.zero_()
            torch.sparse.sampled_addmm(self.scores, queries, keys, alpha=scale / softcap, out=self.scores)
            values.tanh_().mul_(softcap).add_(self.mask)
        for scores, weights in self.groups:
            torch.softmax(scores, -1, out=weights)
        out = torch.embedding_bag(v_cache.view(-1, dim), self.columns, self.bag_starts, False, 0, False, self.weights)[
            0
        ].view(count, num_heads, dim)
        return out if self.inverse is None else out.index_select(0, self.inverse)


@dataclass(slots=True)
class _Tile:
    """Query rows [first_row, last_row) of the batch against gathered tokens [first_key, last_key)."""

    first_row: int
    last_row: int
    first_key: int
    last_key: int
    mask: torch.Tensor
    """[group * rows, keys], 0 or -inf, to be added to the scores."""


@dataclass(slots=True)
class _PromptPlan:
    """For sequences with several new tokens."""

    blocks: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    """float32 [gathered blocks, 16, Hkv, D], of one layer. Kept, as fresh memory costs page faults."""
    tiles: list[_Tile]

    @staticmethod
    def build(num_heads: int, k_cache: torch.Tensor, layout: BatchLayout, window: int | None) -> _PromptPlan:
        group = num_heads // k_cache.shape[2]
        tiles: list[_Tile] = []
        chosen: list[torch.Tensor] = []
        row, gathered = layout.num_decodes, 0
        for s in range(layout.num_decodes, layout.num_sequences):
            new, context = layout.query_lens_host[s], layout.context_lens_host[s]
            computed = context - new
            first_block = 0 if window is None else max(0, computed - window + 1) // BLOCK_SIZE
            end_block = -(-context // BLOCK_SIZE)
            chosen.append(layout.block_tables[s, first_block:end_block])
            base = gathered - first_block * BLOCK_SIZE
            for start in range(0, new, _TILE):
                stop = min(start + _TILE, new)
                first = 0 if window is None else max(0, computed + start - window + 1)
                last = computed + stop
                mask = _mask(range(computed + start, last), range(first, last), window, group)
                tiles.append(_Tile(row + start, row + stop, base + first, base + last, mask))
            row += new
            gathered += (end_block - first_block) * BLOCK_SIZE
        blocks = torch.cat(chosen).long()
        keys = torch.empty(len(blocks), *k_cache.shape[1:])
        return _PromptPlan(blocks, keys, torch.empty_like(keys), tiles)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        num_kv, dim = k_cache.shape[2], q.shape[2]
        group = q.shape[1] // num_kv
        for cache, gathered in ((k_cache, self.keys), (v_cache, self.values)):
            if cache.dtype == torch.float32:
                torch.index_select(cache, 0, self.blocks, out=gathered)
            else:
                gathered.copy_(cache.index_select(0, self.blocks))
        keys = self.keys.view(-1, num_kv, dim).permute(1, 2, 0)
        values = self.values.view(-1, num_kv, dim).transpose(0, 1)
        for tile in self.tiles:
            rows = tile.last_row - tile.first_row
            queries = q[tile.first_row : tile.last_row].view(rows, num_kv, group, dim).permute(1, 2, 0, 3)
            queries = queries.reshape(num_kv, group * rows, dim).float()
            seen = keys[:, :, tile.first_key : tile.last_key]
            if softcap is None:
                scores = torch.baddbmm(tile.mask, queries, seen, alpha=scale)
            else:
                scores = torch.bmm(queries, seen).mul_(scale / softcap).tanh_().mul_(softcap).add_(tile.mask)
            result = torch.bmm(scores.softmax(-1), values[:, tile.first_key : tile.last_key])
            out[tile.first_row : tile.last_row].view(rows, num_kv, group, dim).copy_(
                result.view(num_kv, group, rows, dim).permute(2, 0, 1, 3)
            )


@dataclass(slots=True)
class _Plan:
    decodes: _DecodePlan | None
    prompts: _PromptPlan | None

    @staticmethod
    def build(num_heads: int, k_cache: torch.Tensor, layout: BatchLayout, window: int | None) -> _Plan:
        return _Plan(
            _DecodePlan.build(num_heads, k_cache, layout, window) if layout.num_decodes else None,
            _PromptPlan.build(num_heads, k_cache, layout, window)
            if layout.num_decodes < layout.num_sequences
            else None,
        )


def _balanced_order(lengths: list[int]) -> list[int]:
    """Sequences sorted by length and dealt out, so that equal shares of consecutive ones are equal work per thread."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    shares = min(torch.get_num_threads(), 8)
    return [s for share in range(shares) for s in by_length[share::shares]]


def _groups(lengths: list[int], max_waste: int) -> list[slice]:
    """Cut consecutive sequences into runs in which no member adds more than ``max_waste`` tokens of padding."""
    groups: list[slice] = []
    start = longest = total = 0
    for i, length in enumerate(lengths):
        members = i - start
        waste_before = longest * members - total
        waste_after = max(longest, length) * (members + 1) - total - length
        if members and waste_after - waste_before > max_waste:
            groups.append(slice(start, i))
            start, longest, total = i, 0, 0
        longest, total = max(longest, length), total + length
    groups.append(slice(start, len(lengths)))
    return groups


def _renumbered(tables: torch.Tensor, contexts: list[int]) -> torch.Tensor:
    """The block tables as they would be if each sequence's blocks lay one after the other."""
    counts = torch.tensor([-(-c // BLOCK_SIZE) for c in contexts])
    firsts = counts.cumsum(0) - counts
    return firsts.unsqueeze(1) + torch.arange(tables.shape[1])


def _mask(queries: range, keys: range, window: int | None, group: int) -> torch.Tensor:
    """[group * queries, keys], 0 where the query's position sees the key's, else -inf."""
    query_pos = torch.arange(queries.start, queries.stop).unsqueeze(1)
    key_pos = torch.arange(keys.start, keys.stop)
    hidden = key_pos > query_pos
    if window is not None:
        hidden |= key_pos <= query_pos - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return mask.repeat(group, 1)
