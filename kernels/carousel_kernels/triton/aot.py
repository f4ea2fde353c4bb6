"""Compile every kernel for every target, without a GPU, and hold what comes out against the devices' limits.

    python -m carousel_kernels.triton.aot [--targets sm_90,gfx942] [--kernels decode] [--jobs 2] [--cache DIR]

Prints a line per kernel, variant and target: shared memory of a program, registers of a thread, bytes that a thread
spills to memory. Exits with 1 if something does not compile, does not fit its device, or spills in a kernel that runs
in every decode step. What has not changed since the last run (source, configuration, version of triton) is not compiled
again: results are kept in one file in the cache folder, by a hash of all that they depend on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .common import INTERPRETED
from .registry import TARGETS, Spec, Target, specs

__all__ = ["Result", "compile_spec", "main"]

_RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Result:
    """What a compiled kernel takes: bytes of shared memory per program; registers and spilled bytes per thread.

    ``error`` is the last line of why it did not compile, or empty.
    """

    shared: int = 0
    registers: int = 0
    spilled: int = 0
    error: str = ""


def compile_spec(spec: Spec, target: Target) -> Result:
    """Compile one kernel for one target; errors of the compiler are part of the result."""
    kernel = spec.kernel
    signature = {name: spec.signature.get(name, "constexpr") for name in kernel.arg_names}
    unknown = {*spec.signature, *spec.constexprs} - set(kernel.arg_names)
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in spec.constexprs]
    if unknown or missing:
        return Result(error=f"the spec has unknown arguments {sorted(unknown)} and lacks {missing}")
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned_arguments()}
    source = ASTSource(kernel, signature, dict(spec.constexprs), attributes)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    try:
        compiled = triton.compile(
            source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options
        )
    except Exception as error:  # whatever the compiler's passes raise is what the table must show
        return Result(error=_reason(error))
    registers, spilled = _amd_usage(compiled) if target.is_amd else _nvidia_usage(compiled)
    return Result(int(compiled.metadata.shared), registers, spilled)


def _reason(error: BaseException) -> str:
    """The first cause of a compiler's error, on a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _amd_usage(compiled: Any) -> tuple[int, int]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    return number("vgpr_count") + number("agpr_count"), number("private_segment_fixed_size")


def violations(spec: Spec, target: Target, result: Result) -> list[str]:
    """What of a result the device cannot run, or must not."""
    if result.error:
        return [result.error]
    found = []
    if result.shared > target.max_shared:
        found.append(f"{result.shared} bytes of shared memory, the device has {target.max_shared}")
    if result.registers > target.max_registers:
        found.append(f"{result.registers} registers, the device has {target.max_registers}")
    threads = spec.num_warps * target.warp_size
    if threads * result.registers > target.registers_per_unit * (4 if target.is_amd else 1):
        found.append(f"{threads} threads of {result.registers} registers do not fit")
    if spec.decode and result.spilled:
        found.append(f"spills {result.spilled} bytes in a decode step")
    return found


def _key(spec: Spec, target: Target) -> str:
    """All that a result depends on, hashed."""
    parts = [
        spec.kernel.cache_key, sorted(spec.signature.items()), sorted((k, repr(v)) for k, v in spec.constexprs.items()),
        spec.num_warps, spec.num_stages, sorted(spec.aligned_arguments()), sorted(spec.options.items()),
        asdict(target), triton.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Job:
    target: int
    spec: int
    key: str


_in_worker: dict[int, list[Spec]] = {}


def _work(job: _Job) -> Result:
    """In a worker, which makes its own specs: kernels do not travel between processes."""
    target = TARGETS[job.target]
    if job.target not in _in_worker:
        _in_worker[job.target] = specs(target)
    return compile_spec(_in_worker[job.target][job.spec], target)


def _compile_all(jobs: list[_Job], processes: int) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(prefix="carousel-aot-") as folder:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = folder  # results are kept here instead, and are small
        try:
            with ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn")) as pool:
                yield from pool.map(_work, jobs)
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def _stored(cache: Path) -> dict[str, Result]:
    try:
        return {key: Result(**value) for key, value in json.loads((cache / _RESULTS).read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError):
        return {}  # none yet, or of another version


def _store(cache: Path, results: dict[str, Result]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f"{_RESULTS}.{os.getpid()}"
    temporary.write_text(json.dumps({key: asdict(value) for key, value in sorted(results.items())}), "utf-8")
    temporary.replace(cache / _RESULTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carousel_kernels.triton.aot", description=(__doc__ or "")[:120])
    names = [target.name for target in TARGETS]
    parser.add_argument("--targets", default=",".join(names), help=f"by commas, of {', '.join(names)} (all)")
    parser.add_argument("--kernels", default="", help="only kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per CPU)")
    parser.add_argument("--cache", type=Path, default=Path(".aot-cache"), help="where results are kept (.aot-cache)")
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong, and the summary")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if INTERPRETED.value:
        print("aot: TRITON_INTERPRET is set, with which triton compiles nothing: unset it", file=sys.stderr)
        return 2
    wanted = options.targets.split(",")
    unknown = set(wanted) - {target.name for target in TARGETS}
    if unknown:
        print(f"aot: --targets: got {', '.join(sorted(unknown))}, allowed: {_parser().get_default('targets')}",
              file=sys.stderr)  # fmt: skip
        return 2
    started = time.monotonic()
    jobs: list[_Job] = []
    chosen: list[tuple[Spec, Target]] = []
    for t, target in enumerate(TARGETS):
        for s, spec in enumerate(specs(target) if target.name in wanted else []):
            if options.kernels in spec.name:
                jobs.append(_Job(t, s, _key(spec, target)))
                chosen.append((spec, target))
    known = _stored(options.cache)
    missing = [job for job in jobs if job.key not in known]
    if missing:
        fresh = dict(zip((job.key for job in missing), _compile_all(missing, options.jobs), strict=True))
        known |= fresh
        # A failure is not kept: it may have been the machine's. Nor is what a run over everything had no use for.
        everything = not options.kernels and len(wanted) == len(TARGETS)
        kept = {job.key for job in jobs} if everything else set(known)
        _store(options.cache, {key: known[key] for key in kept if not known[key].error})
    bad = _report(chosen, [known[job.key] for job in jobs], options.quiet)
    print(f"aot: {len(jobs)} variants, {len(missing)} compiled, {bad} bad, {time.monotonic() - started:.0f} s, "
          f"triton {triton.__version__}")  # fmt: skip
    return 1 if bad else 0


def _report(chosen: list[tuple[Spec, Target]], results: list[Result], quiet: bool) -> int:
    """The table; how many lines of it are bad."""
    bad = 0
    rows = []
    for (spec, target), result in sorted(
        zip(chosen, results, strict=True), key=lambda row: (row[0][0].name, row[0][0].label, row[0][1].name)
    ):
        wrong = violations(spec, target, result)
        bad += bool(wrong)
        if wrong or not quiet:
            numbers = f"{result.shared:>8} {result.registers:>5} {result.spilled:>6}"
            launch = f"{spec.num_warps}x{spec.num_stages}"
            rows.append(f"{spec.name:<22} {spec.label:<34} {target.name:<7} {launch:>5} {numbers}  {'; '.join(wrong)}")
    header = f"{'kernel':<22} {'variant':<34} {'target':<7} {'WxS':>5} {'shared':>8} {'regs':>5} {'spill':>6}"
    print("\n".join([header, *(row.rstrip() for row in rows)]) if rows else "")
    return bad


if __name__ == "__main__":
    sys.exit(main())
