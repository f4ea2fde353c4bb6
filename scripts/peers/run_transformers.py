"""Runs a job on transformers in Carousel's own environment: generate on static batches, or its continuous batching.

python run_transformers.py JOB static|continuous. The model is a folder as transformers saves it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from job import Job, Pass, Record, answer, read_job  # type: ignore[import-not-found]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PAD = 2
_PAGE = 256


def load(job: Job) -> Any:
    torch.set_num_threads(job.threads)
    return transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=_TYPES[job.precision], attn_implementation="sdpa"
    ).eval()


class _Times(transformers.LogitsProcessor):
    """Notes when each step's logits are there."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.taken.append(time.perf_counter())
        return scores


def run_static(model: Any, one: Pass, batch: int) -> list[Record]:
    """Left-padded batches in order of arrival; each runs until its longest answer is done."""
    records = []
    start = time.perf_counter()
    for first in range(0, len(one.requests), batch):
        group = one.requests[first : first + batch]
        width = max(len(request.prompt) for request in group)
        ids = torch.full((len(group), width), _PAD)
        mask = torch.zeros((len(group), width), dtype=torch.int64)
        for row, request in enumerate(group):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        times = _Times()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=max(request.output for request in group), do_sample=False,
                pad_token_id=_PAD, eos_token_id=None, logits_processor=transformers.LogitsProcessorList([times]),
            )  # fmt: skip
        steps = [at - start for at in times.taken]
        records += [Record(request.at, [(at, 1) for at in steps[: request.output]]) for request in group]
    return records


def run_continuous(model: Any, one: Pass) -> list[Record]:
    """All requests at once; only the times of the first and last tokens are known."""
    longest = max(len(request.prompt) + request.output for request in one.requests)
    config = transformers.ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=len(one.requests) * (longest // _PAGE + 1) + 8,
        max_batch_tokens=1024,
        max_requests_per_batch=len(one.requests),
        allow_block_sharing=False,
    )
    generation = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=_PAD, max_new_tokens=longest
    )
    records = [Record(request.at) for request in one.requests]
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=True
    ) as manager:
        start = time.perf_counter()
        for number, request in enumerate(one.requests):
            manager.add_request(
                list(request.prompt), request_id=str(number), max_new_tokens=request.output, eos_token_id=-1,
                record_timestamps=True,
            )  # fmt: skip
        left = len(records)
        while left:
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running():
                    raise SystemExit("transformers' continuous batching ended early")
            elif result.is_finished():
                times, tokens = result.timestamps, len(result.generated_tokens)
                records[int(result.request_id)].deltas += [(times[0] - start, 1), (times[-1] - start, tokens - 1)]
                left -= 1
    return records


def main() -> None:
    job, kind = read_job(sys.argv[1]), sys.argv[2]
    model = load(job)
    model.generation_config.eos_token_id = None
    answer(job, lambda one: run_static(model, one, job.batch) if kind == "static" else run_continuous(model, one))


if __name__ == "__main__":
    main()
