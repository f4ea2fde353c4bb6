"""Runs a workload against a server over OpenAI's ``/v1/completions``, streaming."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from carousel.bench import scrape
from carousel.bench.inprocess import WARMUP_TOKENS, Progress, last_token
from carousel.bench.measure import BenchError, RequestResult, check, figures
from carousel.bench.record import record
from carousel.bench.workload import WorkItem, Workload, headers_of

_ROOTS = ("/openai/v1", "/v1")
_ERROR_LENGTH = 300
_READ_BUFFER = 2**20


class Client:
    """A server under test. Use as an async context; ``model`` None asks the server for its first model.

    Args:
        url: the server's address, with or without the ``/v1`` of the OpenAI API.
        model: the name to ask for.
        timeout_s: seconds after which a request counts as failed.
    """

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._root = self.url if self.url.endswith("/v1") else ""
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector, read_bufsize=_READ_BUFFER)
        try:
            await self._find_api()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        return self._session

    async def _find_api(self) -> None:
        """Find where the API is mounted, and the model's name.

        Raises:
            BenchError: when nothing answers as an OpenAI API.
        """
        answers = []
        for root in [self._root] if self._root else [self.url + path for path in _ROOTS]:
            try:
                async with self.session.get(root + "/models") as response:
                    answers.append(f"{root}/models: HTTP {response.status}")
                    if response.status != 200:
                        continue
                    listed = await response.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                answers.append(f"{root}/models: {error or type(error).__name__}")
                continue
            names = _model_names(listed)
            if self.model is None and names:
                self.model = names[0]
            if self.model is not None:
                self._root = root
                return
        raise BenchError(f"no OpenAI API with a model at {self.url} ({'; '.join(answers)})")

    async def metrics(self) -> scrape.Scrape | None:
        """What ``/metrics`` of the same host says, or None where there is no such page."""
        parts = urlsplit(self.url)
        try:
            async with self.session.get(f"{parts.scheme}://{parts.netloc}/metrics") as response:
                return scrape.parse(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def complete(self, item: WorkItem, result: RequestResult, start: float, progress: Progress) -> None:
        """Stream one completion into ``result``; what goes wrong is put into ``result.error``."""
        body = {
            "model": self.model,
            "prompt": list(item.prompt_ids) or item.prompt,
            "max_tokens": result.wanted,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # says how many tokens a chunk holds; servers that do not know it ignore it
        }
        try:
            async with self.session.post(self._root + "/completions", json=body, headers=headers_of(item)) as response:
                if response.status != 200:
                    detail = (await response.text())[:_ERROR_LENGTH]
                    result.error = f"HTTP {response.status}: {detail}"
                else:
                    await _read_stream(response, result, start, progress)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        if result.error is None and not result.deltas:
            result.error = "the stream ended without a token"
        progress.on_request()


def _model_names(listed: Any) -> list[str]:
    """From OpenAI's list (``data``) or KServe V1's (``models``)."""
    if not isinstance(listed, dict):
        return []
    names = [entry.get("id") for entry in listed.get("data") or [] if isinstance(entry, dict)]
    names += [entry for entry in listed.get("models") or [] if isinstance(entry, str)]
    return [name for name in names if name]


def _tokens_of(choice: dict[str, Any]) -> int:
    """Tokens that came with a chunk: by its ids, or one where the server sends none. An empty last chunk has none."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    return 1 if choice.get("text") or choice.get("finish_reason") is None else 0


async def _read_stream(
    response: aiohttp.ClientResponse, result: RequestResult, start: float, progress: Progress
) -> None:
    finished = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        now = time.perf_counter() - start
        event = json.loads(data)
        if "error" in event:
            result.error = str(event["error"])[:_ERROR_LENGTH]
            return
        if count := sum(map(_tokens_of, event.get("choices") or [])):
            result.deltas.append((now, count))
            result.finished = now
            progress.on_tokens(count)
        if usage := event.get("usage"):
            result.prompt_tokens = usage.get("prompt_tokens", 0)
            result.output_tokens = usage.get("completion_tokens", 0)
            result.queue = usage.get("queue_time")
    if not finished:
        result.error = "the stream broke off before [DONE]"
    elif not result.output_tokens:
        result.error = "the server sent no usage, so that its tokens cannot be counted"


async def run(
    client: Client,
    workload: Workload,
    *,
    rate: float,
    concurrency: int = 0,
    progress: Progress | None = None,
    keep_record: bool = False,
) -> dict[str, Any]:
    """One measured run against a server; as :func:`carousel.bench.inprocess.run`.

    Where the server does not say which token ids a chunk holds, ``itl`` takes each chunk for one token. Queue time is
    what ``usage`` says of each request; where it says nothing, it is what ``/metrics`` grew by, as occupancy always is,
    so nobody else may use the server meanwhile.
    """
    progress = progress or Progress()
    results: list[RequestResult] = []
    gate = asyncio.Semaphore(concurrency) if concurrency else None
    before = await client.metrics()
    start = time.perf_counter()

    async def arrive(item: WorkItem, due: float) -> None:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
                due = time.perf_counter() - start
            result = RequestResult(item.id, due, item.output_len, item=item)
            results.append(result)
            await client.complete(item, result, start, progress)

    async with asyncio.TaskGroup() as tasks:
        for item, due in zip(workload.items, workload.arrivals(rate), strict=True):
            tasks.create_task(arrive(item, due))
    after = await client.metrics()
    check(results)
    queue = occupancy = None
    if before is not None and after is not None:
        queue, occupancy = scrape.queue_summary(before, after), scrape.occupancy(before, after)
    if all(result.queue is not None for result in results):
        found = figures(results, last_token(results), occupancy, queue_source="usage")
    else:
        found = figures(results, last_token(results), occupancy, queue, "metrics" if queue else None)
    return found | {"record": record(results)} if keep_record else found


async def warm_up(client: Client, workload: Workload, count: int) -> None:
    """Run ``count`` short requests and forget them.

    Raises:
        BenchError: when one fails, before anything is measured.
    """
    results = [RequestResult(item.id, 0.0, min(item.output_len, WARMUP_TOKENS)) for item in workload.items[:count]]
    start = time.perf_counter()
    pairs = zip(workload.items, results, strict=False)
    await asyncio.gather(*(client.complete(item, result, start, Progress()) for item, result in pairs))
    check(results)
