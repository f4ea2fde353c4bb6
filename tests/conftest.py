"""What all tests need: ids and logging of their own, and a place for Triton kernels.

Where the Triton kernels run in tests: on the GPU if there is one, otherwise in Triton's interpreter.

Triton decides that when a kernel is defined and looks at this variable when it is imported, so it is set before any
test module is. Nothing else reads it: servers that tests start use the CPU backend as always.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

# A busy machine is no failure: no test asserts on absolute time, hypothesis's own deadline included.
hypothesis.settings.register_profile("house", deadline=None)
hypothesis.settings.load_profile("house")

if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give schemathesis's items ids of their own: pytest 9.2 makes them of the function's name alone."""
    if item.parent is not None and not item.nodeid.endswith(f"::{item.name}"):
        item._id = type(item.id).parse(f"{item.parent.nodeid}::{item.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests with one id, xdist would run one and say nothing of the others."""
    again = [nodeid for nodeid, times in Counter(item.nodeid for item in items).items() if times > 1]
    if again:
        raise pytest.UsageError(f"tests with the same id: {', '.join(again)}")


@contextmanager
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: found.level for name, found in root.manager.loggerDict.items() if isinstance(found, logging.Logger)}
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands configure the logging of their process for good, which here is that of all tests to come."""
    with restored_logging():
        yield


@pytest.fixture(autouse=True, scope="module")
def logging_as_it_was_before_the_module() -> Iterator[None]:
    """So do the servers that all tests of a module share."""
    with restored_logging():
        yield
