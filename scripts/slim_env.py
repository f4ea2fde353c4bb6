"""Take out of an environment what serving never reads, so that the image is smaller. Says what went, and how much.

Only files of known packages go, by the patterns below; nothing that a running server imports. `pip check` is content
afterwards, since the metadata stays. A second run finds nothing.

    python3 scripts/slim_env.py /opt/venv
    python3 scripts/slim_env.py --keep headers /opt/venv     Triton and PyTorch's compiler need the headers
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

#: Kind -> patterns below site-packages. What they match is removed, folders with all that is in them.
CUTS = {
    "tests": (
        "pandas/tests",
        "numpy/tests",
        "numpy/*/tests",
        "sympy/*/tests",
        "sympy/*/*/tests",
        "networkx/*/tests",
        "networkx/*/*/tests",
        "torch/test",
        "torch/bin/*Test",
        "torch/bin/test_*",
        "torch/lib/lib*_test.so",
        "torch/lib/libbackend_with_compiler.so",
        "torch/lib/libaoti_custom_ops.so",
        "pyarrow/tests",
        "psutil/tests",
    ),
    "headers": (
        "torch/include",
        "torch/share",
        "torch/bin/protoc*",
        "torch/lib/*.a",
        "numpy/_core/include",
        "numpy/_core/lib/*.a",
        "numpy/random/lib/*.a",
        "numpy/f2py/src",
    ),
    # Types and sources of what is compiled: for tools, not for the interpreter.
    "sources": ("**/*.pyi", "**/*.pyx", "**/*.pxd"),
    # Of Kubernetes' clients KServe imports the one that blocks; gRPC's code generator is for builds.
    "clients": ("kubernetes/aio", "grpc_tools"),
    # Of transformers only the tokenisers are used. Models, image processors and scripts that convert weights stay away.
    "models": (
        "transformers/models/*/modeling_*.py",
        "transformers/models/*/modular_*.py",
        "transformers/models/*/convert_*.py",
        "transformers/models/*/image_processing_*.py",
        "transformers/models/*/video_processing_*.py",
    ),
}

#: What stays though a pattern matches it: transformers looks up its classes there, tokenisers among them.
KEPT = ("transformers/models/auto/*",)

#: Libraries whose tables of local symbols, for debuggers, are taken out by `strip`. Those that auditwheel has rewritten
#: are not touched.
SYMBOLS = ("torch/lib/*.so", "uvloop/*.so")


def site_packages(venv: Path) -> Path:
    """The environment's folder of packages.

    Raises:
        SystemExit: when there is none, or more than one.
    """
    found = list(venv.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise SystemExit(f"slim_env: {venv} is no environment: it has {len(found)} folders lib/python3.*/site-packages")
    return found[0]


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(entry.lstat().st_size for entry in path.rglob("*") if not entry.is_dir())
    return path.lstat().st_size


def bytecode(source: Path) -> list[Path]:
    """What was compiled from a source file."""
    return list((source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")) if source.suffix == ".py" else []


def cut(site: Path, patterns: tuple[str, ...]) -> int:
    """Remove what the patterns match; the bytes that went."""
    gone = 0
    kept = {path for pattern in KEPT for path in site.glob(pattern)}
    for pattern in patterns:
        for path in sorted(set(site.glob(pattern)) - kept):
            for victim in (path, *bytecode(path)):
                gone += size(victim)
                if victim.is_dir() and not victim.is_symlink():
                    shutil.rmtree(victim)
                else:
                    victim.unlink()
    return gone


def strip(site: Path) -> int:
    """Take symbols out of what SYMBOLS name; the bytes that went, 0 where there is no `strip`."""
    tool = shutil.which("strip")
    if tool is None:
        print("slim_env: no strip here: symbols stay", flush=True)
        return 0
    libraries = [path for pattern in SYMBOLS for path in sorted(site.glob(pattern))]
    before = sum(size(path) for path in libraries)
    if libraries:
        subprocess.run([tool, "--strip-unneeded", *map(str, libraries)], check=True)
    return before - sum(size(path) for path in libraries)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--keep", choices=CUTS, action="append", default=[], help="a kind that stays")
    options = parser.parse_args(argv)
    site = site_packages(options.venv)
    before = size(site)
    for kind in CUTS:
        if kind not in options.keep:
            print(f"slim_env: {kind}: {cut(site, CUTS[kind]) / 1e6:.1f} MB", flush=True)
    print(f"slim_env: symbols: {strip(site) / 1e6:.1f} MB", flush=True)
    print(f"slim_env: {before / 1e6:.1f} -> {size(site) / 1e6:.1f} MB in {site}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
