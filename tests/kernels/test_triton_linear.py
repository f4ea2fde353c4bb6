"""Quantised linear layers and low-rank adapters: the formats by hand, Triton's kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.devices import DEVICE, moved, on_device

import carousel_kernels as ck
from carousel_kernels import cpu, reference, weight_formats
from carousel_kernels.triton import linear
from carousel_kernels.weight_formats import GroupedWeight, ScaledWeight

# Rounding of the result, and of single products by how the sum is cut; in units of the largest result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., 32 / bits] -> int32 [...], the first in the lowest bits; in Python's integers."""
    words = [sum(int(v) << (bits * i) for i, v in enumerate(part)) for part in values.reshape(-1, 32 // bits)]
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32).view(values.shape[:-1])


def quantized(columns: int, features: int, group: int, bits: int, seed: int = 0) -> GroupedWeight:
    g = torch.Generator().manual_seed(seed)
    groups = features // group
    q = torch.randint(0, 2**bits, (columns, features), generator=g, dtype=torch.uint8)
    zeros = torch.randint(1, 2**bits, (groups, columns), generator=g, dtype=torch.int16)
    scales = (torch.rand(groups, columns, generator=g) * 0.02 + 0.01).half()
    return GroupedWeight(q, scales, zeros, None, group, bits)


def gptq(weight: GroupedWeight, zero_offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_word = 32 // weight.bits
    columns, features = weight.q.shape
    words = pack(weight.q.T.reshape(features // per_word, per_word, columns).transpose(1, 2), weight.bits)
    zeros = pack((weight.zeros - zero_offset).reshape(-1, columns // per_word, per_word), weight.bits)
    return words, zeros, weight.scales


def grouped(weight: GroupedWeight, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return on_device(lambda weight, bias, x: linear.prepare_grouped_linear(weight, bias)(x), weight, bias, x)


def scaled(weight: ScaledWeight, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return on_device(lambda weight, bias, x: linear.prepare_scaled_linear(weight, bias)(x), weight, bias, x)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    scale = float(expected.float().abs().max())
    error = float((got.float() - expected.float()).abs().max())
    assert error <= TOLERANCE[got.dtype] * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_is_unpacked(bits: int, zero_offset: int, shuffled: bool) -> None:
    weight = quantized(16, 96, 32, bits)
    dense = weight.dense(torch.float32)
    words, zeros, scales = gptq(weight, zero_offset)
    g_idx = torch.arange(96, dtype=torch.int32) // 32
    if shuffled:  # the words and the groups of the input features, in another order of features
        order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
        moved = GroupedWeight(weight.q[:, order], weight.scales, weight.zeros, None, 32, bits)
        words, dense, g_idx = gptq(moved, zero_offset)[0], dense[:, order], g_idx[order]
    got = weight_formats.grouped_from_gptq(
        words, zeros, scales, g_idx, bits=bits, group_size=32, zero_offset=zero_offset
    )
    assert torch.equal(got.dense(torch.float32), dense)
    assert (got.order is not None) == shuffled


def test_awq_is_unpacked() -> None:
    weight = quantized(24, 64, 32, 4)
    order = list(AWQ_ORDER)
    words = pack(weight.q.T.reshape(64, 3, 8)[:, :, order], 4)
    zeros = pack(weight.zeros.reshape(2, 3, 8)[:, :, order], 4)
    got = weight_formats.grouped_from_awq(words, zeros, weight.scales, group_size=32)
    assert torch.equal(got.q, weight.q)
    assert torch.equal(got.zeros, weight.zeros)
    x = torch.randn(3, 64)
    expected = x @ weight.dense(torch.float32).T
    torch.testing.assert_close(ck.prepare_linear_awq(words, zeros, weight.scales, group_size=32)(x), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits: got 3, allowed: 4, 8"),
        ({"group_size": 24}, "group_size: got 24"),
        ({"zero_offset": 2}, "zero_offset: got 2"),
        ({"scales": torch.ones(2, 16)}, r"shape of scales: got \(2, 16\), allowed: \(3, 16\)"),
        ({"g_idx": torch.zeros(96, dtype=torch.int32)}, "g_idx: got groups of other sizes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    words, zeros, scales = gptq(quantized(16, 96, 32, 4), 1)
    given_: dict[str, object] = {"qweight": words, "qzeros": zeros, "scales": scales, "group_size": 32} | change
    with pytest.raises(ValueError, match=message):
        ck.prepare_linear_gptq(**given_)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 33),
    columns=st.sampled_from([24, 64, 100]),
    shape=st.sampled_from([(32, 32), (96, 32), (192, 64), (256, 128), (160, 160)]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(list(TOLERANCE)),
    with_bias=st.booleans(),
    shuffled=st.booleans(),
)
def test_grouped_layers_equal_the_reference(
    rows: int,
    columns: int,
    shape: tuple[int, int],
    bits: int,
    dtype: torch.dtype,
    with_bias: bool,
    shuffled: bool,
) -> None:
    torch.manual_seed(rows)
    weight = quantized(columns, *shape, bits)
    if shuffled:
        weight = GroupedWeight(weight.q, weight.scales, weight.zeros, torch.randperm(shape[0]), shape[1], bits)
    bias = torch.randn(columns).to(dtype) if with_bias else None
    x = torch.randn(rows, 2 * shape[0]).to(dtype)[:, : shape[0]]
    expected = reference.prepare_grouped_linear(weight, bias)(x)
    close(grouped(weight, bias, x), expected)
    close(cpu.prepare_grouped_linear(weight, bias)(x), expected)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 33),
    shape=st.sampled_from([(24, 64), (64, 200), (100, 256)]),
    stored=st.sampled_from([torch.float8_e4m3fn, torch.int8]),
    activations=st.sampled_from(["keep", "quantize"]),
    dtype=st.sampled_from(list(TOLERANCE)),
    per_tensor=st.booleans(),
)
def test_scaled_layers_equal_the_reference(
    rows: int,
    shape: tuple[int, int],
    stored: torch.dtype,
    activations: weight_formats.Activations,
    dtype: torch.dtype,
    per_tensor: bool,
) -> None:
    torch.manual_seed(rows)
    q = (torch.randn(shape) * 30).clamp(-127, 127).to(stored)
    weight = weight_formats.scaled(q, torch.rand(1 if per_tensor else shape[0]) * 0.02, activations)
    bias, x = torch.randn(shape[0]).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    close(scaled(weight, bias, x), reference.prepare_scaled_linear(weight, bias)(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_are_multiplied_by_a_widened_weight(bits: int) -> None:
    torch.manual_seed(0)
    weight, x = quantized(40, 96, 32, bits), torch.randn(linear.MOST_ROWS + 1, 96)
    close(grouped(weight, None, x), reference.prepare_grouped_linear(weight, None)(x))
    int8 = weight_formats.scaled(torch.randint(-127, 128, (40, 96), dtype=torch.int8), torch.rand(40), "keep")
    close(scaled(int8, None, x), reference.prepare_scaled_linear(int8, None)(x))


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    """Of as many tiles as need splitting: the parts are added in an order of their own."""
    torch.manual_seed(0)
    layer = linear.prepare_grouped_linear(moved(quantized(48, 1536, 128, 4)), None)
    x = torch.randn(20, 1536, device=DEVICE, dtype=torch.float16)
    together = layer(x)
    assert linear._splits(linear.target_of(x.device), 48, 12)[0] > 1
    assert torch.equal(together, torch.cat([layer(x[:3]), layer(x[3:4]), layer(x[4:])]))


def test_fp8_without_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ampere and CDNA 3 unpack the bytes, NaN's neighbours and subnormals included, and refuse FP8 activations."""
    from carousel_kernels.triton.registry import TARGETS

    monkeypatch.setattr(linear, "target_of", lambda device: TARGETS[0])
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(2, 127)
    weight = codes.view(torch.float8_e4m3fn)
    layer = ck.prepare_linear_fp8(weight, torch.tensor(0.5))
    x = torch.eye(127)[:40]
    assert torch.equal(layer(x), (weight.float() * 0.5).T[:40])
    assert torch.equal(scaled(weight_formats.scaled(weight, torch.tensor(0.5), "keep"), None, x), layer(x))
    with pytest.raises(ValueError, match="activations: got 'quantize' with FP8 weights, allowed on sm_80: 'keep'"):
        linear.prepare_scaled_linear(weight_formats.scaled(weight, torch.tensor(0.5), "quantize"), None)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(0, 9),
    rank=st.sampled_from([1, 8, 20]),
    sizes=st.sampled_from([(40, 24), (300, 200)]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_every_row_gets_its_own_adapter(rows: int, rank: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(rank + rows)
    features, columns = sizes
    a, b = torch.randn(3, rank, features).to(dtype), torch.randn(3, columns, rank).to(dtype)
    scaling, adapters = torch.tensor([0.5, 1.0, 2.0]), torch.randint(-1, 3, (rows,), dtype=torch.int32)
    x, out = torch.randn(rows, features).to(dtype), torch.randn(rows, columns).to(dtype)
    before, expected = out.clone(), out.clone()
    reference.add_lora_(expected, x, a, b, scaling, adapters)
    out = on_device(lambda out, *rest: linear.add_lora_(out, *rest) or out, out, x, a, b, scaling, adapters)
    if rows:
        close(out, expected)
    assert torch.equal(out[adapters < 0], before[adapters < 0])
    by_hand = [
        before[t].float() + scaling[i] * (b[i].float() @ (a[i].float() @ x[t].float()))
        for t, i in enumerate(adapters.tolist())
        if i >= 0
    ]
    if by_hand:
        close(expected[adapters >= 0], torch.stack(by_hand).to(dtype))
