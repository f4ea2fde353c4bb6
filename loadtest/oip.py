"""The Open Inference Protocol's gRPC messages, declared here.

KServe's package and Triton's both register the messages' full names, so that a process can hold only one of them, and
each pulls in a serving framework. A load generator needs neither: on the wire only field numbers count, and methods are
found by their path. Numbers are those of the protocol's ``grpc_predict_v2.proto``.
"""

from __future__ import annotations

from typing import Any

from carousel.proto_messages import Fields, declare

_MESSAGES: dict[str, Fields] = {
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

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

_classes = declare("carousel.loadtest", _MESSAGES, one_of=("Parameter",))
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
