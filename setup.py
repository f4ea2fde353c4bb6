"""The compiled operators of the CPU backend; all else about the distribution stands in pyproject.toml.

They are optional: without a C compiler the package installs all the same, and computes with PyTorch's own operators.
The library is plain C and knows neither Python nor PyTorch, so that one wheel serves every Python of a platform.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "kernels/carousel_kernels/cpu/native"


class BuildLibrary(build_ext):
    """Names the library without the tag of a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel with the platform, and with no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "carousel_kernels.cpu._native",
            sources=[f"{NATIVE}/{name}.c" for name in ("attention", "carousel_native", "layers", "quant")],
            depends=[str(path) for path in sorted(Path(NATIVE).glob("*.h"))],
            # No -march: the widest vectors are chosen where the library is loaded. -ffp-contract: fused multiply-add.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-g0",
                "-ffp-contract=fast",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fno-signed-zeros",
                "-fopenmp-simd",
                "-fvisibility=hidden",
            ],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
