"""The staged reader: what arrives is what the files hold, however it is cut; no buffer is filled before its time."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.models.harness import SIZES, logits_in_chunks, random_ids, random_model, save
from tests.models.test_loader import directory  # noqa: F401  a fixture
from tests.models.test_packed import awq, gptq, scaled
from tests.models.test_parallel import among, logits

import carousel_kernels as ck
from carousel.models import loader
from carousel.models.decoder import Decoder
from carousel.models.errors import ModelLoadError
from carousel.models.families import decoder_config
from carousel.models.parallel import ALONE, Part, Ranks
from carousel.models.staging import Copies, StagedSource
from carousel.models.weights import SafetensorsSource, open_safetensors
from carousel_kernels.weight_formats import grouped_from_awq, grouped_from_gptq, scaled_by_blocks
from carousel_kernels.weight_formats import scaled as scaled_weight

CPU = torch.device("cpu")
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LateCopies(Copies):
    """Copies that are done when somebody waits for them, or later ones, and no sooner."""

    def __init__(self) -> None:
        self.taken = 0
        self.launched = self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def buffer(self, size: int) -> torch.Tensor:
        self.taken += size
        return super().buffer(size)

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self._queue.append(work)
            self.launched += 1
            ticket = self.launched
        return lambda: self._until(ticket)

    def _until(self, ticket: int) -> None:
        with self._lock, torch.inference_mode():
            while self.done < ticket:
                self._queue.popleft()()
                self.done += 1

    def end(self) -> None:
        self._until(self.launched)


class Careless(LateCopies):
    """Copies that are said to be done when they are not."""

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        super().run(work)
        return lambda: None


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, and what is wanted of it."""

    kind: str
    shape: tuple[int, ...]
    wanted: torch.dtype
    scale: float
    offset: float
    part: Part | None
    file: int
    gap: int


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=2)))
    part = None
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        begin = draw(st.integers(0, shape[dim]))
        part = Part(dim, begin, draw(st.integers(begin, shape[dim])))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (1.0, 1.0), (0.22, 0.0), (3.0, -1.5)]))
    types = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
    kind, wanted = draw(st.sampled_from(sorted(TYPES))), draw(types)
    return Stored(kind, shape, wanted, scale, offset, part, draw(st.integers(0, 2)), draw(st.integers(0, 5)))


def write(path: Path, tensors: dict[str, Stored], odd: int) -> None:
    """Random tensors with gaps between them, at any alignment."""
    entries, data = {}, b""
    for number, (name, tensor) in enumerate(tensors.items()):
        data += b"\xaa" * tensor.gap
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)).to(TYPES[tensor.kind])
        held = values.view(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": tensor.kind,
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + len(held)],
        }
        data += held
    header = json.dumps(entries).encode() + b" " * odd
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(stored(), min_size=1, max_size=12),
    st.integers(0, 8),
    st.integers(1, 300),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_all_arrives_as_the_mapped_files_have_it(
    tmp_path_factory: pytest.TempPathFactory, many: list[Stored], odd: int, piece: int, buffers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    named = {f"t{number}": tensor for number, tensor in enumerate(many)}
    files = []
    for file in sorted({tensor.file for tensor in many}):
        files.append(folder / f"{file}.safetensors")
        write(files[-1], {name: tensor for name, tensor in named.items() if tensor.file == file}, odd)
    plain, copies = SafetensorsSource(files), LateCopies()
    staged = StagedSource(
        SafetensorsSource(files), CPU, copies=copies, piece_bytes=piece, buffers=buffers, readers=readers
    )
    assert (staged.shapes(), staged.files()) == (plain.shapes(), plain.files())
    found, expected = {}, {}
    for name, tensor in named.items():
        shape = tensor.shape if tensor.part is None else tensor.part.shape_of(tensor.shape)
        for source, into in ((plain, expected), (staged, found)):
            into[name] = torch.full(shape, 7.0, dtype=tensor.wanted)
            source.read(name, into[name], scale=tensor.scale, offset=tensor.offset, part=tensor.part)
    staged.complete()
    row = max((8 * tensor.shape[-1] for tensor in many if tensor.part and tensor.part.dim), default=0)
    assert copies.taken <= buffers * max(piece, row, 8)
    for name in named:
        assert torch.equal(found[name], expected[name]), named[name]
        assert torch.equal(staged.raw(name), plain.raw(name))


def big(folder: Path, count: int = 6) -> tuple[dict[str, torch.Tensor], SafetensorsSource]:
    """Some tensors of 4,000 bytes, in one file."""
    tensors = {f"t{number}": Stored("F32", (1000,), torch.float32, 1.0, 0.0, None, 0, 0) for number in range(count)}
    write(folder / "model.safetensors", tensors, 0)
    return load_file(folder / "model.safetensors"), open_safetensors(folder)


def arrived(source: SafetensorsSource, copies: Copies, **how: int) -> dict[str, torch.Tensor]:
    staged = StagedSource(source, CPU, copies=copies, **how)
    found = {name: torch.zeros(shape) for name, shape in source.shapes().items()}
    for name, out in found.items():
        staged.read(name, out)
    staged.complete()
    return found


def test_a_buffer_that_is_filled_too_early_is_noticed(tmp_path: Path) -> None:
    """Of the test's own device: it does tell a reader that waits for copies from one that does not."""
    expected, source = big(tmp_path)
    how = {"piece_bytes": 512, "buffers": 2, "readers": 2}
    good = arrived(source, LateCopies(), **how)
    assert all(torch.equal(good[name], expected[name]) for name in expected)
    bad = arrived(source, Careless(), **how)
    assert not all(torch.equal(bad[name], expected[name]) for name in expected)


def test_reading_goes_on_while_copies_are_under_way_within_few_buffers(tmp_path: Path) -> None:
    _, source = big(tmp_path)
    copies = LateCopies()
    staged = StagedSource(source, CPU, copies=copies, piece_bytes=1000, buffers=3, readers=2)
    for name, shape in source.shapes().items():
        staged.read(name, torch.zeros(shape))
    waiting: list[int] = []
    run = copies.run

    def watched(work: Callable[[], None]) -> Callable[[], None]:
        waiting.append(copies.launched - copies.done)
        return run(work)

    copies.run = watched  # type: ignore[method-assign]
    staged.complete()
    assert len(waiting) == 24
    assert max(waiting) >= 1
    assert max(waiting) < 3
    assert copies.taken == 3000
    assert staged.bytes_read == 24000
    assert "0.00 GB read in" in str(staged)


def test_a_single_tensor_is_read_by_all_readers(tmp_path: Path) -> None:
    """As those of quantised checkpoints are, which are unpacked one by one."""
    mib = 1 << 20
    write(tmp_path / "model.safetensors", {"t": Stored("F32", (mib,), torch.float32, 1.0, 0.0, None, 0, 0)}, 0)
    source, copies, threads = open_safetensors(tmp_path), LateCopies(), threading.active_count()
    staged = StagedSource(source, CPU, copies=copies, readers=3, buffers=4)
    for _ in range(2):
        assert torch.equal(staged.raw("t"), source.raw("t"))
    assert copies.done == 2 * 4
    assert threading.active_count() <= threads + 3
    staged.complete()
    assert threading.active_count() == threads


def test_nothing_is_read_before_it_is_asked_for_and_others_devices_are_left_to_the_files(tmp_path: Path) -> None:
    expected, source = big(tmp_path, 2)
    staged = StagedSource(source, torch.device("meta"), copies=Copies())
    here, there = torch.zeros(1000), torch.zeros(1000, device="meta")
    staged.read("t0", here)
    assert torch.equal(here, expected["t0"])
    staged.read("t1", there)
    assert staged.bytes_read == 0


def test_a_file_that_got_shorter_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    _, source = big(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    threads = threading.active_count()
    path.write_bytes(whole[:-5000])
    cut = rf"model\.safetensors: truncated: ends at byte {len(whole) - 5000}, .*; download it again"
    with pytest.raises(ModelLoadError, match=cut):
        arrived(source, LateCopies(), piece_bytes=700, buffers=3, readers=2)
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read \(No such file or directory\)"):
        arrived(source, LateCopies())
    path.mkdir()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read \(Is a directory\)"):
        arrived(source, LateCopies())
    assert threading.active_count() == threads


def test_types_that_hold_no_floats_are_refused_at_once(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\x02\x03\x04")
    staged = StagedSource(open_safetensors(tmp_path), CPU)
    with pytest.raises(ModelLoadError, match="tensor t has dtype I8, supported: F64"):
        staged.read("t", torch.zeros(4))
    assert staged.raw("t").tolist() == [1, 2, 3, 4]


def staged_decoder(path: Path, ranks: Ranks = ALONE, **options: Any) -> tuple[Decoder, LateCopies]:
    """A decoder whose layers keep their weights where the reader puts them, as those of a GPU do."""
    copies = LateCopies()
    source = StagedSource(open_safetensors(path), CPU, copies=copies, piece_bytes=999, buffers=3, readers=2)
    config = decoder_config(json.loads((path / "config.json").read_text()))
    return Decoder(config, source, ranks=ranks, **options), copies


FAMILIES = {
    "fused, biases": tf.Qwen2Config(**SIZES),
    "offset norms, post norms": tf.Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16),
    "stored fused": tf.Phi3Config(**SIZES),
    "scaled": tf.GraniteConfig(**SIZES, residual_multiplier=0.22, embedding_multiplier=12.0, logits_scaling=8.0),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_and_ranks_are_those_of_the_mapped_files(
    family: str, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    path = save(random_model(FAMILIES[family]), tmp_path)
    config = decoder_config(json.loads((path / "config.json").read_text()))

    def both(group: Ranks) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        plain = Decoder(config, open_safetensors(path), dtype=dtype, ranks=group)
        staged, copies = staged_decoder(path, group, dtype=dtype)
        return logits(plain), logits(staged), copies.launched, copies.done

    with ck.use_backend("reference"):
        for plain, staged, launched, done in among(ranks, both):
            assert torch.equal(plain, staged)
            assert launched == done > 10


def test_a_rank_reads_only_its_rows(tmp_path: Path) -> None:
    path = save(random_model(tf.LlamaConfig(**SIZES, tie_word_embeddings=False)), tmp_path)
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    columns = sum(
        tensor.nbytes
        for name, tensor in load_file(path / "model.safetensors").items()
        if name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight"))
    )

    def read(group: Ranks) -> int:
        source = StagedSource(open_safetensors(path), CPU, piece_bytes=1 << 20)
        config = decoder_config(json.loads((path / "config.json").read_text()))
        Decoder(config, source, ranks=group)
        return source.bytes_read

    with ck.use_backend("reference"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("carousel.models.staging._GAP", 0)
        assert among(2, read) == [columns + (size - columns) // 2] * 2


def test_load_model_reads_by_stages_and_says_how_fast(
    directory: Path,  # noqa: F811  the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, lines = random_ids(12), []
    assert isinstance(loader._opened(directory, CPU), SafetensorsSource)
    with ck.use_backend("reference"):
        plain = logits_in_chunks(loader.load_model(directory, log=lines.append).decoder, ids, [5])
        opened = StagedSource(open_safetensors(directory), CPU, copies=LateCopies())
        monkeypatch.setattr(loader, "_opened", lambda *_: opened)
        loaded = loader.load_model(directory, log=lines.append)
        assert torch.equal(logits_in_chunks(loaded.decoder, ids, [5]), plain)
    assert " GB/s" not in lines[0]
    assert lines[1].endswith(f"float32 on cpu; {opened}")
    assert "GB read in" in lines[1]
    assert opened.bytes_read >= loaded.decoder.weight_bytes


@pytest.mark.parametrize("kind", ["gptq", "awq", "scaled", "blocks"])
def test_packed_weights_are_unpacked_where_they_were_read_to(kind: str) -> None:
    """On a device that is not there: fake tensors refuse operators on tensors of two devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = torch.randn(64, 128)
    tensors = {"gptq": gptq, "awq": awq}.get(kind, lambda w: scaled(w, "channel"))(weight)[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
        if kind == "gptq":
            made: Any = grouped_from_gptq(
                there["qweight"], there["qzeros"], there["scales"], None, bits=4, group_size=32, zero_offset=1
            )
        elif kind == "awq":
            made = grouped_from_awq(there["qweight"], there["qzeros"], there["scales"], group_size=32)
        elif kind == "scaled":
            made = scaled_weight(there["weight"], there["weight_scale"], "keep")
        else:
            scale = torch.empty(2, 4, device="meta")
            made = scaled_by_blocks(there["weight"], scale, (32, 32))
        half = made.part(0, 0, 32)
        for one in (made, half, made.part(1, 0, 64), type(made).stacked([half, half]).times(2.0)):
            assert one.q.device == one.scales.device == one.dense(torch.float32).device == torch.device("meta")


def test_copies_to_a_gpu_go_over_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be seen without one: after the work before, each with an event that its buffer waits for."""
    told: list[tuple[object, ...]] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            told.append(("stream", device))

        def wait_stream(self, other: str) -> None:
            told.append(("after", other))

        def synchronize(self) -> None:
            told.append(("all done",))

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking  # a reader that waits takes no CPU

        def record(self, stream: Stream) -> None:
            told.append(("event", type(stream)))

        def synchronize(self) -> None:
            told.append(("done",))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append(("on", type(stream)))
        yield

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", on), ("current_stream", lambda _: "its own")):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: told.append(("given back",)), raising=False)
    gpu = torch.device("cuda", 1)
    made = StagedSource(SafetensorsSource([]), gpu)._copies
    made.begin()
    wait = made.run(lambda: told.append(("copy",)))
    assert told == [("stream", gpu), ("after", "its own"), ("on", Stream), ("copy",), ("event", Stream)]
    wait()
    made.end()
    made.release()
    assert told[5:] == [("done",), ("all done",), ("given back",)]
