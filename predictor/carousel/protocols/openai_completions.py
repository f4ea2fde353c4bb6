"""OpenAI text completions.

``max_tokens`` is 16 unless the client or the model's generation_config says otherwise, as OpenAI documents it; with
``echo`` it may be 0, to score a prompt.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from carousel.engine.request import Output, TokenLogprob
from carousel.protocols import common, openai_common
from carousel.protocols import fields as read
from carousel.protocols.common import Context
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import finite_logprob, refuse
from carousel.protocols.openai_common import OpenAICall

DEFAULT_MAX_TOKENS = 16
_KNOWN = openai_common.BODY | {"prompt", "echo"}
_SPELLINGS = {**common.SPELLINGS, "max_tokens": ("max_tokens",)}
_PROMPT = f"a string, a list of token ids, or a list of 1 to {common.MAX_PROMPTS} of either"


def _prompts(values: Values, context: Context) -> list[tuple[str, str | list[int]]]:
    """(path, prompt) of each prompt; a list of integers is one prompt, any other list is several."""
    if "prompt" not in values:
        refuse("prompt", None, _PROMPT)
    path, value = values["prompt"]
    if isinstance(value, str):
        return [(path, common.read_prompt(path, value, context))]
    if not isinstance(value, list) or not value:
        refuse(path, value, _PROMPT)
    if type(value[0]) is int:
        return [(path, common.read_prompt(path, value, context))]
    if len(value) > common.MAX_PROMPTS:
        refuse(path, value, _PROMPT)
    paths = [f"{path}[{index}]" for index in range(len(value))]
    return [(where, common.read_prompt(where, item, context)) for where, item in zip(paths, value, strict=True)]


def _flag(values: Values, name: str) -> bool:
    return read.boolean(*values[name]) if name in values else False


def _sampling(values: Values, context: Context, *, echo: bool) -> tuple[common.Sampling, bool]:
    """Sampling, and whether nothing but the echo is wanted."""
    path, value = values.get("max_tokens", ("", None))
    only_echo = echo and type(value) is int and value == 0
    if only_echo:
        values["max_tokens"] = (path, 1)
    sampling = common.read_sampling(values, context, spellings=_SPELLINGS, default_max_tokens=DEFAULT_MAX_TOKENS)
    return sampling, only_echo


def parse_completion(body: object, context: Context) -> OpenAICall:
    """A ``/completions`` body.

    Raises:
        InvalidRequest: naming the field, e.g. ``prompt[3]``.
        UnknownModel: ``model`` is not served.
    """
    values = openai_common.read_body(body, _KNOWN, openai_common.UNSUPPORTED_TEXT)
    openai_common.check_model(values, context)
    stream = openai_common.read_stream(values)
    echo = _flag(values, "echo")
    sampling, only_echo = _sampling(values, context, echo=echo)
    params = sampling.params
    wanted_prompt_logprobs = params.prompt_logprobs
    if wanted_prompt_logprobs is not None and stream["stream"]:
        refuse(sampling.names["prompt_logprobs"], wanted_prompt_logprobs, "only without stream")
    if echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, wanted_prompt_logprobs or 0)
    options = common.read_options(values, context)
    prompts = _prompts(values, context)
    if len(prompts) * params.n > common.MAX_CALL_CHOICES:
        most = common.MAX_CALL_CHOICES // len(prompts)
        refuse(sampling.names["n"], params.n, f"at most {most} for {len(prompts)} prompts")
    call_id = common.new_call_id(context, "cmpl-")
    requests = [
        common.new_request(context, call_id, index, prompt, sampling, options)
        for index, (_, prompt) in enumerate(prompts)
    ]
    skip = params.skip_special_tokens
    decode = context.tokenizer.decode
    echoes = [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip) for _, prompt in prompts]
    return OpenAICall(
        id=call_id,
        context=context,
        requests=requests,
        names=[{**sampling.names, "prompt": path} for path, _ in prompts],
        n=params.n,
        logprobs=params.logprobs,
        prompt_logprobs=wanted_prompt_logprobs,
        return_token_ids=_flag(values, "return_token_ids"),
        echoes=echoes if echo else None,
        only_echo=only_echo,
        **stream,
    )


@dataclass(slots=True)
class _Choice:
    """Where the text of one choice stands: ``position`` in characters of the answer's text."""

    call: OpenAICall
    echo: str
    position: int = 0
    begun: bool = False
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def _advance(self, token_id: int) -> int:
        """The offset at which a token of the completion begins."""
        start = self.position
        tokenizer = self.call.context.tokenizer
        skip = self.call.requests[0].sampling.skip_special_tokens
        if not (skip and tokenizer.is_special(token_id)):
            self.position += len(self.decoder.decode(tokenizer.token_bytes(token_id)))
        return start

    def _advance_in_echo(self, token_id: int) -> int:
        """The offset of a prompt token; tokens that the tokenizer added are not in the text and take no room."""
        start = self.position
        tokenizer = self.call.context.tokenizer
        piece = self.decoder.decode(tokenizer.token_bytes(token_id))
        if self.echo.startswith(piece, start) or not tokenizer.is_special(token_id):
            self.position = min(start + len(piece), len(self.echo))
        return start

    def logprobs(self, echoed: list[TokenLogprob], tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        """The legacy ``logprobs`` object of these tokens, after ``echoed`` ones of the prompt."""
        if self.call.logprobs is None:
            return None
        body: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in echoed:
            self._append(body, token, self._advance_in_echo(token.token_id))
        if echoed:
            self.position = len(self.echo)
            self.decoder.reset()
        for token in tokens:
            self._append(body, token, self._advance(token.token_id))
        return body

    def _append(self, body: dict[str, Any], token: TokenLogprob, offset: int) -> None:
        tokenizer = self.call.context.tokenizer
        shown = common.token_text(tokenizer, token.token_id)
        logprob = finite_logprob(token.logprob)
        top: dict[str, float | None] | None = None
        if logprob is not None:
            top = {}
            for other, other_logprob in token.top[: self.call.logprobs]:
                top.setdefault(common.token_text(tokenizer, other), finite_logprob(other_logprob))
            top.setdefault(shown, logprob)
        body["tokens"].append(shown)
        body["token_logprobs"].append(logprob)
        body["top_logprobs"].append(top)
        body["text_offset"].append(offset)

    def delta(self, output: Output) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs that this output adds; the first one brings the echo."""
        echoing = self.call.echoes is not None and not self.begun
        self.begun = True
        text, tokens = ("", []) if self.call.only_echo else (output.text, output.logprobs or [])
        if not echoing:
            return text, self.logprobs([], tokens)
        if not output.prompt_logprobs:
            self.position = len(self.echo)
        return self.echo + text, self.logprobs(output.prompt_logprobs or [], tokens)


def _new_choice(call: OpenAICall, which: int) -> _Choice:
    return _Choice(call, "" if call.echoes is None else call.echoes[which])


def render_completion(call: OpenAICall, results: list[list[Output]]) -> dict[str, Any]:
    """The unstreamed answer; ``results[i]`` holds the choices of ``call.requests[i]``, in the order of their indices.

    Raises:
        RequestTimedOut, RequestCancelled, GenerationFailed: a choice has no proper end.
    """
    choices = []
    for which, outputs in enumerate(results):
        for output in outputs:
            reason = openai_common.finished(output)
            text, logprobs = _new_choice(call, which).delta(output)
            choice: dict[str, Any] = {
                "index": which * call.n + output.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": "length" if call.only_echo else reason,
                "stop_reason": None if call.only_echo else output.stop_reason,
            }
            if call.return_token_ids:
                choice["token_ids"] = [] if call.only_echo else output.token_ids
            if call.prompt_logprobs is not None:
                choice["prompt_logprobs"] = openai_common.prompt_logprobs(call, output)
            choices.append(choice)
    body = openai_common.envelope(call, "text_completion", choices)
    body["usage"] = openai_common.total_usage(call, results)
    return body


def stream_completion(call: OpenAICall, streams: Sequence[AsyncIterator[Output]]) -> AsyncIterator[bytes]:
    """Server-sent events: chunks of text, the last one of each choice with its finish reason; then the end."""
    states: dict[int, _Choice] = {}

    def choices_of(which: int, output: Output) -> list[dict[str, Any]]:
        index = which * call.n + output.index
        state = states.get(index) or states.setdefault(index, _new_choice(call, which))
        text, logprobs = state.delta(output)
        reason = openai_common.FINISH.get(output.finish_reason) if output.finish_reason else None
        token_ids = output.token_ids if call.return_token_ids and not call.only_echo else []
        has_logprobs = logprobs is not None and bool(logprobs["tokens"])
        if not (text or has_logprobs or token_ids or reason):
            return []
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs if has_logprobs else None,
            "finish_reason": "length" if reason and call.only_echo else reason,
        }
        if reason:
            choice["stop_reason"] = None if call.only_echo else output.stop_reason
        if call.return_token_ids:
            choice["token_ids"] = token_ids
        return [choice]

    return openai_common.run_stream(call, streams, "text_completion", choices_of)
