"""Triton's gRPC messages that KServe's copy of the protocol lacks: streams, configuration, statistics, repository.

Two copies of one protobuf package cannot live in a process, and KServe's (``inference``) is here already. These are
therefore declared at run time in a package of our own. On the wire only field numbers count, and methods are found by
their path, so Triton's clients cannot tell the difference.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from carousel.engine.errors import InvalidRequest
from carousel.proto_messages import Fields, declare
from carousel.telemetry.statistics import KINDS

# Triton's enums are int32 on the wire.
_MESSAGES: dict[str, Fields] = {
    "StreamResponse": (("error_message", 1, "string"), ("infer_response", 2, ".inference.ModelInferResponse")),
    "ConfigRequest": (("name", 1, "string"), ("version", 2, "string")),
    "InputConfig": (("name", 1, "string"), ("data_type", 2, "int32"), ("dims", 4, "int64*")),
    "OutputConfig": (("name", 1, "string"), ("data_type", 2, "int32"), ("dims", 3, "int64*")),
    "TransactionPolicy": (("decoupled", 1, "bool"),),
    "Config": (
        ("name", 1, "string"),
        ("platform", 2, "string"),
        ("max_batch_size", 4, "int32"),
        ("input", 5, "InputConfig*"),
        ("output", 6, "OutputConfig*"),
        ("backend", 17, "string"),
        ("model_transaction_policy", 19, "TransactionPolicy"),
    ),
    "ConfigResponse": (("config", 1, "Config"),),
    "StatisticsRequest": (("name", 1, "string"), ("version", 2, "string")),
    "Duration": (("count", 1, "uint64"), ("ns", 2, "uint64")),
    "InferStatistics": tuple((kind, number, "Duration") for number, kind in enumerate(KINDS, start=1)),
    "BatchStatistics": (("batch_size", 1, "uint64"),),
    "ModelStatistics": (
        ("name", 1, "string"),
        ("version", 2, "string"),
        ("last_inference", 3, "uint64"),
        ("inference_count", 4, "uint64"),
        ("execution_count", 5, "uint64"),
        ("inference_stats", 6, "InferStatistics"),
        ("batch_stats", 7, "BatchStatistics*"),
    ),
    "StatisticsResponse": (("model_stats", 1, "ModelStatistics*"),),
    "IndexRequest": (("repository_name", 1, "string"), ("ready", 2, "bool")),
    "ModelIndex": (("name", 1, "string"), ("version", 2, "string"), ("state", 3, "string"), ("reason", 4, "string")),
    "IndexResponse": (("models", 1, "ModelIndex*"),),
}

#: Triton's ``DataType``.
DATA_TYPES = {
    "TYPE_INVALID": 0,
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": 13,
    "TYPE_BF16": 14,
}


_classes = declare("carousel.triton", _MESSAGES, pool=descriptor_pool.Default(), dependencies=(pb.DESCRIPTOR.name,))
StreamResponse: Any = _classes["StreamResponse"]
ConfigRequest: Any = _classes["ConfigRequest"]
ConfigResponse: Any = _classes["ConfigResponse"]
StatisticsRequest: Any = _classes["StatisticsRequest"]
StatisticsResponse: Any = _classes["StatisticsResponse"]
IndexRequest: Any = _classes["IndexRequest"]
IndexResponse: Any = _classes["IndexResponse"]


def decode(kind: Any, raw: bytes) -> Any:
    """A message of class ``kind`` out of its bytes.

    Raises:
        InvalidRequest: they are none; a ``string`` field that is not UTF-8 counts as well.
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        shown = f"{len(raw)} bytes"
        allowed = f"a serialised {kind.DESCRIPTOR.name} (its strings in valid UTF-8)"
        raise InvalidRequest("message", shown, allowed) from None


def config_response(config: dict[str, Any], decoupled: bool) -> Any:
    """The answer to ModelConfig.

    Args:
        config: ``CarouselDataPlane.model_config``'s.
        decoupled: whether a request may get more responses than one.
    """

    def typed(tensor: dict[str, Any]) -> dict[str, Any]:
        return {**tensor, "data_type": DATA_TYPES[tensor["data_type"]]}

    fields = {**config, "input": [typed(item) for item in config["input"]]}
    fields["output"] = [typed(item) for item in config["output"]]
    return ConfigResponse(config={**fields, "model_transaction_policy": {"decoupled": decoupled}})
