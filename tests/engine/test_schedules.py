"""Thousands of random schedules on the fake model: whatever comes, the text is right and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fakes import TOKENIZER, VOCAB, Bench, expected

from carousel.engine.block_pool import blocks_for
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Client:
    """A request of a scenario. ``family`` decides the prompt's beginning, so that families share prefixes."""

    arrives: int
    family: int
    shared: int
    own: int
    max_tokens: int
    n: int
    priority: int
    tenant: str
    leaves: int | None
    timeout: int | None


clients = st.builds(
    Client,
    arrives=st.integers(0, 30),
    family=st.integers(0, 2),
    shared=st.sampled_from([0, 5, 16, 32, 48]),
    own=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.integers(-1, 2),
    tenant=st.sampled_from(["a", "b", "c"]),
    leaves=st.none() | st.integers(0, 40),
    timeout=st.none() | st.integers(1, 60),
)


@dataclass(frozen=True)
class House:
    """An engine's configuration. ``spare`` blocks beyond what the largest request needs: small means preemptions."""

    spare: int
    max_batch_tokens: int
    max_batch_sequences: int
    policy: str
    prefix_caching: bool
    static: bool


houses = st.builds(
    House,
    spare=st.sampled_from([0, 1, 2, 5, 100]),
    max_batch_tokens=st.sampled_from([8, 17, 64, 512]),
    max_batch_sequences=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
    prefix_caching=st.booleans(),
    static=st.sampled_from([False, False, False, True]),
)


def make_request(number: int, client: Client) -> GenerationRequest:
    prompt = [(client.family * 7 + i) % VOCAB for i in range(client.shared)]
    prompt += [(number * 5 + i * 3) % VOCAB for i in range(client.own)]
    return GenerationRequest(
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=client.max_tokens, n=client.n),
        request_id=f"r{number}",
        priority=client.priority,
        tenant=client.tenant,
        deadline_s=float(client.priority + 2),
        arrival=float(client.arrives),
    )


def make_bench(requests: list[GenerationRequest], house: House, **how: Any) -> Bench:
    """The house, with memory for the largest of the requests and what it has to spare."""
    largest = max(blocks_for(len(r.prompt) + (r.sampling.max_tokens or 0)) for r in requests)
    return Bench(
        num_blocks=largest + house.spare,
        max_batch_tokens=max(house.max_batch_tokens, house.max_batch_sequences),
        max_batch_sequences=house.max_batch_sequences,
        policy=house.policy,
        prefix_caching=house.prefix_caching,
        static=house.static,
        **how,
    )


def play(bench: Bench, crowd: list[Client], requests: list[GenerationRequest]) -> None:
    """Let the crowd come and go, and check everything that must hold on the way and at the end."""
    for now in range(4000):
        for request, client in zip(requests, crowd, strict=True):
            if client.arrives == now:
                bench.submit(request, None if client.timeout is None else bench.now + client.timeout)
            if client.leaves is not None and client.arrives + client.leaves == now:
                bench.core.end(request.request_id, FinishReason.CANCELLED)
        bench.check()
        live = bench.scheduler.has_work
        worked = bench.step()
        assert worked or not bench.scheduler.has_work, "idle while something could run"
        if live and worked and bench.runner.steps:
            step = bench.runner.steps[-1]
            assert step.entries, "a step without tokens"
            assert step.num_tokens == sum(entry.num_new_tokens for entry in step.entries)
            assert step.num_tokens <= bench.scheduler.limits.max_batch_tokens
        if now > 80 and not bench.core.has_work:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    stats = bench.ledger.snapshot(draining=False, alive=True)
    assert stats.live == 0
    assert stats.admitted == len(requests) == len(bench.recorder.requests)
    assert bench.pool.num_available == bench.pool.num_blocks
    assert stats.generation_tokens == sum(len(output.token_ids) for output in bench.outputs.values())


@settings(max_examples=400, deadline=None)
@given(st.lists(clients, min_size=1, max_size=12), houses)
def test_any_schedule_gives_the_right_text_and_leaks_nothing(crowd: list[Client], house: House) -> None:
    requests = [make_request(number, client) for number, client in enumerate(crowd)]
    bench = make_bench(requests, house)
    play(bench, crowd, requests)
    for request, client in zip(requests, crowd, strict=True):
        tokens, reason = expected(request)
        for index in range(client.n):
            output = bench.outputs[request.request_id, index]
            if output.finish_reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
                assert tokens[: len(output.token_ids)] == output.token_ids
                assert client.leaves is not None or client.timeout is not None
            else:
                assert output.finish_reason is reason
                assert output.token_ids == tokens
            assert output.completion_tokens == len(output.token_ids)
            assert output.text == TOKENIZER.decode(output.token_ids)
