"""Device functions that several kernels share, and the switch for Triton's interpreter."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["E4M3_BIAS", "INTERPRETED", "byte_to_e4m3", "cdiv", "dot", "e4m3_to_byte", "narrowed", "tanh"]

# Multiply-adds in one rounding, which all versions did before 3.10: 3.9 warns of every kernel that does not ask for it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when triton was imported): numpy, any device."""

E4M3_BIAS = tl.constexpr(256.0)
"""What ``byte_to_e4m3`` leaves out: 2^(15 - 7), between the exponents' biases of float16 and e4m3."""


@triton.jit
def cdiv(a, b):
    """a / b rounded up, for a >= 0 and b > 0."""
    return (a + b - 1) // b


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. The interpreter multiplies bfloat16 wrongly, so there the operands are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """x in the type to be stored, rounded to nearest, ties to even. The interpreter would cut bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """By the exponential, which saturates rightly for large |x|; error below 1e-6 absolute in float32."""
    return 1 - 2 / (1 + tl.exp(2 * x))


@triton.jit
def byte_to_e4m3(x):
    """The number that a byte encodes in e4m3, divided by ``E4M3_BIAS``, exactly, as float16.

    For devices without the conversion: the byte's exponent and mantissa are those of a float16 with another bias,
    subnormals included. The encoding of NaN becomes 480 / 256.
    """
    bits = x.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_to_byte(x):
    """float32 -> the byte that encodes it in e4m3, rounded to nearest (ties to even), saturated at 448; NaN is 0x7F.

    The same on every device. Below the least normal number, 2^-6, codes are multiples of 2^-9, to which adding 2^14
    rounds; above, the code is the upper bits of the float32, rounded, less the difference of the exponents' biases.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)
