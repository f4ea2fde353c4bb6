"""The usage log survives kills, torn lines, full disks and rotation, and syncs no more than once a second."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.conftest import wait_until

from carousel.engine.meter import Amounts, RequestUsage
from carousel.engine.request import FinishReason
from carousel.telemetry import usage_log
from carousel.telemetry.usage import Price
from carousel.telemetry.usage_log import NAME, TORN, UsageLog, UsageLogUnusable, line_of, read_log, repair

PRICE = Price(3.6, "EUR")


def usage(name: str = "r", tenant: str = "a", device_ns: int = 10**9) -> RequestUsage:
    amounts = Amounts(prompt_tokens=5, generated_tokens=3, device_ns=device_ns, slot_ns=7, block_ns=9)
    return RequestUsage(name, tenant, FinishReason.LENGTH, 1, 0, 0.25, 0.5, 1.0, amounts)


def line(name: str = "r") -> bytes:
    return line_of(usage(name), "m", PRICE, 0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "BATCH_SECONDS", 0.005)
    monkeypatch.setattr(usage_log, "RETRY_SECONDS", 0.01)


def entries(folder: Path) -> list[str]:
    return [entry["id"] if entry else "-" for entry in read_log(folder)]


def test_a_line_has_everything_and_no_text() -> None:
    assert json.loads(line("x")) == {
        "v": 1, "at": "1970-01-01T00:00:00.000Z", "id": "x", "model": "m", "tenant": "a", "reason": "length",
        "choices": 1, "preemptions": 0, "prompt_tokens": 5, "cached_tokens": 0, "generated_tokens": 3,
        "recomputed_tokens": 0, "device_ns": 10**9, "slot_ns": 7, "block_ns": 9, "queue_ms": 250.0, "ttft_ms": 500.0,
        "e2e_ms": 1000.0, "cost": 0.001, "currency": "EUR",
    }  # fmt: skip


def test_lines_are_written_in_order_and_to_the_end(tmp_path: Path, quick: None) -> None:
    log = UsageLog(tmp_path / "new" / "folder", "m", PRICE)
    for index in range(500):
        log(usage(str(index)))
    log.close()
    assert entries(tmp_path / "new" / "folder") == [str(index) for index in range(500)]
    assert (log.written, log.pending, log.lost) == (500, 0, 0)


def test_syncs_come_at_most_once_a_second_and_soon_after_the_last_line(tmp_path: Path) -> None:
    synced: list[float] = []
    log = UsageLog(tmp_path, "m", PRICE, sync=lambda descriptor: synced.append(time.monotonic()))
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        log(usage())
        time.sleep(0.01)
    wait_until(lambda: log.pending == 0)
    count = len(synced)
    log(usage())
    wait_until(lambda: len(synced) > count)  # what came last is synced without anything after it
    assert all(later - earlier >= 0.99 for earlier, later in itertools.pairwise(synced))
    log.close()


def test_a_full_file_gets_a_name_of_its_own(tmp_path: Path, quick: None) -> None:
    log = UsageLog(tmp_path, "m", PRICE, max_bytes=4096, keep_files=3)
    for index in range(200):
        log(usage(str(index)))
        if index % 10 == 0:
            wait_until(lambda: log.pending == 0)
    log.close()
    full = sorted(tmp_path.glob(usage_log.ROTATED))
    assert len(full) == 3
    found = entries(tmp_path)
    assert found == [str(index) for index in range(200 - len(found), 200)]  # the oldest went, nothing between
    assert len(found) > 30


def test_a_second_process_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, "m", PRICE)
    with pytest.raises(UsageLogUnusable, match="another process"):
        UsageLog(tmp_path, "m", PRICE)
    log.close()
    UsageLog(tmp_path, "m", PRICE).close()


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageLogUnusable, match=r"file.*(exists|directory)"):
        UsageLog(tmp_path / "file", "m", PRICE)


GOOD = line("1") + line("2")


@pytest.mark.parametrize(
    ("raw", "kept", "torn"),
    [
        (GOOD, GOOD, b""),
        (b"", b"", b""),
        (GOOD + line("3")[:40], GOOD, line("3")[:40]),
        (GOOD + line("3")[:-1], GOOD + line("3"), b""),  # only its end was missing
        (GOOD + b"\0" * 5000, GOOD, b"\0" * 5000),
        (GOOD + b'{"half": \n' + b"\0\0\n", GOOD, b'{"half": \n\0\0\n'),
        (b"rubbish", b"", b"rubbish"),
        (GOOD + b"\n\n", GOOD, b"\n\n"),
    ],
)
def test_what_a_kill_has_torn_is_cut_off_and_kept_aside(tmp_path: Path, raw: bytes, kept: bytes, torn: bytes) -> None:
    (tmp_path / NAME).write_bytes(raw)
    assert repair(tmp_path) == len(torn)
    assert (tmp_path / NAME).read_bytes() == kept
    assert repair(tmp_path) == 0
    if torn:
        assert (tmp_path / TORN).read_bytes() == torn + b"\n"
    log = UsageLog(tmp_path, "m", PRICE)
    log(usage("after"))
    log.close()
    assert entries(tmp_path)[-1] == "after"
    assert "-" not in entries(tmp_path)


@settings(max_examples=40)
@given(st.integers(0, 400), st.integers(0, 700))
def test_wherever_it_is_torn_whole_lines_stay(tmp_path_factory: pytest.TempPathFactory, lines: int, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    raw = b"".join(line(str(index)) for index in range(lines))
    raw = raw[: len(raw) - cut] if cut else raw
    (folder / NAME).write_bytes(raw)
    repair(folder)
    whole = raw.count(b"\n")
    assert entries(folder)[:whole] == [str(index) for index in range(whole)]
    assert len(entries(folder)) <= whole + 1


class FullDisk:
    """A file that takes half of what is written, or nothing, until there is room."""

    def __init__(self, inner: object) -> None:
        self.inner, self.full = inner, False

    def write(self, data: bytes) -> int:
        if self.full:
            self.inner.write(data[: len(data) // 2])  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.inner.write(data)  # type: ignore[attr-defined,no-any-return]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_a_full_disk_loses_nothing_and_leaves_no_half_line(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    log = UsageLog(tmp_path, "m", PRICE)
    disk = FullDisk(log._file)
    log._file = disk  # type: ignore[assignment]
    log(usage("before"))
    wait_until(lambda: log.written == 1)
    disk.full = True
    for index in range(20):
        log(usage(str(index)))
    wait_until(lambda: log.failures >= 3)
    assert "No space left" in (log.problem or "")
    assert (tmp_path / NAME).read_bytes().count(b"\n") == 1
    disk.full = False
    log.close()
    assert entries(tmp_path) == ["before", *map(str, range(20))]
    assert caplog.text.count("cannot be written") == 1


def test_a_disk_that_takes_nothing_for_long_loses_the_oldest_and_counts_them(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log, "MAX_PENDING", 5)
    log = UsageLog(tmp_path, "m", PRICE)
    disk = FullDisk(log._file)
    disk.full = True
    log._file = disk  # type: ignore[assignment]
    for index in range(9):
        log(usage(str(index)))
    wait_until(lambda: log.lost == 4)
    disk.full = False
    log.close()
    assert entries(tmp_path) == [str(index) for index in range(4, 9)]


WRITER = """
import sys
from pathlib import Path
from carousel.engine.meter import Amounts, RequestUsage
from carousel.engine.request import FinishReason
from carousel.telemetry.usage import Price
from carousel.telemetry.usage_log import UsageLog
def usage(name):
    return RequestUsage(name, "a", FinishReason.LENGTH, 1, 0, 0.25, 0.5, 1.0, Amounts(device_ns=7))
log = UsageLog(Path(sys.argv[1]), "m", Price(), max_bytes=200_000)
number = int(sys.argv[2])
while True:
    log(usage(str(number)))
    number += 1
    while log.pending > 500:
        pass
    if number % 500 == 0:
        print(number, flush=True)
"""


def test_kill_9_in_the_middle_again_and_again_leaves_a_valid_log(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for _ in range(2):
        seen = entries(tmp_path)
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(len(seen))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)
        assert process.stdout is not None
        for _ in range(4):
            told = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        repair(tmp_path)
        found = entries(tmp_path)
        assert "-" not in found
        assert found == [str(index) for index in range(len(found))], "nothing is missing or double"
        assert len(found) > told - 2000, "what was written long ago is there"
