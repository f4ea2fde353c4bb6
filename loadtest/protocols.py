"""The wire formats as a client writes and reads them: bodies, and answers into an ``Observation``. No I/O in here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carousel.bench.workload import WorkItem
from loadtest.figures import Observation

HTTP = ("chat", "completions", "generate", "infer")
GRPC = ("grpc", "grpc-stream")
PROTOCOLS = (*HTTP, *GRPC)
STREAMS = frozenset({"chat", "completions", "generate", "grpc-stream"})
_ERROR_LENGTH = 200


class AnswerError(Exception):
    """The server answered with an error, or with what is no answer of the protocol."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked and how.

    ``openai``: where OpenAI's API is mounted. ``extensions``: send fields beyond the protocols that make lengths exact
    and tell how many tokens a chunk holds (``ignore_eos``, ``return_token_ids``, ``details``); servers other than
    Carousel, vLLM and SGLang may refuse them.
    """

    model: str
    openai: str = "/v1"
    extensions: bool = True
    temperature: float = 0.0


def path_of(protocol: str, target: Target) -> str:
    """The HTTP path of a protocol."""
    return {
        "chat": f"{target.openai}/chat/completions",
        "completions": f"{target.openai}/completions",
        "generate": f"/v2/models/{target.model}/generate_stream",
        "infer": f"/v2/models/{target.model}/infer",
    }[protocol]


def body_of(protocol: str, item: WorkItem, target: Target) -> dict[str, Any]:
    """The JSON body of a request over HTTP."""
    sampling: dict[str, Any] = {"max_tokens": item.output_len, "temperature": target.temperature}
    if target.extensions:
        sampling["ignore_eos"] = True
    if protocol == "infer":
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [item.prompt]}
        return {"inputs": [tensor], "parameters": sampling}
    if protocol == "generate":
        return {"text_input": item.prompt, "parameters": sampling | ({"details": True} if target.extensions else {})}
    body = {"model": target.model, **sampling, "stream": True, "stream_options": {"include_usage": True}}
    if target.extensions:
        body["return_token_ids"] = True
    if protocol == "chat":
        messages = item.messages or (("user", item.prompt),)
        body["messages"] = [{"role": role, "content": content} for role, content in messages]
    else:
        body["prompt"] = list(item.prompt_ids) if item.prompt_ids and target.extensions else item.prompt
    return body


def error_text(raw: bytes) -> str:
    """The message of an error body of any of the protocols, or the beginning of what came instead."""
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        return raw[:_ERROR_LENGTH].decode("utf-8", "replace")
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_ERROR_LENGTH]


def read_headers(headers: Mapping[str, str], seen: Observation) -> None:
    """Queue time by ``Server-Timing: queue;dur=MILLISECONDS`` (W3C Server Timing)."""
    match = re.search(r"(?:^|[,\s])queue\s*;[^,]*?dur=([\d.]+)", headers.get("server-timing") or "")
    if match:
        seen.queue = float(match[1]) / 1000


def _read_queue(holder: Any, seen: Observation) -> None:
    """Queue time as a field ``queue_time``, in seconds, of a usage, details or parameters object."""
    value = holder.get("queue_time") if isinstance(holder, dict) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seen.queue = float(value)


def _chunk_tokens(protocol: str, choice: dict[str, Any]) -> int:
    """Tokens of a chunk by its ids; one where the server sends none and the chunk says something."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    if protocol == "completions":
        return 1 if choice.get("text") else 0
    delta = choice.get("delta") or {}
    return 1 if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")) else 0


def read_event(protocol: str, data: bytes, now: float, seen: Observation) -> bool:
    """Take one server-sent event in.

    Returns:
        whether it ends the stream.

    Raises:
        AnswerError: it is an error, or cannot be read.
    """
    if data == b"[DONE]":
        return True
    try:
        event = json.loads(data)
        if "error" in event:
            raise AnswerError(error_text(data))
        if protocol == "generate":
            details = event.get("details") or {}
            seen.add_delta(now, 1 if details.get("token") or event["text_output"] else 0)
            _read_queue(details, seen)
            return details.get("finish_reason") is not None
        seen.add_delta(now, sum(_chunk_tokens(protocol, choice) for choice in event.get("choices") or []))
        if usage := event.get("usage"):
            seen.prompt_tokens, seen.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            _read_queue(usage, seen)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnswerError(f"an event that cannot be read ({type(error).__name__}: {error}): {data[:80]!r}") from None
    return False


def read_infer(raw: bytes, seen: Observation) -> None:
    """Take the answer of V2 ``infer`` in. Servers without token counts leave them 0.

    Raises:
        AnswerError: it is none.
    """
    try:
        body = json.loads(raw)
        columns = {output["name"]: output.get("data") or [] for output in body["outputs"]}
        if "text_output" not in columns:
            raise AnswerError(f"no text_output among the outputs {', '.join(columns)}")
        seen.prompt_tokens = sum(columns.get("prompt_tokens", []))
        seen.output_tokens = sum(columns.get("completion_tokens", []))
        _read_queue(body.get("parameters"), seen)
    except (ValueError, KeyError, TypeError) as error:
        raise AnswerError(f"an answer that cannot be read ({type(error).__name__}: {error}): {raw[:80]!r}") from None


def read_tensors(response: Any, now: float, seen: Observation) -> bool:
    """Take a ``ModelInferResponse`` in: a whole answer, or a delta of a stream.

    Returns:
        whether it is the last of its request, by ``triton_final_response``.
    """
    counts = {}
    for place, output in enumerate(response.outputs):
        if output.name in ("prompt_tokens", "completion_tokens"):
            raw = response.raw_output_contents[place] if response.raw_output_contents else b""
            value = int.from_bytes(raw[:4], "little") if raw else sum(output.contents.int_contents)
            counts[output.name] = value
    seen.prompt_tokens = counts.get("prompt_tokens", seen.prompt_tokens)
    if seen.protocol == "grpc-stream":
        before = seen.output_tokens
        seen.output_tokens = counts.get("completion_tokens", before + bool(response.outputs))
        seen.add_delta(now, seen.output_tokens - before)
    else:
        seen.output_tokens = counts.get("completion_tokens", 0)
    queue = response.parameters["queue_time"].string_param if "queue_time" in response.parameters else ""
    if re.fullmatch(r"\d+\.?\d*(e-?\d+)?", queue):  # the protocol's parameters have no floating-point numbers
        seen.queue = float(queue)
    final = response.parameters.get("triton_final_response")
    return final is not None and final.bool_param
