"""Incremental text equals the whole text, for every kind of tokenizer, any ids and any stop strings."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from carousel.engine.detokenizer import Detokenizer

CORPUS = [
    "The carousel never stops turning. Riders step on, and riders step off.",
    "def turn(n):\n    return [step(i) for i in range(n)]\n",
    "Das Karussell dreht sich. Le manège tourne, naïve café; señor, ¿qué tal?",
    "你好，世界！旋转木马不会停下来。 日本語のテキストと 한국어 텍스트",
    "🎠🎡🎢 👩‍👩‍👧‍👦 👍🏽 🇨🇭 family",
] * 3
FAMILY = "👩‍👩‍👧‍👦"
REPLACEMENT = "\ufffd"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class Counting:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.calls = 0
        self.longest = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        self.longest = max(self.longest, len(ids))
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>", "<|start of turn|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback(strip: bool) -> Tokenizer:
    """As Llama 2 (``strip``) and as Gemma have it, with byte tokens that are ordinary tokens."""
    learner = Tokenizer(models.BPE())
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=250, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    learnt = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "\ufffd"]
    names += [name for name, _ in sorted(learnt["vocab"].items(), key=lambda item: item[1]) if name != "\n"]
    merges = [tuple(pair) for pair in learnt["merges"] if "\n" not in "".join(pair)]
    names = [name for name in names if "\n" not in name]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "llama": lambda: byte_fallback(True),
    "gemma": lambda: byte_fallback(False),
    "metaspace": metaspace,
}
names = st.sampled_from(sorted(TOKENIZERS))
odd_text = st.lists(
    st.one_of(
        st.sampled_from([FAMILY, "🎠", "👍🏽", "世界", "é", "한국", "क्षि", "ÿ", "\u200d", REPLACEMENT]),
        st.sampled_from(["\n", " ", "  ", "the carousel"]),
        st.text(max_size=3),
    ),
    max_size=12,
).map("".join)


@st.composite
def ids_of(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Encoded text, random ids (also unknown ones) and runs of bytes in any order, one after another."""
    size = tokenizer.get_vocab_size()
    anything = st.lists(st.integers(0, size + 3), max_size=12)
    encoded = odd_text.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    low = st.lists(st.integers(0, min(270, size)), max_size=10)  # where the byte tokens are
    parts = draw(st.lists(st.one_of(anything, encoded, low), max_size=5))
    ids = [i for part in parts for i in part]
    if draw(st.booleans()) and ids:
        del ids[draw(st.integers(0, len(ids) - 1))]  # a character broken in the middle
    return ids


def stream(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], int]:
    """Deltas (the last one from the flush), and how many tokens were used until a stop string matched."""
    deltas = []
    used = 0
    for token_id in ids:
        used += 1
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.take())
        if stop is not None:
            break
    deltas.append(detokenizer.flush())
    return deltas, used


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_deltas_join_to_the_whole_text(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(names)]()
    ids = data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas, _ = stream(detokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas) == whole == detokenizer.text
    assert detokenizer.flush() == ""


@settings(max_examples=200, deadline=None)
@given(names, odd_text)
def test_valid_text_never_shows_a_broken_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text.replace(REPLACEMENT, ""), add_special_tokens=False).ids
    deltas, _ = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in delta for delta in deltas)
    for delta in deltas:
        delta.encode()  # no lone surrogates


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
def test_characters_appear_as_soon_as_they_are_certain(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(f"turn {FAMILY} turn", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    for position, token_id in enumerate(ids, 1):
        detokenizer.append(token_id)
        detokenizer.take()
        rest = tokenizer.decode(ids[:position])[len(detokenizer.text) :]
        if name == "byte level":
            assert rest in ("", REPLACEMENT)
        elif token_id > 258:  # not a byte token
            assert rest == ""


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
def test_invalid_bytes_are_not_held_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    lead = lead_byte(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(50):
        detokenizer.append(lead)
        detokenizer.take()
    assert len(detokenizer.text) >= 49
    assert detokenizer.text + detokenizer.flush() == REPLACEMENT * 50


def test_a_character_after_many_invalid_bytes_is_whole() -> None:
    tokenizer = byte_level()
    lead = lead_byte(tokenizer)
    for character in ("ॐ", "𝄞"):
        encoded = tokenizer.encode(character, add_special_tokens=False).ids
        assert len(encoded) == len(character.encode())  # a token per byte
        for invalid in range(20):
            ids = [lead] * invalid + encoded
            deltas, _ = stream(Detokenizer(tokenizer), ids)
            assert "".join(deltas) == tokenizer.decode(ids) == REPLACEMENT * invalid + character


def test_a_leading_space_that_is_a_byte_is_stripped_as_well() -> None:
    tokenizer = byte_fallback(True)
    space, lead = tokenizer.token_to_id("<0x20>"), tokenizer.token_to_id("<0xE4>")
    turn = tokenizer.encode("turn", add_special_tokens=False).ids
    for ids in ([space, *turn], [space, space, *turn], [space], [space, space, lead, *turn], [turn[0], space, *turn]):
        deltas, _ = stream(Detokenizer(tokenizer), ids)
        assert "".join(deltas) == tokenizer.decode(ids)


def lead_byte(tokenizer: Tokenizer) -> int:
    """The token of the byte 0xE4, which begins a character of three bytes."""
    token = tokenizer.token_to_id("<0xE4>")
    return token if token is not None else tokenizer.token_to_id("ä")


def test_an_invalid_byte_spoils_its_whole_fallback_run() -> None:
    tokenizer = byte_fallback(True)
    turn = tokenizer.encode("turn", add_special_tokens=False).ids
    newline, lead = tokenizer.token_to_id("<0x0A>"), tokenizer.token_to_id("<0xE4>")
    ids = [*turn, newline, lead, *turn]
    deltas, _ = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids) == f"turn{REPLACEMENT * 2} turn"


@pytest.mark.parametrize("offset", [1, 300, 800, 860, 900, 1500])
def test_byte_tokens_are_recognised_wherever_they_are_in_the_vocabulary(offset: int) -> None:
    names = ["<unk>", REPLACEMENT, *(f"pad{i}" for i in range(offset)), *BYTE_TOKENS, "▁A", "A"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spelt = [
        "▁A",
        "<0x41>",
        "<0xE4>",
        "A",
        "<0xE4>",
        "<0xB8>",
        "<0xAD>",
        REPLACEMENT,
        "<0x41>",
        "<0x80>",
        "A",
        "<0x41>",
    ]
    ids = [vocab[name] for name in spelt]
    deltas, _ = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "A" + REPLACEMENT * 2 + "A中" + REPLACEMENT * 3 + "AA"
    assert deltas[1] == ""  # an "A" that the byte after it may spoil
    assert deltas[3] == REPLACEMENT * 2 + "A"  # and one that nothing can


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("kind", ["text", "bytes", "special", "invalid"])
def test_decoding_windows_stay_bounded(name: str, kind: str) -> None:
    counting = Counting(TOKENIZERS[name]())
    text = {"text": "the carousel turns ", "bytes": "ॐ🎠𝄞", "special": "", "invalid": ""}[kind]
    ids = counting.inner.encode(text, add_special_tokens=False).ids if text else [1]
    if kind == "invalid" and name != "metaspace":  # which has no bytes
        ids = [lead_byte(counting.inner)]
    Detokenizer(counting)  # looks at the vocabulary once
    counting.longest = counting.calls = 0
    detokenizer = Detokenizer(counting)
    for token_id in ids * 100:
        detokenizer.append(token_id)
        detokenizer.take()
    detokenizer.flush()
    assert counting.longest <= 10
    assert counting.calls <= 2 * len(ids) * 100 + 20
    if kind == "text":
        assert counting.calls <= 4 * len(set(ids)) + 20


# ---- stop strings


def reference(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Text, stop string and tokens used, by decoding everything after every token and trying every end."""
    seen = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        for end in range(seen + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and count > min_tokens:
                stop = max(found, key=len)
                return text[: end if include else end - len(stop)], stop, count
        seen = max(seen, len(text.rstrip(REPLACEMENT)))  # at the end of valid text these are a character to come
    return tokenizer.decode(ids), None, len(ids)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_stop_strings_match_the_reference(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(names)]()
    words = ["ab", "abab", "a", "世界", FAMILY, "\n", "b a", " ", "é🎠", "carousel", "\n\n", "xyz"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 5) if text[i : i + n]]
    stops = data.draw(st.lists(st.sampled_from([*pieces, "ba", "aba", "abac", "zz"]), min_size=1, max_size=4))
    include = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 6))
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop=include, min_tokens=min_tokens)
    deltas, used = stream(detokenizer, ids)
    assert ("".join(deltas), detokenizer.matched_stop, used) == reference(tokenizer, ids, stops, include, min_tokens)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stop_strings_leave_unmatched_text_whole(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(names)]()
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=3) | st.sampled_from([REPLACEMENT * 2, "the"]), max_size=4))
    detokenizer = Detokenizer(tokenizer, stop=stops, min_tokens=len(ids) if data.draw(st.booleans()) else 0)
    deltas, _ = stream(detokenizer, ids)
    if detokenizer.matched_stop is None:
        assert "".join(deltas) == whole
    else:
        assert detokenizer.matched_stop in stops


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from("ab"), max_size=30).map("".join),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(0, 30),
)
def test_text_is_held_back_exactly_as_long_as_it_may_become_a_stop(text: str, stops: list[str], ignored: int) -> None:
    tokenizer = byte_level()
    one = {character: tokenizer.token_to_id(character) for character in "ab"}
    detokenizer = Detokenizer(tokenizer, stop=stops, min_tokens=ignored)
    for position, character in enumerate(text, 1):
        stop = detokenizer.append(one[character])
        detokenizer.take()
        sofar = text[:position]
        if stop is not None:
            assert detokenizer.text == sofar[: -len(stop)]
            assert detokenizer.append(one["a"]) == stop
            assert detokenizer.flush() == ""
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max((n for n in range(position + 1) if sofar[position - n :] in beginnings), default=0)
        assert detokenizer.text == sofar[: position - held]
    assert detokenizer.text + detokenizer.flush() == text


def test_a_stop_in_a_fallback_run_counts_at_once() -> None:
    tokenizer = byte_fallback(True)
    ids = tokenizer.encode("turn", add_special_tokens=False).ids
    newline = tokenizer.token_to_id("<0x0A>")
    detokenizer = Detokenizer(tokenizer, stop=["\n"])
    assert [detokenizer.append(i) for i in [*ids, newline]] == [None] * len(ids) + ["\n"]
    assert detokenizer.flush() == "turn"


def test_a_stop_ignored_within_min_tokens_is_text_even_when_its_run_ends_later() -> None:
    tokenizer = byte_fallback(True)
    newline = tokenizer.token_to_id("<0x0A>")
    ids = [newline, newline, *tokenizer.encode("turn", add_special_tokens=False).ids]
    detokenizer = Detokenizer(tokenizer, stop=["\n"], min_tokens=2)
    deltas, _ = stream(detokenizer, ids)
    assert "".join(deltas) == "\n\n turn"
    assert detokenizer.matched_stop is None


def test_the_longest_of_the_stops_that_end_together_wins() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("riders step on", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, stop=["ep", "step", "p on", "", "riders step on!"])
    deltas, _ = stream(detokenizer, ids)
    assert ("".join(deltas), detokenizer.matched_stop) == ("riders ", "step")


def test_empty_sequence() -> None:
    detokenizer = Detokenizer(byte_level(), stop=["x"])
    assert (detokenizer.take(), detokenizer.flush(), detokenizer.text) == ("", "", "")
