"""A byte-level tokenizer, scripted streams and SSE reading for the protocol tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from itertools import pairwise
from typing import Any

from carousel.engine.request import FinishReason, Output, TokenLogprob
from carousel.protocols.common import Context

BOS, EOS = 256, 257
VOCAB = 258
MAX_LEN = 100


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 is ``<s>``, 257 ``</s>``. Its chat template refuses two user turns in a row."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.extra: dict[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        self.extra = extra
        roles = [message["role"] for message in messages]
        if any(a == b == "user" for a, b in pairwise(roles)):
            raise ValueError("roles must alternate\nline two of a template's complaint")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


def context(
    headers: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    tokenizer: ByteTokenizer | None = None,
    max_model_len: int = MAX_LEN,
) -> Context:
    return Context(
        tokenizer=tokenizer or ByteTokenizer(),
        model_name="demo",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        generation_defaults=defaults or {},
        headers=headers or {},
    )


def logprob(token_id: int, value: float | None = -0.5, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
    return TokenLogprob(token_id, value, 0 if value is None else 1, list(top))


def output(
    text: str = "",
    *,
    index: int = 0,
    finish: FinishReason | None = None,
    done: int = 0,
    prompt: int = 3,
    cached: int = 0,
    token_ids: list[int] | None = None,
    **more: Any,
) -> Output:
    """A delta of one choice; ``done`` is its count of tokens so far."""
    return Output(
        request_id="r",
        index=index,
        text=text,
        token_ids=list(text.encode()) if token_ids is None else token_ids,
        finish_reason=finish,
        completion_tokens=done,
        prompt_tokens=prompt,
        cached_tokens=cached,
        **more,
    )


async def script(*items: Output | Exception) -> AsyncIterator[Output]:
    for item in items:
        await asyncio.sleep(0)
        if isinstance(item, Exception):
            raise item
        yield item


async def read_events(stream: AsyncIterator[bytes]) -> list[Any]:
    """The JSON payloads of a whole stream, ``"[DONE]"`` as that string."""
    raw = b"".join([piece async for piece in stream])
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode("utf-8").removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ")
        payload = block.removeprefix("data: ")
        assert len(payload.splitlines()) == 1
        events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events
