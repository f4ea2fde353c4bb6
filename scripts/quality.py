"""What quantised or 16-bit weights cost in quality: perplexity and top-1 agreement with float32 on a fixed text.

    python -m scripts.quality [--model URI] [--text FILE] [--against none:bfloat16,int8:float32] [--max-tokens N]

The text is this project's own documentation, frozen. It is cut into windows of 512 tokens, each seen alone, and every
token after a window's first is predicted from those before it. Agreement is the share of positions at which the most
likely token is float32's. With --limit PERCENT the exit status is 1 if a perplexity rises by more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from carousel.config import DEMO_MODEL
from carousel.models.decoder import Decoder
from carousel.models.loader import load_model
from carousel.models.source import resolve
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "quality.txt"
WINDOW = 512


@dataclass(frozen=True)
class Quality:
    """``perplexity`` over ``predictions`` tokens, and at each of them the most likely one, int64 [predictions]."""

    perplexity: float
    predictions: int
    likeliest: torch.Tensor


def measure(decoder: Decoder, ids: Sequence[int], window: int = WINDOW) -> Quality:
    """The quality of a decoder's predictions on token ids, window by window."""
    cache = decoder.allocate_kv_cache(-(-window // BLOCK_SIZE))
    loss, likeliest = 0.0, []
    with torch.inference_mode():
        for first in range(0, len(ids) - 1, window):
            piece = torch.tensor(ids[first : first + window])
            count = len(piece)
            layout = BatchLayout(
                query_start=torch.tensor([0, count], dtype=torch.int32),
                context_lens=torch.tensor([count], dtype=torch.int32),
                block_tables=torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32).unsqueeze(0),
                slots=torch.arange(count),
                query_lens_host=[count],
                context_lens_host=[count],
                num_decodes=int(count == 1),
            )
            logits = decoder.forward(piece, torch.arange(count), layout, cache, torch.arange(count - 1))
            loss += float(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum"))
            likeliest.append(logits.argmax(dim=1))
    every = torch.cat(likeliest)
    return Quality(math.exp(loss / len(every)), len(every), every)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--against",
        default="none:float32:bfloat16,none:bfloat16,int8:float32",
        help="quantization:dtype, or quantization:dtype:type of K and V, with commas between",
    )
    parser.add_argument("--max-tokens", type=int, default=0, help="of the text, from its start; 0: all")
    parser.add_argument("--limit", type=float, default=math.inf, help="percent that a perplexity may rise")
    options = parser.parse_args(argv)
    path = resolve(options.model)
    worst, reference = 0.0, None
    print("| weights | K and V | perplexity | against float32 | top-1 agreement | predictions |\n" + "|---" * 6 + "|")
    for name in ("none:float32", *options.against.split(",")):
        quantization, dtype, kv_dtype = (*name.split(":"), "auto", "auto")[:3]
        model = load_model(path, quantization=quantization, dtype=dtype, kv_dtype=kv_dtype)
        ids = model.tokenizer.encode(options.text.read_text("utf-8"))
        found = measure(model.decoder, ids[: options.max_tokens or None])
        reference = reference or found
        rise = 100 * (found.perplexity / reference.perplexity - 1)
        agreement = float((found.likeliest == reference.likeliest).float().mean())
        worst = max(worst, rise)
        label = dtype if quantization == "none" else quantization
        stored = str(model.decoder.kv_dtype).removeprefix("torch.")
        cells = (label, stored, f"{found.perplexity:.4f}", f"{rise:+.2f} %", f"{agreement:.2%}", str(found.predictions))
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(worst > options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
