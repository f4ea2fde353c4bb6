"""The messages of KEDA's external scaler (``externalscaler.proto``), declared at run time in a pool of their own.

Field names and numbers are the protocol's. A pool of their own, because the default pool of a process holds one package
of that name only, and a test's client brings the generated one.
"""

from __future__ import annotations

from typing import Any

from carousel.proto_messages import Fields, declare

SERVICE = "externalscaler.ExternalScaler"

_MESSAGES: dict[str, Fields] = {
    "ScaledObjectRef": (("name", 1, "string"), ("namespace", 2, "string"), ("scalerMetadata", 3, "string%")),
    "IsActiveResponse": (("result", 1, "bool"),),
    "MetricSpec": (("metricName", 1, "string"), ("targetSize", 2, "int64"), ("targetSizeFloat", 3, "double")),
    "GetMetricSpecResponse": (("metricSpecs", 1, "MetricSpec*"),),
    "GetMetricsRequest": (("scaledObjectRef", 1, "ScaledObjectRef"), ("metricName", 2, "string")),
    "MetricValue": (("metricName", 1, "string"), ("metricValue", 2, "int64"), ("metricValueFloat", 3, "double")),
    "GetMetricsResponse": (("metricValues", 1, "MetricValue*"),),
}

_classes = declare(SERVICE.partition(".")[0], _MESSAGES)
ScaledObjectRef: Any = _classes["ScaledObjectRef"]
IsActiveResponse: Any = _classes["IsActiveResponse"]
MetricSpec: Any = _classes["MetricSpec"]
GetMetricSpecResponse: Any = _classes["GetMetricSpecResponse"]
GetMetricsRequest: Any = _classes["GetMetricsRequest"]
MetricValue: Any = _classes["MetricValue"]
GetMetricsResponse: Any = _classes["GetMetricsResponse"]
