"""KServe's V1 protocol: ``{"instances": [...]}`` -> ``{"predictions": [...]}``.

An instance is a string, or an object with one of ``prompt``, ``text``, ``text_input`` (text, or a list of token ids) or
``messages`` (a chat), and optionally its own ``parameters``, which override the body's. ``parameters`` take every
sampling field of the engine (``carousel.protocols.common.SPELLINGS``) and ``priority``, ``deadline``, ``timeout``,
``cache_salt``, ``add_special_tokens``. A prediction is ``{"text", "finish_reason", "usage"}``, with ``"logprobs"`` if
asked for.

V1 does not say how an answer streams. Here ``"stream": true`` beside ``instances`` asks for server-sent events, each
``{"predictions": [{"index", "text"}]}`` with what is new of instance ``index``; the last one of an instance has
``finish_reason`` and ``usage`` too. A failure is an event ``{"error": message}``. ``[DONE]`` ends the stream, always.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from carousel.engine.errors import CarouselError, GenerationFailed
from carousel.engine.request import GenerationRequest, Output
from carousel.protocols import common, sse
from carousel.protocols import fields as read
from carousel.protocols.common import Call, Context
from carousel.protocols.errors import describe, v1_error_body
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import refuse
from carousel.protocols.messages import render_messages

_PROMPTS = ("prompt", "text", "text_input", "messages")
_INSTANCE = (*_PROMPTS, "parameters")
_PARAMETERS = common.SAMPLING_NAMES | common.OPTION_NAMES
_BODY = ("instances", "parameters", "stream")
_INSTANCE_FORM = "a string, or an object with one of " + ", ".join(_PROMPTS)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class V1Call(Call):
    """A V1 body: ``requests[i]`` belongs to ``instances[i]``."""


def _parameters(path: str, value: object) -> Values:
    return read.read_object(value, path, _PARAMETERS)


def _instance(path: str, value: object, context: Context) -> tuple[str, str | list[int], Values, bool]:
    """Where the prompt stands, the prompt, the instance's own parameters, and whether it is a chat."""
    if isinstance(value, str):
        return path, common.read_prompt(path, value, context), {}, False
    if not isinstance(value, dict):
        refuse(path, value, _INSTANCE_FORM)
    instance = read.read_object(value, path, _INSTANCE, hint="; sampling fields go into parameters")
    own = _parameters(*instance["parameters"]) if "parameters" in instance else {}
    given = [name for name in _PROMPTS if name in instance]
    if len(given) != 1:
        refuse(path, given, _INSTANCE_FORM)
    where, prompt = instance[given[0]]
    if given[0] == "messages":
        return where, render_messages(where, prompt, context), own, True
    return where, common.read_prompt(where, prompt, context), own, False


def parse(body: object, context: Context) -> V1Call:
    """A ``:predict`` body.

    Raises:
        InvalidRequest: naming the field as the client wrote it, e.g. ``instances[2].parameters.top_p``.
    """
    values = read.read_object(body, "", _BODY)
    if "instances" not in values:
        refuse("instances", None, "a non-empty list of strings or objects")
    path, instances = values["instances"]
    if not isinstance(instances, list) or not 0 < len(instances) <= common.MAX_PROMPTS:
        refuse(path, instances, f"a list of 1 to {common.MAX_PROMPTS} strings or objects")
    shared = _parameters(*values["parameters"]) if "parameters" in values else {}
    stream = read.boolean(*values["stream"]) if "stream" in values else False
    call = V1Call(id=common.new_call_id(context), context=context, requests=[], names=[], stream=stream)
    for index, item in enumerate(instances):
        where, prompt, own, is_chat = _instance(f"{path}[{index}]", item, context)
        merged = {**shared, **own}
        sampling = common.read_sampling(merged, context)
        common.one_text_only(sampling)
        options = common.read_options(merged, context)
        if is_chat:
            options["add_special_tokens"] = False  # the template wrote them
        call.requests.append(common.new_request(context, call.id, index, prompt, sampling, options))
        call.names.append({**sampling.names, "prompt": where})
    return call


def usage(output: Output) -> dict[str, float]:
    """Token counts of one finished choice, and the seconds that it waited."""
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "total_tokens": output.prompt_tokens + output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        **common.queue_time(common.waited_s(output)),
    }


def _prediction(call: V1Call, request: GenerationRequest, output: Output) -> dict[str, Any]:
    """What an output, whole or a delta, says of its instance."""
    prediction: dict[str, Any] = {"text": output.text}
    if output.finish_reason is not None:
        prediction |= {"finish_reason": common.final_reason(output).value, "usage": usage(output)}
    if request.sampling.logprobs is not None:
        tokens = output.logprobs or []
        prediction["logprobs"] = common.logprob_records(call.context.tokenizer, tokens, request.sampling.logprobs)
    return prediction


def render(call: V1Call, results: list[list[Output]]) -> dict[str, Any]:
    """The answer; ``results[i]`` holds the one merged output of ``call.requests[i]``.

    ``finish_reason`` is ``eos``, ``stop``, ``length``, ``cancelled`` or ``timeout``.

    Raises:
        GenerationFailed: the engine failed on any of them.
    """
    predictions = []
    for request, outputs in zip(call.requests, results, strict=True):
        common.final_reason(outputs[0])
        predictions.append(_prediction(call, request, outputs[0]))
    return {"predictions": predictions}


async def stream_events(call: V1Call, streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[bytes, None]:
    """Server-sent events, an event per delta, then ``[DONE]``. Never a silent end."""
    unfinished = len(call.requests)
    try:
        async with aclosing(sse.merge(streams)) as outputs:
            async for which, output in outputs:
                prediction = _prediction(call, call.requests[which], output)
                unfinished -= output.finish_reason is not None
                if output.text or output.finish_reason is not None or prediction.get("logprobs"):
                    yield sse.event({"predictions": [{"index": which, **prediction}]})
        if unfinished:
            raise GenerationFailed("the answer ended before its end")
    except Exception as error:
        if not isinstance(error, CarouselError):
            log.exception("stream %s failed", call.id)
        yield sse.event(v1_error_body(describe(error)))
    yield sse.DONE
