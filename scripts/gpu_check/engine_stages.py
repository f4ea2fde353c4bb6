"""The engine on the device: equal to transformers, as fast as its memory, and with many clients."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from typing import Any

import torch

import carousel_kernels as ck
from carousel.bench import inprocess
from carousel.bench.measure import summary
from carousel.bench.record import Recorder
from carousel.bench.workload import WorkItem, Workload
from carousel.engine.engine import Engine
from carousel_kernels.bench.measure import Timer, copy_bandwidth

from .model import Session

__all__ = ["batching", "decode", "graphs", "itl", "parity"]

PARITY_GOAL, DECODE_GOAL, BATCHING_GOAL = 1.0, 0.75, 8.0


def _items(session: Session, lengths: list[tuple[int, int]], seed: int) -> tuple[WorkItem, ...]:
    return tuple(
        WorkItem(str(i), "", tuple(session.prompt(prompt, seed + i)), output, 1.0)
        for i, (prompt, output) in enumerate(lengths)
    )


def _run(
    session: Session, seats: int, items: tuple[WorkItem, ...], mode: str = "continuous"
) -> tuple[dict[str, Any], list[Any]]:
    """The figures of a run with all requests at once, and its steps; on an engine that is gone afterwards."""
    engine = session.engine(seats, batching=mode)
    collector = Recorder()
    engine.timeline.observers.append(collector)
    try:
        return asyncio.run(inprocess.run(engine, Workload("check", items), rate=math.inf)), collector.steps
    finally:
        engine.stop()


def parity(session: Session) -> dict[str, Any]:
    """Greedy tokens of the engine under transformers' logits for the same text.

    Random weights make near-ties, which rounding decides; so a token is right if its logit is the largest to within
    that rounding. Texts are generated together, and each is checked by one forward pass of transformers.
    """
    lengths, output = session.plan.parity
    model = session.transformers_model
    prompts = [session.prompt(length, 100 + i) for i, length in enumerate(lengths)]
    with ck.use_backend("triton"):  # in the interpreter with --tiny; the device's own anyway otherwise
        engine = session.engine(len(lengths))
        try:
            answers = asyncio.run(_generate(engine, prompts, output))
        finally:
            engine.stop()
    same, worst, total = 0, 0.0, 0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer], device=session.device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            chosen = torch.tensor(answer, device=session.device)
            gaps = logits.amax(-1) - logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
            same += int((logits.argmax(-1) == chosen).sum())
            total += len(answer)
            worst = max(worst, float(gaps.max()))
    return {
        "ok": worst <= session.plan.tolerance, "tokens": total, "identical": same / total, "largest_gap": worst,
        "tolerance": session.plan.tolerance,
    }  # fmt: skip


async def _generate(engine: Engine, prompts: list[list[int]], output: int) -> list[list[int]]:
    requests = [inprocess.request_of(WorkItem("", "", tuple(p), output, 1.0), output) for p in prompts]
    return [list(answer[0].token_ids) for answer in await asyncio.gather(*(engine.generate(r) for r in requests))]


def decode(session: Session) -> dict[str, Any]:
    """Steps that only decode, against the time in which a copy would move the weights and the keys and values."""
    session.drop_transformers()
    bandwidth = copy_bandwidth(Timer(session.device, 0.05), 1 << (20 if session.tiny else 31))
    decoder, config = session.decoder, session.decoder.config
    # Of the embedding a step reads a row per sequence.
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * session.dtype.itemsize
    rows: list[dict[str, Any]] = []
    for count, prompt, output in session.plan.decode:
        _, steps = _run(session, count, _items(session, [(prompt, output)] * count, 200))
        alone = [s for s in steps if not s.num_prefill_tokens]
        most = max((s.num_decode_tokens for s in alone), default=0)
        pure = [s for s in alone if s.num_decode_tokens == most]
        if not pure:
            rows.append({"sequences": count, "context": prompt, "error": "every step had prompts"})
            continue
        step = statistics.median(s.duration_s for s in pure)
        moved = decoder.weight_bytes - table + most * (prompt + output / 2) * decoder.kv_bytes_per_token
        rows.append({
            "sequences": most, "context": prompt + output // 2, "step_ms": step * 1e3,
            "run_ms": statistics.median(s.run_s for s in pure) * 1e3,
            "sample_ms": statistics.median(s.sample_s for s in pure) * 1e3,
            "tokens_per_second": most / step, "bound_tokens_per_second": most * bandwidth / moved,
            "share_of_bound": moved / bandwidth / step,
        })  # fmt: skip
    reached = [row for row in rows if row.get("share_of_bound", 0.0) >= DECODE_GOAL]
    return {
        "ok": all("error" not in row for row in rows), "copy_gigabytes_per_s": bandwidth / 1e9, "goal": DECODE_GOAL,
        "reached": len(reached) == len(rows), "rows": rows,
    }  # fmt: skip


def graphs(session: Session) -> dict[str, Any]:
    """How long capturing CUDA graphs takes at the engine's start; says so where it has none.

    Then requests run while torch refuses operators that make the host wait for the device.
    """
    if session.device.type != "cuda":
        return {"ok": True, "built": False, "note": "there are no CUDA graphs without CUDA"}
    session.drop_transformers()
    started = time.perf_counter()
    engine = session.engine(64)
    elapsed = time.perf_counter() - started
    try:
        prompts = [session.prompt(length, 40 + i) for i, length in enumerate((5, 90, 600, 1500))]
        torch.cuda.set_sync_debug_mode("error")
        answers = asyncio.run(_generate(engine, prompts, 24))
        waits = engine.failure or ("" if all(len(answer) == 24 for answer in answers) else "answers are cut off")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.stop()
    return {
        "ok": not waits, "built": True, "start_s": elapsed, "capture": engine.graph_capture, "host_waits": waits
    }  # fmt: skip


def itl(session: Session) -> dict[str, Any]:
    """Gaps between the tokens of running streams: alone, and while long prompts enter."""
    session.drop_transformers()
    streams, output, longs, length = session.plan.itl
    items = _items(session, [(16 if not session.tiny else 3, output)] * streams, 300)
    intruders = _items(session, [(length, 8 if not session.tiny else 2)] * longs, 900)
    quiet, _ = _run(session, streams + longs, items)
    engine = session.engine(streams + longs)
    try:
        busy, steps = asyncio.run(_disturbed(engine, items, intruders))
    finally:
        engine.stop()
    return {
        "ok": True, "streams": streams, "long_prompts": longs, "long_prompt_tokens": length,
        "alone_ms": _milliseconds(quiet["itl"]), "beside_long_prompts_ms": _milliseconds(busy),
        "longest_step_ms": max(s.duration_s for s in steps) * 1e3,
    }  # fmt: skip


def _milliseconds(figures: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else value * 1e3 for name, value in figures.items()}


async def _disturbed(
    engine: Engine, items: tuple[WorkItem, ...], intruders: tuple[WorkItem, ...]
) -> tuple[dict[str, float | None], list[Any]]:
    collector = Recorder()
    engine.timeline.observers.append(collector)
    times: list[list[float]] = [[] for _ in items]
    begun = asyncio.Event()

    async def stream(item: WorkItem, seen: list[float]) -> None:
        async with engine.submit(inprocess.request_of(item, item.output_len)) as outputs:
            async for output in outputs:
                seen += [time.perf_counter()] * len(output.token_ids)
                if len(seen) > 2:
                    begun.set()

    async def intrude() -> None:
        await begun.wait()
        await asyncio.gather(*(engine.generate(inprocess.request_of(item, item.output_len)) for item in intruders))

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(intrude())
            for item, seen in zip(items, times, strict=True):
                tasks.create_task(stream(item, seen))
    finally:
        engine.timeline.observers.remove(collector)
    gaps = [after - before for seen in times for before, after in itertools.pairwise(seen)]
    return summary(gaps), collector.steps


def batching(session: Session) -> dict[str, Any]:
    """Static against continuous batching with the same seats, at the lengths of Anyscale's comparison."""
    session.drop_transformers()
    count, seats, prompt, least, most = session.plan.batching
    lengths = random.Random(0)
    items = _items(session, [(prompt, lengths.randint(least, most)) for _ in range(count)], 400)
    found: dict[str, Any] = {}
    for mode in ("continuous", "static"):
        figures, _ = _run(session, seats, items, mode)
        found[mode] = {
            "output_tokens_per_second": figures["output_tokens_per_second"], "wall_s": figures["wall"],
            "mean_occupancy": figures["batch_occupancy"]["mean"],
        }  # fmt: skip
    factor = found["continuous"]["output_tokens_per_second"] / found["static"]["output_tokens_per_second"]
    return {
        "ok": True, "requests": count, "seats": seats, "prompt": prompt, "outputs": [least, most], **found,
        "factor": factor, "goal": BATCHING_GOAL, "reached": factor >= BATCHING_GOAL,
    }  # fmt: skip
