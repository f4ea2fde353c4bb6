"""From settings to a running engine; what ``carousel generate`` and ``carousel bench`` run on, without a server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from carousel.config import Settings
from carousel.engine.errors import EngineUnavailable

if TYPE_CHECKING:
    from carousel.engine.engine import Engine
    from carousel.models.loader import LoadedModel


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
        EngineUnavailable: the device is not there.
    """
    from carousel.models.fetch.cache import default_cache
    from carousel.models.loader import load_model

    return load_model(
        path,
        device=pick_device(settings.device),
        dtype=settings.dtype,
        quantization=settings.quantization,
        cache_dir=settings.cache_dir or default_cache(),
        max_model_len=settings.max_model_len or None,
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
