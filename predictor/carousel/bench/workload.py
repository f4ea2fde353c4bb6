"""What to run: a file shaped like the shared workload, or a built-in one made from a seed."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carousel.bench.text import SENTENCES

BUILT_IN_REQUESTS = 32
_PROMPT = (90, 0.9, 16, 512)  # median, sigma of the logarithm, least, most; tokens
_OUTPUT = (48, 0.85, 8, 192)
_TOKENS_PER_WORD = 1.35


class WorkloadError(ValueError):
    """The workload cannot be used; the message names the file, the request and the field."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload. ``prompt_ids`` is empty where only text is known; ``unit_gap`` has mean 1.

    What a load test may say besides: ``messages``, (role, content) pairs of a chat; ``tenant`` and ``priority``, None
    where the server shall choose; ``deadline``, seconds to the first token aimed at; ``group``, the row of the
    statistics that it counts in.
    """

    id: str
    prompt: str
    prompt_ids: tuple[int, ...]
    output_len: int
    unit_gap: float
    messages: tuple[tuple[str, str], ...] = ()
    tenant: str | None = None
    priority: int | None = None
    deadline: float | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests in order of arrival, what to call them, and a digest by which two reports may be compared."""

    name: str
    items: tuple[WorkItem, ...]

    @property
    def digest(self) -> str:
        content = [(item.prompt_ids or item.prompt, item.output_len, item.unit_gap) for item in self.items]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "name": self.name,
            "requests": len(self.items),
            "prompt_tokens": sum(len(item.prompt_ids) for item in self.items) or None,
            "output_tokens": self.output_tokens,
            "digest": self.digest,
        }

    def arrivals(self, rate: float) -> list[float]:
        """Seconds from the start at which each request arrives; all 0 for an infinite rate."""
        if math.isinf(rate):
            return [0.0] * len(self.items)
        times, now = [], 0.0
        for item in self.items:
            now += item.unit_gap / rate
            times.append(now)
        return times


def headers_of(item: WorkItem) -> dict[str, str]:
    """Tenant, priority and deadline as Carousel takes them; lower case, as gRPC's metadata wants it."""
    given = {"tenant": item.tenant, "priority": item.priority, "deadline": item.deadline}
    return {f"x-carousel-{name}": str(value) for name, value in given.items() if value is not None}


def load_workload(path: str | Path, limit: int = 0) -> Workload:
    """Read a workload file.

    Args:
        path: a JSON file: a list of objects with ``prompt_ids`` or ``prompt``, ``output_len``, ``unit_gap`` (default
            0), ``id`` (default: the place in the list); also ``tenant``, ``priority``, ``deadline`` and ``group``
            (default: the tenant).
        limit: only the first so many; 0 for all.

    Raises:
        WorkloadError: for a file that cannot be read or an entry that is wrong.
    """
    path = Path(path).expanduser()
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"workload {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise WorkloadError(f"workload {path}: not JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"workload {path}: must be a non-empty list of requests")
    items = tuple(_item(path, place, entry) for place, entry in enumerate(entries[: limit or None]))
    return Workload(path.name, items)


def _item(path: Path, place: int, entry: Any) -> WorkItem:
    def wrong(field: str, allowed: str) -> WorkloadError:
        return WorkloadError(f"workload {path}: request {place}: {field} must be {allowed}")

    if not isinstance(entry, dict):
        raise WorkloadError(f"workload {path}: request {place}: must be an object")
    ids, prompt = entry.get("prompt_ids") or [], entry.get("prompt") or ""
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise wrong("prompt_ids", "a list of token ids")
    if not isinstance(prompt, str) or not (ids or prompt):
        raise wrong("prompt", "text, unless there are prompt_ids")
    output_len, gap = entry.get("output_len"), entry.get("unit_gap", 0.0)
    if type(output_len) is not int or output_len < 1:
        raise wrong("output_len", "a whole number >= 1")
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < math.inf:
        raise wrong("unit_gap", "a number >= 0")
    if "prompt_len" in entry and ids and entry["prompt_len"] != len(ids):
        raise wrong("prompt_len", f"the number of prompt_ids ({len(ids)})")
    tenant, priority = entry.get("tenant"), entry.get("priority")
    if tenant is not None and not (isinstance(tenant, str) and tenant):
        raise wrong("tenant", "a name")
    if priority is not None and type(priority) is not int:
        raise wrong("priority", "a whole number; lower goes first")
    deadline = entry.get("deadline")
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or deadline <= 0):
        raise wrong("deadline", "a number of seconds above 0")
    group = str(entry.get("group") or tenant or "")
    return WorkItem(
        str(entry.get("id", place)),
        prompt,
        tuple(ids),
        output_len,
        float(gap),
        tenant=tenant,
        priority=priority,
        deadline=deadline,
        group=group,
    )


def _length(random_: random.Random, shape: tuple[int, float, int, int]) -> int:
    median, sigma, least, most = shape
    return min(most, max(least, round(random_.lognormvariate(math.log(median), sigma))))


def _sentences(random_: random.Random) -> Iterable[str]:
    while True:
        yield random_.choice(SENTENCES)


def built_in_workload(seed: int = 0, count: int = 0, encode: Callable[[str], list[int]] | None = None) -> Workload:
    """A small workload with the usual long-tailed lengths; equal seeds give equal workloads.

    Args:
        seed: of every random choice.
        count: requests; 0 for ``BUILT_IN_REQUESTS``.
        encode: text -> token ids. None, where there is no tokenizer: the prompts stay text of about the same length.

    Returns:
        prompts of 16 to 512 tokens (exactly so with ``encode``), outputs of 8 to 192, exponential gaps of mean 1.
    """
    random_ = random.Random(seed)
    items = []
    for place in range(count or BUILT_IN_REQUESTS):
        prompt_len, output_len = _length(random_, _PROMPT), _length(random_, _OUTPUT)
        words: list[str] = []
        ids: list[int] = []
        for sentence in _sentences(random_):
            words += sentence.split()
            if encode is None and len(words) * _TOKENS_PER_WORD >= prompt_len:
                words = words[: max(1, int(prompt_len / _TOKENS_PER_WORD))]
                break
            if encode is not None and len(ids := encode(" ".join(words))) >= prompt_len:
                ids = ids[:prompt_len]
                break
        gap = random_.expovariate(1.0)
        items.append(WorkItem(str(place), " ".join(words), tuple(ids), output_len, gap))
    return Workload(f"built-in (seed {seed})", tuple(items))
