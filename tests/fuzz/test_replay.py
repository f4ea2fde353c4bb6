"""The fuzzers' seeds and finds, and some mutations of them, replayed; the fuzzers themselves run by hand."""

from __future__ import annotations

import random

import pytest
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_stays_mended(name: str) -> None:
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_seeds(name: str) -> None:
    chance = random.Random(name)
    inputs = [data for data in seeds(name) if len(data) < 5000]
    for _ in range(300):
        data = bytearray(chance.choice(inputs))
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        TARGETS[name](bytes(data))
