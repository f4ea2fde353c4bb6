"""Linear layers of 8-bit integers: every implementation gives what the reference gives, for each row by itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import carousel_kernels as ck
from carousel_kernels import int8_weights
from carousel_kernels.cpu import choices, half, linear, native, quant, timing
from carousel_kernels.int8_weights import QuantizedWeight, quantize_rows, quantize_weight, turn, turns


@contextlib.contextmanager
def implementation(name: str) -> Iterator[str]:
    """``native:4`` is the compiled kernel with instructions of kind 4, if this CPU has them."""
    name, _, kind = name.partition(":")
    if not kind:
        yield name
        return
    if not native.available():
        pytest.skip("without the compiled operators")
    try:
        context = native.dot_products_of(int(kind))
        context.__enter__()
    except ValueError:
        pytest.skip(f"this CPU has no dot products of kind {kind}")
    try:
        yield name
    finally:
        context.__exit__(None, None, None)


EVERY = pytest.mark.parametrize("which", ["native:1", "native:2", "native:3", "native:4", "onednn", "torch"])


def reference(weight: QuantizedWeight, x: torch.Tensor, wide: bool, turned: bool = False) -> torch.Tensor:
    with ck.use_backend("reference"):
        return ck.prepare_quantized_linear(weight, wide=wide, turned=turned)(x)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums are exact, so only the last float operations may round differently."""
    torch.testing.assert_close(
        got, expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max() if expected.numel() else 0)
    )


@EVERY
@settings(max_examples=25, deadline=None)
@example(rows=0, shape=(70, 576), with_bias=False, strided=False, wide=False, turned=True)
@given(
    rows=st.integers(0, 65),
    shape=st.sampled_from([(96, 64), (33, 17), (64, 200), (1, 1), (31, 6), (70, 576)]),
    with_bias=st.booleans(),
    strided=st.booleans(),
    wide=st.booleans(),
    turned=st.booleans(),
)
def test_implementations_agree(
    which: str, rows: int, shape: tuple[int, int], with_bias: bool, strided: bool, wide: bool, turned: bool
) -> None:
    torch.manual_seed(rows)
    weight = quantize_weight(torch.randn(shape), torch.randn(shape[0]) if with_bias else None)
    x = torch.randn(rows, 2 * shape[1])[:, : shape[1]] if strided else torch.randn(rows, shape[1])
    with implementation(which) as name, torch.inference_mode():
        got = quant.prepare_quantized_linear(weight, wide=wide, turned=turned, names=(name,))(x)
    assert got.shape == (rows, shape[0])
    close(got, reference(weight, x, wide, turned))


@EVERY
@pytest.mark.parametrize("wide", [False, True])
def test_large_layers_on_two_threads(which: str, wide: bool) -> None:
    """Large enough for the compiled kernel to share the work out, activations included."""
    torch.manual_seed(1)
    weight, x = quantize_weight(torch.randn(320, 900)), torch.randn(61, 900)
    torch.set_num_threads(2)
    try:
        with implementation(which) as name, torch.inference_mode():
            got = quant.prepare_quantized_linear(weight, wide=wide, names=(name,))(x)
    finally:
        torch.set_num_threads(1)
    close(got, reference(weight, x, wide))


@EVERY
@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_any_size(which: str, wide: bool) -> None:
    """Nothing, next to nothing, nearly too much, too much: and no row sees the trouble of another."""
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(40, 48), torch.randn(40))
    x = torch.randn(7, 48)
    for row, size in enumerate((0.0, 1e-36, 1e-29, 1e30, 1.0)):
        x[row] *= size
    x[5, 3], x[6, 47] = math.inf, math.nan
    with implementation(which) as name, torch.inference_mode():
        got = quant.prepare_quantized_linear(weight, wide=wide, names=(name,))(x)
    expected = reference(weight, x, wide)
    assert weight.bias is not None
    for row in (0, 1):
        assert torch.equal(got[row], weight.bias[:40])
    assert got[5:].isnan().all()
    for row in range(5):
        close(got[row], expected[row])


@EVERY
@pytest.mark.parametrize("wide", [False, True])
def test_the_largest_codes_do_not_overflow(which: str, wide: bool) -> None:
    """All codes 127 or -127: sums that saturate in 16 bits, or lose bits in a float, would show."""
    weight = quantize_weight(torch.tensor([1.0, -1.0]).repeat(16).unsqueeze(1).expand(32, 4096))
    x = torch.stack([torch.ones(4096), -torch.ones(4096)]) * 3
    with implementation(which) as name, torch.inference_mode():
        got = quant.prepare_quantized_linear(weight, wide=wide, names=(name,))(x)
    signs = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(got, torch.outer(signs, signs.repeat(16)) * 3 * 4096, rtol=1e-6, atol=0)


@EVERY
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_is_the_same_in_any_company(which: str, wide: bool) -> None:
    torch.manual_seed(0)
    weight, x = quantize_weight(torch.randn(72, 100), torch.randn(72)), torch.randn(40, 100)
    with implementation(which) as name, torch.inference_mode():
        layer = quant.prepare_quantized_linear(weight, wide=wide, names=(name,))
        together = layer(x)
        for count in (1, 2, 5, 12, 13, 25):
            assert torch.equal(layer(x[:count].contiguous()), together[:count])


def test_wide_activations_are_nearly_exact() -> None:
    """With one large value in each row, 8 bits leave the others little; 16 bits leave what the weights' 8 bits cost."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256), torch.randn(9, 256)
    x[:, 7] = 200.0
    quantized = quantize_weight(weight)
    held = quantized.row_major().float() * quantized.scales[:64].unsqueeze(1)
    errors = [
        float((ck.prepare_quantized_linear(quantized, wide=wide)(x) - x @ held.T).norm()) for wide in (False, True)
    ]
    assert errors[1] < errors[0] / 100


@pytest.mark.parametrize(("length", "runs"), [(1536, 32), (576, 4), (64, 4), (32, 2), (48, 1), (16, 1), (100, 1)])
def test_a_turn_spreads_outliers_and_can_be_taken_back(length: int, runs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, length)
    turned = turn(x)
    assert turns(length) == runs
    torch.testing.assert_close(turn(turned) / runs, x, rtol=0, atol=1e-5)
    weight = torch.randn(5, length)
    torch.testing.assert_close(turned @ (turn(weight) / runs).T, x @ weight.T, rtol=0, atol=1e-3)
    peak = torch.zeros(1, length)
    peak[0, 7] = 1.0
    assert int(turn(peak).count_nonzero()) == runs


def test_turned_rows_lose_less_in_8_bits() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 512), torch.randn(9, 512)
    x[:, 7] = 100.0
    plain = ck.prepare_quantized_linear(quantize_weight(weight))(x)
    turned = ck.prepare_quantized_linear(quantize_weight(turn(weight) / turns(512)), turned=True)(x)
    exact = x @ weight.T
    assert float((turned - exact).norm()) < float((plain - exact).norm()) / 3


def test_other_types_and_backends() -> None:
    torch.manual_seed(0)
    weight, x = quantize_weight(torch.randn(48, 64)), torch.randn(5, 64).bfloat16()
    got = ck.prepare_quantized_linear(weight)(x)
    assert got.dtype == torch.bfloat16
    expected = reference(weight, x.float(), False)
    torch.testing.assert_close(got.float(), expected, rtol=0.01, atol=0.01)
    with ck.use_backend("cpu-torch"):  # as where nothing could be compiled
        close(ck.prepare_quantized_linear(weight)(x.float()), expected)
    assert not any(name == "native" for _, name in quant.chosen()[48, 64, False])


def test_a_timed_layer_is_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant, "_choices", {})
    weight, x, times = quantize_weight(torch.randn(48, 64)), torch.randn(5, 64), ck.OperatorTimes()
    with ck.time_operators(times):
        layer = ck.prepare_quantized_linear(weight)
    assert [shape[:2] for shape in quant.chosen()] == [(48, 64)]  # not by the reference
    assert torch.equal(layer(x), ck.prepare_quantized_linear(weight)(x))
    assert times["linear"].calls == 1


def test_without_the_library_another_implementation_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(quant, "_choices", {})
    weight, x = quantize_weight(torch.randn(64, 64)), torch.randn(3, 64)
    close(ck.prepare_quantized_linear(weight)(x), reference(weight, x, False))
    assert list(quant.chosen()) == [(64, 64, False)]
    monkeypatch.setattr(quant, "_IMPLEMENTATIONS", dict.fromkeys(quant.NAMES, quant._native))
    monkeypatch.setattr(quant, "_choices", {})
    with pytest.raises(RuntimeError, match="no implementation of a quantised 64 x 64 layer works here"):
        ck.prepare_quantized_linear(weight)


@settings(max_examples=40, deadline=None)
@given(columns=st.integers(1, 80), inputs=st.integers(1, 40), chunk=st.sampled_from([1, 200, 1 << 22]))
def test_weights_are_padded_and_packed(columns: int, inputs: int, chunk: int) -> None:
    torch.manual_seed(columns)
    weight, bias = torch.randn(columns, inputs), torch.randn(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_weights, "_CHUNK_ELEMENTS", chunk)
        packed = quantize_weight(weight, bias)
    codes, scales = quantize_rows(weight)
    assert torch.equal(packed.row_major(), codes)
    assert torch.equal(packed.scales[:columns], scales)
    assert torch.equal(packed.shifts[:columns], codes.sum(1).int() * 128)
    assert packed.bias is not None
    assert torch.equal(packed.bias[:columns], bias)
    for tensor in (packed.scales, packed.shifts, packed.bias):
        assert not tensor[columns:].any()
    assert int(packed.codes.long().sum()) == int(codes.long().sum())  # zero beyond
    torch.testing.assert_close(codes * scales.unsqueeze(1), weight, rtol=0, atol=float(scales.max()) * 0.5001)
    again = QuantizedWeight.of(packed.tensors(), columns, inputs)
    assert again.nbytes == packed.nbytes == sum(t.nbytes for t in packed.tensors().values())
    with pytest.raises(ValueError, match=r"codes: not torch.int8"):
        QuantizedWeight.of(packed.tensors(), columns, inputs + 4)
    with pytest.raises(ValueError, match="scales: not"):
        QuantizedWeight.of(packed.tensors() | {"scales": packed.scales.double()}, columns, inputs)


def test_layers_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="65537 inputs cannot be quantised; at most 65536"):
        quantize_weight(torch.zeros(1, 65_537))


def test_choice_of_one_implementation_or_two() -> None:
    same = [1.0] * 5
    assert timing.fastest({"native": same, "onednn": [2.0] * 5}, quant._ROWS) == ((1, "native"),)
    few_and_many = {"native": [1.0, 1.0, 1.0, 4.0, 4.0], "onednn": [4.0, 4.0, 4.0, 1.0, 1.0]}
    assert timing.fastest(few_and_many, quant._ROWS) == ((1, "native"), (32, "onednn"))
    hardly = {"native": [1.0, 1.0, 1.0, 1.0, 1.2], "onednn": [4.0, 4.0, 4.0, 1.0, 1.0]}
    assert timing.fastest(hardly, quant._ROWS) == ((1, "native"),)  # not worth a second copy of the weights


def test_two_implementations_share_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantize_weight(torch.randn(64, 64)), torch.randn(40, 64)
    used: list[tuple[str, int]] = []

    def spying(name: str) -> object:
        def prepare(weight: QuantizedWeight, wide: bool) -> linear.Linear:
            layer = quant._torch(weight, wide)

            def spy(x: torch.Tensor) -> torch.Tensor:
                used.append((name, x.shape[0]))
                return layer(x)

            return spy

        return prepare

    monkeypatch.setattr(quant, "_IMPLEMENTATIONS", {name: spying(name) for name in ("native", "onednn")})
    monkeypatch.setattr(quant, "_choices", {(64, 64, native.available()): ((1, "native"), (32, "onednn"))})
    monkeypatch.setattr(quant, "_choose", lambda *_: ((1, "native"), (32, "onednn")))
    layer = ck.prepare_quantized_linear(weight)
    for rows in (1, 31, 32, 40):
        close(layer(x[:rows]), reference(weight, x[:rows], False))
    assert used == [("native", 1), ("native", 31), ("onednn", 32), ("onednn", 40)]


def test_measurements_are_kept_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {(960, 576, torch.float32): "onednn", (8, 8, torch.bfloat16): "torch"}
    quantized = {(960, 576, True): ((1, "native"), (32, "onednn")), (960, 576, False): ((1, "torch"),)}
    monkeypatch.setattr(linear, "_choices", dict(plain))
    monkeypatch.setattr(quant, "_choices", dict(quantized))
    halves = {(960, 576, True): ((1, "native"), (64, "onednn"))}
    monkeypatch.setattr(half, "_choices", dict(halves))
    kept = choices.saved()
    monkeypatch.setattr(linear, "_choices", {(8, 8, torch.bfloat16): "mkl"})
    monkeypatch.setattr(quant, "_choices", {})
    monkeypatch.setattr(half, "_choices", {})
    choices.restore(kept)
    assert half.chosen() == halves
    assert linear.chosen_implementations() == plain | {(8, 8, torch.bfloat16): "mkl"}  # own measurements stay
    assert quant.chosen() == quantized
    strange = {"linear": [[1, 1, "float32", "cublas"]], "quantized": [[1, 1, True, [[1, "cublas"]]], [2, 2, True, []]]}
    choices.restore(strange)
    assert (1, 1, torch.float32) not in linear.chosen_implementations()
    assert (1, 1, True) not in quant.chosen()
    assert (2, 2, True) not in quant.chosen()
    for damaged in ({}, {"linear": 3, "quantized": []}, {"linear": [[1, 1, "no_type", "torch"]], "quantized": []}):
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            choices.restore(damaged)


def test_another_cpu_measures_for_itself(tmp_path: object) -> None:
    def machine(text: str) -> str:
        file = tmp_path / "cpuinfo"  # type: ignore[operator]
        file.write_text(text)
        return choices.machine(file)

    one = machine("processor : 0\nmodel name : A\nflags : avx2\ncpu MHz : 1\n\nprocessor : 1\nmodel name : A\n")
    assert one == machine("processor : 0\nmodel name : A\nflags : avx2\ncpu MHz : 999\n\n")
    assert one != machine("processor : 0\nmodel name : B\nflags : avx2\ncpu MHz : 1\n\n")
    assert one != machine("processor : 0\nmodel name : A\nflags : avx2 avx512_vnni\ncpu MHz : 1\n\n")


def test_large_layers_are_measured_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(weight: QuantizedWeight, wide: bool) -> linear.Linear:
        seen.append(weight.columns)
        return quant._torch(weight, wide)

    monkeypatch.setattr(quant, "_IMPLEMENTATIONS", dict.fromkeys(quant.NAMES, spy))
    monkeypatch.setattr(quant, "_choices", {})
    monkeypatch.setattr(quant, "_MAX_TIMED_ELEMENTS", 1000)
    ck.prepare_quantized_linear(quantize_weight(torch.rand(640, 10), torch.rand(640)))
    assert (seen[0], seen[-1]) == (96, 640)
