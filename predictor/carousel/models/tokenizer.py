"""Text <-> token ids, chat prompts and the ids that end a text, from whatever tokenizer files a model has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from carousel.engine.errors import InvalidRequest

from .chat import ChatTemplate
from .errors import ModelLoadError
from .files import check_regular, parse_object, read_text
from .gguf import eos_ids as gguf_eos_ids
from .gguf_tokenizer import byte_alphabet, gguf_tokenizer

MAX_TOKENIZER_BYTES = 512 * 2**20
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer, its chat template and its special ids. Encoding and decoding release the GIL; all is thread-safe.

    Args:
        backend: does the work.
        special_tokens: text of the named special tokens, ``bos_token`` and so on; templates see them.
        templates: chat templates by name, ``default`` and perhaps ``tool_use``.
        eos_ids: ids that end a generation.
        bos_id: the id that starts a text, if any.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        self.bos_id = bos_id if bos_id is not None else self._id("bos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._chat = ChatTemplate(templates, self.special_tokens) if templates else None

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised. ``add_special_tokens`` adds what
        the model wants around a text (often BOS); a chat prompt already has it."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Incomplete UTF-8 becomes U+FFFD; ids without a token become nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text in the middle of it; b"" for an id without a token."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._byte_values is not None:
            values = [self._byte_values.get(character) for character in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for incomplete UTF-8."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def _added(self) -> dict[int, str]:
        return {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_values(self) -> dict[str, int] | None:
        """For byte-level vocabularies, the byte that each character of a token stands for."""
        if "ByteLevel" not in repr(self.backend.decoder):
            return None
        return {character: byte for byte, character in enumerate(byte_alphabet())}

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` leaves the token out by default."""
        return token_id in self._special

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the default template."""
        return None if self._chat is None else self._chat.sources.get("default")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt for a conversation; encode it with ``add_special_tokens=False``.

        Args:
            messages: each with ``role`` and ``content``, and whatever else the template knows.
            add_generation_prompt: end with the header of the assistant's turn.
            extra: further variables of the template, ``tools`` for one.

        Raises:
            InvalidRequest: on ``messages``, if the model has no template or the template refuses them.
        """
        if self._chat is None:
            raise InvalidRequest("messages", messages, "none: this model has no chat template; send a prompt instead")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **extra)


def _ids(value: Any) -> set[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return {value}
    return {i for i in value if isinstance(i, int)} if isinstance(value, list) else set()


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; {} if it is not there. ModelLoadError if it is there and broken."""
    return parse_object(read_text(path), path) if path.exists() or path.is_symlink() else {}


def _text_of(token: Any) -> str | None:
    """A special token as the config files write it: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _directory_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja, additional_chat_templates/*.jinja, then tokenizer_config.json's."""
    given = config.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in given}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = read_text(file)
    if templates and "default" not in templates:
        templates["default"] = next(iter(templates.values()))
    return templates


def _converted_backend(directory: Path) -> tokenizers.Tokenizer:
    """Without a tokenizer.json (only tokenizer.model, or vocab.json and merges.txt), transformers converts."""
    known = ("tokenizer.model", "vocab.json", "spiece.model")
    if not any((directory / name).is_file() for name in known):
        raise ModelLoadError(
            f"{directory}: no tokenizer found (tokenizer.json, or one of {', '.join(known)}); finish the download"
        )
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory).backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"{directory}: has no tokenizer.json and its tokenizer cannot be converted ({error}); "
            "add a tokenizer.json (save_pretrained of the fast tokenizer), or install transformers and sentencepiece"
        ) from error


def _add_bos_eos(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """tokenizer_config.json's add_bos_token and add_eos_token, where present, overrule tokenizer.json."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special.get("bos_token") if config.get("add_bos_token") else None
    eos = special.get("eos_token") if config.get("add_eos_token") else None
    single = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    tokens = [(token, backend.token_to_id(token)) for token in {bos, eos} if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def load_tokenizer(directory: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    Args:
        directory: with tokenizer.json, or files that transformers converts; tokenizer_config.json if need be.
        config, generation_config: the model's, for their special ids.

    Raises:
        ModelLoadError: a file is missing or broken.
    """
    own = read_json(directory / "tokenizer_config.json")
    named = read_json(directory / "special_tokens_map.json") | own
    special = {name: text for name in _NAMED if (text := _text_of(named.get(name))) is not None}
    file = directory / "tokenizer.json"
    if file.is_file():
        if check_regular(file) > MAX_TOKENIZER_BYTES:
            raise ModelLoadError(f"{file}: is larger than {MAX_TOKENIZER_BYTES} bytes; check where it comes from")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:  # the library raises plain Exception, and where it panics BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ModelLoadError(f"{file}: is not a valid tokenizer ({error}); download it again") from error
    else:
        backend = _converted_backend(directory)
    known = [text for text in special.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens(known)
    _add_bos_eos(backend, own, special)
    text_config = config.get("text_config") or {}
    eos = _ids(generation_config.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    eos |= _ids(text_config.get("eos_token_id"))
    if "eos_token" in special:
        eos |= _ids(backend.token_to_id(special["eos_token"]))
    return Tokenizer(
        backend,
        special_tokens=special,
        templates=_directory_templates(directory, own),
        eos_ids=eos,
        bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
    )


def load_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes. ModelLoadError as ``gguf_tokenizer``."""
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    prefix = "tokenizer.chat_template"
    templates = {
        key[len(prefix) + 1 :] or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
    return Tokenizer(
        gguf_tokenizer(metadata, where),
        special_tokens=special,
        templates=templates,
        eos_ids=gguf_eos_ids(metadata),
    )
