"""Who asks: keys, service account tokens, a trusted header; together, and when the API server is away."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from carousel.auth import ApiKeys
from carousel.engine.errors import EngineUnavailable, InvalidRequest
from carousel.protocols.errors import AuthenticationFailed
from carousel.tenancy.identity import AccountIdentity, Door, HeaderIdentity, Identity, IdentitySource, KeyIdentity
from carousel.tenancy.policy import Policies, parse_policies
from carousel.tenancy.quota import Caller, Governor

AUDIENCE = "carousel"
NOW = 1_000_000.0
KEY, GOLD = "sk-open-sesame-1", "sk-gold-customer"


def token(account: str = "team-a:chat", salt: str = "", **claims: Any) -> str:
    """Looks like a service account's; the reviewer below knows it by its words."""
    body = {"sub": f"system:serviceaccount:{account}", "exp": NOW + 3600, "salt": salt, **claims}
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, body, 1))


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


class Reviewer:
    """An API server in memory."""

    def __init__(self) -> None:
        self.good: dict[str, str] = {}
        self.audiences: list[str] = [AUDIENCE]
        self.asked = 0
        self.at_once = self.most_at_once = 0
        self.error: Exception | None = None

    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        assert list(audiences) == [AUDIENCE]
        if self.error is not None:
            raise self.error
        if token not in self.good:
            return {"authenticated": False, "error": "unknown"}
        return {"authenticated": True, "audiences": self.audiences, "user": {"username": self.good[token]}}

    async def close(self) -> None:
        self.error = OSError("closed")


class Accounts:
    def __init__(self, text: str = "") -> None:
        self.now, self.reviewer = NOW, Reviewer()
        policies = parse_policies(text)
        self.source = AccountIdentity(self.reviewer, AUDIENCE, lambda: policies, lambda: self.now)

    def add(self, account: str = "team-a:chat", **claims: Any) -> str:
        made = token(account, **claims)
        self.reviewer.good[made] = f"system:serviceaccount:{account}"
        return made

    async def who(self, text: str) -> Identity | None:
        return await self.source.identify(bearer(text))


async def test_an_account_is_the_tenant_of_the_policy_or_its_namespace() -> None:
    accounts = Accounts('tenants: {gold: {service_accounts: ["team-a/chat"]}}')
    assert await accounts.who(accounts.add()) == Identity("gold")
    assert await accounts.who(accounts.add("team-b:batch")) == Identity("ns.team-b")
    assert await accounts.source.identify({"x-api-key": accounts.add()}) == Identity("gold")


async def test_a_review_is_believed_for_a_minute_and_no_longer_than_the_token() -> None:
    accounts = Accounts()
    long, short = accounts.add(), accounts.add(exp=NOW + 5)
    for _ in range(3):
        assert await accounts.who(long)
        assert await accounts.who(short)
    assert accounts.reviewer.asked == 2
    accounts.reviewer.good.clear()  # the account is deleted
    accounts.now += 6
    assert await accounts.who(long)
    assert await accounts.who(short) is None
    accounts.now += 60
    assert await accounts.who(long) is None


async def test_a_bad_token_is_asked_about_once_in_a_while() -> None:
    accounts = Accounts()
    for _ in range(5):
        assert await accounts.who(token()) is None
    assert accounts.reviewer.asked == 1
    accounts.now += 11
    await accounts.who(token())
    assert accounts.reviewer.asked == 2


@pytest.mark.parametrize("text", ["no-jwt", "a.b.c", token() + ".x", token(sub="system:node:n1"), "..", "é.é.é"])
async def test_what_is_no_service_account_token_is_not_asked_about(text: str) -> None:
    accounts = Accounts()
    assert await accounts.who(text) is None
    assert accounts.reviewer.asked == 0


async def test_another_audience_or_user_is_not_ours() -> None:
    accounts = Accounts()
    made = accounts.add()
    accounts.reviewer.audiences = ["https://kubernetes.default.svc"]
    assert await accounts.who(made) is None
    accounts.reviewer.audiences = [AUDIENCE]
    other = accounts.add(salt="2")
    accounts.reviewer.good[other] = "admin"
    assert await accounts.who(other) is None


async def test_an_api_server_that_is_away_is_neither_yes_nor_no() -> None:
    accounts = Accounts()
    known, new = accounts.add(), accounts.add(salt="2")
    assert await accounts.who(known)
    accounts.reviewer.error = OSError("refused")
    assert await accounts.who(known)
    with pytest.raises(EngineUnavailable, match="cannot be checked"):
        await accounts.who(new)
    accounts.reviewer.error = None
    assert await accounts.who(new)


async def test_many_at_once_ask_once_and_few_at_a_time() -> None:
    accounts = Accounts()
    made = accounts.add()
    assert set(await asyncio.gather(*(accounts.who(made) for _ in range(50)))) == {Identity("ns.team-a")}
    # Each one that was under way before the first answer may have asked; no more than that.
    assert accounts.reviewer.asked <= 8
    await asyncio.gather(*(accounts.who(token(salt=str(index))) for index in range(100)))
    assert accounts.reviewer.most_at_once <= 8


def door(sources: Sequence[IdentitySource] = (), trust: bool = False) -> Door:
    return Door(Governor(Policies), sources, HeaderIdentity() if trust else None)


async def admitted(door: Door, headers: dict[str, str]) -> tuple[str, bool]:
    caller = await door.admit(headers)
    assert isinstance(caller, Caller)
    return caller.tenant, caller.tied


CLAIM = {"x-carousel-tenant": "mine"}


async def test_the_header_is_believed_only_where_the_server_trusts_it() -> None:
    assert await admitted(door(), CLAIM) == ("", False)
    assert await admitted(door(trust=True), CLAIM) == ("mine", False)
    assert await admitted(door(trust=True), {}) == ("", False)
    for bad in ("x" * 129, "a\tb"):
        with pytest.raises(InvalidRequest, match="x-carousel-tenant"):
            await door(trust=True).admit({"x-carousel-tenant": bad})


async def test_a_tied_credential_is_more_than_any_header(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n{GOLD}=gold\n")
    accounts = Accounts()
    both = [KeyIdentity(ApiKeys(tmp_path / "keys")), accounts.source]
    for trust in (True, False):
        entry = door(both, trust)
        assert await admitted(entry, {**bearer(GOLD), **CLAIM}) == ("gold", True)
        assert await admitted(entry, {**bearer(accounts.add()), **CLAIM}) == ("ns.team-a", True)
        assert await admitted(entry, {**bearer(KEY), **CLAIM}) == ("mine" if trust else "", False)
        with pytest.raises(AuthenticationFailed, match="required"):
            await entry.admit(CLAIM)
        with pytest.raises(AuthenticationFailed, match="not valid"):
            await entry.admit({**bearer(token(salt="x")), **CLAIM})
