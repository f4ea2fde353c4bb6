"""What is compiled ahead of time: every kernel module of this package says so itself.

A kernel module that defines ``aot_specs(target)`` takes part, with no entry in any list::

    def aot_specs(target: Target) -> Iterator[Spec]:
        for dim in (64, 128):
            yield Spec(
                _my_kernel,                                # the @triton.jit function
                f"bf16 D{dim}",                            # distinguishes this variant in the table
                {"x": "*bf16", "out": "*bf16", "n": "i32", "eps": "fp32"},
                {"DIM": dim, "BLOCK": 128},
                num_warps=4,
                num_stages=target.stages(3),
                decode=True,
            )

``aot_specs`` is called once per target, so that a variant can have another configuration there, or be left out where
the device cannot run it: it should yield what the launch code would launch on that device. ``python -m
carousel_kernels.triton.aot`` compiles all of it. Nothing here needs a GPU, nor triton itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TARGETS", "Spec", "Target", "specs"]


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for, and its limits.

    Attributes:
        name: as the table prints it.
        backend, arch, warp_size: triton's ``GPUTarget``: ("cuda", 90, 32), ("hip", "gfx942", 64).
        max_shared: bytes of shared memory that one program may take.
        max_registers: 32-bit registers that one thread may take; accumulation registers included on AMD.
        registers_per_unit: registers of an SM or, on AMD, of a SIMD times its lanes: threads times registers of a
            program must fit.
        num_units: streaming multiprocessors, or compute units, of the whole device.
        fp8: whether the device converts e4m3 itself (triton's ``fp8e4nv``).
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    max_shared: int
    max_registers: int
    registers_per_unit: int
    num_units: int
    fp8: bool

    @property
    def is_amd(self) -> bool:
        return self.backend == "hip"

    def stages(self, wanted: int) -> int:
        """The depth of software pipelining: as wanted, but two on AMD, whose 64 KiB hold no more."""
        return min(wanted, 2) if self.is_amd else wanted


_KIB = 1024
TARGETS = (
    Target("sm_80", "cuda", 80, 32, 163 * _KIB, 255, 65536, 108, False),
    Target("sm_90", "cuda", 90, 32, 227 * _KIB, 255, 65536, 132, True),
    Target("sm_100", "cuda", 100, 32, 227 * _KIB, 255, 65536, 148, True),
    Target("gfx942", "hip", "gfx942", 64, 64 * _KIB, 512, 131072, 304, False),
)
"""Ampere (A100), Hopper (H100, H200), Blackwell (B200), CDNA 3 (MI300X). Limits from the vendors' programming guides:
CUDA C++ Programming Guide, "Compute Capabilities"; AMD "CDNA 3 ISA" (512 vector registers a lane, 64 KiB LDS)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One kernel as it would be launched: types of its arguments and values of its compile-time ones.

    Attributes:
        kernel: the ``@triton.jit`` function.
        label: what distinguishes this variant from the kernel's others.
        signature: every run-time argument in triton's notation: "*bf16", "*fp16", "*fp32", "*fp8e4nv", "*u8", "*i8",
            "*i32", "*i64", "i32", "i64", "fp32". Optional pointers passed as None go to ``constexprs`` instead.
        constexprs: every compile-time argument.
        num_warps, num_stages: launch options.
        decode: runs once per layer in every decode step: registers spilled to memory are then an error, elsewhere only
            shown.
        aligned: run-time arguments known to be divisible by 16; None: all pointers, as torch allocates them.
        options: further options of the back end.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    decode: bool = False
    aligned: tuple[str, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).lstrip("_")

    def aligned_arguments(self) -> tuple[str, ...]:
        if self.aligned is not None:
            return self.aligned
        return tuple(name for name, kind in self.signature.items() if kind.startswith("*"))


def specs(target: Target) -> list[Spec]:
    """Everything to compile for a target, in the order of modules and of their specs.

    Raises ValueError for two specs with one name and label.
    """
    package = importlib.import_module(__package__ or "")
    found: list[Spec] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if info.name in ("aot", "registry"):
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        declared = getattr(module, "aot_specs", None)
        if declared is not None:
            found += declared(target)
    seen: set[tuple[str, str]] = set()
    for spec in found:
        if (spec.name, spec.label) in seen:
            raise ValueError(f"{spec.name} {spec.label!r} is declared twice for {target.name}")
        seen.add((spec.name, spec.label))
    return found
