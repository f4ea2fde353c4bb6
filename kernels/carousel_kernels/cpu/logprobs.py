"""Log-probabilities on the CPU: library calls, with the search for the most likely tokens cut to the blocks that hold
them."""

from __future__ import annotations

import math

import torch

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``carousel_kernels.token_logprobs``."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    value = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    ranks = (logits > value).sum(dim=-1, dtype=torch.int32).long() + 1
    values, ids = _top(logits, num_top)
    return (value - total).squeeze(1), ranks, ids, values - total


def _top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and token ids [R, k] of each row's largest logits, best first: those of the k blocks that hold them."""
    block = math.gcd(logits.shape[1], 256)
    if block < 32 or not k or logits.shape[1] < 16 * block or k * block * 4 > logits.shape[1]:
        return logits.topk(k, dim=-1)
    blocks = logits.reshape(len(logits), logits.shape[1] // block, block).amax(dim=-1).topk(k, dim=-1).indices
    ids = (blocks.unsqueeze(2) * block + torch.arange(block)).flatten(1)
    values, best = logits.gather(1, ids).topk(k, dim=-1)
    return values, ids.gather(1, best)
