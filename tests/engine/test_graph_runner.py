"""Recorded decodes, on a device whose recordings are replayed by doing the same work again on the same buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tests.engine.test_async_engine import check_equal, crowd, outputs
from tests.engine.test_engine import PROMPTS, greedy
from tests.engine.tiny import VOCAB, kv_memory, started_engine, tiny_model

from carousel.engine.buckets import NUM_SCRATCH_BLOCKS, bucket_sizes
from carousel.engine.device import Device, explain
from carousel.engine.errors import EngineUnavailable, InvalidRequest
from carousel.engine.graph_runner import GraphRunner
from carousel.engine.memory import free_memory
from carousel.engine.memory_profile import worst_step
from carousel.engine.piecewise import token_buckets
from carousel_kernels.layout import BLOCK_SIZE


class RecordingDevice(Device):
    """Records by remembering; counts replays. Uploads are copies, as they are where memory is another."""

    records = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.recorded = self.replayed = 0

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        replay, result = super().record(work)

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted, result


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    device = RecordingDevice()
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    return device


@pytest.mark.parametrize("scheduling", ["on", "off"])
async def test_replayed_steps_answer_as_launched_ones(
    scheduling: str, recording: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started_engine(async_scheduling=scheduling, max_batch_sequences=6, kv_cache_memory=kv_memory(40))
    try:
        assert recording.recorded == len(bucket_sizes(6)) + 2 * len(token_buckets(64))
        assert engine.graph_capture is not None
        assert engine.graph_capture["buckets"] == bucket_sizes(6)
        replayed = recording.replayed
        found = await outputs(engine, crowd())
        assert recording.replayed > replayed
    finally:
        engine.stop()
    monkeypatch.undo()
    engine = started_engine(async_scheduling="off")
    try:
        assert engine.graph_capture is None
        check_equal(found, await outputs(engine, crowd()))
    finally:
        engine.stop()


async def test_a_static_batch_replays_its_idle_rows(recording: RecordingDevice) -> None:
    engine = started_engine(batching="static", max_batch_sequences=3)
    try:
        requests = [greedy(ids, 4 + 9 * n) for n, ids in enumerate(PROMPTS[:3])]
        answers = await asyncio.gather(*map(engine.generate, requests))
        assert [len(answer[0].token_ids) for answer in answers] == [4, 13, 22]
        assert recording.replayed > 10
        assert any(step.num_idle_tokens for step in engine.timeline.steps)
    finally:
        engine.stop()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 60, 64, 100, 256, 1000, 4096])
def test_buckets_waste_at_most_a_quarter(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert len(sizes) < 60
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(7, size // 4)


def test_no_bucket_without_rows() -> None:
    with pytest.raises(ValueError, match="most: got 0"):
        bucket_sizes(0)


@torch.inference_mode()
def test_padding_rows_write_to_scratch_alone(recording: RecordingDevice) -> None:
    decoder = tiny_model().decoder
    runner = GraphRunner(decoder, 8, 4, 64, max_rows=4, device=recording)
    for keys, values in runner._executor.kv_cache:
        assert keys.shape[0] == 8 + NUM_SCRATCH_BLOCKS
        keys.fill_(7.0)
        values.fill_(7.0)
    runner.capture()
    for bucket in runner._executor.buckets:
        bucket.replay()
        assert int(bucket.layout.slots.min()) >= 8 * BLOCK_SIZE
        assert len(set(bucket.layout.slots.tolist())) == bucket.size
    for keys, values in runner._executor.kv_cache:
        assert bool((keys[:8] == 7.0).all())
        assert bool((values[:8] == 7.0).all())
        assert not bool((keys[8:] == 7.0).all())


class MeasuringDevice(RecordingDevice):
    """Counts memory, so that the largest steps are run."""

    def __init__(self, peak: int) -> None:
        super().__init__()
        self.peak = peak
        self.measured = 0

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.measured += 1
        return self.peak


def test_the_kv_pool_takes_what_the_largest_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 * 16 * tiny_model().decoder.kv_bytes_per_token
    monkeypatch.setattr("carousel.engine.device.free_memory", lambda _: free)
    blocks = {}
    for peak in (0, free // 2):
        device = MeasuringDevice(peak)
        monkeypatch.setattr(Device, "of", staticmethod(lambda _, device=device: device))
        engine = started_engine(kv_cache_memory="0.5", max_batch_sequences=64)
        blocks[peak] = engine.stats().num_blocks
        engine.stop()
        assert device.measured == 1
    assert blocks == {0: 32, free // 2: 16}


def start_with_free(monkeypatch: pytest.MonkeyPatch, *free: int, memory: str) -> tuple[int, int]:
    """An engine whose device has so many bytes left each time that it is asked, and whose largest step takes 2 MiB: its
    blocks, and how often its graphs were recorded."""
    left = iter(free)
    monkeypatch.setattr("carousel.engine.device.free_memory", lambda _: next(left))
    device = MeasuringDevice(2 * 2**20)
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    engine = started_engine(kv_cache_memory=memory, max_batch_sequences=512, max_batch_tokens=512)
    engine.stop()
    assert next(left, None) is None
    assert engine.graph_capture is not None
    return engine.stats().num_blocks, device.recorded // engine.graph_capture["graphs"]


def test_the_kv_pool_gives_way_to_recorded_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was recorded has taken memory since the pool was sized, of which the largest step needs a MiB."""
    mib = 2**20
    block = 16 * tiny_model().decoder.kv_bytes_per_token
    assert start_with_free(monkeypatch, 6 * mib, 2 * mib, memory="0.5") == (2 * mib // block, 1)
    assert start_with_free(monkeypatch, 6 * mib, mib, 2 * mib, memory="0.5") == (mib // block, 2)
    assert "the KV cache becomes 0.00 GiB smaller: recorded graphs took the room" in caplog.messages


@pytest.mark.parametrize(("free", "memory"), [([64, 1, 1], "0.5"), ([64, 1], "4MiB")])
def test_a_start_that_leaves_no_room_for_the_largest_step_fails(
    free: list[int], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that was asked for is kept, or refused: better an error now than under load."""
    said = rf"--kv-cache-memory: got '{memory}', allowed: 0\.00 GiB less, for the largest step"
    with pytest.raises(InvalidRequest, match=said):
        start_with_free(monkeypatch, *(size * 2**20 for size in free), memory=memory)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "^the device is out of memory"),
        (
            torch.AcceleratorError("CUDA error: ECC error\nadvice"),
            "^the device has failed: CUDA error: ECC error; only",
        ),
    ],
)
def test_a_device_that_fails_while_the_engine_starts_is_explained(
    error: Exception, said: str, recording: RecordingDevice
) -> None:
    def failing(work: Callable[[], torch.Tensor]) -> None:
        raise error

    recording.record = failing  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineUnavailable, match=said):
        started_engine()


def test_the_largest_step_computes_logits_of_every_prompt_token_and_samples_every_row() -> None:
    decoder = tiny_model().decoder
    seen: list[tuple[int, int]] = []

    class Watched:
        device = decoder.device
        allocate_kv_cache = staticmethod(decoder.allocate_kv_cache)
        reserve_positions = staticmethod(decoder.reserve_positions)

        @staticmethod
        def forward(token_ids, positions, layout, kv_cache, logit_rows):
            seen.append((len(token_ids), len(logit_rows)))
            return decoder.forward(token_ids, positions, layout, kv_cache, logit_rows)

    rows: list[int] = []

    class Reads(RecordingDevice):
        def read(self, *tensors: torch.Tensor):
            rows.append(len(tensors[0]))
            return super().read(*tensors)

    worst_step(Watched, VOCAB, Reads(), 50, 8)  # type: ignore[arg-type]
    assert seen == [(50, 51)]
    assert rows == [49, 8, 8]  # log-probabilities of the prompt, of the sampled tokens, and these


@pytest.mark.parametrize(("count", "beside"), [(1, ""), (3, "; 2 more visible, not used")])
def test_what_is_used_of_what_is_visible_is_said(count: int, beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG slice counts as a device, with its own memory."""
    slice_ = SimpleNamespace(name="H200 MIG 1g.18gb", total_memory=16 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: {"cuda:1": slice_}[str(which)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda which: {"cuda:1": (5, 9)}[str(which)])
    bound: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    device = Device.of(torch.device("cuda", 1))
    device.bind()
    assert device.describe() == f"cuda:1: H200 MIG 1g.18gb, 16 GiB, compute capability 9.0{beside}"
    assert bound == [torch.device("cuda", 1)]
    assert free_memory(device.torch_device) == 5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 80 GiB."
            ),
            "the device is out of memory: CUDA out of memory; lower --kv-cache-memory or --max-batch-tokens",
        ),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider CUDA_LAUNCH"),
            "the device has failed: CUDA error: an illegal memory access was encountered; only a restart helps",
        ),
        (RuntimeError("the device is on fire"), "RuntimeError: the device is on fire"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_failed_device_is_explained_in_a_line(error: Exception, said: str) -> None:
    assert explain(error) == said
