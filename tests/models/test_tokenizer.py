"""Tokenizers and chat templates give what transformers gives, without it; special and final ids come from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from tests.models.gguf_files import write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from carousel.engine.errors import InvalidRequest
from carousel.models.errors import ModelLoadError
from carousel.models.gguf import GGUFSource, eos_ids
from carousel.models.tokenizer import load_gguf_tokenizer, load_tokenizer

TEXTS = [
    "Hello world! It's 12345.67 o'clock, we'LL see\n\n\n  spaced   out\t\ttabs ",
    "Grüße aus Köln: naïve façade, ÅNGSTRÖM, ЖЖ привет, 你好世界, こんにちは, 🎠🎡 👩‍👩‍👧",
    "def f(x):\n    return x**2 // 3  # comment\r\n\r\nCamelCaseHTTPServer /usr/bin",
    " leading space",
    "  two leading",
    "<|im_start|>user\nHi<|im_end|>\n<think>x</think>",
    "",
]
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog, again and again and again"] * 3


def byte_level_backend(size: int = 420) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_metadata(pre: str) -> dict[str, Any]:
    backend = byte_level_backend()
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    tokens += ["<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_metadata(space_prefix: bool | None = None) -> dict[str, Any]:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator([t for t in CORPUS if "🎠" not in t], trainer)
    state = json.loads(backend.to_str())["model"]["vocab"]
    tokens = sorted(state, key=state.get)
    types = [2, 3, 3, *[6] * 256, 3, *[1] * (len(tokens) - len(special))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata if space_prefix is None else metadata | {"tokenizer.ggml.add_space_prefix": space_prefix}


def gguf_file(directory: Path, architecture: str, metadata: dict[str, Any]) -> Path:
    """With the few settings that transformers wants to see before it reads the vocabulary."""
    sizes = {"context_length": 8, "block_count": 1, "embedding_length": 32, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": 8}
    own = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return write(
        directory / "tokens.gguf",
        architecture,
        own | {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5} | metadata,
        {"token_embd.weight": np.ones((8, 32), np.float32)},
    )


GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        pre: ("llama", byte_level_metadata(pre) | {"tokenizer.ggml.add_bos_token": pre == "llama-bpe"})
        for pre in ("llama-bpe", "qwen2", "tekken", "gpt-4o", "default")
    },
    "sentencepiece": ("llama", sentencepiece_metadata()),
    "sentencepiece-eos": ("llama", sentencepiece_metadata() | {"tokenizer.ggml.add_eos_token": True}),
    "phi3": ("phi3", sentencepiece_metadata()),
    "gemma3": ("gemma3", sentencepiece_metadata(space_prefix=False)),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_vocabulary_gives_transformers_ids(case: str, tmp_path: Path) -> None:
    file = gguf_file(tmp_path, *GGUF_CASES[case])
    theirs = tf.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = load_gguf_tokenizer(GGUFSource(file).metadata, str(file))
    for text in TEXTS:
        expected = theirs(text).input_ids
        assert ours.encode(text) == expected
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)
    assert (ours.bos_id, ours.special_tokens["eos_token"]) == (theirs.bos_token_id, theirs.eos_token)


def test_smollm_cuts_digits_apart(tmp_path: Path) -> None:
    """Its tokenizer.json does, llama.cpp does; transformers' conversion of the GGUF forgets to."""
    metadata = byte_level_metadata("smollm")
    merges = [*metadata["tokenizer.ggml.merges"], "1 2"]
    metadata |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "12"]}
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = load_gguf_tokenizer(metadata, "memory")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a 12")] == ["a", " ", "1", "2"]


def test_whole_words_and_normal_forms_of_their_models(tmp_path: Path) -> None:
    """Llama 3's tokenizer takes a word that is a token whole, though no merges lead to it; Qwen's composes letters."""
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xyzzyx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    llama3 = load_gguf_tokenizer(metadata, "memory")
    assert llama3.encode("xyzzyx", add_special_tokens=False) == [len(metadata["tokenizer.ggml.tokens"]) - 1]
    qwen = load_gguf_tokenizer(byte_level_metadata("qwen2"), "memory")
    assert qwen.encode("Ko\u0308ln") == qwen.encode("K\u00f6ln")


def test_user_defined_runs_of_spaces_are_tokens() -> None:
    """As llama.cpp takes them; transformers' conversion leaves out those that are not spelled as bytes."""
    metadata = byte_level_metadata("default")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "  "]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = load_gguf_tokenizer(metadata, "memory")
    ids = tokenizer.encode("x  =")
    assert ids[1] == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.decode(ids) == "x  ="


def test_an_unknown_pre_tokenizer_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    load_gguf_tokenizer(byte_level_metadata("brand-new"), "memory")
    assert "brand-new" in caplog.text


def test_a_gguf_without_a_usable_vocabulary_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"a\.gguf: has no vocabulary"):
        load_gguf_tokenizer({}, "a.gguf")
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(ModelLoadError, match=r"a\.gguf: its tokenizer is of kind 'bert', supported are"):
        load_gguf_tokenizer(metadata, "a.gguf")


def test_final_ids_of_a_gguf() -> None:
    metadata = byte_level_metadata("qwen2") | {"tokenizer.ggml.eot_token_id": 7}
    assert eos_ids(metadata) == {1, 3, 7}  # eos, <|im_end|>, eot
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    assert eos_ids(metadata) == {1, 7}  # text that only looks like the end of a turn


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's tokenizer files, as save_pretrained writes them."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    backend.add_tokens([AddedToken("<think>", special=False)])
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_transformers_ids(directory: Path) -> None:
    theirs = tf.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory, {"eos_token_id": [5]}, {"eos_token_id": 3})
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_ids == {1, 3, 5}
    assert ours.bos_id == 0
    assert ours.vocab_size == len(theirs)
    assert ours.has_chat_template
    assert ours.apply_chat_template([{"role": "user", "content": "a"}]) == "a<|eos|>"


def test_tokenizer_config_overrules_what_is_put_around_a_text(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"add_bos_token": False, "add_eos_token": True}
    file.write_text(json.dumps(config))
    ids = load_tokenizer(directory, {}, {}).encode("Hello")
    assert (ids[0] != 0, ids[-1]) == (True, 1)


def test_bytes_of_tokens_join_to_the_text(directory: Path) -> None:
    byte_level = load_tokenizer(directory, {}, {})
    sentencepiece = load_gguf_tokenizer(sentencepiece_metadata(), "memory")
    for tokenizer in (byte_level, sentencepiece):
        for text in TEXTS[:5]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
            assert joined.removeprefix(" ") == text.removeprefix(" ")
    emoji = byte_level.encode("🎠", add_special_tokens=False)
    assert len(emoji) > 1
    assert "\ufffd" in byte_level.token_text(emoji[0])
    assert byte_level.token_text(0) == "<|bos|>"
    assert byte_level.is_special(0)
    think = byte_level.encode("<think>", add_special_tokens=False)
    assert byte_level.token_bytes(think[0]) == b"<think>"
    assert not byte_level.is_special(think[0])
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.decode([10**6]) == ""


def test_templates_are_found_wherever_they_lie(directory: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    file = directory / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}

    def loaded(**changes: Any) -> Any:
        file.write_text(json.dumps(config | changes))
        return load_tokenizer(directory, {}, {})

    assert not loaded().has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        loaded().apply_chat_template(message)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = loaded(chat_template=named)
    assert tokenizer.apply_chat_template(message) == "plain"
    assert tokenizer.apply_chat_template(message, tools=[{"type": "function"}]) == "tools"
    (directory / "chat_template.jinja").write_text("file")
    assert loaded(chat_template="config").apply_chat_template(message) == "file"
    assert loaded().chat_template == "file"


def test_broken_or_missing_files_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is not a valid tokenizer"):
        load_tokenizer(directory, {}, {})
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        load_tokenizer(directory, {}, {})
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=r"empty: no tokenizer found \(tokenizer\.json, or one of"):
        load_tokenizer(empty, {}, {})
    (empty / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"empty: has no tokenizer\.json and its tokenizer cannot be converted"):
        load_tokenizer(empty, {}, {})


def test_files_without_a_tokenizer_json_are_converted(directory: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 and early Qwen models have them."""
    expected = load_tokenizer(directory, {}, {})
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]))
    own = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(own))
    converted = load_tokenizer(directory, {}, {})
    for text in TEXTS[:5]:
        assert converted.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Hi <b>&'\"</b> ünï"}],
    "turns": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Köln", "n": 1.5}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
}
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n    {% if loop.first and message['role'] != 'system' %}\n"
        "{{ '<|im_start|>system\nDefault<|im_end|>\n' }}\n    {% endif %}\n"
        "{{'<|im_start|>' + message['role'] + '\n' + (message.content or '') + '<|im_end|>' + '\n'}}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tools-json": (
        "{{ bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{%- for m in messages %}{%- if m.tool_calls is defined %}"
        "{%- for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
        "{%- elif 'content' in m %}[{{ m.role }}]{{ m.content | trim | tojson }}{% endif %}{% endfor %}"
    ),
    "namespace-loop-controls": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if loop.index0 > ns.last %}{% break %}{% endif %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}={{ m.content }};{% endfor %}{{ ns.last }}"
    ),
    "macro-and-date": (
        "{% macro show(m) %}<{{ m['role'] }}>{{ m.get('content', '') }}{% endmacro %}"
        "{{ strftime_now('%Y') }}{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}{{ extra }}"
    ),
    "generation-tag": (
        "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}\n{% endfor %}{{ eos_token }}"
    ),
}
TOOL = {"type": "function", "function": {"name": "w", "description": "<weather> & more", "parameters": {}}}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template: str, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    theirs = tf.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory, {}, {})
    for messages in CONVERSATIONS.values():
        for prompt in (True, False):
            for extra in ({}, {"tools": [TOOL], "extra": "x"}):
                expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **extra)
                assert ours.apply_chat_template(messages, add_generation_prompt=prompt, **extra) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for m in messages %}", "broken"),
        ("{{ messages[0].nothing.here }}", "nothing"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(template: str, message: str, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(directory, {}, {})
    with pytest.raises(InvalidRequest, match=message) as refused:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"
    with pytest.raises(InvalidRequest, match="at least one message"):
        tokenizer.apply_chat_template([])
