"""What a tenant that asks for far more than its share does to the others, on a server of its own.

    .venv/bin/python scripts/bench_tenants.py --factor 100 --seconds 60 --rounds 2

Three tenants and the attacker arrive in an open loop (Poisson, the same times in every run), stream short answers of
the demo model and are measured from arrival to first token, at the client. The rounds take turns, calm and attacked.
With ``--no-policy`` the server has neither shares nor quotas: what would happen then.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from bench_run import percentile
from soak.server import Server

TENANTS = ("one", "two", "three")
POLICY = """
default: {queue_share: 0.25}
tenants: {attacker: {concurrent_requests: 1, requests_per_minute: %d}}
"""
_WORDS = ("river", "stone", "lamp", "garden", "winter", "paper", "silver", "engine", "morning", "table", "harbour")


class Client:
    """All tenants of one run. ``first_s`` holds the others' times to first token, ``ended`` statuses by tenant."""

    def __init__(self, url: str, rate: float, factor: float, seconds: float) -> None:
        self.url, self.seconds = url, seconds
        self.rates = {**dict.fromkeys(TENANTS, rate), "attacker": rate * factor}
        self.first_s: list[float] = []
        self.ended: Counter[tuple[str, int]] = Counter()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for tenant in self.rates:
                group.create_task(self._arrive(session, group, tenant))

    async def _arrive(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup, tenant: str) -> None:
        draw, began, at = random.Random(tenant), time.monotonic(), 0.0
        while (at := at + draw.expovariate(self.rates[tenant])) < self.seconds:
            prompt = " ".join(draw.choice(_WORDS) for _ in range(draw.randrange(10, 40)))
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            group.create_task(self._ask(session, tenant, prompt, draw.randrange(4, 16), began + at))

    async def _ask(self, session: aiohttp.ClientSession, tenant: str, prompt: str, tokens: int, due: float) -> None:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        headers = {"x-carousel-tenant": tenant}
        async with session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            first = await answer.content.readline()
            if tenant in TENANTS and answer.status == 200 and first:
                self.first_s.append(time.monotonic() - due)
            await answer.read()
            self.ended[tenant, answer.status] += 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second of each tenant (0.8)")
    parser.add_argument("--factor", type=float, default=100.0, help="the attack, in times of that (100)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run (60)")
    parser.add_argument("--rounds", type=int, default=2, help="of each, in turns (2)")
    parser.add_argument("--warm", type=float, default=40.0, help="seconds of attack before anything is measured (40)")
    parser.add_argument("--policy", action=argparse.BooleanOptionalAction, default=True, help="shares and quotas (on)")
    options = parser.parse_args(argv)
    flags = ["--threads", "1", "--log-level", "error"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        if options.policy:
            file = Path(folder) / "policy.yaml"
            file.write_text(POLICY % max(1, round(60 * options.rate)), "utf-8")
            flags += ["--policy", "fair", "--tenant-policy", str(file)]
        with Server(flags, log) as server:
            server.wait_ready()
            # Warm, and the attacker has used up the minute that its full bucket gives it at once.
            asyncio.run(Client(server.url, options.rate, options.factor, options.warm).run())
            found: dict[str, list[float]] = {"calm": [], "attacked": []}
            for _ in range(options.rounds):
                for name, factor in (("calm", 1.0), ("attacked", options.factor)):
                    client = Client(server.url, options.rate, factor, options.seconds)
                    asyncio.run(client.run())
                    found[name] += client.first_s
                    refused, taken = client.ended["attacker", 429], client.ended["attacker", 200]
                    wrong = {key: count for key, count in client.ended.items() if key[0] in TENANTS and key[1] != 200}
                    print(f"{name}: attacker {taken} taken, {refused} refused; others not answered: {wrong or 'none'}")
    for share in (0.5, 0.9, 0.99):
        calm, attacked = (1000 * percentile(found[name], share) for name in ("calm", "attacked"))
        print(f"p{100 * share:g}: {calm:.0f} ms calm, {attacked:.0f} ms attacked, {attacked / calm:.2f} x")
    print(f"{len(found['calm'])} and {len(found['attacked'])} requests of the others")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
