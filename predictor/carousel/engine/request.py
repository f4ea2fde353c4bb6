"""What goes into the engine and what comes out: plain data, no tensors, no protocol.

A :class:`GenerationRequest` is what a client asked for. The engine turns it into ``n`` :class:`Sequence` objects, which
the scheduler moves through the batch, and answers with :class:`Output` deltas.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from carousel.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from carousel.engine.detokenizer import Detokenizer
    from carousel.engine.sampler import SequenceSampler

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_CHOICES = 64


class FinishReason(StrEnum):
    """Why a sequence ended. Exact: one and only one of these, always."""

    STOP = "stop"  # a stop string or a stop token id
    EOS = "eos"  # the model ended its turn
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client went away or asked for it
    TIMEOUT = "timeout"  # the request's deadline passed
    ERROR = "error"  # the engine failed, or shut down before the end


def _number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    # NaN compares false with everything, so it is refused too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequest(name, value, allowed)


def _integer(name: str, value: object, low: int, high: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, allowed)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, per request. Field names and meanings are the field's usual ones.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filter off. ``seed`` None draws a
    fresh one. ``logprobs`` is the number of alternatives reported beside the chosen token (0: only the chosen one;
    None: none at all), ``prompt_logprobs`` likewise for the prompt. ``max_tokens`` None means up to the context length.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Greedy with nothing that changes or reports logits: a batch of these needs only an argmax."""
        return (
            self.temperature == 0.0
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and self.logprobs is None
            and self.min_tokens == 0
        )

    def validate(self, vocab_size: int) -> None:
        """Check every field.

        Raises:
            InvalidRequest: naming the first field that is out of bounds, its value and what is allowed.
        """
        _number("temperature", self.temperature, 0.0, 100.0, "a number from 0 (greedy) to 100")
        _integer("top_k", self.top_k, 0, 2**31 - 1, "an integer >= 0, where 0 means all tokens")
        _number("top_p", self.top_p, 1e-9, 1.0, "a number > 0 and <= 1")
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit integer")
        _integer("n", self.n, 1, MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer >= 1")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"an integer <= max_tokens ({self.max_tokens})")
        self._validate_stops(vocab_size)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, vocab_size - 1, f"token ids from 0 to {vocab_size - 1}")
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "a number from -100 to 100")

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", text, f"non-empty strings of at most {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1, f"token ids from 0 to {vocab_size - 1}")


def new_request_id() -> str:
    """A fresh request id: ``cmpl-`` and 32 hexadecimal digits."""
    return f"cmpl-{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One client request. ``prompt`` is text or token ids (never empty once tokenised).

    ``priority``: lower goes first (policy ``priority``). ``tenant``: who is charged (policy ``fair``), and may fill no
    more than ``queue_share`` of the waiting queue's bounds.
    ``deadline_s``: a first-token objective in seconds from arrival that policy ``deadline`` orders by.
    ``timeout_s``: after this many seconds from arrival the request ends with ``FinishReason.TIMEOUT``.
    ``cache_salt``: prompts share cached prefixes only under equal salts.
    ``add_special_tokens``: whether tokenising text adds BOS and friends (chat templates bring their own).
    """

    prompt: str | list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = field(default_factory=new_request_id)
    priority: int = 0
    tenant: str = ""
    queue_share: float = 1.0
    deadline_s: float | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    add_special_tokens: bool = True
    arrival: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class TokenLogprob:
    """A token with its natural-log probability, its 1-based rank, and the alternatives (token id, logprob), best first.

    For the first prompt token, which has no prediction, ``logprob`` is None and ``rank`` 0.
    """

    token_id: int
    logprob: float | None
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestTimings:
    """Seconds since arrival (monotonic), for the metrics and for ``details`` in responses."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class Output:
    """A delta of one choice: everything new since the last one. The deltas of a choice join to the whole answer.

    ``text`` may lag behind ``token_ids`` while a character is incomplete or a stop string may be forming; at the end
    nothing is missing. A reader that falls behind gets several deltas merged into one, never less.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: RequestTimings | None = None

    def merge(self, later: Output) -> None:
        """Append a later delta of the same choice to this one, in place."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.prompt_tokens = later.prompt_tokens
        self.cached_tokens = later.cached_tokens
        self.completion_tokens = later.completion_tokens
        self.timings = later.timings


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request on its way through the batch. Owned by the engine thread alone.

    ``token_ids`` holds prompt and output; ``num_computed_tokens`` of them have their KV in ``block_table``. A step
    computes some of ``num_tokens - num_computed_tokens``; when the difference closes, a new token is sampled.
    The host may run ahead of the device: ``num_in_flight`` entries of launched steps are this sequence's, and
    ``num_pending_tokens`` of its tokens are sampled by such steps. They count as tokens; only the device has their ids.
    ``order`` is the place of arrival, unique in the engine. ``num_lost_tokens`` counts the leading tokens that had been
    computed before a preemption threw them away. Times are ``time.monotonic`` seconds.
    """

    request: GenerationRequest
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    order: int
    detokenizer: Detokenizer
    sampler: SequenceSampler
    eos_ids: frozenset[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_pending_tokens: int = 0
    num_in_flight: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Output tokens, known or pending: the number of the next one to be sampled."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def ending(self) -> bool:
        """Whether its last token has been sampled for sure, known or not: more would exceed its length."""
        return self.num_tokens >= self.max_total_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
