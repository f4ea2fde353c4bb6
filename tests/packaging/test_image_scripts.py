"""What the image's builders run beside the installation: the cuts and the bill of materials."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import sbom, slim_env


def environment(folder: Path) -> tuple[Path, Path]:
    venv = folder / "venv"
    site = venv / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    return venv, site


def put(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_cuts_take_what_they_name_with_its_bytecode_and_nothing_else(tmp_path, capsys):
    venv, site = environment(tmp_path)
    gone = [
        put(site / "torch/include/ATen/a.h", 1000),
        put(site / "pandas/tests/io/test_x.py", 2000),
        put(site / "transformers/models/llama/modeling_llama.py"),
        put(site / "transformers/models/llama/__pycache__/modeling_llama.cpython-311.pyc"),
        put(site / "numpy/typing/x.pyi"),
    ]
    kept = [
        put(site / "torch/lib/libgomp.so.1"),
        put(site / "torch/bin/torch_shm_manager"),
        put(site / "torch/testing/__init__.py"),
        put(site / "jinja2/tests.py"),
        put(site / "grpc/_cython/cygrpc.cpython-311-x86_64-linux-gnu.so"),
        put(site / "transformers/models/auto/modeling_auto.py"),
        put(site / "transformers/models/llama/tokenization_llama.py"),
        put(site / "transformers/models/llama/__pycache__/tokenization_llama.cpython-311.pyc"),
        put(site / "carousel/tests/x.py"),
    ]
    assert slim_env.main([str(venv)]) == 0
    assert [path for path in gone if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert f"{(3030 + 70) / 1e6:.1f} -> " in capsys.readouterr().out
    assert slim_env.cut(site, tuple(pattern for kind in slim_env.CUTS.values() for pattern in kind)) == 0


@pytest.mark.skipif(shutil.which("strip") is None or shutil.which("cc") is None, reason="needs a compiler and strip")
def test_symbols_for_debuggers_go_and_the_library_still_works(tmp_path):
    venv, site = environment(tmp_path)
    library = site / "torch/lib/libx.so"
    library.parent.mkdir(parents=True)
    source = put(tmp_path / "x.c")
    source.write_text("static int hidden(int a) { return a + 1; }\nint shown(int a) { return hidden(a); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-O0", "-g", "-o", library, source], check=True)
    before = library.stat().st_size
    assert slim_env.main([str(venv)]) == 0
    assert library.stat().st_size < before
    assert ctypes.CDLL(str(library)).shown(1) == 2


def test_kept_kinds_stay(tmp_path):
    venv, site = environment(tmp_path)
    header = put(site / "torch/include/a.h")
    slim_env.main(["--keep", "headers", str(venv)])
    assert header.exists()


def test_no_environment(tmp_path):
    with pytest.raises(SystemExit, match="is no environment"):
        slim_env.main([str(tmp_path)])


def distribution(site: Path, name: str, version: str, *fields: str) -> None:
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields]
    put(site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")


def test_the_bill_names_versions_licences_and_dependencies(tmp_path):
    venv, site = environment(tmp_path)
    distribution(site, "kserve-carousel", "1.0", "License-Expression: Apache-2.0", "Requires-Dist: Some_Lib>=2")
    distribution(site, "some-lib", "2.5", "License: BSD", "Requires-Dist: pytest; extra == 'test'")
    distribution(
        site, "pytest", "9", "Classifier: License :: OSI Approved :: MIT License", "License: a text\n  of lines"
    )
    distribution(site, "silent", "0.1")
    status = tmp_path / "status"
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
    )
    arguments = ["--venv", str(venv), "--dpkg", str(status), "--out"]
    assert sbom.main([*arguments, str(tmp_path / "a")]) == 0
    assert sbom.main([*arguments, str(tmp_path / "b")]) == 0
    text = (tmp_path / "a" / "sbom.cdx.json").read_text()
    assert text == (tmp_path / "b" / "sbom.cdx.json").read_text()
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/kserve-carousel@1.0"
    by_name = {item["name"]: item for item in bill["components"]}
    assert set(by_name) == {"some-lib", "pytest", "silent", "libc6"}
    assert by_name["some-lib"]["licenses"] == [{"license": {"name": "BSD"}}]
    assert by_name["pytest"]["licenses"] == [{"license": {"name": "MIT License"}}]
    assert "licenses" not in by_name["silent"]
    assert by_name["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9?arch=amd64"
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    assert edges["pkg:pypi/kserve-carousel@1.0"] == ["pkg:pypi/some-lib@2.5"]
    assert edges["pkg:pypi/some-lib@2.5"] == []
    lines = (tmp_path / "a" / "licences.txt").read_text().splitlines()
    assert len(lines) == 5
    assert any(line.split() == ["python", "silent", "0.1", "not", "stated"] for line in lines)


def test_the_bill_of_this_environment_is_whole():
    import sysconfig

    components, edges = sbom.python_components(Path(sysconfig.get_paths()["purelib"]))
    refs = [item["bom-ref"] for item in components]
    assert len(refs) == len(set(refs)) == len(edges)
    assert {target for edge in edges for target in edge["dependsOn"]} <= set(refs)
    named = {item["name"]: sbom.shown_licence(item) for item in components}
    assert {"torch", "kserve", "kserve-carousel"} <= set(named)
    assert "BSD" in named["torch"]


def test_a_bill_without_carousel_is_refused():
    with pytest.raises(ValueError, match="0 times"):
        sbom.document([], [])
