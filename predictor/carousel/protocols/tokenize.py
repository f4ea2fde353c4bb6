"""Tokenise and detokenise, in the form that vLLM gave them.

``/tokenize`` takes ``prompt`` (text) or ``messages`` (a chat, run through the model's template), with
``add_special_tokens`` (on for a prompt, off for a chat, whose template wrote them) and ``return_token_strs``; it
answers ``{"count", "max_model_len", "tokens", "token_strs"}``, the last one null unless asked for. ``/detokenize``
takes ``tokens`` and answers ``{"prompt"}``, special tokens included unless ``skip_special_tokens`` is set.

The work itself is :meth:`TokenizeCall.run` and :meth:`DetokenizeCall.run`, apart from parsing, because a long text is
worth a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carousel.protocols import common
from carousel.protocols import fields as read
from carousel.protocols.common import Context
from carousel.protocols.jsonio import refuse
from carousel.protocols.messages import render_messages
from carousel.protocols.openai_common import check_model, take_unsupported

_SHARED = frozenset({"model", "add_special_tokens", "return_token_strs"})
_CHAT_ONLY = frozenset({"add_generation_prompt", "chat_template_kwargs"})
_TOKENIZE = _SHARED | _CHAT_ONLY | {"prompt", "messages"}
_DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
    "tools": ([],),
}


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A checked ``/tokenize`` body. ``text`` is what the tokenizer sees, the chat template already applied."""

    context: Context
    text: str
    add_special_tokens: bool
    return_token_strs: bool

    @property
    def size(self) -> int:
        """How much work it is, in characters."""
        return len(self.text)

    def run(self) -> dict[str, Any]:
        """The answer's body."""
        tokenizer = self.context.tokenizer
        tokens = tokenizer.encode(self.text, self.add_special_tokens)
        strings = [common.token_text(tokenizer, token) for token in tokens] if self.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self.context.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    """A checked ``/detokenize`` body."""

    context: Context
    tokens: list[int]
    skip_special_tokens: bool

    @property
    def size(self) -> int:
        """How much work it is, in tokens."""
        return len(self.tokens)

    def run(self) -> dict[str, Any]:
        """The answer's body."""
        return {"prompt": self.context.tokenizer.decode(self.tokens, skip_special_tokens=self.skip_special_tokens)}


def _flag(values: read.Values, name: str, default: bool) -> bool:
    return read.boolean(*values[name]) if name in values else default


def parse_tokenize(body: object, context: Context) -> TokenizeCall:
    """A ``/tokenize`` body.

    Raises:
        InvalidRequest: naming the field; neither or both of ``prompt`` and ``messages``.
        UnknownModel: ``model`` is not served.
    """
    values = read.read_object(body, "", _TOKENIZE | UNSUPPORTED.keys())
    take_unsupported(values, UNSUPPORTED)
    check_model(values, context)
    given = [name for name in ("prompt", "messages") if name in values]
    if len(given) != 1:
        refuse("prompt", given, "one of prompt (a string) and messages (a list)")
    is_chat = given == ["messages"]
    if is_chat:
        text = render_messages(*values["messages"], context, values)
    else:
        for name in sorted(_CHAT_ONLY & values.keys()):
            refuse(*values[name], "nothing beside prompt: it belongs to messages")
        path, prompt = values["prompt"]
        checked = common.read_prompt(path, read.text(path, prompt), context)
        assert isinstance(checked, str)
        text = checked
    return TokenizeCall(
        context, text, _flag(values, "add_special_tokens", not is_chat), _flag(values, "return_token_strs", False)
    )


def parse_detokenize(body: object, context: Context) -> DetokenizeCall:
    """A ``/detokenize`` body; ``tokens`` may be empty.

    Raises:
        InvalidRequest: naming the field, ``tokens[3]`` for an id outside the vocabulary.
        UnknownModel: ``model`` is not served.
    """
    values = read.read_object(body, "", _DETOKENIZE)
    check_model(values, context)
    path, tokens = values.get("tokens", ("tokens", None))
    ids = read.token_ids(path, tokens, context.vocab_size)
    return DetokenizeCall(context, ids, _flag(values, "skip_special_tokens", False))
