"""One thread for these tests: their tensors are tiny, and on a busy machine threads mostly wait for each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

# Triton has no wheels for macOS; everywhere else it is among the requirements of the tests.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
