"""README, image and Job of the load tests."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from loadtest.arrivals import SHAPES
from loadtest.protocols import PROTOCOLS
from tests.loadtest.test_pieces import options

from carousel.config import declared_settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "loadtest"
#: Locust's own options that our files use.
LOCUSTS = {"--headless", "--only-summary", "--host", "--csv", "--html", "--json-file", "--help", "--json"}
LOCUSTS |= {"--master", "--worker", "--expect-workers", "--master-host"}


def ours() -> argparse.Namespace:
    return options()


def test_the_readme_names_every_option_and_no_other() -> None:
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"--[a-z][a-z-]+", text.split("## In a cluster")[0] + text.split("## Other servers")[1]))
    declared = {"--" + name.replace("_", "-") for name in vars(ours())}
    servers = {item.flag for item in declared_settings()}  # what a server must be told to take part
    assert named - LOCUSTS - declared - servers == set()
    assert declared - named == set()
    for word in (*PROTOCOLS, *SHAPES):
        assert f"`{word}`" in text, word


def test_the_image_holds_all_that_locust_imports(tmp_path: Path) -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    for words in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        *sources, target = words.split()
        if not target.startswith("/app"):
            continue
        place = tmp_path / target.lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    code = "import runpy, sys; sys.argv[1:] = ['--list']; runpy.run_module('loadtest', run_name='__main__')"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}"], cwd=tmp_path / "app", capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "ChatUser" in run.stdout


def test_the_job_is_restricted_and_its_arguments_are_options() -> None:
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    words = [word for word in container["args"] if word.split("=")[0] not in LOCUSTS]
    assert options(*words).rate == 2.0
    service = yaml.safe_load((ROOT / "manifests" / "example.yaml").read_text().split("\n---")[0])["metadata"]["name"]
    assert f"--host=http://{service}-predictor" in container["args"]
