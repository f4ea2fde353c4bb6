"""``python -m scripts.gpu_check``: runs the stages that have no result yet, each in a process of its own, and reports.

A stage's result is a file in the output folder, written when the stage has ended, so that an interrupted run goes on
where it stopped; a result from other code or another device counts for nothing. A stage that fails, hangs or breaks the
device takes only itself along. Exits with 0 when every stage has a good result, 1 when one has not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .plan import STAGES
from .report import markdown

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels/carousel_kernels", "scripts/gpu_check")
ENGINE_SOURCES = "predictor/carousel"
WITHOUT_ENGINE = ("kernels", "roofline")
MINUTES = 12.0
RESERVE_S = 10.0  # for the report, and for what a stage takes to die


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of results (gpu-check)")
    made.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, kernels in Triton's interpreter")
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"time for everything ({MINUTES:g})")
    made.add_argument("--stages", default=",".join(STAGES), help=f"by commas, of {', '.join(STAGES)} (all)")
    made.add_argument("--worker", metavar="STAGE", help=argparse.SUPPRESS)
    return made


def fingerprint(name: str, tiny: bool) -> str:
    """What a stage's result is of: its code and the device."""
    digest = hashlib.sha256()
    for folder in SOURCES if name in WITHOUT_ENGINE else (*SOURCES, ENGINE_SOURCES):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return f"{digest.hexdigest()[:24]} {'tiny' if tiny else device()['name']}"


def device() -> dict[str, Any]:
    """What the report says of the machine."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "name": "CPU"}
    for library in ("triton", "transformers"):
        with contextlib.suppress(ImportError):
            found[library] = __import__(library).__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
                  "units": properties.multi_processor_count, "cuda": torch.version.cuda}  # fmt: skip
    return found


def stage_function(name: str) -> Callable[[Any], dict[str, Any]]:
    """Imported in the worker only: the interpreter's variable is set there, and kernels need no engine."""
    if name == "roofline":
        return roofline
    modules = {"kernels": ".kernel_stage", "load": ".model_stages", "mixed": ".model_stages"}
    module = importlib.import_module(modules.get(name, ".engine_stages"), __package__)
    function: Callable[[Any], dict[str, Any]] = getattr(module, name)
    return function


def roofline(session: Any) -> dict[str, Any]:
    """``carousel_kernels.bench`` on the device; with --tiny on the CPU backend and in the interpreter."""
    from carousel_kernels.bench.report import measure

    only = "add_rms_norm" if session.tiny else ""
    table = measure(session.device, "triton", tiny=session.tiny, only=only, seconds=session.plan.kernel_seconds)
    if session.tiny:
        table.rows += measure(session.device, "cpu", tiny=True, seconds=session.plan.kernel_seconds).rows
    asked = [row for row in table.rows if row.goal is not None]
    return {
        "ok": not any(row.error for row in table.rows), "reached": all(row.reached for row in asked) if asked else None,
        "table": table.to_json(), "markdown": table.to_markdown(),
    }  # fmt: skip


def work(name: str, out: Path, tiny: bool, mark: str) -> int:
    """In a worker: run a stage and write its result."""
    from .model import Session

    started = time.monotonic()
    result = stage_function(name)(Session(tiny))
    write(out / f"{name}.json", result | {"stage": name, "seconds": round(time.monotonic() - started, 1), "of": mark})
    return 0


def write(path: Path, value: object) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", "utf-8")
    temporary.replace(path)


def stored(out: Path, name: str, mark: str) -> dict[str, Any] | None:
    """The result of a finished stage, if it is of this code and this device."""
    try:
        result: dict[str, Any] = json.loads((out / f"{name}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return result if result.get("of") == mark else None


def run_stage(name: str, out: Path, tiny: bool, seconds: float) -> str:
    """Run a stage in a process of its own; why it has no result, or "". Its output goes to a log beside the result."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--out", str(out), "--worker", name]
    environment = dict(os.environ)
    if tiny:
        command.append("--tiny")
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    search = [str(ROOT / "predictor"), str(ROOT / "kernels"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(search)
    log = out / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        worker = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = worker.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return f"no result within {seconds:.0f} s"
    if code == 0:
        return ""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1][:300] if lines else 'no output'}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    started = time.monotonic()
    names = options.stages.split(",")
    unknown = sorted(set(names) - set(STAGES))
    if unknown:
        print(f"gpu_check: --stages: got {', '.join(unknown)}, allowed: {', '.join(STAGES)}", file=sys.stderr)
        return 2
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return work(options.worker, out, options.tiny, fingerprint(options.worker, options.tiny))
    if not options.tiny and device()["name"] == "CPU":
        print("gpu_check: there is no GPU here; --tiny checks on the CPU that the script runs", file=sys.stderr)
        return 2
    marks = {name: fingerprint(name, options.tiny) for name in STAGES}
    failures: dict[str, str] = {}
    for name in [name for name in STAGES if name in names]:
        if stored(out, name, marks[name]) is not None:
            print(f"gpu_check: {name}: finished before", flush=True)
            continue
        left = 60 * options.minutes - RESERVE_S - (time.monotonic() - started)
        if left <= 0:
            failures[name] = "no time was left; run the script again"
        else:
            print(f"gpu_check: {name} ...", flush=True)
            failures[name] = run_stage(name, out, options.tiny, left)
        if not failures[name] and stored(out, name, marks[name]) is None:
            failures[name] = "the code changed while it ran"
        if failures[name]:
            print(f"gpu_check: {name}: {failures[name]}", flush=True)
    return finish(out, names, marks, failures, time.monotonic() - started)


def finish(out: Path, names: Sequence[str], marks: dict[str, str], failures: dict[str, str], seconds: float) -> int:
    """Write the reports of all results; the exit status."""
    results = {name: stored(out, name, marks[name]) or {"ok": False, "failure": failures.get(name, "was not asked for")}
               for name in STAGES}  # fmt: skip
    whole = {"device": device(), "at": datetime.now(UTC).isoformat(timespec="seconds"),
             "seconds": round(seconds, 1), "stages": results}  # fmt: skip
    write(out / "report.json", whole)
    (out / "report.md").write_text(markdown(whole), "utf-8")
    print(f"gpu_check: {out / 'report.md'}", flush=True)
    return 0 if all(results[name]["ok"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
