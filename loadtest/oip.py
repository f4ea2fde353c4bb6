"""The Open Inference Protocol's gRPC messages, declared here.

KServe's package and Triton's both register the messages' full names, so that a process can hold only one of them, and
each pulls in a serving framework. A load generator needs neither: on the wire only field numbers count, and methods are
found by their path. Numbers are those of the protocol's ``grpc_predict_v2.proto``.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

_PACKAGE = "carousel.loadtest"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "double": _FIELD.TYPE_DOUBLE,
}
# name: (field, number, type); "*" repeats, "%" is a map from strings. Other types are messages.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Parameter": (("bool_param", 1, "bool"), ("int64_param", 2, "int64"), ("string_param", 3, "string")),
    "Contents": (("int_contents", 2, "int32*"), ("bytes_contents", 8, "bytes*")),
    "Tensor": (
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "int64*"),
        ("contents", 5, "Contents"),
    ),
    "InferRequest": (
        ("model_name", 1, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "Parameter%"),
        ("inputs", 5, "Tensor*"),
    ),
    "InferResponse": (
        ("model_name", 1, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "Parameter%"),
        ("outputs", 5, "Tensor*"),
        ("raw_output_contents", 6, "bytes*"),
    ),
    "StreamResponse": (("error_message", 1, "string"), ("infer_response", 2, "InferResponse")),
}
_ONE_OF = "Parameter"  # its fields are the choices of a oneof

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def _declare() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="carousel/loadtest.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == _ONE_OF:
            message.oneof_decl.add(name="choice")
        for field, number, kind in fields:
            base = kind.rstrip("*%")
            declared = message.field.add(name=field, number=number, label=_FIELD.LABEL_OPTIONAL)
            if base in _SCALARS:
                declared.type = _SCALARS[base]
            else:
                declared.type, declared.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{base}"
            if name == _ONE_OF:
                declared.oneof_index = 0
            if kind != base:
                declared.label = _FIELD.LABEL_REPEATED
            if kind.endswith("%"):
                _declare_map(message, declared, base)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in _MESSAGES}


def _declare_map(message: Any, field: Any, value: str) -> None:
    """A map is a repeated message of keys and values, whose name follows from the field's."""
    entry = message.nested_type.add(name=f"{field.name.capitalize()}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_MESSAGE, type_name=f".{_PACKAGE}.{value}"
    )
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


_classes = _declare()
InferRequest: Any = _classes["InferRequest"]
InferResponse: Any = _classes["InferResponse"]
StreamResponse: Any = _classes["StreamResponse"]


def infer_request(model: str, prompt: str, parameters: dict[str, bool | int | str], request_id: str = "") -> Any:
    """A request with one prompt."""
    request = InferRequest(model_name=model, id=request_id)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(prompt.encode())
    for name, value in parameters.items():
        slot = request.parameters[name]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, int):
            slot.int64_param = value
        else:
            slot.string_param = value
    return request
