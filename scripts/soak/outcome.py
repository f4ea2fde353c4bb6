"""What a client saw of one request, and whether that is as it should be."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan

COMPLETE, OVERLOADED, INVALID, LEFT = "complete", "overloaded", "refused as wrong", "left"
TIMED_OUT, DRAINING, GONE, UNEXPLAINED = "timed out as asked", "refused: draining", "server gone", "UNEXPLAINED"
OUTCOMES = (COMPLETE, OVERLOADED, INVALID, LEFT, TIMED_OUT, DRAINING, GONE, UNEXPLAINED)
_GOOD_ENDS = ("eos", "stop", "length", "eos_token", "stop_sequence")


@dataclass(slots=True)
class Seen:
    """One request as its client saw it.

    ``status``: HTTP's, or that of the gRPC code; None when nothing came. ``error``: the error body's or event's
    message. ``reason``: finish reason. ``ended``: the answer came to its proper end. ``broken``: what went wrong with
    the connection. ``left``: this client went away on purpose. ``stopping``: the server had been told to stop when this
    was sent. Times are seconds since it was sent.
    """

    status: int | None = None
    error: str | None = None
    retry_after: str | None = None
    reason: str | None = None
    text: str = ""
    tokens: int | None = None
    ended: bool = False
    broken: str | None = None
    left: bool = False
    stopping: bool = False
    first_s: float | None = None
    total_s: float = 0.0


def _waits(seen: Seen) -> bool:
    return seen.retry_after is not None and seen.retry_after.isdecimal() and int(seen.retry_after) >= 1


def classify(plan: Plan, seen: Seen) -> tuple[str, str]:
    """The outcome, one of :data:`OUTCOMES`, and for an unexplained one what is wrong with it."""
    if seen.left and seen.status in (None, 200) and seen.error is None:
        return _with_text(plan, seen, LEFT)
    if seen.broken is not None:
        if seen.stopping:
            return GONE, ""
        return UNEXPLAINED, f"the connection broke: {seen.broken}"
    if plan.bad is not None and seen.status != 503:
        if seen.status not in plan.bad.statuses:
            return UNEXPLAINED, f"status {seen.status} for bad input ({plan.bad.name}), not {plan.bad.statuses}"
        return (INVALID, "") if seen.error else (UNEXPLAINED, f"no error text for bad input ({plan.bad.name})")
    if seen.status in (429, 503):
        if not _waits(seen):
            return UNEXPLAINED, f"status {seen.status} with Retry-After {seen.retry_after!r}"
        if seen.status == 429:
            return OVERLOADED, ""
        return (DRAINING, "") if seen.stopping else (UNEXPLAINED, f"503 although nobody stopped it: {seen.error}")
    return _answer(plan, seen)


def _answer(plan: Plan, seen: Seen) -> tuple[str, str]:
    timeout = seen.status == 504 or seen.reason == "timeout" or (seen.error is not None and "time" in seen.error)
    if timeout and plan.timeout_s is not None:
        return _with_text(plan, seen, TIMED_OUT)
    if seen.status != 200 or seen.error is not None:
        return UNEXPLAINED, f"status {seen.status}, error {seen.error!r}"
    if not seen.ended or seen.reason not in _GOOD_ENDS:
        return UNEXPLAINED, f"the answer ended with reason {seen.reason!r}, its proper end {seen.ended}"
    if seen.tokens is not None and not 0 < seen.tokens <= plan.max_tokens:
        return UNEXPLAINED, f"{seen.tokens} tokens where 1 to {plan.max_tokens} were asked for"
    return _with_text(plan, seen, COMPLETE)


def _with_text(plan: Plan, seen: Seen, outcome: str) -> tuple[str, str]:
    """A greedy text must be the lone one, or its beginning where the answer was cut off."""
    if plan.expected is None:
        return outcome, ""
    same = seen.text == plan.expected if outcome == COMPLETE else plan.expected.startswith(seen.text)
    return (outcome, "") if same else (UNEXPLAINED, f"greedy text {seen.text!r} is not the lone {plan.expected!r}")
