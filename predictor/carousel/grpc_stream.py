"""Triton's ``ModelStreamInfer``: requests in and deltas out on one bidirectional stream.

A request is a ``ModelInferRequest`` as for ``ModelInfer``; any number of them run side by side. Each delta is one
response with the request's id, the output tensors of ``protocols.v2_stream`` and the parameter
``triton_final_response``: true on the request's last response, which also has ``queue_time``, the seconds before the
request was first computed, as a string. With ``triton_enable_empty_final_response`` the last
response is one of its own, without outputs, for clients that stop reading when they see the flag. With the parameter
``stream`` false the request's whole answer comes as one response.

What is wrong with a request ends that request alone: a response with an ``error_message``, whose text begins with
``[request id: …]`` (Triton's client hands out nothing else), whose ``infer_response`` has the id, and whose parameters
have ``grpc_status`` and, where it makes sense, ``retry-after`` (seconds).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from carousel.engine.errors import EngineUnavailable
from carousel.generation import run_all, submit_all
from carousel.grpc_messages import StreamResponse, decode
from carousel.http_errors import describe_any
from carousel.lifecycle import EngineLike
from carousel.middleware import access_logger
from carousel.predictor import MODEL_VERSION, CarouselModel, check_model, make_context
from carousel.protocols import fields as read
from carousel.protocols import v2
from carousel.protocols.errors import RequestCancelled
from carousel.protocols.v2 import V2Call, V2Tensor
from carousel.protocols.v2_stream import Deltas, gather
from carousel.telemetry.notes import current_notes, open_notes
from carousel.tensors import neutral_request, request_from_grpc

logger = logging.getLogger("carousel.grpc")

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"

#: Requests of one stream that may be unanswered at a time; more are not read before others have ended.
MAX_OPEN_REQUESTS = 1024


class _ClientLeft(Exception):
    """Nothing can be written to this stream any more."""


class StreamInfer:
    """One stream.

    Args:
        headers: the stream's metadata, which holds for all of its requests.
        write: sends one response; it waits while the client reads nothing.
        closing: set when the server ends, after everything that was admitted has ended.
    """

    def __init__(
        self,
        model: CarouselModel,
        headers: Mapping[str, str],
        write: Callable[[Any], Awaitable[None]],
        closing: asyncio.Event,
    ) -> None:
        self._model, self._headers, self._closing = model, headers, closing
        self._send = write
        self._turn = asyncio.Lock()  # one response at a time, in the order in which they were ready
        self._open = asyncio.Semaphore(MAX_OPEN_REQUESTS)

    async def run(self, messages: AsyncIterator[bytes]) -> None:
        """Serve until the client has said everything and got its answers.

        Raises:
            EngineUnavailable: the server takes no work, or ends.
            RequestCancelled: the client left.
        """
        self._model.lifecycle.require()  # a client that has not sent anything yet can still turn to another server
        reader = aiter(messages)
        closing = asyncio.ensure_future(self._closing.wait())
        told = False
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._open.acquire()
                    reading = asyncio.ensure_future(anext(reader, None))
                    try:
                        await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not reading.done():
                            reading.cancel()
                    told = not reading.done() or reading.cancelled()
                    message = None if told else reading.result()
                    if message is None:
                        break
                    group.create_task(self._serve(message))
        except* _ClientLeft:
            raise RequestCancelled("the client left the stream") from None
        finally:
            closing.cancel()
        if told:
            raise EngineUnavailable("the server is shutting down")

    async def _serve(self, raw: bytes) -> None:
        """One request, from its bytes to its last response."""
        started, request_id, code = time.perf_counter(), "", "CANCELLED"
        with open_notes() as notes:
            try:
                message = decode(pb.ModelInferRequest, raw)
                request_id = message.id
                del raw
                await self._answer(message)
                code = "OK"
            except (_ClientLeft, asyncio.CancelledError):
                raise
            except Exception as error:
                info = describe_any(error)
                code = info.grpc_code
                if info.grpc_code == "INTERNAL":
                    logger.exception("streamed request %s failed", request_id[:128])
                await self._fail(request_id, info.grpc_code, info.message, info.headers)
            finally:
                self._open.release()
                if access_logger.isEnabledFor(logging.INFO):
                    took_ms = round((time.perf_counter() - started) * 1000, 1)
                    fields = {
                        "method": "ModelStreamInfer", "id": request_id[:128], "status": code, "duration_ms": took_ms,
                        **notes.fields(),
                    }  # fmt: skip
                    text = "streamed request %s in %.1f ms%s"
                    access_logger.info(text, code, took_ms, notes.summary(), extra={"fields": fields})

    async def _answer(self, message: pb.ModelInferRequest) -> None:
        engine = self._model.lifecycle.require()
        check_model(message.model_name, message.model_version, self._model.name)
        raw = bool(message.raw_input_contents)
        request = request_from_grpc(message)
        streamed, empty_final = _stream_parameters(request.parameters)
        call = v2.parse(neutral_request(request), make_context(engine, self._model.name, self._headers))
        del message, request
        if streamed:
            await self._stream(engine, call, raw, empty_final)
        else:
            tensors = v2.render(call, await run_all(engine, call))
            await self._write(response(call, tensors, raw=raw, final=not empty_final))
        if empty_final:
            await self._write(response(call, [], raw=False, final=True))

    async def _stream(self, engine: EngineLike, call: V2Call, raw: bool, empty_final: bool) -> None:
        deltas = Deltas(call)
        async with AsyncExitStack() as stack:
            streams = await submit_all(stack, engine, call)
            async with aclosing(gather([aiter(stream) for stream in streams])) as outputs:
                async for output in outputs:
                    tensors = deltas.render(output)
                    if tensors:
                        final = deltas.finished and not empty_final
                        await self._write(response(call, tensors, raw=raw, final=final))
        deltas.check_end()

    async def _fail(self, request_id: str, code: str, text: str, headers: Mapping[str, str]) -> None:
        shown = f"[request id: {request_id[:256] or '<id_unknown>'}] {text}"
        answer = StreamResponse(error_message=shown)
        answer.infer_response.id = request_id
        answer.infer_response.model_name = self._model.name
        answer.infer_response.parameters[FINAL].bool_param = True
        answer.infer_response.parameters["grpc_status"].string_param = code
        for name, value in headers.items():
            answer.infer_response.parameters[name.lower()].string_param = value
        await self._write(answer)

    async def _write(self, answer: Any) -> None:
        async with self._turn:
            try:
                await self._send(answer)
            except Exception as error:  # gRPC has several for a stream that is gone
                raise _ClientLeft from error


def _stream_parameters(parameters: dict[str, Any]) -> tuple[bool, bool]:
    """Take what only streams know out of the parameters: whether deltas are wanted, and an empty final response."""
    found = []
    for name, default in (("stream", True), (EMPTY_FINAL, False)):
        value = read.from_text(parameters.pop(name, default), "boolean")
        found.append(read.boolean(f"parameters.{name}", value))
    return found[0], found[1]


def response(call: V2Call, tensors: Sequence[V2Tensor], *, raw: bool, final: bool) -> Any:
    """A ``ModelStreamInferResponse``; ``raw``: the tensors' bytes behind them, as the client sent its own."""
    answer = StreamResponse()
    message = answer.infer_response
    message.id, message.model_name, message.model_version = call.id, call.context.model_name, MODEL_VERSION
    message.parameters[FINAL].bool_param = final
    notes = current_notes.get()
    if final and notes is not None and notes.queue_s is not None:
        message.parameters["queue_time"].string_param = f"{notes.queue_s:.6f}"  # there are no numbers but integers
    for tensor in tensors:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.datatype == "BYTES":
            texts = [text.encode() for text in tensor.data]
            if raw:
                pieces = (struct.pack("<I", len(text)) + text for text in texts)
                message.raw_output_contents.append(b"".join(pieces))
            else:
                output.contents.bytes_contents.extend(texts)
        elif raw:
            message.raw_output_contents.append(struct.pack(f"<{len(tensor.data)}i", *tensor.data))
        else:
            output.contents.int_contents.extend(tensor.data)
    return answer
