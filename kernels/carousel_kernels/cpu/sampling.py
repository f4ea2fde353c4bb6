"""Sampling without sorting the vocabulary: the largest logits are taken out first, and nearly always suffice."""

from __future__ import annotations

import math

import torch

from carousel_kernels import reference

__all__ = ["gumbel_noise", "largest", "sample"]

gumbel_noise = reference.gumbel_noise

_CANDIDATES = 256
_ROWS_AT_ONCE = 4  # of the whole vocabulary: the hash's intermediate values then stay in cache


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block = math.gcd(logits.shape[1], 256)
    if block < 32 or logits.shape[1] < 16 * block:
        return reference.largest(logits)
    # Seven times as fast as max with its indices.
    values, best = logits.reshape(len(logits), -1, block).amax(dim=-1).max(dim=-1)
    within = logits.gather(1, (best * block).unsqueeze(1) + torch.arange(block)).argmax(dim=-1)
    failed = ~values.isfinite()
    return (best * block + within).masked_fill(failed, -1), failed


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    drawn = temperature > 0
    filtered = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    plain = drawn & ~filtered
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    rows = torch.nonzero(~drawn).squeeze(1)
    if len(rows) == len(tokens):
        return logits.argmax(dim=-1)
    if len(rows):
        tokens[rows] = logits[rows].argmax(dim=-1)
    for rows in torch.split(torch.nonzero(plain).squeeze(1), _ROWS_AT_ONCE):
        if len(rows):
            noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[1])
            tokens[rows] = noise.add_(logits[rows] / temperature[rows].unsqueeze(1)).argmax(dim=-1)
    rows = torch.nonzero(filtered).squeeze(1)
    if len(rows):
        arguments = [t[rows] for t in (logits, temperature, top_k, top_p, min_p, seeds, positions)]
        tokens[rows] = _sample_filtered(*arguments)
    return tokens


def _sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    scaled = logits / temperature.unsqueeze(1)
    count = min(_CANDIDATES, scaled.shape[1])
    # Ids in order first, so that the stable sort ranks equal logits by id.
    token_ids = scaled.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, rank = scaled.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(1, rank)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1]).unsqueeze(1)
    beyond_k = torch.arange(count) >= limit
    # Probabilities among what top_k keeps: all of the vocabulary, where it is off.
    kept_log_sum = ranked.masked_fill(beyond_k, float("-inf")).logsumexp(dim=-1)
    probs = (ranked - torch.where(top_k > 0, kept_log_sum, _log_sum(scaled)).unsqueeze(1)).exp()
    before = probs.cumsum(dim=-1) - probs
    beyond_p = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    dropped = beyond_k | beyond_p | (probs < min_p.unsqueeze(1) * probs[:, :1])
    dropped[:, 0] = False
    noisy = ranked.masked_fill(dropped, float("-inf")) + gumbel_noise(seeds, positions, token_ids)
    tokens = token_ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    # Unless the set ends above the last candidate, other tokens may belong to it as well; and with more than the
    # candidates in the top k, probabilities among those are not known. Then sort everything.
    smallest_kept = ranked.masked_fill(dropped, float("inf")).amin(dim=-1)
    if count < scaled.shape[1]:
        unsure = torch.nonzero((smallest_kept <= ranked[:, -1]) | (top_k > count)).squeeze(1)
        if len(unsure):
            arguments = [t[unsure] for t in (logits, temperature, top_k, top_p, min_p, seeds, positions)]
            tokens[unsure] = reference.sample(*arguments)
    return tokens


def _log_sum(scaled: torch.Tensor) -> torch.Tensor:
    """logsumexp of each row by itself: reducing a single row would split it over threads and round otherwise."""
    return torch.cat([row.logsumexp(dim=-1, keepdim=True) for row in scaled])
