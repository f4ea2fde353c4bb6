"""How long linear layers take on this CPU: float32, bfloat16 and 8-bit integers, by shape and number of rows.

    python -m scripts.linear_table [--threads 2] [--rows 1,4,8,16,32,64,128,256] [--shapes 960x576,576x576,...]

A cell is the least time of one layer in microseconds, since other work on the machine can only add. Between two runs of
the same copy of a layer's weights come as many others as make ``--working-set-mib``, so that weights come from memory,
as they do in a model. The implementations take turns. The last lines sum the layers of one decoding step of the demo
model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

import carousel_kernels as ck
from carousel_kernels.cpu import half, linear, quant

Linear = Callable[[torch.Tensor], torch.Tensor]

DEMO_SHAPES = {(960, 576): 30, (576, 576): 30, (3072, 576): 30, (576, 1536): 30, (49152, 576): 1}
"""(N, K) of SmolLM2-135M's layers -> how many there are: qkv, o, gate and up, down, output."""


def _prepare(name: str, weight: torch.Tensor) -> Linear:
    if name == "float32":
        return linear.prepare_linear(weight)
    if name == "bfloat16":
        return half.prepare_half_linear(ck.halve_weight(weight))
    if name.startswith("bfloat16-"):
        return half.prepare_half_linear(ck.halve_weight(weight), names=(name.partition("-")[2],))
    return quant.prepare_quantized_linear(ck.quantize_weight(weight), names=(name,))


def _time(layers: dict[str, list[Linear]], x: torch.Tensor, seconds: float) -> dict[str, float]:
    """Least mean seconds of a call by name; in turns."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(next(iter(times.values()))) < 3:
        for name, copies in layers.items():
            copies[0](x)  # wakes the threads
            start = time.perf_counter()
            for layer in copies[1:]:
                layer(x)
            times[name].append((time.perf_counter() - start) / (len(copies) - 1))
    return {name: min(values) for name, values in times.items()}


def _available(names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        try:
            with torch.inference_mode():
                _prepare(name, torch.rand(64, 64))(torch.rand(2, 64))
            found.append(name)
        except (AttributeError, NotImplementedError, RuntimeError):
            continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in DEMO_SHAPES))
    parser.add_argument("--names", default=f"float32,bfloat16,{','.join(quant.NAMES)}")
    parser.add_argument("--working-set-mib", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and number of rows")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    rows = [int(text) for text in options.rows.split(",")]
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in options.shapes.split(","))]
    names = _available(options.names.split(","))
    steps = {name: [0.0] * len(rows) for name in names}
    with torch.inference_mode():
        for n, k in shapes:
            copies = max(3, min(60, options.working_set_mib * 2**20 // (n * k)))
            weight = torch.randn(n, k)
            layers = {name: [_prepare(name, weight) for _ in range(copies)] for name in names}
            print(f"\n| {n} x {k}, us | " + " | ".join(map(str, rows)) + " |\n|---" + "|---" * len(rows) + "|")
            table = [_time(layers, torch.randn(count, k), options.seconds) for count in rows]
            for name in names:
                print(f"| {name} | " + " | ".join(f"{times[name] * 1e6:.0f}" for times in table) + " |", flush=True)
                for i, times in enumerate(table):
                    steps[name][i] += times[name] * DEMO_SHAPES.get((n, k), 0)
    print("\n| all layers of a step, ms | " + " | ".join(map(str, rows)) + " |\n|---" + "|---" * len(rows) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{seconds * 1e3:.1f}" for seconds in steps[name]) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
