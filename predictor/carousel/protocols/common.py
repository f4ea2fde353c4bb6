"""What the protocols share: the context of a call, sampling fields, prompts, headers.

Where a value comes from, in this order: the client's own field; the model's ``generation_config`` (temperature, top_k,
top_p, min_p, repetition_penalty, max_new_tokens), for every protocol alike; the engine's default.

Headers that every protocol honours (gRPC metadata of the same names):

===========================  =========================================================================================
``x-request-id``             becomes part of the request's id; 1 to 128 visible ASCII characters
``x-carousel-tenant``        who is charged; the server believes it only with ``--trust-tenant-header``
``x-carousel-priority``      an integer, lower goes first, or a class of the tenants' policy; wins over the body's
``x-carousel-deadline``      seconds to the first token, aimed at by policy ``deadline``; wins over the body's
``x-request-timeout``        seconds until the request ends with reason ``timeout``; the shorter of both wins
===========================  =========================================================================================
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from carousel.engine.errors import CarouselError, GenerationFailed, InvalidRequest, RequestTooLong
from carousel.engine.request import (
    MAX_STOP_STRINGS,
    FinishReason,
    GenerationRequest,
    Output,
    SamplingParams,
    TokenLogprob,
)
from carousel.protocols import fields as read
from carousel.protocols.errors import RequestCancelled, RequestTimedOut, UnknownModel
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import brief, decode_body, dumps, finite_logprob, json_bytes, refuse

__all__ = [
    "Call",
    "Context",
    "Tokenizer",
    "brief",
    "decode_body",
    "dumps",
    "json_bytes",
]

MAX_PROMPTS = 2048
MAX_CALL_CHOICES = 4096
MAX_STOP_TOKENS = 1024
MAX_SECONDS = 1_000_000.0
# No real text averages more characters per token; beyond this, tokenising would only cost time before the refusal.
MAX_CHARACTERS_PER_TOKEN = 128
_SPECIAL_TOKENS = 16  # more than any tokenizer adds around a text

SPELLINGS: dict[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "repetition_penalty": ("repetition_penalty",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "logit_bias": ("logit_bias",),
    "seed": ("seed",),
    "n": ("n",),
    "logprobs": ("logprobs",),
    "prompt_logprobs": ("prompt_logprobs",),
    "min_tokens": ("min_tokens",),
    "max_tokens": ("max_tokens", "max_new_tokens"),
    "stop": ("stop",),
    "stop_token_ids": ("stop_token_ids",),
    "ignore_eos": ("ignore_eos",),
    "include_stop": ("include_stop", "include_stop_str_in_output"),
    "skip_special_tokens": ("skip_special_tokens",),
}
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTEGERS = ("top_k", "seed", "n", "logprobs", "prompt_logprobs", "min_tokens", "max_tokens")
_BOOLEANS = ("ignore_eos", "include_stop", "skip_special_tokens")

SAMPLING_NAMES = frozenset(name for names in SPELLINGS.values() for name in names)
OPTION_NAMES = frozenset({"priority", "deadline", "timeout", "cache_salt", "add_special_tokens"})

_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_STOPS = "a string or a list of strings"
_SECONDS = f"a number of seconds > 0 and at most {MAX_SECONDS:.0f}"
_PRIORITY = "an integer from -2147483648 to 2147483647, lower goes first"


class Tokenizer(Protocol):
    """What the protocols need of a tokenizer; ``carousel.models.tokenizer.Tokenizer`` has it."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Context:
    """The served model and the headers of this one call.

    ``max_model_len`` in tokens. ``generation_defaults`` is the model's ``generation_config`` as a dictionary.
    ``headers`` are looked up in lower case: a case-insensitive mapping, or one with lower-case keys. ``priorities`` are
    the names that the header of a priority may have.
    """

    tokenizer: Tokenizer
    model_name: str
    vocab_size: int
    max_model_len: int
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    model_version: str = "1"
    priorities: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Call:
    """A parsed body: one engine request per prompt, and what rendering the answer needs.

    ``names[i]`` maps the engine's field names to the client's, for ``requests[i]``.
    """

    id: str
    context: Context
    requests: list[GenerationRequest]
    names: list[Mapping[str, str]]
    stream: bool = False

    def restate(self, error: Exception, index: int = 0) -> Exception:
        """What ``engine.submit(call.requests[index])`` raised, with the field as the client spelled it."""
        return restate(error, self.names[index]) if isinstance(error, InvalidRequest) else error


def restate(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same error, its field renamed: ``logit_bias[7]`` becomes ``parameters.logit_bias[7]``."""
    head, bracket, rest = error.field.partition("[")
    return type(error)(names.get(head, head) + bracket + rest, brief(error.value), error.allowed)


def check_model(path: str, value: object, context: Context) -> None:
    """Raises ``UnknownModel`` unless ``value`` names the served model."""
    name = read.text(path, value, "the name of a served model")
    if name != context.model_name:
        raise UnknownModel(name, [context.model_name])


def _scalar(path: str, value: object, kind: str, *, lenient: bool) -> object:
    if lenient:
        value = read.from_text(value, kind)
    if kind == "boolean":
        return read.boolean(path, value)
    if isinstance(value, int) and value.bit_length() > 64:
        refuse(path, value, "a number that fits in 64 bits")
    return value  # types and ranges are SamplingParams.validate's


def _from_json_text(value: object, kind: type) -> object:
    """A list or object that travelled as JSON in a string; any other string stays as it is."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        decoded = decode_body(value.encode("utf-8", "surrogatepass"))
    except InvalidRequest:
        return value
    return decoded if isinstance(decoded, kind) else value


def _stops(path: str, value: object, *, lenient: bool) -> tuple[str, ...]:
    if lenient:
        decoded = _from_json_text(value, list)
        # "[END]" or "[1]" is a stop string of its own, '["a", "b"]' a list of two
        if isinstance(decoded, list) and all(isinstance(item, str) for item in decoded):
            value = decoded
    return read.strings(path, value, _STOPS, MAX_STOP_STRINGS)


class Sampling(NamedTuple):
    """Checked parameters; the engine's field names mapped to the client's; whether ``max_tokens`` is only a default."""

    params: SamplingParams
    names: Mapping[str, str]
    default_length: bool


def read_sampling(
    values: Values,
    context: Context,
    *,
    spellings: Mapping[str, tuple[str, ...]] = SPELLINGS,
    default_max_tokens: int | None = None,
    lenient: bool = False,
) -> Sampling:
    """The sampling fields of a request, checked.

    Args:
        values: the client's fields; those that are not sampling fields are left alone.
        context: gives vocabulary size and the model's generation defaults.
        spellings: the client's names for each of the engine's fields.
        default_max_tokens: the protocol's own default, where neither client nor model says any.
        lenient: the carrier knows scalars only: numbers and booleans may come as strings, lists as JSON in a string.

    Raises:
        InvalidRequest: naming the field as the client spelled it.
    """
    given: dict[str, Any] = {}
    names = {engine_name: read.join("", known[0]) for engine_name, known in spellings.items()}
    for key, engine_name in _DEFAULTS.items():
        default = context.generation_defaults.get(key)
        if default is not None:
            given[engine_name] = default
            names[engine_name] = f"generation_config.{key}"
    for engine_name, known in spellings.items():
        found = read.pick(values, known)
        if found is None:
            continue
        path, value = found
        names[engine_name] = path
        if engine_name in _NUMBERS:
            given[engine_name] = _scalar(path, value, "number", lenient=lenient)
        elif engine_name in _INTEGERS:
            given[engine_name] = _scalar(path, value, "integer", lenient=lenient)
        elif engine_name in _BOOLEANS:
            given[engine_name] = _scalar(path, value, "boolean", lenient=lenient)
        elif engine_name == "stop":
            given[engine_name] = _stops(path, value, lenient=lenient)
        elif engine_name == "stop_token_ids":
            value = _from_json_text(value, list) if lenient else value
            if isinstance(value, list) and len(value) > MAX_STOP_TOKENS:
                refuse(path, value, f"at most {MAX_STOP_TOKENS} token ids")
            given[engine_name] = frozenset(read.token_ids(path, value, context.vocab_size))
        else:
            value = _from_json_text(value, dict) if lenient else value
            given[engine_name] = read.logit_bias(path, value, context.vocab_size)
    given.setdefault("max_tokens", default_max_tokens)
    if given.get("top_k") == -1 and not isinstance(given["top_k"], bool):
        given["top_k"] = 0  # what most engines of the field call "all tokens"
    params = SamplingParams(**given)
    try:
        params.validate(context.vocab_size)
    except InvalidRequest as error:
        raise restate(error, names) from None
    for name in _NUMBERS:
        setattr(params, name, float(getattr(params, name)))
    return Sampling(params, names, read.pick(values, spellings["max_tokens"]) is None)


def _header(context: Context, name: str, pattern: str, allowed: str) -> str | None:
    value = context.headers.get(name)
    if value is None:
        return None
    if not re.fullmatch(pattern, value):
        refuse(name, value, allowed)
    return value


def _seconds(values: Values, name: str) -> float | None:
    if name not in values:
        return None
    path, value = values[name]
    seconds = read.number(path, value, 0.0, MAX_SECONDS, _SECONDS)
    if seconds == 0.0:
        refuse(path, value, _SECONDS)
    return seconds


def _header_seconds(context: Context, name: str) -> float | None:
    value = _header(context, name, r"\d{1,7}(\.\d{1,9})?", _SECONDS)
    return None if value is None else _seconds({name: (name, float(value))}, name)


def _priority_of_header(context: Context) -> int:
    name, classes = "x-carousel-priority", context.priorities
    if (given := context.headers[name]) in classes:
        return classes[given]
    allowed = f"{_PRIORITY}, or {', '.join(classes)}" if classes else _PRIORITY
    number = _header(context, name, r"[+-]?\d{1,10}", allowed)
    return read.integer(name, int(number or 0), -(2**31), 2**31 - 1, allowed)


def read_options(values: Values, context: Context) -> dict[str, Any]:
    """Priority, tenant, deadline, timeout, cache salt and ``add_special_tokens``: ``GenerationRequest``'s arguments."""
    options: dict[str, Any] = {}
    if "priority" in values:
        path, value = values["priority"]
        options["priority"] = read.integer(path, value, -(2**31), 2**31 - 1, _PRIORITY)
    if "x-carousel-priority" in context.headers:
        options["priority"] = _priority_of_header(context)
    tenant = context.headers.get("x-carousel-tenant")
    if tenant is not None:
        if len(tenant) > 128 or not tenant.isprintable():
            refuse("x-carousel-tenant", tenant, "at most 128 printable characters")
        options["tenant"] = tenant
    deadline = _seconds(values, "deadline")
    aim = _header_seconds(context, "x-carousel-deadline")
    options["deadline_s"] = deadline if aim is None else aim
    limits = [_seconds(values, "timeout"), _header_seconds(context, "x-request-timeout")]
    options["timeout_s"] = min((limit for limit in limits if limit is not None), default=None)
    if "cache_salt" in values:
        path, value = values["cache_salt"]
        options["cache_salt"] = read.text(path, value, "a string of at most 256 characters", max_length=256)
    if "add_special_tokens" in values:
        options["add_special_tokens"] = read.boolean(*values["add_special_tokens"])
    return options


def read_prompt(path: str, value: object, context: Context) -> str | list[int]:
    """A prompt: text, or a non-empty list of token ids.

    Raises:
        InvalidRequest: wrong type, lone surrogates, ids outside the vocabulary.
        RequestTooLong: longer than the context can be, whatever the tokenizer says.
    """
    if isinstance(value, str):
        limit = context.max_model_len * MAX_CHARACTERS_PER_TOKEN
        if len(value) > limit:
            allowed = f"text that fits {context.max_model_len} tokens (certainly at most {limit} characters)"
            raise RequestTooLong(path, f"{len(value)} characters", allowed)
        return read.text(path, value)
    if not isinstance(value, list) or not value:
        refuse(path, value, "a string, or a non-empty list of token ids")
    if len(value) > context.max_model_len:
        raise RequestTooLong(path, f"{len(value)} tokens", f"at most {context.max_model_len} tokens")
    return read.token_ids(path, value, context.vocab_size)


def new_call_id(context: Context, prefix: str = "") -> str:
    """The id of an answer: ``prefix`` and the client's ``x-request-id``, or 32 fresh hexadecimal digits."""
    allowed = "1 to 128 visible ASCII characters"
    return prefix + (_header(context, "x-request-id", r"[\x21-\x7e]{1,128}", allowed) or uuid.uuid4().hex)


def new_request(
    context: Context,
    call_id: str,
    index: int,
    prompt: str | list[int],
    sampling: Sampling,
    options: Mapping[str, Any],
) -> GenerationRequest:
    """The engine's request. A ``max_tokens`` that the client did not ask for gives way to a long prompt.

    Args:
        call_id: the id of the answer; the request's own id begins with it.
        index: of the prompt within the call.
        options: what :func:`read_options` returned.
    """
    params = sampling.params
    if sampling.default_length and params.max_tokens is not None:
        # a token is at least one byte; only near the limit is counting worth its time
        longest = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
        if longest + params.max_tokens + _SPECIAL_TOKENS > context.max_model_len:
            if isinstance(prompt, str):
                prompt = context.tokenizer.encode(prompt, options.get("add_special_tokens", True))
            room = context.max_model_len - len(prompt)
            params = replace(params, max_tokens=max(1, min(params.max_tokens, room)))
    identity = f"{call_id}-{index}-{uuid.uuid4().hex[:8]}"  # clients may reuse theirs, the engine must not
    return GenerationRequest(prompt=prompt, sampling=params, request_id=identity, **options)


def one_text_only(sampling: Sampling) -> None:
    """For protocols that answer each prompt with one text: refuse ``n`` > 1 and ``prompt_logprobs``."""
    params, names = sampling.params, sampling.names
    if params.n != 1:
        refuse(names["n"], params.n, "1; several choices per prompt are for the OpenAI endpoints")
    if params.prompt_logprobs is not None:
        refuse(names["prompt_logprobs"], params.prompt_logprobs, "nothing here; the OpenAI endpoints return them")


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A single token as text; bytes that are no whole character show as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_record(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    """``{"id", "text", "logprob", "special"}``: the Open Inference Protocol's ``Token``."""
    return {
        "id": token.token_id,
        "text": token_text(tokenizer, token.token_id),
        "logprob": finite_logprob(token.logprob),
        "special": tokenizer.is_special(token.token_id),
    }


def logprob_records(tokenizer: Tokenizer, tokens: list[TokenLogprob], top: int) -> list[dict[str, Any]]:
    """Token records, with ``top`` alternatives each under ``"top"`` if any were asked for."""
    records = []
    for token in tokens:
        record = token_record(tokenizer, token)
        if top:
            record["top"] = [
                {"id": other, "text": token_text(tokenizer, other), "logprob": finite_logprob(logprob)}
                for other, logprob in token.top[:top]
            ]
        records.append(record)
    return records


def failure(output: Output) -> CarouselError | None:
    """The error that this last delta of a choice stands for, None if the choice ended properly or goes on."""
    tokens = f"after {output.completion_tokens} output tokens"
    if output.finish_reason is FinishReason.TIMEOUT:
        return RequestTimedOut(output.error or f"the request's timeout passed {tokens}")
    if output.finish_reason is FinishReason.CANCELLED:
        return RequestCancelled(output.error or f"the request was cancelled {tokens}")
    if output.finish_reason is FinishReason.ERROR:
        return GenerationFailed(output.error or f"the engine failed {tokens}")
    return None


def queue_time(waited_s: float | None) -> dict[str, float]:
    """The field ``queue_time``: seconds before a request was first computed. Nothing while nobody knows."""
    return {} if waited_s is None else {"queue_time": round(waited_s, 6)}


def waited_s(output: Output) -> float | None:
    """What the last delta of a choice says of its wait."""
    return None if output.timings is None else output.timings.queue_s


def final_reason(output: Output) -> FinishReason:
    """Why a finished choice ended, for protocols that can say ``timeout`` and ``cancelled``.

    Raises:
        GenerationFailed: the engine failed, or the output has no end.
    """
    reason = output.finish_reason
    if reason is None:
        raise GenerationFailed("the answer ended before its end")
    if reason is FinishReason.ERROR:
        raise GenerationFailed(output.error or "the engine failed")
    return reason
