"""What the soak sends: prompts, lengths, protocols, departures, deadlines and mistakes, all drawn from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from carousel.bench.text import SENTENCES

PROTOCOLS = (
    "v1",
    "v2",
    "grpc",
    "generate",
    "generate_stream",
    "completions",
    "completions_stream",
    "chat",
    "chat_stream",
)
STREAMS = frozenset({"generate_stream", "completions_stream", "chat_stream"})
LENGTHS = (1, 2, 4, 8, 8, 16, 16, 24, 32, 48, 64)
# Shares of all requests. What is left are ordinary ones.
LEAVE_SHARE, TIMEOUT_SHARE, BAD_SHARE, CHECK_SHARE = 0.12, 0.04, 0.10, 0.15
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Leave:
    """How the client goes: ``sending`` half of the body, ``waiting`` for an answer, or ``reading`` it.

    ``after_s``: how long it waits or reads. ``reset``: with RST, else with FIN.
    """

    where: str
    after_s: float
    reset: bool


@dataclass(frozen=True, slots=True)
class Bad:
    """A mistake: what is sent and which HTTP statuses (or gRPC codes, as HTTP statuses) are right for it."""

    name: str
    path: str
    body: bytes
    statuses: tuple[int, ...]
    content_type: str = _JSON
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. ``expected`` is the lone greedy answer that its text has to be, or to be the beginning of."""

    protocol: str
    prompt: str = ""
    max_tokens: int = 16
    greedy: bool = False
    seed: int = 0
    timeout_s: float | None = None
    leave: Leave | None = None
    bad: Bad | None = None
    expected: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt whose lone greedy answer is known: ``text`` after ``max_tokens``, through the template or not."""

    prompt: str
    max_tokens: int
    text: str
    chat: bool


def path_of(protocol: str, model: str) -> str:
    """The HTTP path of a protocol."""
    return {
        "v1": f"/v1/models/{model}:predict",
        "v2": f"/v2/models/{model}/infer",
        "generate": f"/v2/models/{model}/generate",
        "generate_stream": f"/v2/models/{model}/generate_stream",
        "completions": "/openai/v1/completions",
        "completions_stream": "/v1/completions",
        "chat": "/v1/chat/completions",
        "chat_stream": "/openai/v1/chat/completions",
    }[protocol]


def body_of(plan: Plan, model: str) -> dict[str, Any]:
    """The JSON body of a request over HTTP."""
    sampling: dict[str, Any] = {"max_tokens": plan.max_tokens}
    sampling |= {"temperature": 0} if plan.greedy else {"temperature": 0.8, "top_p": 0.95, "seed": plan.seed}
    if plan.timeout_s is not None:
        sampling["timeout"] = plan.timeout_s
    if plan.protocol == "v1":
        return {"instances": [plan.prompt], "parameters": sampling}
    if plan.protocol == "v2":
        if plan.timeout_s is not None:
            sampling["timeout"] = int(plan.timeout_s * 1e6)  # Triton's microseconds
        return {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [plan.prompt]}]} | {
            "parameters": sampling
        }
    if plan.protocol.startswith("generate"):
        return {"text_input": plan.prompt, "parameters": sampling | {"details": plan.seed % 2 == 0}}
    body = {"model": model, **sampling}
    if plan.protocol.startswith("chat"):
        body["messages"] = [{"role": "user", "content": plan.prompt}]
    else:
        body["prompt"] = plan.prompt
    if plan.protocol in STREAMS:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def mistakes(model: str, max_request_bytes: int) -> list[Bad]:
    """Bad input of several kinds for every HTTP protocol."""
    text, chat, v1 = "/v1/completions", "/openai/v1/chat/completions", f"/v1/models/{model}:predict"
    v2, generate = f"/v2/models/{model}/infer", f"/v2/models/{model}/generate"
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}

    def bad(name: str, path: str, body: object, *statuses: int, **more: Any) -> Bad:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Bad(name, path, raw, statuses or (400,), **more)

    return [
        bad("no JSON", text, b'{"prompt": "abc", '),
        bad("NaN", text, b'{"prompt": "abc", "temperature": NaN}'),
        bad("no UTF-8", text, b'{"prompt": "\xff\xfe"}'),
        bad("lone surrogate", text, b'{"prompt": "\\ud800"}'),
        bad("unknown field", text, {"prompt": "abc", "temprature": 1}),
        bad("unknown model", text, {"prompt": "abc", "model": "nobody"}, 404),
        bad("token id too large", text, {"prompt": [10**9]}),
        bad("wrong content type", text, {"prompt": "abc"}, 415, content_type="text/csv"),
        bad("too large", text, {"prompt": "a" * max_request_bytes}, 413),
        bad("deep nesting", text, b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
        bad("unsupported field", chat, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}]}),
        bad("empty messages", chat, {"messages": []}),
        bad("wrong role", chat, {"messages": [{"role": "nobody", "content": "a"}]}),
        bad("too long", chat, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**7}),
        bad("negative temperature", chat, {"messages": [{"role": "user", "content": "a"}], "temperature": -1}),
        bad("no instances", v1, {"instances": []}),
        bad("a number for a prompt", v1, {"instances": [7]}),
        bad("wrong type", v1, {"instances": ["abc"], "parameters": {"max_tokens": "many"}}),
        bad("wrong shape", v2, {"inputs": [tensor | {"shape": [3]}]}),
        bad("wrong datatype", v2, {"inputs": [tensor | {"datatype": "FP32"}]}),
        bad("no inputs", v2, {"inputs": []}),
        bad(
            "truncated binary tensor",
            v2,
            b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":9}}]}abc',
            headers=(("Inference-Header-Content-Length", "102"),),
        ),
        bad("unknown model", "/v2/models/nobody/infer", {"inputs": [tensor]}, 404),
        bad("list for a text", generate, {"text_input": ["abc"]}, 422),
        bad("top_p above 1", generate, {"text_input": "abc", "parameters": {"top_p": 1.5}}, 422),
        bad("no such page", "/v3/complete", {}, 404),
        bad("wrong method", text, b"", 405, method="GET"),
    ]


#: gRPC mistakes: (name, HTTP status of the right code, model name, input datatype, parameters)
GRPC_MISTAKES: tuple[tuple[str, int, str | None, str, dict[str, str]], ...] = (
    ("unknown model", 404, "nobody", "BYTES", {}),
    ("wrong datatype", 400, None, "FP32", {}),
    ("wrong type", 400, None, "BYTES", {"max_tokens": "many"}),
)


class Planner:
    """Draws requests. ``longest``: most characters of a prompt."""

    def __init__(self, model: str, seed: int, longest: int, max_request_bytes: int) -> None:
        self.random = random.Random(seed)
        self.model = model
        self.longest = longest
        self.known: list[Known] = []
        self._bad = mistakes(model, max_request_bytes)
        # What many prompts begin with, so that they share blocks of the prefix cache.
        self._prefixes = [self._text(longest // 2) for _ in range(4)]

    def _text(self, characters: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < characters:
            parts.append(self.random.choice(SENTENCES))
        return " ".join(parts)[: max(1, characters)]

    def prompt(self) -> str:
        """Short ones often, long ones seldom, a third behind a shared beginning."""
        size = int(self.longest ** self.random.uniform(0.3, 1.0))
        if self.random.random() < 0.34:
            return (self.random.choice(self._prefixes) + " " + self._text(size // 2))[: self.longest]
        return self._text(size)

    def well_formed(self) -> Plan:
        """An ordinary request that runs to its end."""
        draw = self.random
        plan = Plan(
            draw.choice(PROTOCOLS),
            self.prompt(),
            draw.choice(LENGTHS),
            seed=draw.getrandbits(31),
            headers=self._headers(),
        )
        if not self.known or draw.random() >= CHECK_SHARE:
            return plan
        chat = plan.protocol.startswith("chat")
        candidates = [known for known in self.known if known.chat == chat]
        return checked(plan, draw.choice(candidates)) if candidates else plan

    def _headers(self) -> tuple[tuple[str, str], ...]:
        draw = self.random
        headers = [("x-carousel-tenant", draw.choice(("gold", "silver", "free")))]
        if draw.random() < 0.3:
            headers.append(("x-carousel-priority", str(draw.randint(-2, 2))))
        if draw.random() < 0.5:
            headers.append(("x-request-id", f"soak-{draw.getrandbits(64):x}"))
        return tuple(headers)

    def any(self) -> Plan:
        """A request of the mix."""
        draw, dice = self.random, self.random.random()
        if dice < BAD_SHARE:
            bad = draw.choice([None, *self._bad])
            return Plan("grpc" if bad is None else "http", bad=bad or self._grpc_mistake())
        plan = self.well_formed()
        if dice < BAD_SHARE + TIMEOUT_SHARE:
            return changed(plan, timeout_s=round(draw.uniform(0.05, 2.0), 3), max_tokens=64)
        if dice < BAD_SHARE + TIMEOUT_SHARE + LEAVE_SHARE:
            where = draw.choice(("sending", "waiting", "reading", "reading"))
            leave = Leave(where, draw.choice((0.0, draw.uniform(0, 0.3), draw.uniform(0, 3))), draw.random() < 0.5)
            return changed(plan, leave=leave)
        return plan

    def _grpc_mistake(self) -> Bad:
        name, status, model, datatype, parameters = self.random.choice(GRPC_MISTAKES)
        body = json.dumps({"model": model, "datatype": datatype, "parameters": parameters}).encode()
        return Bad(name, "grpc", body, (status,))


def changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values; a greedy text that may now be longer is still the beginning of nothing known."""
    values = {name: getattr(plan, name) for name in Plan.__slots__} | changes
    if values["max_tokens"] > plan.max_tokens:
        values["expected"] = None
    return Plan(**values)


def checked(plan: Plan, known: Known) -> Plan:
    """The plan with a prompt whose answer is known."""
    return changed(plan, prompt=known.prompt, max_tokens=known.max_tokens, greedy=True, expected=known.text)


def steady_length(margins: Sequence[float], least: float) -> int:
    """How many greedy tokens are beyond rounding: those before the first whose lead is below ``least``.

    Args:
        margins: per token, by how much its log probability exceeds the runner-up's.
    """
    return next((position for position, margin in enumerate(margins) if margin < least), len(margins))
