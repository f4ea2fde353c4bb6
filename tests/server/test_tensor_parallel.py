"""``--tensor-parallel-size``: processes of one server that live and die together, and answer as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file
from tests.engine.test_engine import PROMPTS, greedy
from tests.engine.tiny import CONFIG, _config, _weights, byte_tokenizer, started_engine, tiny_settings
from tests.ports import free_port
from tests.server.harness import answers, wait_until

from carousel.config import Settings, SettingsError, load_settings
from carousel.engine.engine import Engine
from carousel.engine.errors import EngineUnavailable
from carousel.engine.request import FinishReason
from carousel.models.errors import ModelLoadError
from carousel.rank_processes import RankProcesses, join
from carousel.standalone import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children die with their parent on Linux")
LENGTH = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as files."""
    path = tmp_path_factory.mktemp("tiny")
    save_file(_weights(_config()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def settings(directory: Path, **changes: object) -> Settings:
    return tiny_settings(**{"model": str(directory), "tensor_parallel_size": 2, "device": "cpu", **changes})


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    chosen = settings(directory, async_scheduling="on", max_batch_tokens=24)
    model = load(directory, chosen)
    assert isinstance(model.ranks, RankProcesses)
    engine = Engine(model, chosen)
    engine.start()
    yield engine
    engine.stop()
    model.ranks.stop()


def process_of(engine: Engine) -> subprocess.Popen[bytes]:
    ranks = engine._ranks
    assert isinstance(ranks, RankProcesses)
    process = ranks._ranks[0].process
    assert process is not None
    return process


async def test_answers_are_the_whole_model_s_and_a_lost_rank_is_the_engine_s_end(engine: Engine) -> None:
    """With the host a step ahead, chunked prompts and a batch: sampled tokens go from device to device."""
    whole = started_engine()
    try:
        for ids in PROMPTS[:3]:
            expected = await whole.generate(greedy(ids, LENGTH))
            assert (await engine.generate(greedy(ids, LENGTH)))[0].token_ids == expected[0].token_ids
    finally:
        whole.stop()
    assert engine.alive
    async with engine.submit(greedy(PROMPTS[0], 200)) as stream:
        outputs = aiter(stream)
        await anext(outputs)
        process_of(engine).kill()
        last = [output async for output in outputs][-1]
    assert last.finish_reason is FinishReason.ERROR
    wanted = "rank 1 of 2 was killed by SIGKILL; only a restart helps"
    assert last.error == f"the engine has failed: {wanted}"
    assert engine.failure == wanted
    assert not engine.alive
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match=wanted):
        engine.submit(greedy(PROMPTS[0], 1))


def test_an_idle_engine_hears_of_it_too(engine: Engine) -> None:
    process_of(engine).kill()
    wait_until(lambda: not engine.alive)
    assert engine.failure == "rank 1 of 2 was killed by SIGKILL; only a restart helps"
    wait_until(lambda: engine._thread is not None and not engine._thread.is_alive())


def test_what_a_rank_cannot_load_is_said(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(tmp_path, settings(tmp_path))
    with pytest.raises(ModelLoadError, match=r"-size 3 does not suit this model .*possible: 1, 2, 4"):
        load(directory, settings(directory, tensor_parallel_size=3))


def children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_and_its_ranks_end_together(directory: Path, number: signal.Signals) -> None:
    http = free_port()
    flags = {
        "model": directory, "model-name": "tiny", "http-port": http, "device": "cpu", "tensor-parallel-size": 2,
        "threads": 1, "kv-cache-memory": "4MiB", "max-batch-tokens": 64, "drain-seconds": 5,
    }  # fmt: skip
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, "-m", "carousel.cli", "serve", *words, "--no-grpc"]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    url = f"http://127.0.0.1:{http}"
    try:
        wait_until(lambda: answers(f"{url}/v2/models/tiny/ready"), 60)
        ranks = children(server.pid)
        assert len(ranks) == 1
        body = {"text_input": "The", "parameters": {"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
        assert httpx.post(f"{url}/v2/models/tiny/generate", json=body, timeout=20).status_code == 200
        os.kill(ranks[0], signal.SIGTERM)  # as one to a whole process group: the server drains first
        time.sleep(0.2)
        assert httpx.get(f"{url}/livez", timeout=5).status_code == 200
        server.send_signal(number)
        assert server.wait(20) == (0 if number is signal.SIGTERM else -9)
        wait_until(lambda: not runs(ranks[0]))
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_a_rank_on_a_gpu_is_bound_to_its_own(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be seen without GPUs: what torch is told, in order, by the second of three ranks."""
    import torch
    import torch.distributed as dist

    from carousel.models import parallel

    told: list[object] = []

    class Sums:
        def sum(self, x: torch.Tensor) -> None:
            told.append(("sum", x))

    monkeypatch.setattr(torch.cuda, "set_device", lambda which: told.append(("bound", which)))
    monkeypatch.setattr(torch, "zeros", lambda _, device: device)
    monkeypatch.setattr(dist, "FileStore", lambda path, size: (path, size))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **how: told.append((name, how)))
    monkeypatch.setattr(parallel, "Group", Sums)
    assert isinstance(join(1, 3, device, "meeting"), Sums)
    here = None if device == "cpu" else torch.device(device)
    how = {"store": ("meeting", 3), "rank": 1, "world_size": 3, "timeout": timedelta(seconds=300), "device_id": here}
    assert told == ([] if here is None else [("bound", here)]) + [(backend, how), ("sum", device)]


def test_as_many_gpus_as_ranks_are_wanted(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """A process sees one MIG slice at most, and so does not split a model among several."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(EngineUnavailable, match="-size 2: a GPU for each is needed, torch finds 1"):
        load(directory, settings(directory, device="cuda"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda:1"], "takes the first GPUs, not cuda:1"),
        (["--deterministic"], "--deterministic runs on one device only"),
    ],
)
def test_settings_that_contradict_it(words: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(["--tensor-parallel-size", "2", *words], {})
