"""Tensor parallelism: which part of every weight a rank holds, and how the ranks' results become one.

As in Megatron-LM (Shoeybi et al., 2019): a rank has some of the attention heads and some of the MLP's inner features,
so that a layer sums twice over the ranks, after its output and its down projection. The embedding and the output layer
are cut by tokens. Where there are fewer KV heads than ranks, several ranks hold the same one; where they do not divide,
the first ranks have one more, with its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .errors import ModelLoadError
from .families import DecoderConfig

__all__ = ["ALONE", "Alone", "Group", "Part", "Ranks", "Split"]


@dataclass(frozen=True, slots=True)
class Part:
    """[begin, end) of a tensor's dimension ``dim``."""

    dim: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor, as a view."""
        return tensor.narrow(self.dim, self.begin, self.length)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape within a tensor of ``shape``."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


class Ranks(Protocol):
    """The ranks among which a decoder is split, seen from one of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, of one shape; may be x itself, changed. All ranks call it in the same order."""

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x [R, W], of one shape, side by side: [R, size * W]."""

    def share(self, x: torch.Tensor) -> None:
        """Make x, of one shape in all ranks, what it is in rank 0."""


class Alone:
    """No other ranks."""

    rank, size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def share(self, x: torch.Tensor) -> None:
        pass


ALONE = Alone()


class Group:
    """Ranks that are the processes of a ``torch.distributed`` group (NCCL on GPUs, gloo on the CPU).

    Calls are queued on the current stream and can be recorded in CUDA graphs.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(parts.unbind()), x.contiguous(), group=self._group)
        return parts.transpose(0, 1).reshape(x.shape[0], self.size * x.shape[1])

    def share(self, x: torch.Tensor) -> None:
        dist.broadcast(x, 0, group=self._group)


@dataclass(frozen=True, slots=True)
class Split:
    """What one rank holds of a decoder.

    Attributes:
        heads, kv_heads, inner: query heads, KV heads and inner features of the MLP: [begin, end).
        vocab: tokens of embedding and output layer; the last rank may have fewer than ``vocab_width``.
    """

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    inner: tuple[int, int]
    vocab: tuple[int, int]
    vocab_width: int

    @staticmethod
    def of(config: DecoderConfig, rank: int, size: int) -> Split:
        """The part of ``rank``.

        Raises:
            ModelLoadError: the model cannot be split into so many parts; says into how many.
        """
        if not fits(config, size):
            allowed = [str(n) for n in range(1, config.num_heads + 1) if fits(config, n)]
            raise ModelLoadError(
                f"--tensor-parallel-size {size} does not suit this model ({config.num_heads} attention heads, "
                f"{config.num_kv_heads} KV heads, {config.intermediate_size} inner features); "
                f"possible: {', '.join(allowed)}"
            )

        def share(whole: int) -> tuple[int, int]:
            """As equal as they can be; no rank has more than the first."""
            return -(-whole * rank // size), -(-whole * (rank + 1) // size)

        group, holders = config.num_heads // config.num_kv_heads, size // config.num_kv_heads
        if holders > 1:
            each = group // holders
            kv_heads, heads = (rank // holders, rank // holders + 1), (rank * each, (rank + 1) * each)
        else:
            kv_heads = share(config.num_kv_heads)
            heads = kv_heads[0] * group, kv_heads[1] * group
        width = -(-config.vocab_size // size)
        vocab = min(rank * width, config.vocab_size), min((rank + 1) * width, config.vocab_size)
        return Split(heads, kv_heads, share(config.intermediate_size), vocab, width)


def fits(config: DecoderConfig, size: int) -> bool:
    """Whether every rank gets whole KV heads, or as many ranks share each, and inner features and tokens."""
    holders, rest = divmod(size, config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    return (
        (size <= config.num_kv_heads or (rest == 0 and group % holders == 0))
        and size <= config.intermediate_size
        and (size - 1) * -(-config.vocab_size // size) < config.vocab_size
    )
