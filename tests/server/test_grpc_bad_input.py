"""Whatever a gRPC client sends: INVALID_ARGUMENT or NOT_FOUND with the field, on both methods, and nobody is harmed."""

from __future__ import annotations

import asyncio
import struct
from random import Random

import grpc
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from tests.server.grpc_calls import Client, infer_request, parameter, texts
from tests.server.harness import serving

INVALID, UNKNOWN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def tiny():
    with serving(trust_tenant_header=True) as running:
        yield running


@pytest.fixture
async def client(tiny):
    async with Client(tiny.grpc) as client:
        yield client


def request(**parameters: object) -> pb.ModelInferRequest:
    parameters.setdefault("max_tokens", 2)
    return infer_request("hello", model="tiny", **parameters)


def changed(change) -> pb.ModelInferRequest:
    message = request()
    change(message)
    return message


def tensor(name: str, datatype: str, shape: list[int], **contents: list) -> pb.ModelInferRequest:
    """A good request and one more input."""
    message = request()
    added = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for kind, values in contents.items():
        getattr(added.contents, kind).extend(values)
    return message


def text_tensor(datatype: str, shape: list[int], **contents: list) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="tiny")
    added = message.inputs.add(name="text_input", datatype=datatype, shape=shape)
    for kind, values in contents.items():
        getattr(added.contents, kind).extend(values)
    return message


def raw(contents: list[bytes], datatype: str = "BYTES", shape: tuple[int, ...] = (1,)) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="tiny", raw_input_contents=contents)
    message.inputs.add(name="text_input", datatype=datatype, shape=shape)
    return message


def raw_number(datatype: str, content: bytes, name: str = "temperature") -> pb.ModelInferRequest:
    message = raw([struct.pack("<I", 1) + b"a", content])
    message.inputs.add(name=name, datatype=datatype, shape=[1])
    return message


def wire_parameter(name: str, value: bytes) -> bytes:
    """A request with a parameter of a kind that KServe's copy of the protocol has no field for."""
    entry = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12" + bytes([len(value)]) + value
    return request().SerializeToString() + b"\x22" + bytes([len(entry)]) + entry


def double(name: str, value: float) -> bytes:
    return wire_parameter(name, parameter(4, 1, struct.pack("<d", value)))


def uint64(name: str, value: int) -> bytes:
    digits = b""
    while value > 0x7F:
        digits, value = digits + bytes([value & 0x7F | 0x80]), value >> 7
    return wire_parameter(name, parameter(5, 0, digits + bytes([value])))


def tensor_parameter(name: str, kind: str, value: object, output: bool = False) -> pb.ModelInferRequest:
    message = request()
    holder = message.outputs.add(name="text_output") if output else message.inputs[0]
    setattr(holder.parameters[name], kind, value)
    return message


NAN, INFINITY = float("nan"), float("inf")
HUGE = 2**63 - 1
REFUSED: dict[str, tuple[object, str]] = {
    # what is no message
    "no protobuf": (b"\xff\xff\xff", "message"),
    "truncated": (request().SerializeToString()[:-3], "message"),
    "model name not UTF-8": (b"\x0a\x02\xff\xfe", "message"),
    "input name not UTF-8": (b"\x0a\x04tiny\x2a\x04\x0a\x02\xff\xfe", "message"),
    # inputs
    "no inputs": (pb.ModelInferRequest(model_name="tiny"), "inputs"),
    "no text_input": (changed(lambda m: m.inputs[0].__setattr__("name", "other")), "inputs[0].name"),
    "only sampling": (changed(lambda m: m.inputs[0].__setattr__("name", "temperature")), "inputs"),
    "unnamed input": (changed(lambda m: m.inputs[0].__setattr__("name", "")), "inputs[0].name"),
    "text twice": (changed(lambda m: m.inputs.append(m.inputs[0])), "inputs[1].name"),
    "unknown input": (tensor("temprature", "FP32", [1], fp32_contents=[1.0]), "did you mean 'temperature'"),
    "empty batch": (text_tensor("BYTES", [0]), "inputs[0].shape"),
    "empty prompt": (text_tensor("BYTES", [1], bytes_contents=[b""]), "inputs[0].data[0]"),
    "too many rows": (text_tensor("BYTES", [3000], bytes_contents=[b"a"] * 3000), "inputs[0].shape"),
    "too long": (text_tensor("BYTES", [1], bytes_contents=[b"a" * 600]), "600 tokens"),
    "far too long": (text_tensor("BYTES", [1], bytes_contents=[b"a" * 900_000]), "900000 characters"),
    "no UTF-8": (text_tensor("BYTES", [1], bytes_contents=[b"caf\xe9"]), "inputs[0].data[0]"),
    "a surrogate": (text_tensor("BYTES", [1], bytes_contents=[b"\xed\xa0\x80"]), "inputs[0].data[0]"),
    # datatypes and shapes
    "text as numbers": (text_tensor("INT32", [1], int_contents=[1]), "inputs[0].datatype"),
    "no such datatype": (text_tensor("STRING", [1], bytes_contents=[b"a"]), "inputs[0].datatype"),
    "no datatype": (text_tensor("", [1], bytes_contents=[b"a"]), "inputs[0].datatype"),
    "contents of another type": (text_tensor("BYTES", [1], int_contents=[1]), "inputs[0].contents"),
    "contents of two types": (
        text_tensor("BYTES", [1], bytes_contents=[b"a"], fp32_contents=[1.0]), "inputs[0].contents",
    ),
    "FP16 without raw": (tensor("temperature", "FP16", [1], fp32_contents=[1.0]), "raw_input_contents"),
    "no contents": (text_tensor("BYTES", [1]), "inputs[0].shape"),
    "shape too large": (text_tensor("BYTES", [3], bytes_contents=[b"a"]), "inputs[0].shape"),
    "shape too small": (text_tensor("BYTES", [1], bytes_contents=[b"a", b"b"]), "inputs[0].shape"),
    "shape negative": (text_tensor("BYTES", [-1], bytes_contents=[b"a"]), "inputs[0].shape"),
    "shape huge": (text_tensor("BYTES", [HUGE], bytes_contents=[b"a"]), "inputs[0].shape"),
    "shape overflows": (text_tensor("BYTES", [2**33, 2**33], bytes_contents=[b"a"]), "inputs[0].shape"),
    "no shape": (text_tensor("BYTES", [], bytes_contents=[b"a"]), "inputs[0].shape"),
    "three dimensions": (text_tensor("BYTES", [1, 1, 1], bytes_contents=[b"a"]), "inputs[0].shape"),
    "two columns": (text_tensor("BYTES", [1, 2], bytes_contents=[b"a", b"b"]), "inputs[0].shape"),
    # raw contents
    "raw too few": (raw([]), "inputs[0]"),
    "raw too many": (raw([b"\1\0\0\0a", b"x"]), "raw_input_contents"),
    "raw and typed": (
        changed(lambda m: m.raw_input_contents.append(struct.pack("<I", 1) + b"a")), "inputs[0].contents",
    ),
    "raw empty": (raw([b""]), "inputs[text_input]"),
    "raw without length": (raw([b"\1\0"]), "inputs[text_input]"),
    "raw truncated": (raw([struct.pack("<I", 9) + b"abc"]), "inputs[text_input]"),
    "raw length absurd": (raw([b"\xff\xff\xff\xffabc"]), "inputs[text_input]"),
    "raw trailing bytes": (raw([struct.pack("<I", 1) + b"abc"]), "inputs[text_input]"),
    "raw too many rows": (raw([struct.pack("<I", 1) + b"a"], shape=(2,)), "inputs[text_input]"),
    "raw shape huge": (raw([struct.pack("<I", 1) + b"a"], shape=(HUGE,)), "inputs[text_input]"),
    "raw no UTF-8": (raw([struct.pack("<I", 2) + b"\xff\xfe"]), "inputs[0].data[0]"),
    "raw number truncated": (raw_number("FP32", b"\0\0"), "inputs[temperature]"),
    "raw number too long": (raw_number("FP32", b"\0" * 8), "inputs[temperature]"),
    "raw NaN": (raw_number("FP32", struct.pack("<f", NAN)), "temperature"),
    "raw half NaN": (raw_number("FP16", struct.pack("<e", NAN)), "temperature"),
    "raw infinity": (raw_number("FP64", struct.pack("<d", INFINITY)), "temperature"),
    "raw huge": (raw_number("INT64", struct.pack("<q", HUGE), "max_tokens"), "max_tokens"),
    "raw unsigned huge": (raw_number("UINT64", b"\xff" * 8, "max_tokens"), "max_tokens"),
    # sampling as tensors
    "tensor NaN": (tensor("temperature", "FP32", [1], fp32_contents=[NAN]), "temperature"),
    "tensor infinity": (tensor("top_p", "FP64", [1], fp64_contents=[INFINITY]), "top_p"),
    "tensor out of range": (tensor("top_p", "FP32", [1], fp32_contents=[1.5]), "top_p"),
    "tensor of text": (tensor("temperature", "BYTES", [1], bytes_contents=[b"hot"]), "temperature"),
    "tensor of the wrong shape": (tensor("temperature", "FP32", [3], fp32_contents=[1.0] * 3), "inputs[1].shape"),
    "tensor bool": (tensor("ignore_eos", "INT32", [1], int_contents=[2]), "ignore_eos"),
    "token id out of range": (tensor("stop_token_ids", "INT64", [1], int64_contents=[HUGE]), "stop_token_ids"),
    "too many stops": (tensor("stop", "BYTES", [1000], bytes_contents=[b"x"] * 1000), "inputs[1].shape"),
    # parameters of every kind
    "unknown parameter": (request(temprature=1), "did you mean 'temperature'"),
    "negative": (request(max_tokens=-1), "parameters.max_tokens"),
    "zero tokens": (request(max_tokens=0), "parameters.max_tokens"),
    "too many tokens": (request(max_tokens=HUGE), "parameters.max_tokens"),
    "text for a number": (request(temperature="hot"), "parameters.temperature"),
    "NaN as text": (request(temperature="nan"), "parameters.temperature"),
    "infinity as text": (request(temperature="1e999"), "parameters.temperature"),
    "bool for a number": (request(max_tokens=True), "parameters.max_tokens"),
    "number for a bool": (request(ignore_eos=1), "parameters.ignore_eos"),
    "several choices": (request(n=2), "parameters.n"),
    "two spellings": (request(max_tokens=2, max_new_tokens=3), "max_new_tokens"),
    "bad token list": (request(stop_token_ids="[99999]"), "parameters.stop_token_ids"),
    "bad bias": (request(logit_bias='{"a": 1}'), "parameters.logit_bias"),
    "timeout too short": (request(timeout=1), "parameters.timeout"),
    "timeout huge": (request(timeout=HUGE), "parameters.timeout"),
    "priority huge": (request(priority=HUGE), "parameters.priority"),
    "sequence": (request(sequence_id=7), "parameters.sequence_id"),
    "no value": (changed(lambda m: m.parameters["temperature"].SetInParent()), "parameters.temperature"),
    "double out of range": (double("temperature", -0.5), "parameters.temperature"),
    "double NaN": (double("temperature", NAN), "parameters.temperature"),
    "double infinity": (double("temperature", INFINITY), "parameters.temperature"),
    "double for an integer": (double("top_k", 1.5), "parameters.top_k"),
    "uint64 huge": (uint64("top_k", 2**64 - 1), "parameters.top_k"),
    # outputs and what belongs to tensors
    "unknown output": (changed(lambda m: m.outputs.add(name="other")), "outputs[0].name"),
    "output twice": (changed(lambda m: m.outputs.extend([pb.ModelInferRequest.InferRequestedOutputTensor(
        name="text_output")] * 2)), "outputs[1].name"),
    "logprobs not asked for": (changed(lambda m: m.outputs.add(name="logprobs")), "outputs[0].name"),
    "shared memory in": (tensor_parameter("shared_memory_region", "string_param", "x"), "shared_memory_region"),
    "shared memory out": (
        tensor_parameter("shared_memory_region", "string_param", "x", output=True), "outputs[0].parameters",
    ),
    "classification": (tensor_parameter("classification", "int64_param", 3, output=True), "classification"),
    "id too long": (infer_request("a", model="tiny", request_id="x" * 300), "id"),
}  # fmt: skip
UNKNOWN_NAMES: dict[str, tuple[object, str]] = {
    "unknown model": (infer_request("a", model="other"), "'other'"),
    "no model": (infer_request("a", model=""), "''"),
    "long model": (infer_request("a", model="x" * 5000), "served: tiny"),
    "unknown version": (changed(lambda m: m.__setattr__("model_version", "7")), "tiny/versions/7"),
}


@pytest.mark.parametrize("name", [*REFUSED, *UNKNOWN_NAMES])
async def test_refused_by_name(client, name):
    message, named = {**REFUSED, **UNKNOWN_NAMES}[name]
    code = UNKNOWN if name in UNKNOWN_NAMES else INVALID
    error = await client.refusal(message)
    assert (error.code(), named in error.details()) == (code, True), error.details()
    assert len(error.details()) < 2000
    (answer,) = await client.stream(message)
    parameters = answer.infer_response.parameters
    assert (parameters["grpc_status"].string_param, named in answer.error_message) == (code.name, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-request-timeout", "soon"),
        ("x-request-timeout", "0"),
        ("x-request-timeout", "-1"),
        ("x-request-timeout", "nan"),
        ("x-carousel-priority", "high"),
        ("x-carousel-priority", "99999999999"),
        ("x-carousel-deadline", "1e3"),
        ("x-carousel-tenant", "t" * 200),
    ],
)
async def test_bad_metadata_is_refused_by_name(client, key, value):
    error = await client.refusal(request(), metadata=((key, value),))
    assert error.code() is INVALID
    assert error.details().startswith(key)


GOOD: dict[str, object] = {
    "int64": request(max_tokens=2, temperature=0),
    "string": request(temperature="0.0", stop='["x", "y"]', max_tokens="2"),
    "bool": request(ignore_eos=True, max_tokens=2),
    "double": double("temperature", 0.0),
    "uint64": uint64("top_k", 5),
    "column": text_tensor("BYTES", [1, 1], bytes_contents=[b"a"]),
    "raw": raw([struct.pack("<I", 1) + b"a"]),
    "raw half": raw_number("FP16", struct.pack("<e", 0.5)),
    "no sequence": request(sequence_id=0),
    "unknown fields": request().SerializeToString() + b"\xf8\x3f\x01",
}


@pytest.mark.parametrize("name", GOOD)
async def test_taken(client, name):
    response = await client.infer(GOOD[name])
    assert response.model_version == "1"
    assert [answer.error_message for answer in await client.stream(GOOD[name])][:1] == [""]


async def test_a_good_neighbour_in_the_same_batch_is_unharmed(tiny, client):
    """kserve#3957: one bad request hangs the rest. Here all of them at once, on the neighbour's own stream."""
    good = infer_request("good", model="tiny", request_id="good", max_tokens=200, temperature=0, ignore_eos=True)
    alone = texts(await client.infer(good))
    tiny.engine.runner.step_s = 0.005
    stream = client.open_stream()
    await stream.send(good)
    first = await stream.next()
    bad = [message for message, _ in REFUSED.values()]
    for message in bad:
        await stream.send(message)
    refused = await asyncio.gather(*(client.refusal(message) for message in bad))
    assert {error.code() for error in refused} == {INVALID}
    await stream.close()
    answers = [first] + [answer async for answer in stream]
    tiny.engine.runner.step_s = 0.0
    assert sum(bool(answer.error_message) for answer in answers) == len(bad)
    pieces = [texts(answer.infer_response)[0] for answer in answers if not answer.error_message]
    assert ["".join(pieces)] == alone
    stats = tiny.engine.stats()
    assert stats.admitted == sum(stats.finished.values())
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


async def test_damaged_messages(tiny, client):
    """Good messages of every shape with bytes flipped, cut, doubled: taken or refused, never anything else."""
    random = Random(5)
    good = [message for message, _ in REFUSED.values()] + list(GOOD.values())
    seeds = [message if isinstance(message, bytes) else message.SerializeToString() for message in good]
    seeds = [seed for seed in seeds if len(seed) < 500]
    for _ in range(12):
        messages = []
        for seed in random.choices(seeds, k=50):
            damaged = bytearray(seed)
            for _ in range(random.randint(1, 4)):
                place = random.randrange(len(damaged) + 1)
                kind = random.randrange(4)
                if kind == 0:
                    damaged[place:place] = random.randbytes(random.randint(1, 4))
                elif kind == 1:
                    del damaged[place : place + random.randint(1, 8)]
                elif kind == 2 and place < len(damaged):
                    damaged[place] ^= 1 << random.randrange(8)
                else:
                    damaged += damaged[place : place + 40]
            messages.append(bytes(damaged))
        # A flipped bit may well ask for hundreds of tokens: that is no error.
        done = await asyncio.gather(*(client.infer(m) for m in messages), return_exceptions=True)
        for message, result in zip(messages, done, strict=True):
            if isinstance(result, grpc.aio.AioRpcError):
                assert result.code() in (INVALID, UNKNOWN), (message, result.code(), result.details())
        answers = await client.stream(*messages)
        codes = {a.infer_response.parameters["grpc_status"].string_param for a in answers if a.error_message}
        assert codes <= {INVALID.name, UNKNOWN.name}, codes
    assert tiny.engine.alive


async def test_other_methods_refuse_what_is_no_message_too(client):
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex", "RepositoryModelLoad"):
        call = client.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\x0a\x02\xff\xfe")
        assert caught.value.code() is INVALID, method
    call = client.channel.unary_unary("/inference.GRPCInferenceService/NoSuchMethod")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
