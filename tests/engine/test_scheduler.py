"""The scheduler's promises, each by name; the numbers are reports of other engines' users that must not happen here."""

from __future__ import annotations

import pytest
from tests.engine.fakes import Bench, expected

from carousel.engine.cost_model import StepCostModel
from carousel.engine.policy import make_policy
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams, SequenceStatus
from carousel.engine.scheduler import MIN_CHUNK


def request(
    name: str, prompt_len: int = 8, max_tokens: int = 8, *, n: int = 1, offset: int | None = None, **fields: object
) -> GenerationRequest:
    start = sum(map(ord, name)) if offset is None else offset
    return GenerationRequest(
        prompt=[2 + (start + i) % 60 for i in range(prompt_len)],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n),
        request_id=name,
        **fields,  # type: ignore[arg-type]
    )


def scheduled(bench: Bench, step: int = -1) -> dict[str, int]:
    """Request -> tokens computed in a step."""
    return {e.sequence.request.request_id: e.num_new_tokens for e in bench.runner.steps[step].entries}


def test_a_finished_request_leaves_at_once_and_a_waiting_one_takes_its_place() -> None:
    bench = Bench(max_batch_sequences=2)
    for name, tokens in (("long", 20), ("short", 3), ("next", 5)):
        bench.submit(request(name, max_tokens=tokens))
    occupancy = []
    while bench.step():
        occupancy.append(set(scheduled(bench)))
    last_of_short = max(i for i, names in enumerate(occupancy) if "short" in names)
    first_of_next = min(i for i, names in enumerate(occupancy) if "next" in names)
    assert first_of_next == last_of_short + 1
    assert bench.finish_order == ["short", "next", "long"]


def test_long_prompts_are_computed_in_chunks_beside_the_decodes() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=32)
    bench.submit(request("decoding", prompt_len=8, max_tokens=30))
    bench.step()
    bench.submit(request("long", prompt_len=100, max_tokens=2))
    seen = []
    while bench.step():
        seen.append(scheduled(bench))
    chunks = [step["long"] for step in seen if step.get("long", 0) > 1]
    assert chunks == [31, 31, 31, 7]
    assert all(step["decoding"] == 1 for step in seen[:4])
    assert bench.outputs["decoding", 0].token_ids == expected(request("decoding", 8, 30))[0]


def test_a_static_group_is_admitted_only_when_the_last_one_has_wholly_finished() -> None:
    bench = Bench(max_batch_sequences=2, static=True)
    for name, tokens in (("a", 3), ("b", 12), ("c", 2), ("d", 2)):
        bench.submit(request(name, max_tokens=tokens))
    groups = []
    while bench.step():
        groups.append(frozenset(scheduled(bench)))
    first_of_c = min(i for i, names in enumerate(groups) if "c" in names)
    last_of_b = max(i for i, names in enumerate(groups) if "b" in names)
    assert first_of_c == last_of_b + 1
    assert groups[first_of_c] == {"c", "d"}


def test_a_static_batch_keeps_its_shape_and_continuous_batching_does_not() -> None:
    computed = {}
    for static in (True, False):
        bench = Bench(max_batch_sequences=2, static=static)
        for name, tokens in (("short", 2), ("long", 12)):
            bench.submit(request(name, max_tokens=tokens))
        bench.run()
        assert bench.outputs["long", 0].token_ids == expected(request("long", max_tokens=12))[0]
        computed[static] = sum(step.num_tokens for step in bench.runner.steps)
        assert sum(step.num_idle_tokens for step in bench.recorder.steps) == (10 if static else 0)
    assert computed[True] == computed[False] + 10


@pytest.mark.parametrize("max_batch_tokens", [16, 256])
def test_a_static_batch_pads_its_prompts_to_the_longest(max_batch_tokens: int) -> None:
    bench = Bench(max_batch_tokens=max_batch_tokens, max_batch_sequences=3, static=True, prefix_caching=False)
    lengths = {"one": 1, "short": 9, "long": 40}
    for name, length in lengths.items():
        bench.submit(request(name, prompt_len=length, max_tokens=5))
    bench.run()
    for name, length in lengths.items():
        assert bench.outputs[name, 0].token_ids == expected(request(name, length, 5))[0]
    assert sum(step.num_prefill_tokens + step.num_idle_tokens for step in bench.recorder.steps) >= 3 * 40 - 1
    padded = sum(entry.num_new_tokens for step in bench.runner.steps for entry in step.entries if entry.start >= 40)
    assert padded <= 3 * 4  # decodes alone stand behind the longest prompt


def test_padding_takes_no_memory_that_the_living_need() -> None:
    bench = Bench(num_blocks=7, max_batch_tokens=256, max_batch_sequences=3, static=True, prefix_caching=False)
    for name, length in (("a", 1), ("b", 1), ("long", 48)):
        bench.submit(request(name, prompt_len=length, max_tokens=5))
    bench.run()
    assert bench.outputs["long", 0].token_ids == expected(request("long", 48, 5))[0]
    assert sum(record.num_preemptions for record in bench.recorder.requests) == 0


def test_who_leaves_a_static_batch_early_frees_its_row() -> None:
    bench = Bench(max_batch_sequences=2, static=True)
    for name in ("stays", "leaves"):
        bench.submit(request(name, max_tokens=12))
    bench.step()
    bench.core.end("leaves", FinishReason.CANCELLED)
    bench.run()
    assert sum(step.num_idle_tokens for step in bench.recorder.steps) == 0


def test_static_groups_are_filled_even_when_their_prompts_exceed_one_step() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=16, max_batch_sequences=3, static=True)
    for name in "abc":
        bench.submit(request(name, prompt_len=30, max_tokens=2))
    bench.step()
    assert len(bench.scheduler.running) == 3


def test_vllm_25538_preemption_does_not_thrash() -> None:
    # Two sequences that cannot both fit to the end: one must be preempted, but only a few times.
    bench = Bench(num_blocks=8, max_batch_tokens=256, max_batch_sequences=8, prefix_caching=False)
    for name in "abcd":
        bench.submit(request(name, prompt_len=16, max_tokens=90))
    bench.run()
    for name in "abcd":
        assert bench.outputs[name, 0].token_ids == expected(request(name, 16, 90))[0]
    assert 0 < sum(record.num_preemptions for record in bench.recorder.requests) <= 12
    # Every stay on the batch made progress: more tokens than preemptions by far.
    assert len(bench.recorder.steps) < 4 * 90 + 20


def test_vllm_41951_a_preempted_request_keeps_its_place() -> None:
    bench = Bench(num_blocks=6, max_batch_tokens=256, max_batch_sequences=4, prefix_caching=False)
    for name in "abc":
        bench.submit(request(name, prompt_len=16, max_tokens=60))
    bench.run()
    assert any(record.num_preemptions for record in bench.recorder.requests)
    assert bench.finish_order == ["a", "b", "c"]


def test_vllm_40004_an_urgent_request_is_not_stuck_behind_a_full_batch() -> None:
    bench = Bench(max_batch_sequences=2, policy="priority")
    for name in "ab":
        bench.submit(request(name, max_tokens=40, priority=5))
    for _ in range(3):
        bench.step()
    bench.submit(request("urgent", max_tokens=4, priority=0))
    bench.step()
    assert "urgent" in scheduled(bench)
    bench.run()
    assert bench.finish_order[0] == "urgent"
    for name in "ab":
        assert bench.outputs[name, 0].token_ids == expected(request(name, max_tokens=40))[0]


def test_priority_preempts_nobody_in_vain() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=256, policy="priority", prefix_caching=False)
    bench.submit(request("same", prompt_len=64, max_tokens=20, priority=1))
    bench.submit(request("worse", prompt_len=16, max_tokens=20, priority=2))
    bench.step()
    # Even without "worse" this one would not fit beside "same".
    bench.submit(request("big", prompt_len=100, max_tokens=4, priority=1))
    for _ in range(10):
        bench.step()
        assert set(scheduled(bench)) == {"same", "worse"}
    bench.run()
    # Once "same" is gone, "big" fits at the cost of "worse".
    assert bench.finish_order == ["same", "big", "worse"]


def test_vllm_45388_an_unschedulable_head_does_not_idle_the_engine() -> None:
    bench = Bench(num_blocks=10, max_batch_tokens=256, max_batch_sequences=4)
    bench.submit(request("running", prompt_len=64, max_tokens=40))
    bench.step()
    bench.submit(request("head", prompt_len=140, max_tokens=4))
    bench.submit(request("small", prompt_len=4, max_tokens=4))
    steps = bench.run()
    assert steps < 120
    assert bench.finish_order == ["running", "head", "small"] or bench.finish_order == ["running", "small", "head"]


def test_vllm_16832_the_text_is_whole_after_a_recompute() -> None:
    for prefix_caching in (False, True):
        bench = Bench(num_blocks=7, max_batch_tokens=24, max_batch_sequences=4, prefix_caching=prefix_caching)
        for name in "abcde":
            bench.submit(request(name, prompt_len=20, max_tokens=50))
        bench.run()
        assert sum(record.num_preemptions for record in bench.recorder.requests) > 0
        for name in "abcde":
            assert bench.outputs[name, 0].token_ids == expected(request(name, 20, 50))[0]


def test_vllm_54644_recomputed_tokens_are_counted() -> None:
    bench = Bench(num_blocks=8, max_batch_tokens=256, max_batch_sequences=8, prefix_caching=False)
    for name in "ab":
        bench.submit(request(name, prompt_len=16, max_tokens=90))
    bench.run()
    recomputed = bench.ledger.snapshot(draining=False, alive=True).recomputed_tokens
    assert recomputed > 0
    total = sum(step.num_tokens for step in bench.runner.steps)
    # Every token but the last of each answer is computed once, and those lost a second time.
    assert total == 2 * (16 + 90 - 1) + recomputed


def test_vllm_5250_a_request_with_n_choices_counts_once_and_shares_its_prompt() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=64, max_batch_sequences=8)
    bench.submit(request("many", prompt_len=48, max_tokens=4, n=4))
    bench.run()
    stats = bench.ledger.snapshot(draining=False, alive=True)
    assert stats.admitted == 1
    assert stats.finished[FinishReason.LENGTH] == 1
    assert stats.prompt_tokens == 48
    # One computes 48 prompt tokens, the other three only the last block.
    assert sum(step.num_prefill_tokens for step in bench.runner.steps) == 48 + 3 * 16


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=256, max_batch_sequences=8)
    for i in range(6):
        bench.submit(request(f"r{i}", prompt_len=64, max_tokens=3, offset=0))
    bench.run()
    assert sum(step.num_prefill_tokens for step in bench.runner.steps) == 64 + 5 * 16
    assert {tuple(output.token_ids) for output in bench.outputs.values()} == {
        tuple(expected(request("r0", 64, 3, offset=0))[0])
    }


def test_a_cached_prefix_is_not_computed_again_and_is_reported() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=256)
    bench.submit(request("first", prompt_len=50, max_tokens=2, offset=0))
    bench.run()
    bench.submit(request("second", prompt_len=50, max_tokens=2, offset=0))
    bench.run()
    assert bench.outputs["first", 0].cached_tokens == 0
    assert bench.outputs["second", 0].cached_tokens == 48
    stats = bench.ledger.snapshot(draining=False, alive=True)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 48)


def test_salts_keep_prefixes_apart() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=256)
    for salt in ("x", "y"):
        bench.submit(request(salt, prompt_len=50, max_tokens=2, offset=0, cache_salt=salt))
        bench.run()
    assert bench.outputs["y", 0].cached_tokens == 0


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    bench = Bench(num_blocks=64, max_batch_tokens=256)
    for name in ("first", "second"):
        bench.submit(request(name, prompt_len=48, max_tokens=2, offset=0))
        bench.run()
    assert bench.outputs["second", 0].cached_tokens == 32
    assert bench.outputs["second", 0].token_ids == bench.outputs["first", 0].token_ids


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_cancelling_frees_everything_within_the_step(when: str) -> None:
    bench = Bench(num_blocks=32, max_batch_tokens=16, max_batch_sequences=1)
    bench.submit(request("other", prompt_len=4, max_tokens=40))
    live = bench.submit(request("gone", prompt_len=40, max_tokens=40))
    if when != "waiting":
        bench.core.end("other", FinishReason.CANCELLED)
        for _ in range(2 if when == "prefill" else 6):
            bench.step()
        assert live.sequences[0].status is SequenceStatus.RUNNING
        assert (live.sequences[0].num_output_tokens > 0) == (when == "decode")
    bench.core.end("gone", FinishReason.CANCELLED)
    bench.check()
    assert bench.outputs["gone", 0].finish_reason is FinishReason.CANCELLED
    assert not live.sequences[0].block_table
    bench.run()
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    bench = Bench()
    bench.submit(request("slow", max_tokens=40), expires_at=10.5)
    bench.run()
    output = bench.outputs["slow", 0]
    assert output.finish_reason is FinishReason.TIMEOUT
    assert 5 < len(output.token_ids) < 12
    assert output.token_ids == expected(request("slow", max_tokens=40))[0][: len(output.token_ids)]


def test_fair_share_serves_a_light_tenant_beside_a_flood() -> None:
    def finish_position(policy: str) -> int:
        bench = Bench(num_blocks=64, max_batch_sequences=2, policy=policy)
        for i in range(20):
            bench.submit(request(f"flood{i}", max_tokens=10, tenant="flood"))
        for _ in range(4):
            bench.step()
        bench.submit(request("light", max_tokens=10, tenant="light"))
        bench.run()
        return bench.finish_order.index("light")

    assert finish_position("fcfs") == 20
    assert finish_position("fair") <= 4


def test_fair_share_follows_the_weights() -> None:
    bench = Bench(num_blocks=64, max_batch_sequences=1, policy="fair", tenant_weights={"gold": 3.0})
    for i in range(24):
        bench.submit(request(f"gold{i}", max_tokens=8, tenant="gold"))
        bench.submit(request(f"plain{i}", max_tokens=8, tenant="plain"))
    for _ in range(8 * 16):
        bench.step()
    gold = sum(name.startswith("gold") for name in bench.finish_order)
    assert gold == pytest.approx(len(bench.finish_order) * 3 / 4, abs=1.5)


def test_an_idle_tenant_saves_up_no_credit() -> None:
    bench = Bench(num_blocks=64, max_batch_sequences=1, policy="fair")
    bench.submit(request("late-first", max_tokens=1, tenant="late"))
    for i in range(10):
        bench.submit(request(f"busy{i}", max_tokens=10, tenant="busy"))
    for _ in range(60):
        bench.step()
    for i in range(8):
        bench.submit(request(f"late{i}", max_tokens=10, tenant="late"))
    start = len(bench.finish_order)
    bench.run()
    # From here on they take turns; with saved credit all of late's would come first.
    late = sum(name.startswith("late") for name in bench.finish_order[start : start + 6])
    assert 2 <= late <= 4


def test_the_nearest_deadline_goes_first() -> None:
    bench = Bench(max_batch_sequences=1, policy="deadline")
    for name, deadline in (("none", None), ("late", 90.0), ("soon", 5.0)):
        bench.submit(request(name, max_tokens=3, deadline_s=deadline, arrival=0.0))
    bench.run()
    assert bench.finish_order == ["soon", "late", "none"]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policy: got 'lifo', allowed: fcfs, priority, deadline, fair"):
        make_policy("lifo")


def test_the_cost_model_learns_a_linear_cost() -> None:
    model = StepCostModel()
    assert model.max_chunk(0.1, 0, 0, 0, 512) == 512, "without knowledge there is no limit"
    for tokens in (1, 4, 16, 64, 200, 500, 33, 8, 2, 300) * 4:
        model.observe(tokens, tokens * 50, 0.010 + tokens * 0.001 + tokens * 50 * 1e-7)
    assert model.predict(100, 5000) == pytest.approx(0.1105, rel=0.02)
    chunk = model.max_chunk(0.2, 10, 1000, 0, 512)
    assert 160 <= chunk <= 180
    assert model.max_chunk(0.2, 10, 1000, 100_000, 512) < chunk, "a long context costs attention time"


def test_the_cost_model_survives_a_stolen_time_slice() -> None:
    model = StepCostModel()
    for _ in range(50):
        model.observe(10, 100, 0.02)
        model.observe(100, 5000, 0.11)
    model.observe(10, 100, 5.0)
    assert model.predict(10, 100) < 0.08


def test_a_prompt_chunk_shrinks_to_the_step_target_but_never_to_nothing() -> None:
    bench = Bench(num_blocks=256, max_batch_tokens=512)
    object.__setattr__(bench.scheduler.limits, "target_step_s", 0.05)
    for tokens in (1, 16, 64, 200) * 8:
        bench.scheduler.cost_model.observe(tokens, tokens * 10, 0.002 + tokens * 0.001)
    bench.scheduler.cost_model.observe = lambda *args: None  # type: ignore[method-assign]
    bench.submit(request("decoding", max_tokens=60))
    bench.step()
    bench.submit(request("long", prompt_len=400, max_tokens=2))
    bench.step()
    assert 30 <= scheduled(bench)["long"] <= 50
    object.__setattr__(bench.scheduler.limits, "target_step_s", 1e-6)
    bench.step()
    assert scheduled(bench)["long"] == MIN_CHUNK


def test_prompts_do_not_crawl_where_the_decodes_alone_miss_the_target() -> None:
    bench = Bench(num_blocks=256, max_batch_tokens=512, max_batch_sequences=40)
    object.__setattr__(bench.scheduler.limits, "target_step_s", 0.05)
    for tokens in (1, 16, 64, 200) * 8:
        bench.scheduler.cost_model.observe(tokens, tokens * 10, 0.1 + tokens * 0.001)
    bench.scheduler.cost_model.observe = lambda *args: None  # type: ignore[method-assign]
    bench.submit(request("decoding", max_tokens=60))
    bench.step()
    bench.submit(request("long", prompt_len=400, max_tokens=2))
    bench.step()
    # 101 ms without the prompt, 1.4 times as much with a chunk of it.
    assert 30 <= scheduled(bench)["long"] <= 42


def bench_with_streams(*, protect: bool) -> Bench:
    """Four streams; a step takes 50 ms and 1 more for each token, and its target is 400."""
    bench = Bench(num_blocks=512, max_batch_tokens=512, max_batch_sequences=12)
    object.__setattr__(bench.scheduler.limits, "target_step_s", 0.4)
    object.__setattr__(bench.scheduler.limits, "protect_streams", protect)
    for tokens in (1, 16, 64, 200) * 8:
        bench.scheduler.cost_model.observe(tokens, tokens * 10, 0.05 + tokens * 0.001)
    bench.scheduler.cost_model.observe = lambda *args: None  # type: ignore[method-assign]
    for number in range(4):
        bench.submit(request(f"stream{number}", max_tokens=60))
    bench.step()
    return bench


def test_a_long_prompt_hardly_slows_the_streams_to_its_end() -> None:
    bench = bench_with_streams(protect=True)
    bench.submit(request("long", prompt_len=600, max_tokens=2))
    chunks = []
    while sum(chunks) < 600:
        bench.step()
        chunks.append(scheduled(bench)["long"])
    assert sum(chunks) == 600
    assert max(chunks) <= 24


def test_one_long_prompt_hardly_slows_the_streams_of_many_and_many_prompts_go_first() -> None:
    chunks: dict[int | str, int] = {}
    for waiting, protect, length in ((1, True, 600), (6, True, 600), (1, False, 600), (1, True, 400)):
        bench = bench_with_streams(protect=protect)
        for number in range(waiting):
            bench.submit(request(f"long{number}", prompt_len=length, max_tokens=2))
        bench.step()
        step = scheduled(bench)
        assert all(step[f"stream{number}"] == 1 for number in range(4))
        chunks["short" if length < 512 else waiting if protect else "unprotected"] = step["long0"]
    # 54 ms without a prompt, of which 1.4 times leave room for 21 tokens; the target for more than 300.
    assert 16 <= chunks[1] <= 24
    assert chunks[6] >= 250
    assert chunks["unprotected"] >= 250
    assert chunks["short"] >= 250  # it fits a step, and is over with it
