"""V2 requests and responses between KServe's types and the protocol's neutral tensors, for REST and gRPC alike.

KServe's own parsing answers a missing ``id`` with 500, refuses lists in ``parameters``, and loses gRPC parameters of
types that its copy of the protocol does not know. Bodies are therefore checked here, and carried in KServe's
``InferRequest`` and ``InferResponse``, which do the binary encodings.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping
from typing import Any

from google.protobuf import unknown_fields  # type: ignore[import-untyped]
from kserve import InferInput, InferOutput, InferRequest, InferResponse
from kserve.errors import InvalidInput
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.infer_type import RequestedOutput

from carousel.engine.errors import InvalidRequest
from carousel.protocols.common import decode_body
from carousel.protocols.fields import refuse_unknown
from carousel.protocols.v2 import V2Request, V2Tensor

_BODY = ("id", "model_name", "model_version", "parameters", "inputs", "outputs")
_TENSOR = ("name", "shape", "datatype", "parameters", "data")
_MAX_TENSORS = 64
BINARY_HEADER = "inference-header-content-length"
_DOUBLE_PARAM, _UINT64_PARAM = 4, 5  # field numbers in the Open Inference Protocol's InferParameter
# Where each datatype's elements stand in a gRPC message without raw contents; FP16 has no such place.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    "FP16": "",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(field, value, "an object")
    return value


def _list_of(value: object, field: str, most: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(field, value, "a list")
    if most is not None and len(value) > most:
        raise InvalidRequest(field, f"{len(value)} items", f"a list of at most {most}")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "a string")
    return value


def _count(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(field, value, "an integer >= 0")
    return value


def _parameters(value: object, field: str) -> dict[str, Any]:
    return {} if value is None else dict(_object(value, field))


def _switch(parameters: dict[str, Any], name: str, field: str, default: bool = False) -> bool:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{field}.{name}", value, "true or false")
    return default if value is None else value


def _only(value: dict[str, Any], field: str, known: tuple[str, ...]) -> dict[str, Any]:
    """``value``, if it has no fields but ``known``."""
    for name in value.keys() - set(known):
        refuse_unknown(field, name, value[name], known)
    return value


def request_from_rest(raw: bytes, headers: Mapping[str, str], model_name: str, model_version: str) -> InferRequest:
    """The body of ``POST /v2/models/{m}/infer``, with or without binary tensors behind the JSON.

    Raises:
        InvalidRequest: naming the field, ``body`` for what is no JSON at all.
    """
    header = headers.get(BINARY_HEADER)
    split = len(raw)
    if header is not None:
        if not header.isascii() or not header.isdigit() or len(header) > 12 or int(header) > len(raw):
            raise InvalidRequest("Inference-Header-Content-Length", header, f"the JSON's length, at most {len(raw)}")
        split = int(header)
    body = _only(_object(decode_body(raw[:split]), "body"), "", _BODY)
    binary = _Binary(memoryview(raw)[split:] if header is not None else None)
    inputs = [
        _input_from_rest(_object(item, f"inputs[{i}]"), f"inputs[{i}]", binary)
        for i, item in enumerate(_list_of(body.get("inputs"), "inputs", _MAX_TENSORS))
    ]
    binary.finish()
    parameters = _parameters(body.get("parameters"), "parameters")
    all_binary = _switch(parameters, "binary_data_output", "parameters")
    given_outputs = body.get("outputs")
    outputs = [
        _output_from_rest(item, f"outputs[{i}]", all_binary)
        for i, item in enumerate(_list_of([] if given_outputs is None else given_outputs, "outputs", _MAX_TENSORS))
    ]
    given = body.get("id")
    return InferRequest(
        model_name=model_name,
        infer_inputs=inputs,
        request_id=None if given is None else _text(given, "id"),
        parameters=parameters,
        request_outputs=outputs or None,
        model_version=model_version,
    )


def _output_from_rest(item: object, field: str, all_binary: bool) -> RequestedOutput:
    output = _only(_object(item, field), field, ("name", "parameters"))
    wanted = _only(
        _parameters(output.get("parameters"), f"{field}.parameters"), f"{field}.parameters", ("binary_data",)
    )
    binary = _switch(wanted, "binary_data", f"{field}.parameters", all_binary)
    return RequestedOutput(_text(output.get("name"), f"{field}.name"), {"binary_data": binary})


class _Binary:
    """The bytes behind the JSON, handed out in order."""

    def __init__(self, rest: memoryview | None) -> None:
        self.rest = rest

    def take(self, size: int, field: str) -> bytes:
        if self.rest is None:
            raise InvalidRequest(field, size, "nothing without an Inference-Header-Content-Length header")
        if size > len(self.rest):
            raise InvalidRequest(field, size, f"at most the {len(self.rest)} bytes that are left of the body")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return bytes(taken)

    def finish(self) -> None:
        if self.rest:
            raise InvalidRequest("body", f"{len(self.rest)} bytes too many", "as many as the inputs' binary_data_size")


def _input_from_rest(item: dict[str, Any], field: str, binary: _Binary) -> InferInput:
    _only(item, field, _TENSOR)
    name = _text(item.get("name"), f"{field}.name")
    shape = [_count(size, f"{field}.shape") for size in _list_of(item.get("shape"), f"{field}.shape", _MAX_TENSORS)]
    datatype = _text(item.get("datatype"), f"{field}.datatype")
    parameters = _parameters(item.get("parameters"), f"{field}.parameters")
    data = item.get("data")
    size = parameters.get("binary_data_size")
    if size is not None:
        if data is not None:
            raise InvalidRequest(f"{field}.data", data, "nothing beside binary_data_size")
        result = InferInput(name, shape, datatype, parameters=parameters)
        result._raw_data = binary.take(_count(size, f"{field}.parameters.binary_data_size"), f"{field}.parameters")
        return result
    return InferInput(name, shape, datatype, data=_list_of(data, f"{field}.data"), parameters=parameters)


def request_from_grpc(message: pb.ModelInferRequest) -> InferRequest:
    """A gRPC request, with parameters as plain values.

    Raises:
        InvalidRequest: for inputs that contradict themselves.
    """
    raw_count = len(message.raw_input_contents)
    if raw_count and raw_count != len(message.inputs):
        raise InvalidRequest("raw_input_contents", raw_count, f"as many as there are inputs ({len(message.inputs)})")
    for index, item in enumerate(message.inputs):
        _check_contents(item, f"inputs[{index}]", bool(raw_count))
    request = InferRequest.from_grpc(message)
    request.id = message.id or None
    request.parameters = parameters_from_grpc(message.parameters)
    for index, item in enumerate(message.inputs):
        request.inputs[index].parameters = parameters_from_grpc(item.parameters, f"inputs[{index}].parameters")
    for index, output in enumerate(message.outputs):
        field = f"outputs[{index}].parameters"
        request.request_outputs[index].parameters = parameters_from_grpc(output.parameters, field)
    return request


def _check_contents(item: Any, field: str, raw: bool) -> None:
    """Refuse elements that are not in the one place where this datatype's belong: KServe would not see them."""
    if item.datatype not in _CONTENTS:
        raise InvalidRequest(f"{field}.datatype", item.datatype, ", ".join(_CONTENTS))
    if raw:
        if item.HasField("contents"):
            raise InvalidRequest(f"{field}.contents", "given", "nothing beside raw_input_contents")
        return
    own = _CONTENTS[item.datatype]
    for given, _ in item.contents.ListFields():
        if given.name != own:
            allowed = f"{own}, as datatype {item.datatype} says" if own else f"raw_input_contents for {item.datatype}"
            raise InvalidRequest(f"{field}.contents", given.name, allowed)


def parameters_from_grpc(parameters: Mapping[str, pb.InferParameter], field: str = "parameters") -> dict[str, Any]:
    """Plain values of a ``map<string, InferParameter>``.

    KServe's copy of the protocol has no ``double_param`` and ``uint64_param``, which Triton's clients send for every
    float: they arrive as unknown fields, and are read from there.

    Raises:
        InvalidRequest: a parameter without a value.
    """
    return {name: _parameter_value(parameter, f"{field}.{name}") for name, parameter in parameters.items()}


def _parameter_value(parameter: pb.InferParameter, field: str) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is not None:
        return getattr(parameter, kind)
    for unknown in unknown_fields.UnknownFieldSet(parameter):
        if unknown.field_number == _DOUBLE_PARAM and unknown.wire_type == 1:
            return struct.unpack("<d", struct.pack("<Q", unknown.data))[0]
        if unknown.field_number == _UINT64_PARAM and unknown.wire_type == 0:
            return int(unknown.data)
    allowed = "one of bool_param, int64_param, string_param, double_param, uint64_param"
    raise InvalidRequest(field, None, allowed)


def neutral_request(request: InferRequest) -> V2Request:
    """What ``protocols.v2`` reads. A request without an id gets one, and keeps it for the response.

    Raises:
        InvalidRequest: for binary data that is not of the datatype and shape it claims.
    """
    if not request.id:
        request.id = str(uuid.uuid4())
    parameters = request.parameters
    for kind, tensors in (("inputs", request.inputs), ("outputs", request.request_outputs or [])):
        for index, tensor in enumerate(tensors):
            _refuse_extensions(tensor.parameters or {}, f"{kind}[{index}].parameters")
    return V2Request(
        inputs=[_neutral_tensor(item) for item in request.inputs],
        parameters={name: value for name, value in (parameters or {}).items() if name != "binary_data_output"},
        id=request.id,
        outputs=[output.name for output in request.request_outputs or []],
        model_name=request.model_name,
    )


def _refuse_extensions(parameters: Mapping[str, Any], field: str) -> None:
    """What Triton's clients can ask of a tensor and this server does not do: an answer without it would be wrong."""
    for name, value in parameters.items():
        if name.startswith("shared_memory_"):
            raise InvalidRequest(f"{field}.{name}", value, "nothing: shared memory is not supported")
        if name == "classification" and value:
            raise InvalidRequest(f"{field}.{name}", value, "nothing: no output is a classification")


def _neutral_tensor(item: InferInput) -> V2Tensor:
    data: Any = item.data
    if item._raw_data is not None:
        try:
            data = item.as_numpy().reshape(-1).tolist()
        except (InvalidInput, ValueError, TypeError, struct.error, OverflowError):
            size = f"{len(item._raw_data)} bytes of {item.datatype} as {item.shape}"
            raise InvalidRequest(f"inputs[{item.name}]", size, "binary data of the given datatype and shape") from None
    elif item.datatype == "BYTES" and isinstance(data, list):
        data = [bytes(value) if isinstance(value, (bytearray, memoryview)) else value for value in data]
    parameters = {name: value for name, value in (item.parameters or {}).items() if name != "binary_data_size"}
    return V2Tensor(name=item.name, datatype=item.datatype, shape=list(item.shape), data=data, parameters=parameters)


def kserve_response(
    request: InferRequest, tensors: list[V2Tensor], response_id: str, model_version: str
) -> InferResponse:
    """The answer to ``request``: binary where it asked for binary, with its id and the model's version."""
    outputs = [
        InferOutput(item.name, list(item.shape), item.datatype, data=item.data, parameters=item.parameters or None)
        for item in tensors
    ]
    names = {item.name for item in tensors}
    requested = [output for output in request.request_outputs or [] if output.name in names]
    return InferResponse(
        response_id=response_id,
        model_name=request.model_name,
        model_version=model_version,
        infer_outputs=outputs,
        from_grpc=request.from_grpc,
        use_binary_outputs=bool(request.use_binary_outputs),
        requested_outputs=None if request.from_grpc else requested or None,
    )
