"""A decoder that is split among ranks: logits of every family equal the whole one's; each rank reads only its part."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.harness import SIZES, PagedRun, load, random_ids, random_model, save
from tests.models.test_families import CASES, SERVED

from carousel.models.decoder import Decoder
from carousel.models.errors import ModelLoadError
from carousel.models.families import decoder_config
from carousel.models.parallel import ALONE, Part, Split
from carousel.models.quantization import QuantizingWeights
from carousel.models.weights import SafetensorsSource, open_safetensors

IDS = random_ids(40)


class Threads:
    """Ranks that are threads of this process, and meet at a barrier."""

    class _Meeting:
        def __init__(self, size: int) -> None:
            self.barrier = threading.Barrier(size, timeout=60)
            self.given: list[Any] = [None] * size

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.given[self.rank] = x
        self._meeting.barrier.wait()
        found = list(self._meeting.given)
        self._meeting.barrier.wait()
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def share(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x)[0].clone())


def among(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """What every rank's ``work`` returns."""
    meeting = Threads._Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, meeting))
        except BaseException as error:  # the others would wait for it
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def logits(decoder: Decoder) -> torch.Tensor:
    """Of a prompt in two chunks, and of a step of decodes of two sequences."""
    run = PagedRun(decoder, sequences=2)
    parts = [run.step({0: IDS[:21]}), run.step({0: IDS[21:39], 1: IDS[:5]}), run.step({0: IDS[39:], 1: IDS[5:6]})]
    return torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_whole(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    save(random_model(kind(**{**SIZES, **changes})), tmp_path)
    options = {"max_model_len": SERVED.get(case)}
    expected = logits(load(tmp_path, **options))
    for result in among(2, lambda ranks: logits(load(tmp_path, ranks=ranks, **options))):
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)


def test_more_ranks_than_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    kind, changes = CASES["llama"]
    save(random_model(kind(**{**SIZES, **changes, "vocab_size": 125, "tie_word_embeddings": False})), tmp_path)
    ids = [i % 125 for i in IDS]
    expected = PagedRun(load(tmp_path)).step({0: ids})
    for result in among(4, lambda ranks: PagedRun(load(tmp_path, ranks=ranks)).step({0: ids})):
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)


def test_heads_and_features_that_do_not_divide(tmp_path: Path) -> None:
    """As those of the demo model: 9 heads with 3 KV heads."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 50}
    save(random_model(CASES["llama"][0](**{**SIZES, **sizes})), tmp_path)
    expected = logits(load(tmp_path))

    def split(ranks: Threads) -> tuple[torch.Tensor, int]:
        decoder = load(tmp_path, ranks=ranks)
        return logits(decoder), decoder.allocate_kv_cache(1)[0][0].shape[2]

    results = among(2, split)
    for result, _ in results:
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)
    assert [heads for _, heads in results] == [2, 1]


def test_a_rank_reads_and_holds_no_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(random_model(CASES["llama"][0](**SIZES, tie_word_embeddings=False)), tmp_path)
    read: list[tuple[str, Part | None]] = []
    plain = SafetensorsSource.read

    def noted(self: SafetensorsSource, name: str, out: torch.Tensor, **options: Any) -> None:
        read.append((name, options["part"]))
        plain(self, name, out, **options)

    whole = load(tmp_path)
    monkeypatch.setattr(SafetensorsSource, "read", noted)
    parts = among(4, lambda ranks: load(tmp_path, ranks=ranks))
    shapes = open_safetensors(tmp_path).shapes()
    for name, part in read:
        if len(shapes[name]) > 1:
            assert part is not None
            shares = 2 if ".k_proj." in name or ".v_proj." in name else 4  # two KV heads, each in two ranks
            assert part.length * shares == shapes[name][part.dim]
    assert sum(part.weight_bytes for part in parts) < 1.15 * whole.weight_bytes
    assert sum(part.kv_bytes_per_token for part in parts) == 2 * whole.kv_bytes_per_token
    assert [part.allocate_kv_cache(3)[0][0].shape[2] for part in parts] == [1] * 4


def test_layers_quantised_to_int8(tmp_path: Path) -> None:
    save(random_model(CASES["qwen2"][0](**SIZES)), tmp_path)
    config = decoder_config(json.loads((tmp_path / "config.json").read_text()))

    def quantised(ranks: Any = ALONE) -> torch.Tensor:
        source = open_safetensors(tmp_path)
        return logits(Decoder(config, QuantizingWeights(source, config, torch.float32, "int8", ranks)))

    expected = quantised()
    exact = logits(load(tmp_path))
    for result in among(2, quantised):
        # Other scales and other sums than the whole's, within the error that int8 makes anyway.
        assert (result - exact).abs().mean() < 1.5 * (expected - exact).abs().mean()


@pytest.mark.parametrize(("size", "possible"), [(3, "1, 2, 4"), (8, "1, 2, 4")])
def test_what_cannot_be_split_is_refused(size: int, possible: str) -> None:
    config = decoder_config({"model_type": "llama", **SIZES})
    with pytest.raises(ModelLoadError, match=f"--tensor-parallel-size {size} does not suit .*possible: {possible}$"):
        Split.of(config, 0, size)


def _process(rank: int, path: Path, meeting: str, results: Any) -> None:
    from carousel.rank_processes import join

    torch.set_num_threads(1)
    ranks = join(rank, 2, "cpu", meeting)
    found = [logits(load(path, ranks=ranks))]
    found.append(logits(load(path, ranks=ranks, dtype=torch.bfloat16)).float())
    shared = torch.tensor([rank + 5])
    ranks.share(shared)
    results.put((rank, [tensor.numpy() for tensor in found], shared.item()))


def test_two_processes_over_gloo(tmp_path: Path) -> None:
    save(random_model(CASES["gemma2"][0](**{**SIZES, **CASES["gemma2"][1]})), tmp_path)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meeting = str(tmp_path / "meeting")
    processes = [context.Process(target=_process, args=(rank, tmp_path, meeting, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = {rank: (tensors, shared) for rank, tensors, shared in (results.get(timeout=120) for _ in processes)}
    for process in processes:
        process.join(30)
    expected = logits(load(tmp_path))
    for tensors, shared in found.values():
        torch.testing.assert_close(torch.from_numpy(tensors[0]), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(torch.from_numpy(tensors[1]), expected, rtol=0.2, atol=0.1)
        assert shared == 5
