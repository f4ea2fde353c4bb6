"""The tokenizer that GGUF metadata describes, built with the ``tokenizers`` library.

Two kinds of vocabulary: ``gpt2`` (byte-level BPE with merges; ``tokenizer.ggml.pre`` names how text is cut first) and
``llama`` (SentencePiece BPE; the merges follow from the pieces and their scores).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ModelLoadError

log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_MAX_CUTS = 1 << 29  # characters that are looked at to find the merges; Gemma's 262,144 tokens have 40 million

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_CASED_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"

_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_DIGIT_BY_DIGIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_PLAIN_GPT2 = {"default", "gpt-2", "gpt2", "olmo", "jina-es", "jina-de", "phi-2", "granite-docling"}
# Their tokenizers take a word that is in the vocabulary whole, whatever the merges say.
_WHOLE_WORDS = {_LLAMA3, _TEKKEN, _GPT4O}


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte 0..255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _byte_level(tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    alphabet = byte_alphabet()
    known = set(alphabet)
    vocabulary = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (_CONTROL, _USER_DEFINED) and not known.issuperset(token):
            token = "".join(alphabet[byte] for byte in token.encode())  # mislabelled: it is plain text
        vocabulary[token] = index
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    split = _SPLITS.get(pre)
    result = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE_WORDS))
    if split is not None:
        pieces: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
        pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        result.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    elif pre in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        result.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        if pre not in _PLAIN_GPT2:
            log.warning("GGUF pre-tokenizer %r is unknown, GPT-2's is used: some text may be split differently", pre)
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == _QWEN2:
        result.normalizer = normalizers.NFC()
    result.decoder = decoders.ByteLevel()
    return result


def _merges(tokens: Sequence[str], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best piece first; in the vocabulary's order if no scores are given."""
    known = set(tokens)
    if sum(len(token) ** 2 for token in tokens) > _MAX_CUTS:
        raise ValueError("the vocabulary has tokens of thousands of characters")
    merges = [
        (index, token[:cut], token[cut:])
        for index, token in enumerate(tokens)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    if scores is not None:
        merges.sort(key=lambda merge: (-scores[merge[0]], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _sentencepiece(tokens: Sequence[str], metadata: Mapping[str, Any], architecture: str) -> tokenizers.Tokenizer:
    scores: Sequence[float] | None = metadata.get("tokenizer.ggml.scores")
    gemma = architecture.startswith("gemma")
    if gemma:
        # Runs of spaces are stored as such, while text arrives with spaces replaced; and the scores do not follow
        # the merge order, the vocabulary does.
        tokens = [_SPACE * len(token) if token.isspace() and " " in token else token for token in tokens]
        scores = None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    given = metadata.get("tokenizer.ggml.merges")
    merges = [tuple(merge.split(" ", 1)) for merge in given] if given else _merges(tokens, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id") if gemma else None
    model = models.BPE(
        vocab=vocabulary,
        merges=merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    result = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    if gemma or not prefix:
        result.normalizer = normalizers.Replace(" ", _SPACE)
        result.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        steps.append(decoders.Strip(content=" ", left=1))
        if architecture == "phi3":
            result.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        else:
            result.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    result.decoder = decoders.Sequence(steps)
    return result


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole in text, too, but are text."""
    control = [
        AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    backend.add_special_tokens(control)
    plain = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED and backend.token_to_id(token) is not None
    ]
    backend.add_tokens(plain)


def _add_template(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Put BOS before and EOS after every text, where the metadata (or llama.cpp's default) says so."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    llama3 = _SPLITS.get(str(metadata.get("tokenizer.ggml.pre"))) == _LLAMA3
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    before = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", sentencepiece or llama3) else []
    after = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        single = [f"{tokens[i]}:0" for i in before] + ["$A:0"] + [f"{tokens[i]}:0" for i in after]
        special = [(tokens[i], i) for i in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file.

    ModelLoadError, naming the file ``where``, if there is no vocabulary or its kind is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{where}: has no vocabulary (tokenizer.ggml.tokens); use a complete GGUF file")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{where}: tokenizer.ggml.tokens is no list of strings; download the file again")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level(tokens, types, metadata)
    elif kind == "llama":
        backend = _sentencepiece(tokens, metadata, str(metadata.get("general.architecture")))
    else:
        raise ModelLoadError(
            f"{where}: its tokenizer is of kind {kind!r}, supported are 'gpt2' and 'llama'; use the model's safetensors"
        )
    _add_tokens(backend, tokens, types)
    _add_template(backend, metadata, tokens)
    return backend
