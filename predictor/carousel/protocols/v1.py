"""KServe's V1 protocol: ``{"instances": [...]}`` -> ``{"predictions": [...]}``.

An instance is a string, or an object with one of ``prompt``, ``text``, ``text_input`` (text, or a list of token ids) or
``messages`` (a chat), and optionally its own ``parameters``, which override the body's. ``parameters`` take every
sampling field of the engine (``carousel.protocols.common.SPELLINGS``) and ``priority``, ``deadline``, ``timeout``,
``cache_salt``, ``add_special_tokens``. A prediction is ``{"text", "finish_reason", "usage"}``, with ``"logprobs"`` if
asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carousel.engine.request import Output
from carousel.protocols import common
from carousel.protocols import fields as read
from carousel.protocols.common import Call, Context
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import refuse
from carousel.protocols.messages import render_messages

_PROMPTS = ("prompt", "text", "text_input", "messages")
_INSTANCE = (*_PROMPTS, "parameters")
_PARAMETERS = common.SAMPLING_NAMES | common.OPTION_NAMES
_INSTANCE_FORM = "a string, or an object with one of " + ", ".join(_PROMPTS)


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
    values = read.read_object(body, "", ("instances", "parameters"))
    if "instances" not in values:
        refuse("instances", None, "a non-empty list of strings or objects")
    path, instances = values["instances"]
    if not isinstance(instances, list) or not 0 < len(instances) <= common.MAX_PROMPTS:
        refuse(path, instances, f"a list of 1 to {common.MAX_PROMPTS} strings or objects")
    shared = _parameters(*values["parameters"]) if "parameters" in values else {}
    call = V1Call(id=common.new_call_id(context), context=context, requests=[], names=[])
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


def usage(output: Output) -> dict[str, int]:
    """Token counts of one finished choice."""
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "total_tokens": output.prompt_tokens + output.completion_tokens,
        "cached_tokens": output.cached_tokens,
    }


def render(call: V1Call, results: list[list[Output]]) -> dict[str, Any]:
    """The answer; ``results[i]`` holds the one merged output of ``call.requests[i]``.

    ``finish_reason`` is ``eos``, ``stop``, ``length``, ``cancelled`` or ``timeout``.

    Raises:
        GenerationFailed: the engine failed on any of them.
    """
    predictions: list[dict[str, Any]] = []
    for request, outputs in zip(call.requests, results, strict=True):
        output = outputs[0]
        reason = common.final_reason(output)
        prediction: dict[str, Any] = {"text": output.text, "finish_reason": reason.value, "usage": usage(output)}
        if request.sampling.logprobs is not None:
            prediction["logprobs"] = common.logprob_records(
                call.context.tokenizer, output.logprobs or [], request.sampling.logprobs
            )
        predictions.append(prediction)
    return {"predictions": predictions}
