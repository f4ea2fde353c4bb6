"""Linear layers: every implementation computes the same, and the choice between them is measured once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import carousel_kernels as ck
from carousel_kernels.cpu import linear


@pytest.fixture(autouse=True)
def forgotten_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "_choices", {})
    monkeypatch.delenv(linear.IMPLEMENTATION_VARIABLE, raising=False)
    return


def available(dtype: torch.dtype) -> list[str]:
    names = []
    for name in ("torch", "mkl", "onednn", "native"):
        try:
            linear.prepare_linear(torch.ones(16, 16, dtype=dtype), implementation=name)
            names.append(name)
        except (AttributeError, NotImplementedError, RuntimeError):
            pass
    return names


@pytest.mark.parametrize("implementation", available(torch.float32))
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 130),
    shape=st.sampled_from([(96, 64), (33, 17), (64, 200)]),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_implementations_agree(
    implementation: str, rows: int, shape: tuple[int, int], with_bias: bool, strided: bool
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(shape)
    bias = torch.randn(shape[0]) if with_bias else None
    x = torch.randn(rows, 2 * shape[1])[:, : shape[1]] if strided else torch.randn(rows, shape[1])
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.inference_mode():
        got = linear.prepare_linear(weight, bias, implementation=implementation)(x)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", available(torch.bfloat16))
def test_bfloat16(implementation: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    got = linear.prepare_linear(weight, implementation=implementation)(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.1)


def test_the_original_weight_can_be_dropped() -> None:
    """A packed layer must not read the original: its memory goes to something else."""
    for name in set(available(torch.float32)) - {"torch"}:
        torch.manual_seed(0)
        weight, x = torch.randn(64, 48), torch.randn(5, 48)
        expected = x @ weight.T
        layer = linear.prepare_linear(weight, implementation=name)
        weight.fill_(float("nan"))
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_choice_is_made_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []

    def measure(weight: torch.Tensor) -> str:
        measured.append(tuple(weight.shape))
        return "torch"

    monkeypatch.setattr(linear, "_measure", measure)
    for shape in ((32, 16), (32, 16), (16, 32), (32, 16)):
        ck.prepare_linear(torch.ones(shape))
    assert measured == [(32, 16), (16, 32)]
    assert {key[:2] for key in linear.chosen_implementations()} == {(32, 16), (16, 32)}


def test_the_fastest_correct_implementation_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        def layer(x: torch.Tensor) -> torch.Tensor:
            deadline = time.thread_time() + 0.001
            while time.thread_time() < deadline:
                pass
            return x @ weight.T

        return layer

    def fast(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        return lambda x: x @ weight.T

    def wrong_for_many_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        zeros = torch.zeros(256, weight.shape[0])
        return lambda x: x @ weight.T if x.shape[0] < 100 else zeros

    def missing(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        raise AttributeError("not in this build")

    candidates = {"missing": missing, "torch": slow, "wrong": wrong_for_many_rows, "fast": fast}
    monkeypatch.setattr(linear, "_IMPLEMENTATIONS", candidates)
    threads = torch.get_num_threads()
    ck.prepare_linear(torch.rand(64, 64))
    assert torch.get_num_threads() == threads
    assert list(linear.chosen_implementations().values()) == ["fast"]


def test_large_layers_are_measured_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def spy(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        seen.append(tuple(weight.shape))
        return lambda x: x @ weight.T

    monkeypatch.setattr(linear, "_IMPLEMENTATIONS", {"torch": spy})
    monkeypatch.setattr(linear, "_MAX_TIMED_ELEMENTS", 1000)
    ck.prepare_linear(torch.rand(640, 10))
    assert seen == [(100, 10), (640, 10)]


def test_environment_forces_and_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def recorder(name: str) -> object:
        def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
            used.append(name)
            return lambda x: x @ weight.T

        return prepare

    monkeypatch.setattr(linear, "_IMPLEMENTATIONS", {name: recorder(name) for name in ("torch", "mkl", "onednn")})
    monkeypatch.setenv(linear.IMPLEMENTATION_VARIABLE, "mkl")
    ck.prepare_linear(torch.ones(4, 4))
    linear.prepare_linear(torch.ones(4, 4), implementation="onednn")
    assert used == ["mkl", "onednn"]
    assert linear.chosen_implementations() == {}
    monkeypatch.setenv(linear.IMPLEMENTATION_VARIABLE, "cublas")
    with pytest.raises(ValueError, match=r"'cublas'.*torch, mkl, onednn"):
        ck.prepare_linear(torch.ones(4, 4))
