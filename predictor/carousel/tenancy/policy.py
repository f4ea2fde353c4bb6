"""What each tenant may have: a YAML or JSON file, checked as a whole, read again when it changes.

    priority_classes: {interactive: -10, normal: 0, batch: 10}
    default:                      # everybody who is not named below, each on its own
      requests_per_minute: 60
      queue_share: 0.25
    tenants:
      gold:
        weight: 4
        requests_per_minute: null # no limit
        priority_classes: [normal, interactive]
        service_accounts: ["team-a/chat", "team-b/*"]

A tenant has what ``default`` says, but for what its own entry says. A file that is wrong changes nothing: the one
before stays in force, whole.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from carousel.watch import RELOAD_SECONDS, FileWatch

logger = logging.getLogger("carousel.tenants")

MAX_FILE_BYTES = 2**20
MAX_SHOWN = 80
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CLASS_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
ACCOUNT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/(\*|[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)")

_NAME = "1 to 128 letters, digits, dots, dashes or underscores"
_CLASS = "1 to 32 lower-case letters, digits or dashes"


class PolicyUnreadable(Exception):
    """The policy cannot be taken. The message has every problem, each with field, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant may have; None: no limit.

    ``weight`` is its share under policy ``fair``. ``queue_share`` is the part of the waiting queue that it may fill.
    ``priority_classes`` are those it may ask for, the first one for whoever asks for none.
    """

    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queue_share: float = 1.0
    priority_classes: tuple[str, ...] | None = None
    service_accounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policies:
    """A whole file. ``classes`` maps the names of priorities to their numbers, of which the lower go first."""

    default: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantPolicy:
        """What holds for a tenant, named or not."""
        return self.tenants.get(tenant, self.default)

    @property
    def weights(self) -> dict[str, float]:
        """Tenant -> share, of those that are named."""
        return {name: policy.weight for name, policy in self.tenants.items()}

    def tenant_of_account(self, namespace: str, name: str) -> str | None:
        """Whose service account this is; an account named whole counts more than a namespace's ``*``."""
        for wanted in (f"{namespace}/{name}", f"{namespace}/*"):
            for tenant, policy in self.tenants.items():
                if wanted in policy.service_accounts:
                    return tenant
        return None


def read_policies(path: Path) -> Policies:
    """The policies of a file.

    Raises:
        PolicyUnreadable: it is not there, too large, neither YAML nor JSON, or says something that is not allowed.
    """
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyUnreadable(f"{path}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyUnreadable(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_policies(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise PolicyUnreadable(f"{path}: it is no UTF-8 text") from None
    except PolicyUnreadable as error:
        raise PolicyUnreadable(f"{path}: {error}") from None


def parse_policies(text: str) -> Policies:
    """The policies that a text says.

    Raises:
        PolicyUnreadable: with all that is wrong in it.
    """
    reader = _Reader()
    policies = reader.policies(_load(text))
    if reader.problems:
        raise PolicyUnreadable("; ".join(reader.problems))
    return policies


def _load(text: str) -> object:
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_no_twins)
        # A loader of our own: PyYAML's takes the last of two equal keys without a word.
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise PolicyUnreadable(f"{place}{error.problem or 'no YAML'}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyUnreadable(f"no YAML: {type(error).__name__}") from None
    except json.JSONDecodeError as error:
        raise PolicyUnreadable(f"line {error.lineno}: no JSON: {error.msg}") from None


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise PolicyUnreadable(f"{twin}: it is there twice")
    return found


class _Loader(yaml.SafeLoader):
    """Refuses mappings with two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a name must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value}: it is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


class _Reader:
    """Walks a parsed file and collects what is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def fail(self, name: str, value: object, allowed: str) -> None:
        self.problems.append(f"{name}: got {_shown(value)}, allowed: {allowed}")

    def policies(self, found: object) -> Policies:
        entries = self._object("the file", found, ("priority_classes", "default", "tenants"))
        classes = self._classes(entries.get("priority_classes"))
        default = self._tenant("default", entries.get("default"), TenantPolicy(), classes, "service_accounts")
        tenants: dict[str, TenantPolicy] = {}
        named = entries.get("tenants")
        for name, entry in self._items("tenants", named):
            if not isinstance(name, str) or not TENANT_NAME.fullmatch(name):
                self.fail("a name in tenants", name, _NAME)
                continue
            tenants[name] = self._tenant(f"tenants.{name}", entry, default, classes)
        self._accounts_once(tenants)
        return Policies(default, tenants, classes)

    def _object(self, name: str, value: object, known: tuple[str, ...]) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(name, value, "a mapping")
            return {}
        for key in value:
            if key not in known:
                self.fail(f"{name}, a field", key, ", ".join(known))
        return {key: value[key] for key in known if key in value}

    def _items(self, name: str, value: object) -> Iterator[tuple[object, object]]:
        if isinstance(value, dict):
            yield from value.items()
        elif value is not None:
            self.fail(name, value, "a mapping of names")

    def _classes(self, value: object) -> dict[str, int]:
        classes: dict[str, int] = {}
        for name, number in self._items("priority_classes", value):
            if not isinstance(name, str) or not CLASS_NAME.fullmatch(name):
                self.fail("a name in priority_classes", name, _CLASS)
            elif isinstance(number, bool) or not isinstance(number, int) or abs(number) >= 2**31:
                self.fail(f"priority_classes.{name}", number, "a whole number of 32 bits, lower goes first")
            elif number in classes.values():
                self.fail(f"priority_classes.{name}", number, "a number that no other class has")
            else:
                classes[name] = number
        return classes

    def _tenant(
        self, name: str, value: object, base: TenantPolicy, classes: Mapping[str, int], *refused: str
    ) -> TenantPolicy:
        known = tuple(one for one in TenantPolicy.__slots__ if one not in refused)
        given: dict[str, Any] = {}
        for key, item in self._object(name, value, known).items():
            before, path = len(self.problems), f"{name}.{key}"
            if key in ("weight", "queue_share"):
                given[key] = self._number(path, item, *((0.001, 1000.0) if key == "weight" else (0.0, 1.0)))
            elif key == "priority_classes":
                given[key] = self._chosen(path, item, classes)
            elif key == "service_accounts":
                given[key] = self._accounts(path, item)
            else:
                given[key] = self._limit(path, item)
            if len(self.problems) > before:
                del given[key]
        return replace(base, **given)

    def _number(self, name: str, value: object, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self.fail(name, value, f"a number from {low:g} to {high:g}")
            return 0.0
        return float(value)

    def _limit(self, name: str, value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**12:
            self.fail(name, value, "a whole number from 1 to 1000000000000, or null for no limit")
            return None
        return value

    def _chosen(self, name: str, value: object, classes: Mapping[str, int]) -> tuple[str, ...] | None:
        if value is None:
            return None
        known = ", ".join(classes) or "none is declared under priority_classes"
        if not isinstance(value, list) or not value:
            self.fail(name, value, f"a list of priority classes ({known}), or null for any")
            return None
        for item in value:
            if not isinstance(item, str) or item not in classes:
                self.fail(name, item, f"priority classes: {known}")
        return tuple(str(item) for item in value)

    def _accounts(self, name: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.fail(name, value, "a list of NAMESPACE/NAME or NAMESPACE/*")
            return ()
        for item in value:
            if not isinstance(item, str) or not ACCOUNT.fullmatch(item):
                self.fail(name, item, "NAMESPACE/NAME or NAMESPACE/*")
        return tuple(str(item) for item in value)

    def _accounts_once(self, tenants: Mapping[str, TenantPolicy]) -> None:
        owner: dict[str, str] = {}
        for tenant, policy in tenants.items():
            for account in policy.service_accounts:
                if owner.setdefault(account, tenant) != tenant:
                    self.fail(f"tenants.{tenant}.service_accounts", account, f"what {owner[account]} has not")


class PolicyFile:
    """The policies in force, read again when their file changes.

    A change is taken once the file has been the same at two looks, so that one that is being written is not read half.
    What cannot be taken leaves all as it was: the reason is logged and in ``problem``, and ``failures`` counts.

    Args:
        path: the file; with ``None`` nobody has a limit.
        on_change: told of policies that have just come into force, those of the start included.
        clock: seconds, monotonic.

    Raises:
        PolicyUnreadable: at the start.
    """

    def __init__(
        self,
        path: Path | None,
        on_change: Callable[[Policies], None] = lambda policies: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.on_change = on_change
        self.problem: str | None = None
        self.failures = 0
        self.loaded_at = time.time()
        self._clock = clock
        self._watch = FileWatch([path] if path else [])
        self.current = read_policies(path) if path else Policies()
        self._looked = clock()
        self._changing = False
        if path:
            logger.info("tenants: %d named in %s", len(self.current.tenants), path)

    def refresh(self) -> None:
        """Look at the file, at most once a second."""
        now = self._clock()
        if self.path is None or now - self._looked < RELOAD_SECONDS:
            return
        self._looked = now
        if self._watch.changed():
            self._changing = True
        elif self._changing:
            self._changing = False
            self._load(self.path)

    def _load(self, path: Path) -> None:
        try:
            policies = read_policies(path)
        except PolicyUnreadable as error:
            self.failures += 1
            self.problem = str(error)
            logger.error("the tenants' policy changed and cannot be taken; the one before stays in force: %s", error)
            return
        self.problem, self.current, self.loaded_at = None, policies, time.time()
        logger.info("the tenants' policy changed: %d named in %s", len(policies.tenants), path)
        self.on_change(policies)
