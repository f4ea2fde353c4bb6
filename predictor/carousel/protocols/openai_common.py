"""What chat and text completions share: which fields exist, usage, and how a stream runs and ends.

Fields fall into four tables. Sampling and options are honoured (OpenAI's, and the extensions of the field's engines).
:data:`IGNORED` are accepted and have no effect, because they cannot change the text. :data:`UNSUPPORTED` are refused by
name unless they hold the value that means "nothing". Any other name is refused with the nearest known one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from carousel.engine.errors import CarouselError, GenerationFailed
from carousel.engine.request import FinishReason, Output
from carousel.protocols import common, sse
from carousel.protocols import fields as read
from carousel.protocols.common import Call, Context
from carousel.protocols.errors import describe, openai_error_body
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import finite_logprob, refuse

log = logging.getLogger(__name__)

# name -> the type it must have to be waved through
IGNORED: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "service_tier": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
}

# name -> the values that ask for nothing
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
}
UNSUPPORTED_CHAT: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "echo": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
}
UNSUPPORTED_TEXT: dict[str, tuple[object, ...]] = {**UNSUPPORTED, "suffix": ("",)}

SHARED = (common.SAMPLING_NAMES - {"max_new_tokens"}) | common.OPTION_NAMES | {"return_token_ids"}
BODY = SHARED | {"model", "stream", "stream_options"}
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True, kw_only=True)
class OpenAICall(Call):
    """A chat or text completion. Choice ``c`` of ``requests[i]`` has index ``i * n + c`` in the answer.

    ``logprobs``: alternatives per token, None for no log probabilities. ``echoes``: per prompt the text that the answer
    repeats before its own (text completions with ``echo``). ``only_echo``: ``max_tokens`` was 0; one token is generated
    to have something to schedule and then left out. ``created``: Unix seconds.
    """

    n: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echoes: list[str] | None = None
    only_echo: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def read_body(body: object, known: Iterable[str], unsupported: Mapping[str, tuple[object, ...]]) -> Values:
    """The fields of a body that are to be honoured.

    Raises:
        InvalidRequest: an unknown field, a known one that is not supported, an ignored one of a wrong type.
    """
    names = frozenset(known)
    values = read.read_object(body, "", names | unsupported.keys() | IGNORED.keys())
    take_unsupported(values, unsupported)
    for name in values.keys() & IGNORED.keys():
        value = values.pop(name)[1]
        if not isinstance(value, IGNORED[name]):
            refuse(name, value, "an object" if IGNORED[name] is dict else "a string")
    return values


def take_unsupported(values: Values, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Take the fields that ``unsupported`` lists out of ``values``.

    Raises:
        InvalidRequest: one of them asks for something.
    """
    for name in values.keys() & unsupported.keys():
        value = values.pop(name)[1]
        noops = unsupported[name]
        if not any(type(value) is type(noop) and value == noop for noop in noops):
            shown = " or ".join(repr(noop) for noop in noops)
            refuse(name, value, "nothing: not supported" + (f" (leave it out, or {shown})" if noops else ""))


def read_stream(values: Values) -> dict[str, Any]:
    """``stream`` and ``stream_options``, as arguments of :class:`OpenAICall`."""
    stream = read.boolean(*values["stream"]) if "stream" in values else False
    settings: dict[str, Any] = {"stream": stream}
    if "stream_options" in values:
        path, value = values["stream_options"]
        options = read.read_object(value, path, _STREAM_OPTIONS)
        flags = {name: read.boolean(*option) for name, option in options.items()}
        if not stream:
            refuse(path, value, "only together with stream: true")
        settings["include_usage"] = flags.get("include_usage", False)
        settings["continuous_usage"] = flags.get("continuous_usage_stats", False)
    return settings


def check_model(values: Values, context: Context) -> None:
    """A body may leave ``model`` out; if it names one, it must be served."""
    if "model" in values:
        common.check_model(*values["model"], context)


class Usage:
    """Token counts over all choices, as outputs come in."""

    def __init__(self, call: OpenAICall) -> None:
        self._prompts = [0] * len(call.requests)
        self._cached = [0] * len(call.requests)
        self._completions = [0] * (len(call.requests) * call.n)
        self._waits: dict[int, float] = {}  # by prompt: until its first choice took a seat
        self._n = call.n
        self._only_echo = call.only_echo
        self.unfinished = len(self._completions)

    def add(self, which: int, output: Output) -> None:
        self._prompts[which] = output.prompt_tokens
        if output.index == 0:  # the later choices of a prompt find what the first one computed
            self._cached[which] = output.cached_tokens
        if not self._only_echo:
            self._completions[which * self._n + output.index] = output.completion_tokens
        if output.finish_reason is not None:
            self.unfinished -= 1
        if (waited := common.waited_s(output)) is not None:
            self._waits[which] = min(waited, self._waits.get(which, waited))

    def body(self) -> dict[str, Any]:
        prompts, completions = sum(self._prompts), sum(self._completions)
        waited = None if self.unfinished else max(self._waits.values(), default=None)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completions,
            "total_tokens": prompts + completions,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **common.queue_time(waited),  # not OpenAI's; others who tell it call it so
        }


def total_usage(call: OpenAICall, results: Sequence[Sequence[Output]]) -> dict[str, Any]:
    """``usage`` of an unstreamed answer."""
    usage = Usage(call)
    for which, outputs in enumerate(results):
        for output in outputs:
            usage.add(which, output)
    return usage.body()


def finished(output: Output) -> str:
    """OpenAI's finish reason of a finished choice.

    Raises:
        RequestTimedOut, RequestCancelled, GenerationFailed: ends that this protocol has no reason for.
    """
    error = common.failure(output)
    if error is not None:
        raise error
    if output.finish_reason is None:
        raise GenerationFailed("the answer ended before its end")
    return FINISH[output.finish_reason]


def envelope(call: OpenAICall, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What every answer and chunk has around its choices. ``kind`` is the ``object`` field."""
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.context.model_name,
        "choices": choices,
    }


def prompt_logprobs(call: OpenAICall, output: Output) -> list[dict[str, Any] | None]:
    """The extension of the field's engines: per prompt token ``{"token id": {"logprob", "rank", "decoded_token"}}``.

    The first token has no prediction: None. Alternatives come best first; the true token is always among them.
    """
    tokenizer = call.context.tokenizer
    positions: list[dict[str, Any] | None] = []
    for token in output.prompt_logprobs or []:
        if token.logprob is None:
            positions.append(None)
            continue
        ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(token.top[: call.prompt_logprobs], 1)]
        entries = {
            str(other): {
                "logprob": finite_logprob(logprob),
                "rank": rank,
                "decoded_token": common.token_text(tokenizer, other),
            }
            for other, logprob, rank in [*ranked, (token.token_id, token.logprob, token.rank)]
        }
        positions.append(entries)
    return positions


async def run_stream(
    call: OpenAICall,
    streams: Sequence[AsyncIterator[Output]],
    kind: str,
    choices_of: Callable[[int, Output], list[dict[str, Any]]],
) -> AsyncGenerator[bytes, None]:
    """Outputs -> server-sent events: chunks, then the usage chunk if asked for, then ``[DONE]``.

    A failure, whether an output says it or a stream raises it, becomes one event ``{"error": ...}`` before ``[DONE]``.
    All that one output brings is sent as one piece.

    Args:
        kind: the chunks' ``object`` field.
        choices_of: the choices to send for an output of stream ``which``, one chunk each.
    """
    usage = Usage(call)
    try:
        async with aclosing(sse.merge(streams)) as outputs:
            async for which, output in outputs:
                usage.add(which, output)
                pieces = []
                for choice in choices_of(which, output):
                    chunk = envelope(call, kind, [choice])
                    if call.continuous_usage:
                        chunk["usage"] = usage.body()
                    elif call.include_usage:
                        chunk["usage"] = None
                    pieces.append(sse.event(chunk))
                if pieces:
                    yield b"".join(pieces)
                error = common.failure(output)
                if error is not None:
                    raise error
        if usage.unfinished:
            raise GenerationFailed("the answer ended before its end")
        if call.include_usage:
            yield sse.event({**envelope(call, kind, []), "usage": usage.body()})
    except Exception as error:
        if not isinstance(error, CarouselError):
            log.exception("stream %s failed", call.id)
        yield sse.event(openai_error_body(describe(error)))
    yield sse.DONE
