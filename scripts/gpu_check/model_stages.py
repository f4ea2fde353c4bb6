"""The model below the engine: how fast it is read from disk, and what recording small steps in pieces brings."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import carousel_kernels as ck
from carousel.engine.block_pool import blocks_for
from carousel.engine.device import Device
from carousel.engine.graph_runner import GraphExecutor
from carousel.engine.runner import DecoderLike, Executor, NewPool, StepNumbers
from carousel.models.decoder import Decoder
from carousel.models.families import decoder_config
from carousel.models.staging import PIECE_BYTES, READERS, StagedSource
from carousel.models.weights import SafetensorsSource, open_safetensors
from carousel_kernels.layout import BLOCK_SIZE

from .model import Session

__all__ = ["load", "mixed"]

LOAD_GOAL, MIXED_GOAL = 0.9, 1.5
_SHARD_BYTES = 2 << 30


def load(session: Session) -> dict[str, Any]:
    """Weights from disk to the device, against reading the files and doing nothing with them.

    Each is measured with the files out of the page cache, as at a node's first start, and in it. The logits of what was
    loaded are those of what the mapped files gave, bit for bit.
    """
    session.drop_transformers()
    config = session.plan.config | {"num_hidden_layers": session.plan.load}
    decoder = decoder_config(config)

    def staged() -> tuple[Decoder, float]:
        source = StagedSource(open_safetensors(folder), session.device)
        made = Decoder(decoder, source, session.device, session.dtype)
        return made, source.bytes_read / source.seconds

    with tempfile.TemporaryDirectory() as name, ck.use_backend("triton"):
        folder = Path(name)
        size = _write_model(session, config, folder)
        rows: list[dict[str, Any]] = []
        for label, evict in (("from disk", True), ("from the page cache", False)):
            _forget_pages(folder, evict)
            plain = size / _seconds(lambda: _read_all(folder))
            _forget_pages(folder, evict)
            made, rate = staged()
            row = {"files": label, "plain_gb_per_s": plain / 1e9, "load_gb_per_s": rate / 1e9, "share": rate / plain}
            rows.append(row)
            found = _logits(session, made)
            del made
        started = time.perf_counter()
        mapped = Decoder(decoder, open_safetensors(folder), session.device, session.dtype)
        rows.append({"files": "mapped, cached", "load_gb_per_s": size / (time.perf_counter() - started) / 1e9})
        same = torch.equal(found, _logits(session, mapped))
    return {
        "ok": same, "gigabytes": size / 1e9, "goal": LOAD_GOAL, "rows": rows,
        "reached": all(row["share"] >= LOAD_GOAL for row in rows if "share" in row),
    }  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _write_model(session: Session, config: dict[str, object], folder: Path) -> int:
    """Shards of random weights; their bytes."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(LlamaConfig(**known)).state_dict().items()}
    generator = torch.Generator(session.device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    total = 0

    def save() -> None:
        file = f"model-{len(set(names.values())):05}.safetensors"
        save_file(shard, folder / file)
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            save()
        values = torch.randn(shape, generator=generator, device=session.device) * 0.02
        shard[name] = values.to(session.dtype).cpu()
        total += shard[name].nbytes
    save()
    index = ", ".join(f'"{name}": "{file}"' for name, file in names.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    return total


def _forget_pages(folder: Path, really: bool) -> None:
    """Have the files out of the page cache, or leave them."""
    for path in folder.glob("*.safetensors") if really and hasattr(os, "posix_fadvise") else ():
        with _open(path) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def _read_all(folder: Path) -> None:
    """Read the files as the loader does, to nowhere."""
    with contextlib.ExitStack() as opened:
        places = []
        for path in SafetensorsSource(sorted(folder.glob("*.safetensors"))).files():
            file = opened.enter_context(_open(path))
            places += [(file, begin) for begin in range(0, path.stat().st_size, PIECE_BYTES)]
        buffers = [bytearray(PIECE_BYTES) for _ in range(READERS)]

        def read(turn: int) -> None:
            for file, begin in places[turn::READERS]:
                os.preadv(file, [buffers[turn]], begin)

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read, range(READERS)))


def _logits(session: Session, decoder: DecoderLike) -> torch.Tensor:
    """Of the last token of a prompt."""
    pool = NewPool(4, 1, 4 * BLOCK_SIZE, deterministic=False)
    executor = Executor(decoder, pool, Device.of(session.device))
    prompt = session.prompt(20, 5)
    return executor.run(_step([prompt], [0], session))[0].float().cpu()


def _step(new: list[list[int]], before: list[int], session: Session) -> StepNumbers:
    """A step that computes ``new`` tokens of sequences with so many ``before``, decodes first; a row of logits each."""
    lengths = np.array([len(tokens) for tokens in new])
    starts = np.concatenate([[0], lengths.cumsum()])
    contexts = np.array(before) + lengths
    width = blocks_for(int(contexts.max()))
    tables = np.arange(len(new) * width, dtype=np.int32).reshape(len(new), width)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
    rows = np.repeat(np.arange(len(new)), lengths)
    return StepNumbers(
        token_ids=np.array([token for tokens in new for token in tokens], dtype=np.int64),
        positions=positions.astype(np.int64),
        slots=tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=starts.astype(np.int32),
        context_lens=contexts.astype(np.int32),
        block_tables=tables,
        logit_rows=(starts[1:] - 1).astype(np.int64),
        num_decodes=int((lengths == 1).sum()),
        pending_places=[],
        pending_rows=[],
    )


def mixed(session: Session) -> dict[str, Any]:
    """Steps of decodes and a chunk of a prompt, launched operator by operator and replayed between attentions.

    Several steps are launched before the last is waited for, as the engine does: a step takes what host or device takes
    longer for. A token that is chosen of one way's logits is the largest of the other's, to within rounding.
    """
    session.drop_transformers()
    counts, context, repeats = session.plan.mixed
    device = Device.of(session.device)
    with ck.use_backend("triton"):
        most = max(counts)
        blocks = (most // 2 + 1) * blocks_for(max(context + 1, most))
        before = device.free_bytes()
        pool = NewPool(blocks, most, context + most, False, max_rows=1, max_piece_tokens=most)
        executor = GraphExecutor(session.decoder, pool, device)
        made = device.free_bytes()
        capture = executor.capture()
        recorded = max(0, made - device.free_bytes())
        rows, agree = [], True
        for count in counts:
            decodes = count // 2
            new = [session.prompt(1, 7 + i) for i in range(decodes)] + [session.prompt(count - decodes, 6)]
            step = _step(new, [context] * decodes + [0], session)
            launched, wanted = _time(device, partial(Executor.run, executor, step), repeats)
            replayed, found = _time(device, partial(executor.run, step), repeats)
            chosen = wanted.gather(1, found.argmax(1, keepdim=True)).squeeze(1)
            gap = float((wanted.amax(1) - chosen).max())
            agree = agree and gap <= session.plan.tolerance
            rows.append({
                "tokens": count, "decodes": decodes, "launched_ms": launched * 1e3, "replayed_ms": replayed * 1e3,
                "factor": launched / replayed, "largest_gap": gap,
            })  # fmt: skip
    return {
        "ok": agree, "rows": rows, "goal": MIXED_GOAL, "context": context, "graphs": capture.graphs,
        "capture_s": capture.seconds, "pool_gib": (before - made) / 2**30, "recorded_gib": recorded / 2**30,
        "reached": session.tiny or rows[0]["factor"] >= MIXED_GOAL,
    }  # fmt: skip


def _time(device: Device, work: Callable[[], tuple[torch.Tensor, ...]], repeats: int) -> tuple[float, torch.Tensor]:
    """Seconds of each of many in a row, and the first of the results."""
    device.read(work()[0]).wait()
    started = time.perf_counter()
    for _ in range(repeats):
        result = work()[0]
    (found,) = device.read(result).wait()
    return (time.perf_counter() - started) / repeats, found.clone()
