"""Linear layers of bfloat16 between activations in float32, and of float32 by the compiled kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_linear_int8 import implementation

import carousel_kernels as ck
from carousel_kernels.cpu import half, linear, native, native_layer
from carousel_kernels.half_weights import HalfWeight, halve_weight

KINDS = ["native:1", "native:2", "native:4"]
EVERY = pytest.mark.parametrize("which", [*KINDS, "onednn", "torch"])
SHAPES = [(96, 64), (33, 17), (64, 200), (1, 1), (31, 6), (70, 576)]


def reference(weight: HalfWeight, x: torch.Tensor) -> torch.Tensor:
    with ck.use_backend("reference"):
        return ck.prepare_half_linear(weight)(x)


def tolerance(name: str) -> float:
    """A library's result is rounded to bfloat16; ours differs by the order of its sums alone."""
    return 2e-5 if name == "native" else 0.01


@EVERY
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 65),
    shape=st.sampled_from(SHAPES),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_implementations_agree(which: str, rows: int, shape: tuple[int, int], with_bias: bool, strided: bool) -> None:
    torch.manual_seed(rows)
    weight = halve_weight(torch.randn(shape), torch.randn(shape[0]) if with_bias else None)
    x = torch.randn(rows, 2 * shape[1])[:, : shape[1]] if strided else torch.randn(rows, shape[1])
    with implementation(which) as name, torch.inference_mode():
        got = half.prepare_half_linear(weight, names=(name,))(x)
    expected = reference(weight, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance(name) * (1 + float(expected.abs().max())))


@pytest.mark.parametrize("which", KINDS)
def test_a_row_is_the_same_in_any_company_and_on_two_threads(which: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(330, 900), torch.randn(61, 900)
    with implementation(which), torch.inference_mode():
        for layer in (
            half.prepare_half_linear(halve_weight(weight), names=("native",)),
            linear.prepare_linear(weight, implementation="native"),
        ):
            together = layer(x)
            for count in (1, 2, 5, 12, 13, 25):
                assert torch.equal(layer(x[:count].contiguous()), together[:count])
            torch.set_num_threads(2)
            try:
                assert torch.equal(layer(x), together)
            finally:
                torch.set_num_threads(1)


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_by_the_compiled_kernel(which: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(29, shape[1])
    with implementation(which), torch.inference_mode():
        got = linear.prepare_linear(weight, bias, implementation="native")(x)
    exact = x.double() @ weight.double().T + bias
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5 * (1 + float(exact.abs().max())))


@pytest.mark.parametrize("which", KINDS)
def test_activations_are_rounded_as_pytorch_does(which: str) -> None:
    """Ties to even, the largest numbers to infinity, nothing to a number: seen through a layer that passes them on."""
    values = torch.tensor(
        [1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-39, math.inf, -math.inf, math.nan, 0.1, -0.0]
    )
    weight = halve_weight(torch.eye(1))
    with implementation(which) as name:
        got = half.prepare_half_linear(weight, names=(name,))(values.unsqueeze(1)).squeeze(1)
    expected = values.bfloat16().float()
    expected[4] = (
        got[4] if abs(float(got[4])) < 1.2e-38 else expected[4]
    )  # too small: the instruction may take it for 0
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_weights_are_padded_and_packed() -> None:
    torch.manual_seed(0)
    for columns, inputs in SHAPES:
        weight, bias = torch.randn(columns, inputs), torch.randn(columns)
        packed = halve_weight(weight, bias)
        assert torch.equal(packed.row_major(), weight.bfloat16())
        assert packed.bias is not None
        assert torch.equal(packed.bias[:columns], bias)
        assert not packed.bias[columns:].any()
        assert packed.nbytes == sum(tensor.nbytes for tensor in packed.tensors().values())
        assert torch.equal(HalfWeight.of(packed.tensors(), columns, inputs).codes, packed.codes)
        with pytest.raises(ValueError, match=r"codes: not torch.bfloat16"):
            HalfWeight.of(packed.tensors(), columns, inputs + 2)
    part = halve_weight(torch.randn(96, 8), torch.randn(96)).first(32)
    assert part.row_major().shape == (32, 8)


def test_the_choice_is_measured_once_and_without_the_library_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "_choices", {})
    monkeypatch.setattr(half, "_MAX_TIMED_ELEMENTS", 1000)
    weight, x = halve_weight(torch.randn(640, 10), torch.randn(640)), torch.randn(5, 10)
    layer = ck.prepare_half_linear(weight)
    assert list(half.chosen()) == [(640, 10, native.available())]
    torch.testing.assert_close(layer(x), reference(weight, x), rtol=0.02, atol=0.02)
    monkeypatch.setattr(half, "_measure", lambda *_: pytest.fail("measured again"))
    ck.prepare_half_linear(weight)
    monkeypatch.undo()
    monkeypatch.setattr(half, "_choices", {})
    monkeypatch.setattr(native, "_library", None)
    assert not half.full_rate()
    with pytest.raises(NotImplementedError):
        native_layer.float_layer(torch.rand(2, 2), None)
    torch.testing.assert_close(ck.prepare_half_linear(weight)(x), reference(weight, x), rtol=0.02, atol=0.02)
    assert all(name != "native" for _, name in half.chosen()[640, 10, False])


def test_none_that_works_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: HalfWeight) -> half.Linear:
        return lambda x: torch.zeros(x.shape[0], weight.columns)

    monkeypatch.setattr(half, "_choices", {})
    monkeypatch.setattr(half, "_IMPLEMENTATIONS", dict.fromkeys(half.NAMES, broken))
    with pytest.raises(RuntimeError, match="no implementation of a bfloat16 64 x 64 layer works here"):
        ck.prepare_half_linear(halve_weight(torch.randn(64, 64)))
