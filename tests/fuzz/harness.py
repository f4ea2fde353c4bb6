"""Runs a target under atheris: ``python tests/fuzz/fuzz_X.py -max_total_time=60``, with any of libFuzzer's options."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(name: str) -> None:
    """Fuzz the target ``name`` from its seeds; new inputs are kept for this run only, a crash is written to the
    working directory."""
    sys.path[:0] = [str(ROOT), str(ROOT / "predictor"), str(ROOT / "kernels")]
    import atheris
    import torch  # libraries are not instrumented, only what is ours

    torch.set_num_threads(1)
    with atheris.instrument_imports(
        include=["carousel.protocols", "carousel.tensors", "carousel.models", "carousel.engine"]
    ):
        targets = importlib.import_module("tests.fuzz.targets")
    seeds = importlib.import_module("tests.fuzz.seeds").seeds
    with tempfile.TemporaryDirectory() as work:
        corpus, words = Path(work) / "corpus", Path(work) / "words"
        corpus.mkdir()
        for index, data in enumerate(seeds(name)):
            (corpus / f"seed{index}").write_bytes(data)
        words.write_text("\n".join(f'"{_escaped(word)}"' for word in vocabulary()))
        options = ["-max_len=8192", "-rss_limit_mb=4096", "-timeout=20", f"-dict={words}"]
        atheris.Setup([sys.argv[0], *sys.argv[1:], *options, str(corpus)], targets.TARGETS[name])
        atheris.Fuzz()


def vocabulary() -> set[str]:
    """Names of fields and values that say something to a parser: libFuzzer puts them in."""
    from tests.server.bad_values import PROTOCOLS

    words = {"null", "true", "[]", "{}", "NaN", "1e999", "-1", "0.5", '"\\ud800"', "binary_data_size", "BYTES", "F32"}
    for protocol in PROTOCOLS.values():
        for fields in (protocol.good, protocol.fields, protocol.parameters):
            words |= {f'"{name}":' for name in fields}
    return words


def _escaped(word: str) -> str:
    return "".join(char if char.isalnum() or char in "_:.-[]{}" else f"\\x{ord(char):02x}" for char in word)
