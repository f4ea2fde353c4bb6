"""``python -m carousel_kernels.bench``: the operators against the device's memory and against other libraries.

For every operator and shape: the bytes and operations that it cannot avoid, the time it takes, and which share of the
bandwidth of a copy that is. On a GPU with the Triton backend, on a CPU with the ``cpu`` backend; with --tiny and
TRITON_INTERPRET=1 also in Triton's interpreter, which proves that everything runs and times nothing worth knowing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

import carousel_kernels as ck

from .report import Row, measure
from .tune import tune


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m carousel_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--backend", choices=ck.available_backends(), help="default: triton on a GPU, else cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: only to see that everything runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only operators whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.2, help="time per case (0.2)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here (default: print it)")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="instead: try the attention kernels' configurations on this GPU, and keep the best in the package",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    if options.tune:
        if device.type != "cuda" and not options.tiny:
            print("bench: --tune: got a CPU, allowed: a GPU", file=sys.stderr)
            return 2
        path = None if options.tiny else Path(str(files("carousel_kernels.triton") / "tuned.json"))
        print(tune(device, seconds=options.seconds, tiny=options.tiny, path=path))
        return 0

    def show(row: Row) -> None:
        print(f"{row.operator:<16} {row.shape:<32} {row.error or f'{row.microseconds:,.1f} us'}", file=sys.stderr)

    backend = options.backend or ("triton" if device.type == "cuda" else "cpu")
    table = measure(device, backend, tiny=options.tiny, only=options.only, seconds=options.seconds, progress=show)
    if options.json:
        options.json.write_text(json.dumps(table.to_json(), indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(table.to_markdown(), "utf-8")
    else:
        print(table.to_markdown(), end="")
    return 1 if any(row.error for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
