"""The engine as everybody else sees it: submit a request, read its deltas, cancel, drain, ask how it is doing.

One thread owns the device and runs :class:`~carousel.engine.loop.EngineCore`. Clients live on event loops. What
crosses between them is plain data: commands in through a queue, and per step one wake-up of each event loop with all
its deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from carousel.engine.block_pool import BlockPool
from carousel.engine.detokenizer import Detokenizer
from carousel.engine.device import Device, explain
from carousel.engine.errors import SHUT_DOWN, EngineUnavailable, InvalidRequest, RequestTooLong
from carousel.engine.events import Glance
from carousel.engine.graph_runner import GraphCapture, GraphRunner
from carousel.engine.ledger import Ledger
from carousel.engine.loop import EngineCore, LiveRequest
from carousel.engine.memory import KVBudget, plan_kv_cache
from carousel.engine.memory_profile import worst_step
from carousel.engine.meter import work_of
from carousel.engine.policy import make_policy
from carousel.engine.ranks import FreeMemory
from carousel.engine.request import FinishReason, GenerationRequest, Output, SamplingParams, Sequence
from carousel.engine.runner import DecoderRunner
from carousel.engine.sampler import Sampler, SequenceSampler
from carousel.engine.scheduler import Scheduler, SchedulerLimits
from carousel.engine.stream import RequestStream, collect
from carousel.engine.timeline import EngineStats, Refusal, Timeline
from carousel_kernels.layout import BLOCK_SIZE

if TYPE_CHECKING:
    from carousel.config import Settings
    from carousel.models.loader import LoadedModel

log = logging.getLogger(__name__)

_ABORT_S = 2.0
_JOIN_S = 4.0
_STUCK_JOIN_S = 0.2
_LOSS_S = 1.0
_TILES = (64, 32, 16)
"""Rows for which kernels have tiles of their own; with more they take several."""


class _Client:
    """Where a live request's deltas go: its stream, on its event loop."""

    __slots__ = ("account", "expires_at", "loop", "stream")

    def __init__(self, stream: RequestStream, loop: asyncio.AbstractEventLoop, live: LiveRequest) -> None:
        self.stream = stream
        self.loop = loop
        self.account = live.account
        self.expires_at = live.expires_at


class Engine:
    """A model with a batch that never stops turning. See the module.

    :meth:`start` and :meth:`stop` block; call them from a thread. :meth:`submit` needs a running event loop. Everything
    else may be called from anywhere.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = model.tokenizer
        self.timeline = Timeline()
        self.failure: str | None = None
        self.max_model_len = settings.max_model_len or model.max_model_len
        self.model_name = settings.model_name
        self.vocab_size: int = model.decoder.config.vocab_size
        self.generation_defaults: dict[str, Any] = dict(model.generation_defaults)
        self.kv_summary = ""
        self.graph_capture: dict[str, Any] | None = None
        """What recording took: ``buckets``, the sequences of each recorded decode; ``token_buckets``, the tokens of
        each step recorded in pieces; ``graphs``, how many that makes; and ``seconds``."""
        self._device = Device.of(model.decoder.device)
        self._model = model
        self._ranks = model.ranks
        self._thread: threading.Thread | None = None
        self._commands: deque[Callable[[EngineCore], None]] = deque()
        self._commands_lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._warm = False
        self._step_started: float | None = None
        self._clients: dict[str, _Client] = {}
        self._orders = count()
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._ledger = Ledger(settings.max_queue_requests, 1, settings.max_batch_sequences)

    # ---- life

    def start(self) -> None:
        """Size the KV pool, warm the model up, start the thread. Blocks until the engine is :attr:`ready`.

        Raises:
            InvalidRequest: the settings do not fit this model or this machine.
            EngineUnavailable: the device has failed, or has no memory left.
        """
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        try:
            core = self._build()
            started = time.monotonic()
            self._warm_up(core)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise EngineUnavailable(explain(error)) from error
        log.info("warm-up: %.2f s", time.monotonic() - started)
        self._warm = True
        if self._ranks is not None:
            self._ranks.watch(self._fail)
        self._thread = threading.Thread(target=self._run, args=(core,), name="carousel-engine", daemon=True)
        self._thread.start()

    def _build(self) -> EngineCore:
        settings, decoder = self.settings, self._model.decoder
        device = decoder.device
        self._device.bind()
        log.info("running on %s", self._device.describe())
        if device.type == "cpu":
            torch.set_num_threads(settings.num_threads)
        depth = int(settings.async_scheduling == "on" or (settings.async_scheduling == "auto" and device.type != "cpu"))
        budget, runner = self._fit(depth)
        self.kv_summary = str(budget)
        log.info("%s", budget)
        if not settings.max_model_len and budget.max_model_len < self._model.max_model_len:
            log.warning(
                "max_model_len is %d, not the model's %d: the KV cache holds no more; raise --kv-cache-memory",
                budget.max_model_len,
                self._model.max_model_len,
            )
        self.max_model_len = budget.max_model_len
        pool = BlockPool(budget.num_blocks)
        limits = SchedulerLimits(
            max_batch_tokens=settings.max_batch_tokens,
            max_batch_sequences=settings.max_batch_sequences,
            target_step_s=settings.target_step_ms / 1e3,
            prefix_caching=settings.prefix_caching,
            static=settings.batching == "static",
            protect_streams=settings.protect_streams,
        )
        scheduler = Scheduler(
            limits,
            pool,
            make_policy(settings.policy, settings.tenant_weights),
            on_blocks_lost=runner.forget,
        )
        queue_tokens = settings.max_queue_tokens or 32 * budget.max_model_len
        self._ledger = Ledger(
            settings.max_queue_requests, queue_tokens, settings.max_batch_sequences, block_tokens=BLOCK_SIZE
        )
        self._ledger.report_blocks(budget.num_blocks)
        sampler = Sampler(self.vocab_size, self._device)
        return EngineCore(
            scheduler,
            runner,
            sampler,
            self._ledger,
            self.timeline,
            self._publish,
            depth=depth,
            work=work_of(decoder.config),
        )

    def _free_memory(self) -> int:
        """Bytes that may still be taken on the device: of several ranks' the least, or a share of the CPU's."""
        device = self._model.decoder.device
        free = self._device.free_bytes()
        if self._ranks is not None:
            others = self._ranks.ask(FreeMemory())
            free = free // self._ranks.size if device.type == "cpu" else min(free, *others)
        return free

    def _fit(self, depth: int) -> tuple[KVBudget, DecoderRunner]:
        """The KV pool and the runner on it: beside them the largest step fits into the device's memory.

        What recorded work and its libraries take is known only once it is recorded. Where that is what the largest step
        needs, a pool that was given as a fraction becomes so much smaller.

        Raises:
            InvalidRequest: the settings do not fit the model or the memory.
        """
        settings = self.settings
        memory = settings.kv_cache_bytes if settings.kv_cache_bytes is not None else settings.kv_cache_fraction
        assert memory is not None
        step_bytes = self._step_bytes()
        free = max(self._free_memory() - step_bytes, 0)
        budget = self._plan(memory, free)
        runner = self._make_runner(budget, depth)
        missing = self._missing(step_bytes)
        taken = budget.num_tokens * budget.bytes_per_token
        if 0 < missing < taken and isinstance(memory, float):
            log.warning("the KV cache becomes %.2f GiB smaller: recorded graphs took the room", missing / 2**30)
            del runner  # it makes room for the next
            budget = self._plan(taken - missing, free)
            runner = self._make_runner(budget, depth)
            missing = self._missing(step_bytes)
        if missing > 0:
            raise InvalidRequest(
                "--kv-cache-memory",
                settings.kv_cache_memory,
                f"{missing / 2**30:.2f} GiB less, for the largest step to fit beside it",
            )
        return budget, runner

    def _plan(self, memory: float, free: int) -> KVBudget:
        settings, model = self.settings, self._model
        lengths = settings.max_model_len, model.max_model_len
        return plan_kv_cache(model.decoder.kv_bytes_per_token, memory, free, *lengths, settings.max_batch_sequences)

    def _missing(self, step_bytes: int) -> int:
        """Bytes that the largest step would lack now, if its needs are known."""
        return step_bytes - self._device.free_bytes() if step_bytes else 0

    def _step_bytes(self) -> int:
        """What the largest steps take beside weights and KV pool, measured where the device counts it."""
        settings = self.settings
        longest = min(settings.max_batch_tokens, settings.max_model_len or self._model.max_model_len)
        peak = self._device.peak_bytes(
            lambda: worst_step(
                self._model.decoder,
                self.vocab_size,
                self._device,
                longest,
                settings.max_batch_sequences,
                self._ranks,
            )
        )
        if peak:
            log.info("the largest step takes %.2f GiB beside weights and KV cache", peak / 2**30)
        return peak

    def _make_runner(self, budget: KVBudget, depth: int) -> DecoderRunner:
        """One that replays decodes, where the device can record them."""
        decoder, seats = self._model.decoder, self.settings.max_batch_sequences
        # A sequence that has ended holds its blocks while a step in flight may write them; another has its seat.
        tables = seats * (1 + depth)
        place = decoder, budget.num_blocks, tables, budget.max_model_len
        deterministic, followers = self.settings.deterministic, self._ranks
        if not self._device.records:
            return DecoderRunner(*place, device=self._device, deterministic=deterministic, followers=followers)
        runner = GraphRunner(
            *place,
            max_rows=seats,
            max_piece_tokens=min(self.settings.piecewise_graph_tokens, self.settings.max_batch_tokens),
            device=self._device,
            deterministic=deterministic,
            followers=followers,
        )
        self._note_capture(runner.capture())
        return runner

    def _note_capture(self, capture: GraphCapture) -> None:
        self.graph_capture = {
            "buckets": list(capture.buckets),
            "token_buckets": list(capture.token_buckets),
            "graphs": capture.graphs,
            "seconds": capture.seconds,
        }
        said = f"decodes of up to {capture.buckets[-1]} sequences"
        if capture.token_buckets:
            said += f", steps with prompts of up to {capture.token_buckets[-1]} tokens"
        log.info("recorded %d graphs in %.2f s: %s", capture.graphs, capture.seconds, said)

    def _warm_up(self, core: EngineCore) -> None:
        """Run a real generation at the worst shapes: a whole prompt chunk, a full batch, the costly sampler.

        Allocators reach their peak, libraries choose their kernels, others are compiled, and the cost model sees its
        first steps before a client does.
        """
        settings = self.settings
        longest = max(1, min(settings.max_batch_tokens, self.max_model_len - 8))
        costly = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5, max_tokens=3, ignore_eos=True, seed=0)
        greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        seats = min(settings.max_batch_sequences, max(1, core.scheduler.pool.num_blocks // 3))
        prompts = [(greedy, longest, 1)]
        if self._device.compiles:
            prompts += [(greedy, length, 1) for length in _TILES if length < longest]
        for params, length, number in (*prompts, (costly, 4, seats)):
            for _ in range(number):
                request = GenerationRequest(prompt="", sampling=params, cache_salt="warm-up")
                core.add(self._admit(request, [token % self.vocab_size for token in range(length)]))
            while core.step():
                pass
        core.scheduler.pool.clear_cache()
        self.timeline.steps.clear()
        # The books start empty: nobody asked for the warm-up.
        self._ledger.reset()
        core.reset_counters()

    def _fail(self, reason: str) -> None:
        """Take note, in any thread, that a rank is lost. A step in flight may never end, and this thread with it."""
        self.failure = self.failure or reason
        self._wake.set()

    def stop(self) -> None:
        """End what is live with a clear error, and the thread with it, unless that is stuck in a step."""
        self._ledger.close("the server is shutting down")
        alive, self._stopping = self.alive, True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S if alive else _STUCK_JOIN_S)
            if self._thread.is_alive():
                log.error("the engine thread is stuck in a step; it is left behind")
                self._abandon(SHUT_DOWN)

    def _abandon(self, why: str) -> None:
        """Tell the clients without the engine thread, which will not get round to it."""
        with self._commands_lock:
            self._ended = True
        while self._clients:
            _, client = self._clients.popitem()
            self._ledger.left(client.account, FinishReason.ERROR)
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                client.loop.call_soon_threadsafe(client.stream.abandon, why)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and let what is live finish.

        Returns:
            Whether all finished in time; what did not has been ended with an error.
        """
        self._draining = True
        self._ledger.close("the server is draining and takes no new requests")
        if not self.alive:
            return self._ledger.live == 0
        finished = await asyncio.to_thread(self._ledger.wait_idle, timeout_s)
        if not finished:
            self._command(lambda core: core.end_all(FinishReason.ERROR, SHUT_DOWN))
            await asyncio.to_thread(self._ledger.wait_idle, _ABORT_S)
        return finished

    # ---- health

    @property
    def alive(self) -> bool:
        """Whether the engine thread turns: it exists, and no step has taken longer than ``stall_seconds``."""
        thread, started = self._thread, self._step_started
        if thread is None or not thread.is_alive() or self.failure is not None:
            return False
        return started is None or time.monotonic() - started < self.settings.stall_seconds

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be served."""
        return self._warm and self.alive and not self._draining and not self._stopping

    def stats(self) -> EngineStats:
        """A snapshot of counts and gauges."""
        return self._ledger.snapshot(draining=self._draining, alive=self.alive)

    # ---- those who watch

    def glance(self, take: Callable[[Glance], None]) -> bool:
        """Have the engine thread look at itself before its next step and call ``take`` with what it sees.

        ``take`` must be quick and must not raise. False when there is no thread any more that would.
        """
        return self._command(lambda core: take(core.glance()))

    def set_batching(self, static: bool) -> bool:
        """Fill the batch in another way, from the next step on; see :meth:`Scheduler.set_static`.

        Raises:
            InvalidRequest: the policy preempts, which a static batch never does.
        """
        if static and self.settings.policy == "priority":
            raise InvalidRequest("batching", "static", "continuous, as the policy is priority, which preempts")
        return self._command(lambda core: core.scheduler.set_static(static))

    def set_tenant_weights(self, weights: Mapping[str, float], default: float = 1.0) -> bool:
        """Change the tenants' shares under policy ``fair``, from the next step on; ``default`` is everybody else's."""
        shares = dict(weights)
        return self._command(lambda core: core.scheduler.policy.set_weights(shares, default))

    # ---- requests

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Admit a request and return the stream of its deltas. Needs a running event loop.

        Raises:
            InvalidRequest: a field is out of bounds, or (``RequestTooLong``) it can never fit.
            QueueFull: too much is waiting; try again later.
            EngineUnavailable: the engine has not started, is draining or has died.
        """
        loop = asyncio.get_running_loop()
        if not self._warm or not self.alive:
            why = f"the engine has failed: {self.failure}" if self.failure else "the model is not ready"
            self._ledger.count_rejected(Refusal.UNAVAILABLE)
            raise EngineUnavailable(why)
        try:
            prompt_ids = self._prompt_ids(request)
            self._check(request, prompt_ids)
        except InvalidRequest as error:
            too_long = isinstance(error, RequestTooLong)
            self._ledger.count_rejected(Refusal.TOO_LONG if too_long else Refusal.INVALID)
            raise
        live = self._admit(request, prompt_ids)
        request_id = request.request_id
        stream = RequestStream(request_id, len(prompt_ids), len(live.sequences), lambda: self.cancel(request_id))
        self._clients[request_id] = _Client(stream, loop, live)
        if not self._command(lambda core: core.add(live)):
            self._clients.pop(request_id, None)  # whoever abandons them may have been here
            self._ledger.left(live.account, FinishReason.ERROR)
            raise EngineUnavailable(f"the engine has failed: {self.failure}")
        return stream

    async def generate(self, request: GenerationRequest) -> list[Output]:
        """The whole answer: one merged output per choice, by index. Cancelling the call cancels the request."""
        async with self.submit(request) as stream:
            return await collect(stream)

    def cancel(self, request_id: str) -> bool:
        """End a request and free its blocks before the next step. False when it is not live.

        A request whose time was up by now ends as ``timeout``, even if the engine thread has not got round to it: a
        transport with a deadline of its own cancels at the same moment.
        """
        client = self._clients.get(request_id)
        if client is None:
            return False
        late = client.expires_at is not None and time.monotonic() >= client.expires_at
        reason = FinishReason.TIMEOUT if late else FinishReason.CANCELLED
        return self._command(lambda core: core.end(request_id, reason))

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, str):
            ids = self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
            if max(ids, default=0) >= self.vocab_size:
                # A tokenizer may know more tokens than the model; asked for one, the model would read past its table.
                odd = self.tokenizer.decode([max(ids)], skip_special_tokens=False)
                raise InvalidRequest("prompt", odd, f"text without tokens that the model does not know ({max(ids)})")
        else:
            ids = request.prompt
            for position, token in enumerate(ids):
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise InvalidRequest(f"prompt[{position}]", token, f"token ids from 0 to {self.vocab_size - 1}")
        if not ids:
            raise InvalidRequest("prompt", request.prompt, "a prompt of at least one token")
        return list(ids)

    def _check(self, request: GenerationRequest, prompt_ids: list[int]) -> None:
        params = request.sampling
        params.validate(self.vocab_size)
        if request.request_id in self._clients:
            raise InvalidRequest("request_id", request.request_id, "an id that no live request has")
        length, limit = len(prompt_ids), self.max_model_len
        if length >= limit:
            raise RequestTooLong("prompt", f"{length} tokens", f"at most {limit - 1} tokens (max_model_len is {limit})")
        if params.max_tokens is not None and length + params.max_tokens > limit:
            raise RequestTooLong(
                "max_tokens",
                params.max_tokens,
                f"at most {limit - length} beside a prompt of {length} tokens (max_model_len is {limit})",
            )
        if params.min_tokens > limit - length:
            raise RequestTooLong("min_tokens", params.min_tokens, f"at most {limit - length} beside this prompt")
        for name, seconds in (("timeout_s", request.timeout_s), ("deadline_s", request.deadline_s)):
            if seconds is not None and not 0 < seconds < 1e9:
                raise InvalidRequest(name, seconds, "a number of seconds above 0")

    def _admit(self, request: GenerationRequest, prompt_ids: list[int]) -> LiveRequest:
        params = request.sampling
        account = self._ledger.admit(len(prompt_ids), params.n, request.arrival, request.tenant, request.queue_share)
        limit = self.max_model_len
        total = limit if params.max_tokens is None else min(limit, len(prompt_ids) + params.max_tokens)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        eos_ids = self.tokenizer.eos_ids
        limits = (request.timeout_s, self.settings.request_timeout_seconds)
        timeout = min((seconds for seconds in limits if seconds), default=None)
        sequences = [
            Sequence(
                request=request,
                index=index,
                token_ids=list(prompt_ids),
                num_prompt_tokens=len(prompt_ids),
                max_total_tokens=total,
                order=next(self._orders),
                detokenizer=Detokenizer(
                    self.tokenizer,
                    stop=params.stop,
                    include_stop=params.include_stop,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                ),
                sampler=SequenceSampler(
                    params,
                    seed=seed,
                    index=index,
                    prompt_ids=prompt_ids,
                    eos_ids=eos_ids,
                    vocab_size=self.vocab_size,
                ),
                eos_ids=eos_ids,
            )
            for index in range(params.n)
        ]
        return LiveRequest(request, account, sequences, request.arrival + timeout if timeout else None)

    # ---- the thread

    def _command(self, command: Callable[[EngineCore], None]) -> bool:
        """Have the engine thread call ``command``. False when there is no thread any more that would."""
        with self._commands_lock:
            if self._ended:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    def _run(self, core: EngineCore) -> None:
        try:
            self._device.bind()
            while not self._stopping and self.failure is None:
                self._wake.clear()
                self._take_commands(core)
                self._step_started = time.monotonic()
                worked = core.step()
                self._step_started = None
                if not worked and not self._stopping and self.failure is None:
                    due = core.next_deadline
                    self._wake.wait(None if due is None else max(0.0, due - time.monotonic()))
            self._finish(core, SHUT_DOWN if self.failure is None else f"the engine has failed: {self.failure}")
        except Exception as error:  # whatever it is, every client must hear of it
            log.exception("the engine thread died")
            lost = None if self._ranks is None else self._ranks.lost_within(_LOSS_S)
            self.failure = lost or explain(error)
            self._finish(core, f"the engine has failed: {self.failure}")

    def _take_commands(self, core: EngineCore) -> None:
        while self._commands:
            self._commands.popleft()(core)

    def _finish(self, core: EngineCore, why: str) -> None:
        """The thread ends: so does, with an error, whatever is live or was admitted a moment ago."""
        self._ledger.close(why)
        with self._commands_lock:
            self._ended = True
        self._take_commands(core)
        core.end_all(FinishReason.ERROR, why)
        core.meter.settle(finally_=True)  # what is in flight will never be collected

    def _publish(self, deltas: list[tuple[LiveRequest, Output]]) -> None:
        """Hand a step's deltas to the event loops, one wake-up each. Runs on the engine thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Output]]] = {}
        for live, output in deltas:
            client = self._clients.get(live.request.request_id)
            if client is None:
                continue
            by_loop.setdefault(client.loop, []).append((client.stream, output))
        for live, _ in deltas:
            if live.unfinished == 0:
                self._clients.pop(live.request.request_id, None)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                # The client's event loop is closed: nobody will ever read these.
                for stream, _ in batch:
                    self.cancel(stream.request_id)


def _deliver(batch: list[tuple[RequestStream, Output]]) -> None:
    for stream, output in batch:
        stream.deliver(output)
