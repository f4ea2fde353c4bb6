"""``tests/REPORTS.md``: every report has its line, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
KSERVE = (
    "6259 3113 1915 4247 2979 2944 3094 2692 3465 3957 1037 3402 2788 2144 3375 4168 6227 3768 2521 2278 5326 5162 "
    "3687 5527 5496 5485 5019 3983 5646"
)
VLLM = (
    "25538 54644 40004 41951 39734 35541 45388 16832 29071 31503 55634 8115 5250 18826 2901 38025 48853 44620 5907 "
    "5898 36475 35884 22511"
)
OTHERS = (
    "flashinfer#4647 sglang#26248 TGI#1896 local-inference-lab/vllm#541 llm-d-autoscaling#769 llm-d-autoscaling#1427 "
    "llm-d#2492"
)
REPORTS = [
    *(f"kserve#{number}" for number in KSERVE.split()),
    *(f"vllm#{number}" for number in VLLM.split()),
    *OTHERS.split(),
]
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[str, str]:
    """Report -> what covers it. A report that stands there twice fails."""
    found: dict[str, str] = {}
    for line in (TESTS / "REPORTS.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and "#" in cells[0]:
            assert len(cells) == 3, line
            assert cells[0] not in found, line
            found[cells[0]] = cells[2]
    return found


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def test_every_report_has_a_line() -> None:
    assert sorted(rows()) == sorted(REPORTS)


def test_every_line_names_a_test() -> None:
    empty = {report: cell for report, cell in rows().items() if not NAME.search(cell)}
    assert empty == {}


def test_every_named_test_exists() -> None:
    named = [match for cell in rows().values() for match in NAME.findall(cell)]
    missing = [f"{file}::{name}" for file, name in named if name not in functions(TESTS / file)]
    assert missing == []
    assert len(named) > 50


def test_reports_that_tests_mention_are_in_the_index() -> None:
    """A number in a test's own words counts as covered: the index has to know it."""
    mentioned = {
        match
        for path in TESTS.rglob("test_*.py")
        if path.name != Path(__file__).name
        for match in re.findall(r"\b(?:kserve|vllm|sglang|flashinfer)#\d+", path.read_text("utf-8"))
    }
    assert mentioned <= set(REPORTS)
