"""What the scheduler itself costs for each step, by the number of running sequences, all of them decoding.

    .venv/bin/python scripts/bench_scheduler.py

No model and no tensor: `schedule` and what books a step (`launched`, `collected`) alone, on contexts of 200 tokens and
more, medians of many steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import cast

from carousel.engine.block_pool import BlockPool, blocks_for
from carousel.engine.detokenizer import Detokenizer
from carousel.engine.policy import make_policy
from carousel.engine.request import GenerationRequest, SamplingParams, Sequence
from carousel.engine.sampler import SequenceSampler
from carousel.engine.scheduler import Schedule, Scheduler, SchedulerLimits

PROMPT = 200


def sequence(number: int, steps: int) -> Sequence:
    """One with a prompt of its own, and neither detokenizer nor sampler, which the scheduler never looks at."""
    prompt = [(number * 7 + place) % 1000 for place in range(PROMPT)]
    return Sequence(
        request=GenerationRequest(prompt=prompt, sampling=SamplingParams(max_tokens=steps), request_id=str(number)),
        index=0,
        token_ids=prompt,
        num_prompt_tokens=PROMPT,
        max_total_tokens=1 << 30,
        order=number,
        detokenizer=cast(Detokenizer, None),
        sampler=cast(SequenceSampler, None),
        eos_ids=frozenset(),
    )


def take(step: Schedule) -> None:
    """What sampling would do: every sequence whose last token was computed gets another."""
    for entry in step.entries:
        if entry.samples:
            entry.sequence.token_ids.append(7)


def measure(count: int, policy: str, steps: int) -> tuple[float, float]:
    """Median seconds of ``schedule`` and of the booking with ``count`` sequences decoding."""
    pool = BlockPool(count * blocks_for(2 * PROMPT + steps + PROMPT))
    scheduler = Scheduler(SchedulerLimits(8192, count, 0.2), pool, make_policy(policy, {}))
    waiting = [sequence(number, steps) for number in range(count)]
    for one in waiting:
        scheduler.add(one)
    while any(one.num_computed_tokens < PROMPT for one in waiting):
        step = scheduler.schedule()
        scheduler.launched(step)
        scheduler.collected(step)
        take(step)
    schedules, commits = [], []
    for _ in range(steps):
        started = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        scheduler.launched(step)
        scheduler.collected(step)
        commits.append(time.perf_counter() - scheduled)
        take(step)
        schedules.append(scheduled - started)
        assert len(step.entries) == count
    return statistics.median(schedules), statistics.median(commits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="16,64,256,512,1024,2048", help="how many run (default %(default)s)")
    parser.add_argument("--policy", default="fcfs", choices=("fcfs", "priority", "fair", "deadline"))
    parser.add_argument("--steps", type=int, default=100, help="steps of each measurement (default %(default)s)")
    options = parser.parse_args()
    print("| sequences | schedule | book | both, for each sequence |\n|---|---|---|---|")
    for count in map(int, options.sequences.split(",")):
        schedule_s, commit_s = measure(count, options.policy, options.steps)
        whole = schedule_s + commit_s
        print(f"| {count} | {1e3 * schedule_s:.3f} ms | {1e3 * commit_s:.3f} ms | {1e6 * whole / count:.2f} us |")


if __name__ == "__main__":
    main()
