"""Triton's elementwise kernels against the reference; what all backends share is in test_elementwise.py.

Tolerances: float32 in another order of sums, 1e-5; 16-bit results may differ by their last bit, 1 %.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import carousel_kernels as ck
from carousel_kernels import reference
from carousel_kernels import triton as backend
from carousel_kernels.triton import elementwise
from carousel_kernels.triton.common import E4M3_BIAS, byte_to_e4m3, e4m3_to_byte

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (3, 5), (2, 4, 24), (1, 9, 128), (5, 1537), (2, 2, 3, 8), (0, 16)]),
    dtype=DTYPES,
    strided=st.booleans(),
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(*shape[:-1], 3 * shape[-1]) * 3).to(dtype).to(DEVICE)[..., shape[-1] : 2 * shape[-1]]
    weight = torch.randn(shape[-1]).to(dtype).to(DEVICE)
    x = x if strided else x.contiguous()
    assert_close(backend.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(0, 9), width=st.sampled_from([1, 7, 64, 1537]), dtype=DTYPES, strided=st.booleans())
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype, strided: bool) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, 2 * width).to(dtype).to(DEVICE)[..., :width]
    weight = torch.randn(width).to(dtype).to(DEVICE)
    if not strided:
        x, residual = x.contiguous(), residual.contiguous()
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, summed = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert summed.data_ptr() == residual.data_ptr()
    assert_close(normed, expected)


def test_a_sum_of_two_types_takes_the_wider() -> None:
    x, residual, weight = torch.randn(2, 8).bfloat16().to(DEVICE), torch.randn(2, 8).to(DEVICE), torch.ones(8)
    for got, expected in zip(
        backend.add_rms_norm(x, residual, weight.to(DEVICE), 1e-5),
        reference.add_rms_norm(x, residual, weight.to(DEVICE), 1e-5),
        strict=True,
    ):
        assert_close(got, expected)


@settings(max_examples=16, deadline=None)
@given(rows=st.integers(0, 5), width=st.sampled_from([1, 80, 1025]), dtype=DTYPES, gelu=st.booleans())
def test_gates(rows: int, width: int, dtype: torch.dtype, gelu: bool) -> None:
    torch.manual_seed(rows)
    x = (torch.randn(rows, 2 * width + 3) * 4).to(dtype).to(DEVICE)[:, : 2 * width]
    name = "gelu_tanh_mul" if gelu else "silu_mul"
    assert_close(getattr(backend, name)(x), getattr(reference, name)(x))


@settings(max_examples=16, deadline=None)
@given(
    rows=st.integers(0, 5), width=st.sampled_from([1, 80, 1025]), gelu=st.booleans(),
    dtype=st.sampled_from([FP8, torch.int8]),
)  # fmt: skip
def test_quantising_gates(rows: int, width: int, gelu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = (torch.randn(rows, 2 * width) * 4).to(DEVICE)
    x[2:3] = 0
    name = "gelu_tanh_mul_quant" if gelu else "silu_mul_quant"
    (got, scales), (expected, expected_scales) = getattr(backend, name)(x, dtype), getattr(reference, name)(x, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    # A value between two codes may fall on either side: one step of int8, or of e4m3, 1/8 of the value at most.
    step = 1 if dtype == torch.int8 else expected.float().abs() / 8 + 2**-9
    assert ((got.float() - expected.float()).abs() <= step).all()
    assert (got.float() == expected.float()).float().mean() > 0.98 or not got.numel()


def test_quantised_gates_are_close_to_the_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 400)
    exact = reference.silu_mul(x)
    for dtype, error in ((FP8, 2**-4), (torch.int8, 0.5 / 127)):
        values, scales = ck.silu_mul_quant(x, dtype)
        wide = values.float() * scales.unsqueeze(1)
        size = exact.abs() if dtype == FP8 else exact.abs().amax(1, keepdim=True)
        bound = error * size + scales.unsqueeze(1) * 2e-3
        assert ((wide - exact).abs() <= bound).all()
        assert (values.float().abs().amax(1) == (448 if dtype == FP8 else 127)).all()


@settings(max_examples=14, deadline=None)
@given(
    tokens=st.integers(0, 6), heads=st.sampled_from([(1, 1), (9, 3), (5, 1), (35, 2)]),
    sizes=st.sampled_from([(16, 16), (16, 8), (80, 32), (96, 96), (64, 64)]), dtype=DTYPES,
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8]), normed=st.booleans(),
)  # fmt: skip
def test_rope_with_norms_and_the_kv_write(
    tokens: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, cache_dtype: torch.dtype,
    normed: bool,
) -> None:  # fmt: skip
    torch.manual_seed(tokens)
    (q_heads, kv_heads), (dim, rotary) = heads, sizes
    angles = torch.rand(50, rotary // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)
    positions = torch.randint(0, 50, (tokens,)).to(DEVICE)
    slots = torch.randperm(80)[:tokens].to(DEVICE)
    fused = torch.randn(tokens, q_heads + 2 * kv_heads, dim).to(dtype).to(DEVICE)
    weights = torch.randn(2, dim).to(dtype).to(DEVICE)
    options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-3} if normed else {}
    if cache_dtype == FP8:
        options |= {"k_scale": 0.25, "v_scale": 2.0}
    results = []
    for module in (backend, reference):
        q, k, v = fused.clone().split([q_heads, kv_heads, kv_heads], dim=1)
        caches = torch.zeros(2, 5, 16, kv_heads, dim, dtype=torch.float32).to(cache_dtype).to(DEVICE)
        module.rope_write_kv(q, k, v, cos_sin, positions, caches[0], caches[1], slots, **options)
        results.append((q, caches.float()))
    assert_close(results[0][0], results[1][0])
    # The last bit of a stored key: e4m3 has 3 of them, bfloat16 7.
    tolerance = {FP8: 0.13, torch.bfloat16: 1e-2, torch.float32: 1e-5 if dtype == torch.float32 else 1e-2}[cache_dtype]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=tolerance, atol=tolerance)
    assert torch.equal(results[0][1][1], results[1][1][1]), "values are stored exactly"


@pytest.mark.parametrize("fused", [True, False])
def test_padding_is_not_written(fused: bool) -> None:
    k, v = torch.randn(2, 3, 2, 16).to(DEVICE)
    caches = torch.full((2, 4, 16, 2, 16), 7.0, device=DEVICE)
    slots = torch.tensor([5, -1, -16], device=DEVICE)
    if fused:
        cos_sin = torch.ones(9, 16, device=DEVICE)
        positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        backend.rope_write_kv(k.clone(), k, v, cos_sin, positions, caches[0], caches[1], slots)
    else:
        backend.write_kv(k, v, caches[0], caches[1], slots)
    changed = (caches != 7).any(-1).any(-1).view(2, -1)
    assert changed.nonzero().tolist() == [[0, 5], [1, 5]]


def test_caches_of_other_types_are_refused() -> None:
    k, cache = torch.zeros(1, 2, 16, device=DEVICE), torch.zeros(1, 16, 2, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"KV cache: got torch.float64, allowed: float32"):
        backend.write_kv(k, k, cache, cache, torch.zeros(1, dtype=torch.int64, device=DEVICE))


# --- e4m3 by hand


@triton.jit
def _encode(x, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, e4m3_to_byte(tl.load(x + i)))


@triton.jit
def _decode(x, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, byte_to_e4m3(tl.load(x + i)).to(tl.float32) * E4M3_BIAS)


def test_every_byte_is_read_as_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes.to(DEVICE), out, COUNT=256)
    expected = codes.view(FP8).float()
    numbers = ~expected.isnan()
    assert numbers.sum() == 254
    assert torch.equal(out.cpu()[numbers], expected[numbers])
    assert out.cpu()[~numbers].abs().tolist() == [480, 480]


def test_every_number_is_written_as_e4m3() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = (codes[1:] + codes[:-1]) / 2  # exactly between two codes: the even one wins
    near = torch.cat([between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(1e9))])
    special = torch.tensor([0.0, 1e-30, 448.0, 449.0, 1e30, torch.inf])
    positive = torch.cat([codes, between, near, special, torch.rand(400) * 500, torch.rand(400) * 0.02])
    x = torch.cat([positive, -positive])
    x = torch.cat([x, x.new_full((4096 - len(x),), torch.nan)])
    out = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    _encode[(1,)](x.to(DEVICE), out, COUNT=4096)
    expected = x.clamp(-448, 448).to(FP8)
    got = out.cpu().view(FP8)
    assert torch.equal(got.float()[~x.isnan()], expected.float()[~x.isnan()])
    assert got.float()[x.isnan()].isnan().all()


def test_rows_and_heads_fill_a_program() -> None:
    assert elementwise._norm_rows(128) == 8
    assert elementwise._norm_rows(4096) == 1
    assert elementwise._heads_per_program(80) == 8
