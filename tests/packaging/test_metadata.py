"""The distribution: names, extras, pins, and the wheel that is built from the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
}


def test_distribution_and_console_script() -> None:
    distribution = metadata.distribution("kserve-carousel")
    assert distribution.version == PROJECT["version"]
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    scripts = [point.value for point in distribution.entry_points if point.group == "console_scripts"]
    assert scripts == ["carousel.cli:main"]
    assert {"s3", "gcs", "cuda", "otel", "loadtest", "report", "test", "dev"} == PROJECT["optional-dependencies"].keys()
    assert set(distribution.metadata.get_all("Provides-Extra") or []) == PROJECT["optional-dependencies"].keys()


def test_console_script_runs_outside_the_tree(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "carousel"
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {"serve", "pull", "generate", "bench"} <= set(done.stdout.split())


def test_no_top_level_package_shadows_another() -> None:
    # A package called kernels would shadow the one of that name, which transformers imports.
    packages = {path.parent.name for root in ("predictor", "kernels") for path in (ROOT / root).glob("*/__init__.py")}
    assert packages == {"carousel", "carousel_kernels"}
    assert not (ROOT / "predictor" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_package_is_a_regular_one() -> None:
    # Folders without __init__.py are not in the wheel.
    folders = {path.parent for root in ("predictor", "kernels") for path in (ROOT / root).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def _requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]


@pytest.mark.parametrize("text", _requirements())
def test_pins_are_within_the_ranges(text: str) -> None:
    requirement = Requirement(text)
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"


def test_constraints_hold_exact_pins_only() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) == len(PINS)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


def test_everything_that_serving_installs_is_pinned() -> None:
    seen: set[str] = set()

    def walk(name: str, extras: set[str]) -> None:
        key = canonicalize_name(name)
        if key in seen and not extras:
            return
        seen.add(key)
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                walk(needed.name, needed.extras)

    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        walk(requirement.name, requirement.extras)
    # PyTorch's CUDA build brings NVIDIA's libraries and Triton, in versions that it pins itself.
    assert sorted(name for name in seen - set(PINS) if not name.startswith(("nvidia", "cuda", "triton"))) == []


def build_wheel(tmp_path: Path, **variables: str) -> Path:
    tree = tmp_path / "tree"  # setuptools builds inside the tree
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("predictor", "kernels", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(tree)], check=True, env=os.environ | variables)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def test_wheel_holds_both_packages_and_nothing_else(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    # One for all Pythons of a platform, because of the compiled library.
    assert re.fullmatch(rf"kserve_carousel-{re.escape(PROJECT['version'])}-py3-none-(?!any)\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "carousel",
        "carousel_kernels",
        "kserve_carousel",
    }
    assert {"carousel/py.typed", "carousel_kernels/py.typed"} <= names
    sources = {
        path.relative_to(ROOT / root).as_posix()
        for root in ("predictor", "kernels")
        for path in (ROOT / root).rglob("*.py")
    }
    assert sources == {name for name in names if name.endswith(".py")}
    page = {f"carousel/page/static/{path.name}" for path in (ROOT / "predictor/carousel/page/static").iterdir()}
    assert page == {name for name in names if name.startswith("carousel/page/static/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    library = {"carousel_kernels/cpu/_native.so"} if shutil.which("cc") else set()
    assert {name for name in names if name.endswith((".so", ".c", ".h"))} == library


def test_without_a_compiler_the_package_still_installs_and_computes(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="/bin/false")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    code = (
        "import torch, carousel_kernels as ck\n"
        "from carousel_kernels.cpu import native\n"
        "print(ck.__file__); print(native.available())\n"
        "print(ck.silu_mul(torch.tensor([[0.0, 2.0]])).tolist())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    file, available, result = done.stdout.splitlines()
    assert Path(file).is_relative_to(target)
    assert (available, result) == ("False", "[[0.0]]")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_with_a_compiler_the_compiled_operators_are_in_use() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CAROUSEL_NATIVE"}
    code = "from carousel_kernels.cpu import native; print(native.available())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
