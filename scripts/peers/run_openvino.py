"""Runs a job on OpenVINO GenAI's continuous batching; the precision is int8, bf16 (a hint on float32 weights) or fp32.

python run_openvino.py JOB, in the environment that ``install.py`` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]
from job import Job, Request, answer, read_job, run_steps  # type: ignore[import-not-found]

_HINTS = {"fp32": "f32", "bf16": "bf16"}


class Engine:
    def __init__(self, job: Job) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = 4  # GB
        scheduling.max_num_batched_tokens = 512
        scheduling.max_num_seqs = 64
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = False
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
        if job.precision in _HINTS:
            options["INFERENCE_PRECISION_HINT"] = _HINTS[job.precision]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduling, "CPU", options)
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._count = 0

    def add(self, number: int, request: Request) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.output
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(numpy.array([request.prompt], dtype=numpy.int64))
        self._handles[number] = self._pipeline.add_request(self._count, prompt, config)
        self._left[number] = request.output
        self._count += 1

    def step(self) -> Iterable[tuple[int, int]]:
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        found = []
        for number, handle in list(self._handles.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            if count:
                found.append((number, count))
                self._left[number] -= count
                if self._left[number] <= 0:
                    del self._handles[number], self._left[number]
        return found


def main() -> None:
    job = read_job(sys.argv[1])
    engine = Engine(job)
    answer(job, lambda one: run_steps(engine, one))


if __name__ == "__main__":
    main()
