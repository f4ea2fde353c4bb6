"""From settings to a running engine; what ``carousel generate`` and ``carousel bench`` run on, without a server."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from carousel.config import Settings
from carousel.engine.errors import EngineUnavailable

if TYPE_CHECKING:
    from carousel.engine.engine import Engine
    from carousel.models.loader import LoadedModel
    from carousel.models.parallel import Ranks


@contextlib.contextmanager
def busy(message: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def pick_device(name: str) -> str:
    """``auto`` becomes ``cuda`` where torch can use one, else ``cpu``; ``cuda`` is the first of those that are visible.

    Raises:
        EngineUnavailable: a GPU was asked for that is not there.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return name
    if not torch.cuda.is_available():
        raise EngineUnavailable(f"--device {name}: torch finds no CUDA device here; use --device cpu, or auto")
    index = name.partition(":")[2]
    if index and int(index) >= (count := torch.cuda.device_count()):
        there = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise EngineUnavailable(f"--device {name}: torch finds only {there}")
    return name


def fetch(settings: Settings) -> Path:
    """Where the model lies on the local disk, after a download where necessary.

    Raises:
        SourceError: it cannot be had.
    """
    from carousel.models.source import resolve

    return resolve(settings.model, cache_dir=settings.cache_dir or None, checksum=settings.model_checksum or None)


def load(path: Path, settings: Settings) -> LoadedModel:
    """Load the model that lies at ``path``.

    Raises:
        ModelLoadError: it cannot be read.
        UnsupportedModel: its architecture is not supported.
        EngineUnavailable: the device is not there, or cannot do what was asked.
        RankLost: a process of ``tensor_parallel_size`` has ended.
    """
    device = pick_device(settings.device)
    for flag, wanted in (
        ("--deterministic", settings.deterministic),
        ("--kv-cache-dtype fp8", settings.kv_cache_dtype == "fp8"),
    ):
        if wanted and device == "cpu":
            raise EngineUnavailable(f"{flag} runs on GPUs only, and torch finds none here")
    if settings.kv_cache_dtype in ("float32", "bfloat16") and device != "cpu":
        raise EngineUnavailable(
            f"--kv-cache-dtype {settings.kv_cache_dtype} is for CPUs, not for {device}: choose auto, or fp8"
        )
    if settings.tensor_parallel_size == 1:
        return load_part(path, settings, device)
    return _load_split(path, settings, device)


def _load_split(path: Path, settings: Settings, device: str) -> LoadedModel:
    """With a process for each further rank."""
    from dataclasses import replace

    from carousel.rank_processes import RankProcesses

    if device != "cpu":
        import torch

        size, count = settings.tensor_parallel_size, torch.cuda.device_count()
        if size > count:
            raise EngineUnavailable(f"--tensor-parallel-size {size}: a GPU for each is needed, torch finds {count}")
    processes = RankProcesses(settings, path, device)
    try:
        ranks = processes.join()
        model = load_part(path, settings, processes.device, ranks)
        processes.loaded()
    except BaseException:
        processes.stop()
        raise
    return replace(model, ranks=processes)


def load_part(path: Path, settings: Settings, device: str, ranks: Ranks | None = None) -> LoadedModel:
    """Load the model, or what one of several ranks holds of it, onto a device; raises what :func:`load` does."""
    from carousel.models.fetch.cache import default_cache
    from carousel.models.loader import load_model

    return load_model(
        path,
        device=device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        cache_dir=settings.cache_dir or default_cache(),
        max_model_len=settings.max_model_len or None,
        deterministic=settings.deterministic,
        kv_dtype=settings.kv_cache_dtype,
        ranks=ranks,
    )


def start_engine(model: LoadedModel, settings: Settings) -> Engine:
    """A started, warmed-up engine on a loaded model.

    Raises:
        InvalidRequest: the settings do not fit the model or the machine.
    """
    from carousel.engine.engine import Engine

    engine = Engine(model, settings)
    engine.start()
    return engine


def spare_what_lives() -> None:
    """Take what lives now out of the garbage collector's rounds, until ``gc.unfreeze()``.

    A full one would stop every stream while it looks at some 300,000 objects; none of them goes before the engine.
    """
    gc.collect()
    gc.freeze()


def engines(settings: Settings) -> Callable[[Settings], Engine]:
    """Load the model of ``settings`` once; the result starts engines on it, with other settings each time.

    For people at a terminal: shows that it is busy. Raises what :func:`fetch`, :func:`load`, :func:`start_engine` do.
    """
    path = fetch(settings)  # not under a spinner: a download shows its own progress
    with busy(f"loading {settings.model_name}"):
        model = load(path, settings)

    def start(changed: Settings) -> Engine:
        with busy("warming up"):
            return start_engine(model, changed)

    return start
