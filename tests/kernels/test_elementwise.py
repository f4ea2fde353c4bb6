"""Norms, rotary embedding, activations, the KV write and the choice of backends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import CPU_BACKENDS

import carousel_kernels as ck
from carousel_kernels import cpu

BACKENDS = pytest.mark.parametrize("backend", CPU_BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_rms_norm(backend: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, weight = (torch.randn(tokens, 96) * 3).to(dtype), torch.randn(96).to(dtype)
    wide = x.double()
    with ck.use_backend(backend):
        got = ck.rms_norm(x, weight, 0.1)
        head = ck.rms_norm(x.view(tokens, 3, 32), weight[:32], 0.1)
    assert got.dtype == dtype
    close(got, wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double())
    heads = wide.view(tokens, 3, 32)
    close(head, heads / (heads.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight[:32].double())


@BACKENDS
@DTYPES
def test_add_rms_norm(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(5, 64).to(dtype) for _ in range(3))
    expected_sum = x + residual
    with ck.use_backend(backend):
        normed, total = ck.add_rms_norm(x.clone(), residual.clone(), weight[0], 1e-5)
        close(normed, ck.rms_norm(expected_sum, weight[0], 1e-5))
    assert torch.equal(total, expected_sum)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The definition: dimension i and i + R/2 are a complex number that is turned by the position's angle i."""
    half = angles.shape[-1]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * torch.polar(
        torch.ones_like(angles, dtype=torch.float64), angles.double()
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], dim=-1)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rope(backend: str, dtype: torch.dtype, fused: bool, rotary: int, tokens: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(50, rotary // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 50, (tokens,))
    qkv = torch.randn(tokens, (4 + 2 + 2) * 16).to(dtype)
    q, k, v = (t.view(tokens, -1, 16) for t in qkv.split([4 * 16, 2 * 16, 2 * 16], dim=-1))
    if not fused:
        q, k = q.clone(), k.clone()
    expected_q, expected_k, expected_v = rotated(q, angles[positions]), rotated(k, angles[positions]), v.clone()
    with ck.use_backend(backend):
        ck.rope_(q, k, cos_sin, positions)
    close(q, expected_q)
    close(k, expected_k)
    assert torch.equal(v, expected_v)


def test_rope_takes_separate_views_of_one_tensor_apart() -> None:
    """k before q, and a gap between them, look much like a fused projection and are not one."""
    torch.manual_seed(0)
    angles = torch.rand(9, 4)
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.arange(9)
    for q_first, k_first in ((16, 0), (0, 24)):
        storage = torch.randn(9, 40)
        q, k = (storage[:, f : f + 16].view(9, 2, 8) for f in (q_first, k_first))
        untouched = storage.clone()
        expected_q, expected_k = rotated(q, angles), rotated(k, angles)
        ck.rope_(q, k, cos_sin, positions)
        close(q, expected_q)
        close(k, expected_k)
        rest = [c for c in range(40) if not (q_first <= c < q_first + 16 or k_first <= c < k_first + 16)]
        assert torch.equal(storage[:, rest], untouched[:, rest])


@BACKENDS
@DTYPES
def test_activations(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 80) * 3).to(dtype)
    before, (gate, up) = x.clone(), x.double().chunk(2, -1)
    with ck.use_backend(backend):
        silu, gelu = ck.silu_mul(x), ck.gelu_tanh_mul(x)
    assert torch.equal(x, before)
    close(silu / 4, gate / (1 + (-gate).exp()) * up / 4)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    close(gelu / 4, 0.5 * gate * (1 + inner.tanh()) * up / 4)


@BACKENDS
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_write_kv(backend: str, cache_dtype: torch.dtype, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(tokens, 4 * 3 * 8)
    k, v = qkv[:, 48:72].view(tokens, 3, 8), qkv[:, 72:].view(tokens, 3, 8)
    k_cache, v_cache = torch.zeros(2, 5, 16, 3, 8, dtype=cache_dtype)
    slots = torch.randperm(80)[:tokens]
    with ck.use_backend(backend):
        ck.write_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        written = torch.zeros(80, 3, 8, dtype=cache_dtype)
        for i, slot in enumerate(slots.tolist()):
            written[slot] = new[i].to(cache_dtype)
        assert torch.equal(cache.view(80, 3, 8), written)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("fused", [True, False])
def test_rope_with_the_kv_write(backend: str, dtype: torch.dtype, rotary: int, fused: bool) -> None:
    torch.manual_seed(0)
    angles = torch.rand(50, rotary // 2) * 6
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.randint(0, 50, (9,))
    qkv = torch.randn(9, (6 + 2 + 2) * 16).to(dtype)
    q, k, v = (t.view(9, -1, 16) for t in qkv.split([6 * 16, 2 * 16, 2 * 16], dim=-1))
    if not fused:
        q, k, v = q.clone(), k.clone(), v.clone()
    slots = torch.randperm(80)[:9]
    caches = torch.full((2, 5, 16, 2, 16), 7.0, dtype=dtype)
    expected_q, expected_k, expected_v = rotated(q, angles[positions]), rotated(k, angles[positions]), v.clone()
    with ck.use_backend(backend):
        ck.rope_write_kv(q, k, v, cos_sin, positions, caches[0], caches[1], slots)
    close(q, expected_q)
    rows = caches.view(2, 80, 2, 16)
    close(rows[0, slots], expected_k)
    assert torch.equal(rows[1, slots], expected_v)
    others = [slot for slot in range(80) if slot not in slots]
    assert (rows[:, others] == 7).all()


def test_backend_follows_the_device_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise AssertionError("the CPU backend ran")

    monkeypatch.setattr(cpu, "rms_norm", fails)
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(AssertionError, match="the CPU backend ran"):
        ck.rms_norm(x, weight, 1e-5)
    assert ck.rms_norm(x.to("meta"), weight.to("meta"), 1e-5).shape == (2, 4)
    with ck.use_backend("reference"):
        ck.rms_norm(x, weight, 1e-5)
        with ck.use_backend(None), pytest.raises(AssertionError, match="the CPU backend ran"):
            ck.rms_norm(x, weight, 1e-5)
        ck.rms_norm(x, weight, 1e-5)
    with pytest.raises(AssertionError, match="the CPU backend ran"):
        ck.rms_norm(x, weight, 1e-5)


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*reference, cpu"), ck.use_backend("cuda"):
        pass
