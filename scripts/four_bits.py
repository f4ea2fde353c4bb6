"""What 4-bit weights would cost in quality, which is why they are not offered: perplexity on the text of quality.py.

    python scripts/four_bits.py [--model URI] [--max-tokens N] [--group 32]

Linear layers but the output layer are rounded to 16 levels for every group of adjacent inputs of an output, times a
scale in bfloat16, and computed in float32: what a kernel would read is 4 bits a weight and 16 a group. Three ways:

- ``even``: levels a step apart, the largest magnitude at the outermost, as GGUF's Q4_0;
- ``normal``: levels that suit normally distributed weights best, found by Lloyd's algorithm (Least squares quantization
  in PCM, 1982) on random numbers, the idea of NF4 (Dettmers et al., QLoRA, 2023);
- ``searched``: those, with the scale that leaves the least squared error, of several starts, each refined once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from carousel.config import DEMO_MODEL
from carousel.models.decoder import Decoder
from carousel.models.loader import open_checkpoint
from carousel.models.parallel import Part
from carousel.models.source import resolve
from carousel.models.weights import TensorSource
from quality import TEXT, measure

EVEN = torch.arange(-8.0, 8.0)
_STARTS = (0.8, 0.9, 1.0, 1.1)  # of the searched scales, relative to that of the largest magnitude
_PIECE_ROWS = 1024

Round = Callable[[torch.Tensor], torch.Tensor]


def normal_levels(group: int, groups: int = 40_000, rounds: int = 60) -> torch.Tensor:
    """16 levels, ascending from -1, for groups of normal numbers whose largest magnitude is put at -1."""
    values = torch.randn(groups, group, generator=torch.Generator().manual_seed(0))
    values = (values / -_outermost(values)).flatten()
    levels = torch.linspace(-1.0, 1.0, 16)
    for _ in range(rounds):
        nearest = _nearest(values, levels)
        sums = torch.zeros(16).index_add_(0, nearest, values)
        levels = sums / torch.bincount(nearest, minlength=16).clamp(min=1)
    return levels / -levels[0]


def _outermost(x: torch.Tensor) -> torch.Tensor:
    """x [..., G] -> [..., 1], of each group the value of the largest magnitude, with its sign."""
    return x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))


def _nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)


def round_groups(x: torch.Tensor, levels: torch.Tensor, starts: Sequence[float] = ()) -> torch.Tensor:
    """x [..., G] with every value at the nearest level times its group's scale: that of the value of the largest
    magnitude, or, of those that ``starts`` lead to, the one with the least squared error."""
    full = _outermost(x) / levels[0]
    best, error = torch.zeros_like(x), torch.full_like(full, torch.inf)
    for factor in starts or (1.0,):
        scale = full * factor
        if starts:
            chosen = levels[_nearest(x / scale, levels)]
            scale = (x * chosen).sum(-1, keepdim=True) / (chosen * chosen).sum(-1, keepdim=True)
        scale = scale.bfloat16().float()
        rounded = torch.where(scale == 0, 0.0, levels[_nearest(x / scale, levels)] * scale)
        left = (rounded - x).square().sum(-1, keepdim=True)
        best, error = torch.where(left < error, rounded, best), torch.minimum(left, error)
    return best


class RoundedSource:
    """A checkpoint whose linear layers, but for the output layer, have gone through ``change``, a function of weights
    float32 [N, K / G, G]; see ``TensorSource`` for the methods."""

    def __init__(self, source: TensorSource, group: int, change: Round) -> None:
        self._source, self._group, self._change = source, group, change
        self.shapes, self.where, self.files, self.complete = source.shapes, source.where, source.files, source.complete

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        self._source.read(name, out, scale=scale, offset=offset, part=part)
        if name.endswith("_proj.weight"):
            for rows in out.split(_PIECE_ROWS):
                grouped = rows.float().view(rows.shape[0], -1, self._group)
                rows.copy_(self._change(grouped).view(rows.shape))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="a model, or where it is to be had")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--max-tokens", type=int, default=0, help="of the text, from its start; 0: all")
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale")
    options = parser.parse_args(argv)
    config, plain, tokenizer, _, _ = open_checkpoint(Path(resolve(options.model)), torch.device("cpu"))
    ids = tokenizer.encode(options.text.read_text("utf-8"))[: options.max_tokens or None]
    normal = normal_levels(options.group)
    ways: dict[str, Round] = {
        "float32": lambda x: x,
        "even": partial(round_groups, levels=EVEN),
        "normal": partial(round_groups, levels=normal),
        "searched": partial(round_groups, levels=normal, starts=_STARTS),
    }
    reference = None
    print("| weights | perplexity | against float32 | top-1 agreement |\n|---|---|---|---|")
    for name, change in ways.items():
        found = measure(Decoder(config, RoundedSource(plain, options.group, change)), ids)
        reference = reference or found
        rise = 100 * (found.perplexity / reference.perplexity - 1)
        agreement = float((found.likeliest == reference.likeliest).float().mean())
        print(f"| {name} | {found.perplexity:.2f} | {rise:+.1f} % | {agreement:.1%} |", flush=True)


if __name__ == "__main__":
    main()
