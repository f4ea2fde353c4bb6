"""The messages of KEDA's external scaler (``externalscaler.proto``), declared at run time in a pool of their own.

Field names and numbers are the protocol's. A pool of their own, because the default pool of a process holds one package
of that name only, and a test's client brings the generated one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

SERVICE = "externalscaler.ExternalScaler"

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "int64": _FIELD.TYPE_INT64,
    "double": _FIELD.TYPE_DOUBLE,
}
# name: (field, number, type); a type that is no scalar is a message; "*" repeats; "map" maps strings to strings.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ScaledObjectRef": (("name", 1, "string"), ("namespace", 2, "string"), ("scalerMetadata", 3, "map")),
    "IsActiveResponse": (("result", 1, "bool"),),
    "MetricSpec": (("metricName", 1, "string"), ("targetSize", 2, "int64"), ("targetSizeFloat", 3, "double")),
    "GetMetricSpecResponse": (("metricSpecs", 1, "MetricSpec*"),),
    "GetMetricsRequest": (("scaledObjectRef", 1, "ScaledObjectRef"), ("metricName", 2, "string")),
    "MetricValue": (("metricName", 1, "string"), ("metricValue", 2, "int64"), ("metricValueFloat", 3, "double")),
    "GetMetricsResponse": (("metricValues", 1, "MetricValue*"),),
}


def _add_field(message: Any, package: str, field: str, number: int, kind: str) -> None:
    label = _FIELD.LABEL_REPEATED if kind.endswith("*") or kind == "map" else _FIELD.LABEL_OPTIONAL
    declared = message.field.add(name=field, number=number, label=label)
    if kind == "map":
        entry_name = field[0].upper() + field[1:] + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for name, position in (("key", 1), ("value", 2)):
            entry.field.add(name=name, number=position, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        declared.type = _FIELD.TYPE_MESSAGE
        declared.type_name = f".{package}.{message.name}.{entry_name}"
    elif kind.rstrip("*") in _SCALARS:
        declared.type = _SCALARS[kind.rstrip("*")]
    else:
        declared.type = _FIELD.TYPE_MESSAGE
        declared.type_name = f".{package}.{kind.rstrip('*')}"


def _declare() -> dict[str, Any]:
    package = SERVICE.partition(".")[0]
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package=package, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            _add_field(message, package, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _MESSAGES
    }


_classes = _declare()
ScaledObjectRef: Any = _classes["ScaledObjectRef"]
IsActiveResponse: Any = _classes["IsActiveResponse"]
MetricSpec: Any = _classes["MetricSpec"]
GetMetricSpecResponse: Any = _classes["GetMetricSpecResponse"]
GetMetricsRequest: Any = _classes["GetMetricsRequest"]
MetricValue: Any = _classes["MetricValue"]
GetMetricsResponse: Any = _classes["GetMetricsResponse"]
