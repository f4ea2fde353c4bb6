"""Runs a job on vLLM's CPU backend; the precision is fp32 or bf16.

python run_vllm.py JOB, in the environment that ``install.py`` makes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from job import Job, Request, answer, read_job, run_steps  # type: ignore[import-not-found]

_TYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Engine:
    def __init__(self, job: Job) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._engine = LLM(
            model=job.model,
            dtype=_TYPES[job.precision],
            max_model_len=job.longest + 16,
            max_num_seqs=64,
            max_num_batched_tokens=max(512, job.longest + 16),
            enable_prefix_caching=False,
        ).llm_engine
        self._numbers: dict[str, int] = {}
        self._count = 0

    def add(self, number: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        name = str(self._count)
        self._count += 1
        self._numbers[name] = number
        sampling = SamplingParams(
            temperature=0, max_tokens=request.output, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)

    def step(self) -> Iterable[tuple[int, int]]:
        return [
            (self._numbers[output.request_id], len(output.outputs[0].token_ids))
            for output in self._engine.step()
            if output.outputs and output.outputs[0].token_ids
        ]


def main() -> None:
    job = read_job(sys.argv[1])
    cpus = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # By number: left to itself it keeps one of the CPUs for other work.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    engine = Engine(job)
    answer(job, lambda one: run_steps(engine, one))


if __name__ == "__main__":
    main()
