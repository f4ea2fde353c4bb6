"""What the gRPC tests share: messages, and raw calls of the two methods that generate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Self

import grpc
from grpc import aio
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from carousel.grpc_messages import StreamResponse

SERVICE = "/inference.GRPCInferenceService/"


def infer_request(*prompts: str | bytes, model: str = "fake", request_id: str = "", **parameters: object):
    """A ModelInferRequest with typed contents."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    tensor.contents.bytes_contents.extend(text.encode() if isinstance(text, str) else text for text in prompts)
    for name, value in parameters.items():
        set_parameter(message.parameters[name], value)
    return message


def set_parameter(parameter: pb.InferParameter, value: object) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    setattr(parameter, kinds[type(value)], value)


def parameter(field: int, wire_type: int, payload: bytes) -> bytes:
    """An InferParameter's bytes, for the kinds that KServe's copy of the protocol lacks."""
    return bytes([field << 3 | wire_type]) + payload


def texts(message, name: str = "text_output") -> list[str]:
    """A BYTES output with typed contents."""
    (output,) = [item for item in message.outputs if item.name == name]
    return [item.decode() for item in output.contents.bytes_contents]


def counts(message, name: str) -> list[int]:
    (output,) = [item for item in message.outputs if item.name == name]
    return list(output.contents.int_contents)


def is_final(answer) -> bool:
    return answer.infer_response.parameters["triton_final_response"].bool_param


class Client:
    """Every method on one channel. ``infer`` and ``open_stream`` take messages or their bytes."""

    def __init__(self, address: str, options: Iterable[tuple[str, object]] = ()) -> None:
        self.channel = aio.insecure_channel(address, options=list(options))
        self.stub = GRPCInferenceServiceStub(self.channel)
        self._infer = self.channel.unary_unary(SERVICE + "ModelInfer", None, pb.ModelInferResponse.FromString)
        self._stream = self.channel.stream_stream(SERVICE + "ModelStreamInfer", None, StreamResponse.FromString)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()

    def infer(self, message, **options):
        return self._infer(_bytes(message), **options)

    def open_stream(self, **options) -> Stream:
        return Stream(self._stream(**options))

    async def stream(self, *messages, **options) -> list:
        """All responses to all messages."""
        stream = self.open_stream(**options)
        for message in messages:
            await stream.send(message)
        await stream.close()
        return [answer async for answer in stream]

    async def refusal(self, message, **options) -> aio.AioRpcError:
        """The error of a unary call that must fail."""
        try:
            await self.infer(message, **options)
        except aio.AioRpcError as error:
            return error
        raise AssertionError("it was taken")


class Stream:
    """One ModelStreamInfer call."""

    def __init__(self, call) -> None:
        self.call = call

    async def send(self, message) -> None:
        await self.call.write(_bytes(message))

    async def close(self) -> None:
        await self.call.done_writing()

    async def next(self):
        answer = await self.call.read()
        assert answer is not aio.EOF, f"the stream ended: {await self.call.code()} {await self.call.details()}"
        return answer

    async def __aiter__(self) -> AsyncIterator:
        while (answer := await self.call.read()) is not aio.EOF:
            yield answer

    async def until_error(self) -> list:
        """Everything that comes before the stream ends with an error, or without one."""
        answers = []
        with contextlib.suppress(aio.AioRpcError):
            async for answer in self:
                answers.append(answer)  # noqa: PERF401
        return answers

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end; the status."""
        await self.until_error()
        return await self.call.code(), await self.call.details()


def _bytes(message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
