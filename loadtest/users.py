"""Locust's users. One of them can hold any number of requests in flight: arrivals do not wait for answers.

A latency counts from the time at which the request was due, whatever kept this process or the server from taking it
then: a server that stalls shows in the latencies of everybody who should have come meanwhile (no coordinated omission).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import gevent
import grpc
from gevent.pool import Group
from locust import FastHttpUser, User, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS

from carousel.bench.workload import WorkItem, headers_of
from loadtest import oip, protocols
from loadtest.figures import Observation
from loadtest.options import authorization, grpc_target
from loadtest.protocols import AnswerError, Target
from loadtest.traffic import Traffic

_IDLE_SECONDS = 0.2
_CONNECTIONS = 100_000  # of one user; what bounds them is the open loop
_UNFINISHED = "unfinished when the test ended"


class Session:
    """What the users of a process share; ``traffic`` and ``target`` are there once a test runs."""

    def __init__(self) -> None:
        self.traffic: Traffic | None = None
        self.target: Target | None = None
        self.requests = Group()
        self.begun = False

    def reset(self, traffic: Traffic | None, target: Target | None) -> None:
        self.traffic, self.target, self.begun = traffic, target, False

    def start(self) -> tuple[Traffic, Target] | None:
        """Traffic and target once there are any; the first to ask starts the clock."""
        if self.traffic is None or self.target is None:
            return None
        if not self.begun:
            self.traffic.begin()
            self.begun = True
        return self.traffic, self.target

    def abandon(self) -> None:
        """End the requests in flight: they are counted as unfinished."""
        self.requests.kill(block=True)


SESSION = Session()


class _Sender(User):
    """What the users have in common: taking arrivals, and reporting what became of them."""

    abstract = True
    protocol: ClassVar[str]

    @task
    def send_what_is_due(self) -> None:
        started = SESSION.start()
        taken = started and started[0].take()
        if not started or not taken:
            gevent.sleep(_IDLE_SECONDS)
            return
        traffic, target = started
        due, item = taken
        seen = Observation(traffic.now() if due is None else due, self.protocol, item.group)
        if due is None:
            self._serve(item, seen, traffic, target)
            return
        try:
            if (wait := due - traffic.now()) > 0:
                gevent.sleep(wait)
        except gevent.GreenletExit:
            traffic.in_flight -= 1  # it was not due yet: it does not count
            raise
        SESSION.requests.spawn(self._serve, item, seen, traffic, target)

    def _serve(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> None:
        """One request from its sending to its place in the statistics."""
        try:
            seen.sent = traffic.now()
            self.send(item, seen, traffic, target)
            if seen.protocol in protocols.STREAMS and not seen.deltas:
                raise AnswerError("the stream ended without a token")
        except AnswerError as error:
            seen.error = str(error)
        except (*FAILURE_EXCEPTIONS, TimeoutError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        except gevent.GreenletExit:
            seen.error, seen.unfinished = _UNFINISHED, True
            raise
        finally:
            whole = seen.error is None and seen.deltas
            seen.ended = seen.deltas[-1][0] if whole else traffic.now()
            traffic.finish(seen)
            self._tell_locust(seen)

    def send(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> None:
        """Send and read everything.

        Raises:
            AnswerError: the server's answer is an error.
        """
        raise NotImplementedError

    def headers_of(self, item: WorkItem) -> dict[str, str]:
        """What goes with the request beside its body."""
        return headers_of(item) | authorization(self.environment.parsed_options)

    def _tell_locust(self, seen: Observation) -> None:
        """The request as locust's request event; its single times as entries of locust's statistics, without a part in
        the total, which counts requests."""
        name = list(seen.rows)[-1]
        self.environment.events.request.fire(
            request_type="E2E",
            name=name,
            response_time=(seen.ended - seen.due) * 1000,
            response_length=0,
            exception=None if seen.error is None else AnswerError(seen.error),
            context={},
        )
        for metric, values in seen.times().items():
            if metric != "e2e":
                entry = self.environment.stats.get(name, metric.upper())
                for value, times in values:
                    for _ in range(times):
                        entry.log(value * 1000, 0)


def _events(response: Any) -> Iterator[bytes]:
    """The data of each server-sent event, at once when its line has come; the rest of the answer is read too, so that
    the connection can be used again."""
    raw = response._response
    while line := raw.readline(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


class _HttpUser(_Sender, FastHttpUser):
    abstract = True
    concurrency = _CONNECTIONS

    def __init__(self, environment: Any) -> None:
        self.network_timeout = self.connection_timeout = environment.parsed_options.request_timeout
        super().__init__(environment)

    def _post(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> Any:
        """The response, of which only the headers have come. ``catch_response`` without a ``with`` keeps locust from
        reporting it: that is done when it has ended."""
        response = self.client.post(
            protocols.path_of(self.protocol, target),
            json=protocols.body_of(self.protocol, item, target),
            headers={"Accept-Encoding": "identity", **self.headers_of(item)},
            stream=True,
            catch_response=True,
        )
        if response.status_code == 0:
            raise AnswerError(str(getattr(response, "error", "no answer")))
        if response.status_code != 200:
            raise AnswerError(f"HTTP {response.status_code}: {protocols.error_text(response.content or b'')}")
        protocols.read_headers({name.lower(): value for name, value in (response.headers or {}).items()}, seen)
        return response


class _StreamUser(_HttpUser):
    abstract = True

    def send(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> None:
        finished = False
        for data in _events(self._post(item, seen, traffic, target)):
            finished = protocols.read_event(self.protocol, data, traffic.now(), seen) or finished
        if not finished:
            raise AnswerError("the stream broke off before its end")


class ChatUser(_StreamUser):
    """OpenAI's ``chat/completions``, streaming."""

    protocol = "chat"


class CompletionsUser(_StreamUser):
    """OpenAI's ``completions``, streaming; the one that takes token ids."""

    protocol = "completions"


class GenerateUser(_StreamUser):
    """V2 ``generate_stream``."""

    protocol = "generate"


class InferUser(_HttpUser):
    """V2 ``infer`` over REST: whole answers, of which only end-to-end times are known."""

    protocol = "infer"

    def send(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> None:
        protocols.read_infer(self._post(item, seen, traffic, target).content or b"", seen)


class _GrpcUser(_Sender):
    abstract = True

    def on_start(self) -> None:
        options = self.environment.parsed_options
        target = grpc_target(options, self.environment.host or self.host or "")
        self._deadline = options.request_timeout
        self._channel = grpc.insecure_channel(target, options=[("grpc.enable_retries", 0)])

    def on_stop(self) -> None:
        self._channel.close()

    def _request(self, item: WorkItem, target: Target) -> Any:
        parameters: dict[str, bool | int | str] = {
            "max_tokens": item.output_len,
            "temperature": str(target.temperature),
        }
        if target.extensions:
            parameters["ignore_eos"] = True
        return oip.infer_request(target.model, item.prompt, parameters)

    def send(self, item: WorkItem, seen: Observation, traffic: Traffic, target: Target) -> None:
        metadata = list(self.headers_of(item).items())
        try:
            self.call(self._request(item, target), metadata, seen, traffic)
        except grpc.RpcError as error:
            raise AnswerError(f"{error.code().name}: {error.details()}") from None

    def call(self, request: Any, metadata: list[tuple[str, str]], seen: Observation, traffic: Traffic) -> None:
        """Send and read everything; gRPC's own errors are the caller's."""
        raise NotImplementedError


class GrpcUser(_GrpcUser):
    """V2 ``ModelInfer``: whole answers."""

    protocol = "grpc"

    def on_start(self) -> None:
        super().on_start()
        self._infer = self._channel.unary_unary(
            oip.INFER, oip.InferRequest.SerializeToString, oip.InferResponse.FromString
        )

    def call(self, request: Any, metadata: list[tuple[str, str]], seen: Observation, traffic: Traffic) -> None:
        response, call = self._infer.with_call(request, timeout=self._deadline, metadata=metadata)
        protocols.read_headers(dict(call.trailing_metadata() or ()), seen)
        protocols.read_tensors(response, traffic.now(), seen)


class GrpcStreamUser(_GrpcUser):
    """Triton's ``ModelStreamInfer``, a stream for each request."""

    protocol = "grpc-stream"

    def on_start(self) -> None:
        super().on_start()
        self._stream = self._channel.stream_stream(
            oip.STREAM, oip.InferRequest.SerializeToString, oip.StreamResponse.FromString
        )

    def call(self, request: Any, metadata: list[tuple[str, str]], seen: Observation, traffic: Traffic) -> None:
        final = False
        for answer in self._stream(iter((request,)), timeout=self._deadline, metadata=metadata):
            if answer.error_message:
                raise AnswerError(answer.error_message[:200])
            final = protocols.read_tensors(answer.infer_response, traffic.now(), seen) or final
        if not final:
            raise AnswerError("the stream broke off before its end")


USERS: dict[str, type[Any]] = {
    user.protocol: user for user in (ChatUser, CompletionsUser, GenerateUser, InferUser, GrpcUser, GrpcStreamUser)
}
