"""Reports of other engines' users, about the engine, that have no other test; the index is ``tests/REPORTS.md``."""

from __future__ import annotations

from tests.engine.fakes import Bench
from tests.engine.test_scheduler import request
from tests.engine.tiny import started_engine

from carousel.engine.runner import DecoderRunner


def test_sglang_26248_the_engine_is_as_quick_after_preemptions_as_before() -> None:
    """14 x slower after a retraction: what a preemption leaves behind must not cost later requests a step."""
    limits = {"num_blocks": 8, "max_batch_tokens": 256, "max_batch_sequences": 8, "prefix_caching": False}

    def steps_of_a_later_batch(preempted_before: bool) -> list[int]:
        bench = Bench(**limits)
        if preempted_before:
            for name in "abcd":
                bench.submit(request(name, prompt_len=16, max_tokens=90))
            bench.run()
            assert sum(record.num_preemptions for record in bench.recorder.requests) > 0
        before = len(bench.runner.steps)
        for name in "wxyz":
            bench.submit(request(name, prompt_len=8, max_tokens=10))
        bench.run()
        return [step.num_tokens for step in bench.runner.steps[before:]]

    assert steps_of_a_later_batch(True) == steps_of_a_later_batch(False)


def test_vllm_5907_the_warm_up_meets_the_worst_shapes(monkeypatch) -> None:
    """Out of memory after the warm-up, or from logprobs: the largest steps come before the first client."""
    steps: list[tuple[int, int, bool]] = []
    real = DecoderRunner.run

    def run(self, schedule):
        entries = schedule.entries
        logprobs = all(entry.sequence.request.sampling.logprobs for entry in entries)
        steps.append((sum(entry.num_new_tokens for entry in entries), len(entries), logprobs))
        return real(self, schedule)

    monkeypatch.setattr(DecoderRunner, "run", run)
    engine = started_engine()
    try:
        assert max(tokens for tokens, _, _ in steps) == engine.settings.max_batch_tokens
        assert max(rows for _, rows, logprobs in steps if logprobs) == engine.settings.max_batch_sequences
    finally:
        engine.stop()
