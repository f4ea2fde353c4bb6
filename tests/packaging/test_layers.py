"""The layers of the design, held by reading every import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVING = {"kserve", "fastapi", "starlette", "uvicorn", "kubernetes", "grpc", "aiohttp", "httpx", "prometheus_client"}
ABOVE_THE_ENGINE = {
    "protocols",
    "telemetry",
    "tenancy",
    "cluster",
    "bench",
    "report",
    "server",
    "predictor",
    "cli",
    "routes",
    "dataplane",
}


def imports(path: Path, package: str) -> Iterator[str]:
    """The dotted names that a file imports, anywhere in it, relative ones resolved."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def offences(root: str, folder: str, forbidden: set[str]) -> list[str]:
    """``file: import`` for each import of a forbidden name (or of something in it) below a folder."""
    files = sorted((ROOT / root / folder).rglob("*.py"))
    assert files, f"nothing in {folder}"
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports(path, ".".join(path.relative_to(ROOT / root).parent.parts))
        if any(name == item or name.startswith(item + ".") for item in forbidden)
    ]


def test_engine_knows_no_server_and_no_protocol() -> None:
    above = {f"carousel.{name}" for name in ABOVE_THE_ENGINE}
    assert offences("predictor", "carousel/engine", SERVING | above) == []


def test_models_know_no_server() -> None:
    above = {f"carousel.{name}" for name in ABOVE_THE_ENGINE}
    assert offences("predictor", "carousel/models", (SERVING - {"aiohttp"}) | above) == []


def test_kernels_know_only_torch() -> None:
    assert offences("kernels", "carousel_kernels", SERVING | {"carousel", "transformers"}) == []
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "carousel_kernels", "numpy"}
    files = sorted((ROOT / "kernels" / "carousel_kernels").rglob("*.py"))
    used = {
        name.partition(".")[0]
        for path in files
        for name in imports(path, ".".join(path.relative_to(ROOT / "kernels").parent.parts))
    }
    assert used <= allowed, f"further imports: {used - allowed}"


def test_protocols_see_no_tensor() -> None:
    assert offences("predictor", "carousel/protocols", {"torch", "carousel_kernels", "carousel.models"}) == []


def test_the_check_itself_sees_every_form(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import kserve.model as m\nfrom .. import protocols\nfrom ..server import serve\n"
        "def f():\n    from torch import nn\n    from . import request\n"
    )
    assert list(imports(source, "carousel.engine")) == [
        "kserve.model",
        "carousel.protocols",
        "carousel.server.serve",
        "torch.nn",
        "carousel.engine.request",
    ]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("carousel.cli", "torch kserve transformers fastapi rich"),
        ("carousel.config", "torch kserve transformers fastapi rich"),
        ("carousel.models.source", "torch fsspec huggingface_hub rich aiohttp"),
        ("carousel.engine.request", "kserve fastapi transformers"),
        ("carousel_kernels", "kserve fastapi transformers carousel"),
    ],
)
def test_imports_stay_light(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; print(sorted(set({unwanted.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
