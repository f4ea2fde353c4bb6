"""The Open Inference Protocol's ``generate`` and ``generate_stream``.

Request: ``{"text_input": str, "parameters": {...}}``; parameters as in V1 plus ``details``. ``max_tokens`` is 20
unless the client or the model's generation_config says otherwise: this protocol's default, of this protocol alone.

Answer: ``{"text_output", "model_name", "model_version"}``; with ``details`` also ``{"details": {"finish_reason",
"logprobs", "queue_time"}}``. Stream: one event per delta; with ``details`` one per token, each with ``details.token``;
the last event always has ``details.finish_reason`` and ``details.queue_time``, seconds. The protocol's reasons are
``length``, ``eos_token`` and ``stop_sequence``; a request that ended otherwise says so truthfully: ``timeout`` or
``cancelled``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from carousel.engine.errors import GenerationFailed
from carousel.engine.request import FinishReason, Output
from carousel.protocols import common, sse
from carousel.protocols import fields as read
from carousel.protocols.common import Call, Context
from carousel.protocols.errors import describe, v2_error_body
from carousel.protocols.jsonio import refuse

DEFAULT_MAX_TOKENS = 20
_PARAMETERS = common.SAMPLING_NAMES | common.OPTION_NAMES | {"details", "stream"}
_REASONS = {FinishReason.EOS: "eos_token", FinishReason.STOP: "stop_sequence"}

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GenerateCall(Call):
    """A ``generate`` body: always one request. ``details``: token records in the answer."""

    details: bool = False


def parse(body: object, context: Context, *, stream: bool = False) -> GenerateCall:
    """A ``generate`` body, or with ``stream`` a ``generate_stream`` body.

    Raises:
        InvalidRequest: naming the field, e.g. ``parameters.temperature``; this protocol answers it with 422.
    """
    values = read.read_object(body, "", ("text_input", "parameters"), hint="; sampling fields go into parameters")
    if "text_input" not in values:
        refuse("text_input", None, "a string")
    path, prompt = values["text_input"]
    prompt = read.text(path, prompt)
    parameters: read.Values = {}
    if "parameters" in values:
        parameters = read.read_object(values["parameters"][1], "parameters", _PARAMETERS)
    if "stream" in parameters:
        where, given = parameters["stream"]
        if read.boolean(where, given) != stream:
            refuse(where, given, "what the endpoint says: generate does not stream, generate_stream does")
    details = read.boolean(*parameters["details"]) if "details" in parameters else False
    sampling = common.read_sampling(parameters, context, default_max_tokens=DEFAULT_MAX_TOKENS)
    common.one_text_only(sampling)
    details = details or sampling.params.logprobs is not None
    if details and sampling.params.logprobs is None:
        sampling.params.logprobs = 0
    call_id = common.new_call_id(context)
    options = common.read_options(parameters, context)
    text = common.read_prompt(path, prompt, context)
    request = common.new_request(context, call_id, 0, text, sampling, options)
    return GenerateCall(
        id=call_id,
        context=context,
        requests=[request],
        names=[{**sampling.names, "prompt": path}],
        stream=stream,
        details=details,
    )


def _reason(reason: FinishReason) -> str:
    return _REASONS.get(reason, reason.value)


def _body(call: GenerateCall, text: str, details: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "text_output": text,
        "model_name": call.context.model_name,
        "model_version": call.context.model_version,
    }
    if details is not None:
        body["details"] = details
    return body


def _records(call: GenerateCall, output: Output) -> list[dict[str, Any]]:
    top = call.requests[0].sampling.logprobs or 0
    return common.logprob_records(call.context.tokenizer, output.logprobs or [], top)


def render(call: GenerateCall, results: list[list[Output]]) -> dict[str, Any]:
    """The unstreamed answer; ``results`` is ``[[output]]``.

    Raises:
        GenerationFailed: the engine failed.
    """
    output = results[0][0]
    reason = common.final_reason(output)
    details = None
    if call.details or reason in (FinishReason.TIMEOUT, FinishReason.CANCELLED):
        wait = common.queue_time(common.waited_s(output))
        details = {"finish_reason": _reason(reason), "logprobs": _records(call, output), **wait}
    return _body(call, output.text, details)


def _events(call: GenerateCall, output: Output) -> bytes:
    """The events of one delta. With details: one per token, the text on the last of them."""
    reason = None if output.finish_reason is None else _reason(output.finish_reason)
    end = {"finish_reason": reason, **common.queue_time(common.waited_s(output))}
    records = _records(call, output) if call.details else []
    parts = [sse.event(_body(call, "", {"finish_reason": None, "token": record})) for record in records[:-1]]
    if records:
        parts.append(sse.event(_body(call, output.text, {**end, "token": records[-1]})))
    elif reason is not None:
        parts.append(sse.event(_body(call, output.text, end)))
    elif output.text:
        parts.append(sse.event(_body(call, output.text, None)))
    return b"".join(parts)


async def stream_events(call: GenerateCall, streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[bytes, None]:
    """Server-sent events; the last has ``details.finish_reason`` or is ``{"error": message}``. Never a silent end."""
    finished = False
    try:
        async with aclosing(sse.merge(streams)) as outputs:
            async for _, output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise GenerationFailed(output.error or "the engine failed")
                data = _events(call, output)
                if data:
                    yield data
                finished = finished or output.finish_reason is not None
        if not finished:
            raise GenerationFailed("the answer ended before its end")
    except Exception as error:
        if not isinstance(error, GenerationFailed):
            log.exception("stream %s failed", call.id)
        yield sse.event(v2_error_body(describe(error, invalid_status=422)))
