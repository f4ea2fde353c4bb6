"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from carousel.engine.request import Output, TokenLogprob
from carousel.protocols import common, openai_common
from carousel.protocols import fields as read
from carousel.protocols.common import Context, Tokenizer
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import finite_logprob, refuse
from carousel.protocols.messages import render_messages
from carousel.protocols.openai_common import OpenAICall

_KNOWN = openai_common.BODY | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
}
_SPELLINGS = {
    **common.SPELLINGS,
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs",),
}


def _read_logprobs(values: Values) -> None:
    """``logprobs`` is a switch here and ``top_logprobs`` the number: leave only the latter, and only if switched on."""
    wanted = read.boolean(*values.pop("logprobs")) if "logprobs" in values else False
    if wanted:
        values.setdefault("top_logprobs", ("top_logprobs", 0))
    elif "top_logprobs" in values:
        path, value = values.pop("top_logprobs")
        if type(value) is not int or value != 0:
            refuse(path, value, "a number only together with logprobs: true")


def parse_chat(body: object, context: Context) -> OpenAICall:
    """A ``/chat/completions`` body.

    Raises:
        InvalidRequest: naming the field, e.g. ``messages[1].content``.
        UnknownModel: ``model`` is not served.
    """
    values = openai_common.read_body(body, _KNOWN, openai_common.UNSUPPORTED_CHAT)
    openai_common.check_model(values, context)
    stream = openai_common.read_stream(values)
    _read_logprobs(values)
    sampling = common.read_sampling(values, context, spellings=_SPELLINGS)
    params = sampling.params
    if params.prompt_logprobs is not None and stream["stream"]:
        refuse(sampling.names["prompt_logprobs"], params.prompt_logprobs, "only without stream")
    options = common.read_options(values, context)
    options.setdefault("add_special_tokens", False)  # the template wrote them
    if "messages" not in values:
        refuse("messages", None, "a non-empty list of messages")
    path, messages = values["messages"]
    call_id = common.new_call_id(context, "chatcmpl-")
    prompt = render_messages(path, messages, context, values)
    request = common.new_request(context, call_id, 0, prompt, sampling, options)
    return OpenAICall(
        id=call_id,
        context=context,
        requests=[request],
        names=[{**sampling.names, "prompt": path}],
        n=params.n,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        return_token_ids=read.boolean(*values["return_token_ids"]) if "return_token_ids" in values else False,
        **stream,
    )


def _token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": finite_logprob(logprob)}


def _logprobs(call: OpenAICall, tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if call.logprobs is None:
        return None
    content = []
    for token in tokens or []:
        entry = _token(call.context.tokenizer, token.token_id, token.logprob)
        entry["top_logprobs"] = [
            _token(call.context.tokenizer, other, logprob) for other, logprob in token.top[: call.logprobs]
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def render_chat(call: OpenAICall, results: list[list[Output]]) -> dict[str, Any]:
    """The unstreamed answer; ``results`` is ``[choices]``, in the order of their indices.

    Raises:
        RequestTimedOut, RequestCancelled, GenerationFailed: a choice has no proper end.
    """
    choices = []
    for output in results[0]:
        choice: dict[str, Any] = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": _logprobs(call, output.logprobs),
            "finish_reason": openai_common.finished(output),
            "stop_reason": output.stop_reason,
        }
        if call.return_token_ids:
            choice["token_ids"] = output.token_ids
        choices.append(choice)
    body = openai_common.envelope(call, "chat.completion", choices)
    body["usage"] = openai_common.total_usage(call, results)
    if call.prompt_logprobs is not None:
        body["prompt_logprobs"] = openai_common.prompt_logprobs(call, results[0][0])
    return body


def stream_chat(call: OpenAICall, streams: Sequence[AsyncIterator[Output]]) -> AsyncIterator[bytes]:
    """Server-sent events: per choice a chunk with the role, chunks of content, one with the finish reason."""
    begun: set[int] = set()

    def choice(output: Output, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def choices_of(_which: int, output: Output) -> list[dict[str, Any]]:
        choices = []
        if output.index not in begun:
            begun.add(output.index)
            choices.append(choice(output, {"role": "assistant", "content": "", "refusal": None}))
        has_logprobs = call.logprobs is not None and bool(output.logprobs)
        if output.text or has_logprobs or (call.return_token_ids and output.token_ids):
            content = choice(output, {"content": output.text})
            if has_logprobs:
                content["logprobs"] = _logprobs(call, output.logprobs)
            if call.return_token_ids:
                content["token_ids"] = output.token_ids
            choices.append(content)
        if output.finish_reason in openai_common.FINISH:
            reason = openai_common.FINISH[output.finish_reason]
            choices.append(choice(output, {}, finish_reason=reason, stop_reason=output.stop_reason))
        return choices

    return openai_common.run_stream(call, streams, "chat.completion.chunk", choices_of)
