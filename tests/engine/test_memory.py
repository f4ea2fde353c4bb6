"""The KV pool's size from what is free, and the messages when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from carousel.engine import memory
from carousel.engine.errors import InvalidRequest
from carousel.engine.memory import plan_kv_cache

GIB = 2**30


def test_a_fraction_of_free_memory() -> None:
    budget = plan_kv_cache(1024, 0.5, 1 * GIB, 0, 8192, 10_000)
    assert budget.num_blocks == GIB // 2 // 1024 // 16
    assert str(budget) == "KV cache: 0.50 GiB, 524,288 tokens, 64.0 full-length sequences of 8,192"


def test_no_more_than_the_batch_can_fill() -> None:
    assert plan_kv_cache(1024, 0.5, 64 * GIB, 100, 8192, 4).num_blocks == 4 * 7


def test_the_context_shrinks_to_the_memory_unless_it_was_asked_for() -> None:
    assert plan_kv_cache(1024, 2**20, GIB, 0, 8192, 8).max_model_len == 1024
    with pytest.raises(InvalidRequest, match=r"--kv-cache-memory: .* at least 2097152 bytes for one sequence of 2048"):
        plan_kv_cache(1024, 2**20, GIB, 2048, 8192, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1024, 2 * GIB, GIB, 0, 8192, 8), "--kv-cache-memory: got '2147483648 bytes', allowed: at most what is free"),
        (
            (1024, 0.5, GIB, 9000, 8192, 8),
            "--max-model-len: got 9000, allowed: at most the model's context length, 8192",
        ),
        ((2**20, 2**24, GIB, 0, 8192, 8), "two blocks"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_kv_cache(*arguments)
    assert message in str(refused.value)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _write(tmp_path / "meminfo", "MemTotal: 999 kB\nMemAvailable: 2097152 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    original = memory._cgroup_free
    monkeypatch.setattr(memory, "_cgroup_free", lambda: original(tmp_path / "cgroup"))
    return tmp_path / "cgroup"


def free() -> int:
    return memory.free_memory(torch.device("cpu"))


def test_free_memory_without_a_container(machine: Path) -> None:
    assert free() == 2 * GIB


def test_free_memory_under_cgroup_v2(machine: Path) -> None:
    _write(machine / "memory.max", f"{GIB}\n")
    _write(machine / "memory.current", f"{GIB // 2}\n")
    _write(machine / "memory.stat", f"anon 5\ninactive_file {GIB // 4}\n")
    assert free() == GIB // 2 + GIB // 4
    _write(machine / "memory.max", "max\n")
    assert free() == 2 * GIB


def test_free_memory_under_cgroup_v1(machine: Path) -> None:
    _write(machine / "memory/memory.limit_in_bytes", f"{GIB}\n")
    _write(machine / "memory/memory.usage_in_bytes", f"{GIB // 2}\n")
    _write(machine / "memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 8}\n")
    assert free() == GIB // 2 + GIB // 8
    _write(machine / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert free() == 2 * GIB


def test_an_unknown_machine_is_taken_for_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(memory, "_cgroup_free", lambda: None)
    assert free() == 2 * GIB
