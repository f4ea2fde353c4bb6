"""The soak's client over gRPC, with KServe's stubs. Never in a process with tritonclient: both own the messages."""

from __future__ import annotations

import asyncio
import json
import struct
import time

import grpc
from grpc import aio

from carousel.server import bare_arguments

from .outcome import Seen
from .plan import Plan

with bare_arguments():  # KServe reads the command line when it is imported
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
    from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

_STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def _message(plan: Plan, model: str) -> pb.ModelInferRequest:
    datatype = "BYTES"
    parameters: dict[str, str | int] = {"max_tokens": plan.max_tokens}
    parameters |= {"temperature": "0"} if plan.greedy else {"temperature": "0.8", "top_p": "0.95", "seed": plan.seed}
    if plan.bad is not None:
        wrong = json.loads(plan.bad.body)
        model, datatype, parameters = wrong["model"] or model, wrong["datatype"], wrong["parameters"]
    request = pb.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="text_input", datatype=datatype, shape=[1])
    if datatype == "BYTES":
        tensor.contents.bytes_contents.append((plan.prompt or "abc").encode())
    else:
        tensor.contents.fp32_contents.append(1.0)
    for name, value in parameters.items():
        if isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = value
    return request


def _bytes_of(response: pb.ModelInferResponse, index: int) -> bytes:
    if response.raw_output_contents:
        raw = response.raw_output_contents[index]
        return bytes(raw[4 : 4 + struct.unpack("<I", raw[:4])[0]])
    return bytes(response.outputs[index].contents.bytes_contents[0])


def _read(response: pb.ModelInferResponse, seen: Seen) -> None:
    places = {output.name: index for index, output in enumerate(response.outputs)}
    seen.status, seen.ended = 200, True
    seen.text = _bytes_of(response, places["text_output"]).decode()
    seen.reason = _bytes_of(response, places["finish_reason"]).decode()


class GrpcClient:
    """Calls ``ModelInfer``. ``guard_s``: an answer that takes longer is a hang."""

    def __init__(self, address: str, model: str, guard_s: float) -> None:
        self.model, self.guard_s = model, guard_s
        self.channel = aio.insecure_channel(address, options=[("grpc.enable_retries", 0)])
        self.stub = GRPCInferenceServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    async def call(self, plan: Plan, seen: Seen) -> None:
        """Send a request; take its answer in, or cancel it as ``plan.leave`` says."""
        deadline = plan.timeout_s or self.guard_s
        started = time.perf_counter()
        running = self.stub.ModelInfer(_message(plan, self.model), timeout=deadline, metadata=plan.headers)
        try:
            if plan.leave is not None:
                await asyncio.wait([asyncio.ensure_future(_outcome(running))], timeout=plan.leave.after_s)
                seen.left = running.cancel()
            _read(await running, seen)
        except aio.AioRpcError as error:
            code = error.code()
            seen.status = _STATUS.get(code, 500)
            seen.error = f"{code.name}: {error.details()}"
            trailing = dict(error.trailing_metadata() or ())
            seen.retry_after = str(trailing["retry-after"]) if "retry-after" in trailing else None
            if code is grpc.StatusCode.UNAVAILABLE and seen.retry_after is None:
                seen.broken = seen.error  # no answer of the server's but of the transport
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and plan.timeout_s is None:
                seen.broken = f"no answer within {time.perf_counter() - started:.0f} s"
        except asyncio.CancelledError:
            if not seen.left:
                raise
            seen.status = None


async def _outcome(running: object) -> None:
    """Wait for a call's end, whatever it is."""
    await running.code()  # type: ignore[attr-defined]
