"""The schemas of ``/openapi.json`` for KServe's protocols, and for health; see ``openapi_schemas``."""

from __future__ import annotations

from carousel.openapi_schemas import (
    OPTIONS,
    PARAMETERS,
    QUEUE_TIME,
    SAMPLING,
    Schema,
    array,
    boolean,
    nullable,
    obj,
    optional,
    ref,
    text,
)
from carousel.protocols import common
from carousel.telemetry.statistics import KINDS

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TOKEN: dict[str, Schema] = {
    "id": _COUNT,
    "text": text(),
    "logprob": {"type": ["number", "null"]},
    "special": boolean(),
    "top": array(obj({"id": _COUNT, "text": text(), "logprob": {"type": ["number", "null"]}})),
}
_TOKENS = array(obj(_TOKEN, ("id", "text", "logprob", "special")))
_TOKEN_PROMPT: Schema = {"anyOf": [text(), array(_COUNT, minItems=1)]}
# a number or boolean may be a string here, and a list JSON in a string, because gRPC and KServe know scalars only
_LENIENT: dict[str, Schema] = {
    name: {"anyOf": [schema, {"type": "string"}, {"type": "null"}]} for name, schema in {**SAMPLING, **OPTIONS}.items()
}
_DATATYPES = (
    "BYTES", "BOOL", "FP16", "FP32", "FP64",
    "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64",
)  # fmt: skip
_INSTANCE = obj(
    optional(
        {
            **dict.fromkeys(("prompt", "text", "text_input"), _TOKEN_PROMPT),
            "messages": array(ref("Message"), minItems=1),
            "parameters": ref("Parameters"),
        }
    ),
    description="One of prompt, text, text_input (text or token ids) and messages, with its own parameters.",
)
_REASON: Schema = {"enum": ["eos", "stop", "length", "cancelled", "timeout"]}
_V1_USAGE = obj(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"), _COUNT)
    | {"queue_time": QUEUE_TIME},
    ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"),
)
_TENSOR = {"name": text(), "datatype": {"enum": list(_DATATYPES)}, "shape": array(_COUNT)}
_SHAPED = {"name": text(), "datatype": text(), "shape": array({"type": "integer"})}
_CONFIGURED = array(obj({"name": text(), "data_type": text(), "dims": array({"type": "integer"})}))

V1: dict[str, Schema] = {
    "Parameters": obj(PARAMETERS, description="Sampling and options of one or all prompts."),
    "PredictRequest": obj(
        {
            "instances": array({"anyOf": [text(), _INSTANCE]}, minItems=1, maxItems=common.MAX_PROMPTS),
            "parameters": nullable(ref("Parameters")),
            "stream": nullable(boolean("Server-sent events, the last one `[DONE]`.")),
        },
        ("instances",),
    ),
    "PredictAnswer": obj(
        {
            "predictions": array(
                obj(
                    {"text": text(), "finish_reason": _REASON, "usage": _V1_USAGE, "logprobs": _TOKENS},
                    ("text", "finish_reason", "usage"),
                )
            )
        },
        ("predictions",),
    ),
    "PredictEvent": obj(
        {
            "predictions": array(
                obj(
                    {
                        "index": _COUNT, "text": text(), "finish_reason": _REASON, "usage": _V1_USAGE,
                        "logprobs": _TOKENS,
                    },
                    ("index", "text"),
                )
            )
        },
        ("predictions",),
        "What is new of one instance; the last event of an instance has finish_reason and usage.",
    ),
    "Error": obj({"error": text("Names field, value and what is allowed.")}, ("error",)),
}  # fmt: skip

V2: dict[str, Schema] = {
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": nullable(text(maxLength=256)),
            "inputs": array(
                {
                    "type": "object",
                    "required": ["name", "datatype", "shape"],
                    "properties": {
                        **_TENSOR,
                        "data": {"type": ["array", "null"], "description": "Left out when the tensor is binary."},
                        "parameters": {"type": ["object", "null"]},
                    },
                },
                "text_input, BYTES of shape [B] or [B, 1], and sampling fields as further tensors.",
                minItems=1,
            ),
            "parameters": nullable(
                {
                    "type": "object",
                    "properties": {
                        **_LENIENT,
                        "timeout": {"description": "Microseconds, as Triton has it; timeout_seconds takes seconds."},
                        "timeout_seconds": _LENIENT["timeout"],
                        "stream": {"description": "False: generate_stream streams."},
                        "binary_data_output": {"description": "Whether the answer's tensors are binary."},
                    },
                }
            ),
            "outputs": nullable(
                array({"type": "object", "required": ["name"], "properties": {"name": text()}})
            ),
        },
    },
    "InferAnswer": {
        "type": "object",
        "required": ["id", "model_name", "model_version", "outputs"],
        "properties": {
            "id": text(),
            "model_name": text(),
            "model_version": text(),
            "outputs": array(
                {"type": "object", "required": ["name", "datatype", "shape"], "properties": {**_TENSOR, "data": {}}}
            ),
        },
    },
    "GenerateRequest": obj(
        {
            "text_input": text(),
            "parameters": nullable(
                obj(
                    {
                        **PARAMETERS,
                        "details": nullable(boolean("Tokens and the reason in the answer.")),
                        "stream": {"enum": [False, None]},
                    }
                )
            ),
        },
        ("text_input",),
    ),
    "GenerateStreamRequest": obj(
        {
            "text_input": text(),
            "parameters": nullable(
                obj(
                    {
                        **PARAMETERS,
                        "details": nullable(boolean("An event per token, with the token.")),
                        "stream": {"enum": [True, None]},
                    }
                )
            ),
        },
        ("text_input",),
    ),
    "GenerateAnswer": obj(
        {
            "text_output": text(),
            "model_name": text(),
            "model_version": text(),
            "details": obj(
                {"finish_reason": text(), "logprobs": _TOKENS, "queue_time": QUEUE_TIME}, ("finish_reason", "logprobs")
            ),
        },
        ("text_output", "model_name", "model_version"),
    ),
    "GenerateEvent": obj(
        {
            "text_output": text(),
            "model_name": text(),
            "model_version": text(),
            "details": obj(
                {"finish_reason": nullable(text()), "token": obj(_TOKEN), "queue_time": QUEUE_TIME}, ("finish_reason",)
            ),
        },
        ("text_output", "model_name", "model_version"),
        "The last event has details.finish_reason and details.queue_time.",
    ),
    "ServerMetadata": obj(
        {"name": text(), "version": text(), "extensions": array(text())}, ("name", "version", "extensions")
    ),
    "ModelMetadata": obj(
        {
            "name": text(),
            "versions": array(text()),
            "platform": text(),
            "inputs": array(obj(_SHAPED, tuple(_SHAPED))),
            "outputs": array(obj(_SHAPED, tuple(_SHAPED))),
        },
        ("name", "versions", "platform", "inputs", "outputs"),
    ),
    "ModelConfig": obj(
        {
            "name": text(), "platform": text(), "backend": text(), "max_batch_size": _COUNT,
            "input": _CONFIGURED, "output": _CONFIGURED,
        },
        ("name", "platform", "backend", "max_batch_size", "input", "output"),
        "As Triton's model configuration extension has it.",
    ),
    "Statistics": obj(
        {
            "model_stats": array(
                obj(
                    {
                        "name": text(), "version": text(),
                        **dict.fromkeys(("last_inference", "inference_count", "execution_count"), _COUNT),
                        "inference_stats": obj(
                            dict.fromkeys(KINDS, obj({"count": _COUNT, "ns": _COUNT}, ("count", "ns"))), KINDS
                        ),
                        "batch_stats": array({}),
                    },
                    ("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats"),
                )
            )
        },
        ("model_stats",),
        "As Triton's statistics extension has it: sums since the start, ns in nanoseconds.",
    ),
    "ModelReady": obj({"name": text(), "ready": {"const": True}}, ("name", "ready")),
    "ModelNames": obj({"models": array(text())}, ("models",)),
    "IndexRequest": obj({"ready": nullable(boolean("Only models that are ready."))}),
    "Index": array(
        obj({"name": text(), "version": text(), "state": text(), "reason": text()}, ("name", "version", "state"))
    ),
    "Loaded": obj({"name": text(), "load": {"const": True}}, ("name", "load")),
    "Unloaded": obj({"name": text(), "unload": {"const": True}}, ("name", "unload")),
}  # fmt: skip

HEALTH: dict[str, Schema] = {
    "Alive": obj({"status": {"const": "alive"}}, ("status",)),
    "Live": obj({"live": {"const": True}}, ("live",)),
    "Ready": obj({"ready": {"const": True}}, ("ready",)),
    "State": obj(
        {
            "status": {"enum": ["alive", "dead", "ready", "not ready", "started", "not started"]},
            "state": {"enum": ["loading", "ready", "leaving", "draining", "stopped", "failed"]},
            "reason": nullable(text()),
        },
        ("status", "state"),
    ),
    "Load": obj(
        {
            "server_load": {**_COUNT, "description": "Requests in the server, running or waiting."},
            **dict.fromkeys(
                ("requests_running", "requests_waiting", "requests_admitted", "sequences_running", "sequence_slots"),
                _COUNT,
            ),
            **dict.fromkeys(
                ("tokens_running", "tokens_waiting"),
                _COUNT,
            ),
            **dict.fromkeys(("oldest_wait_seconds", "queue_seconds", "kv_cache_usage"), _NUMBER),
            "ready": boolean(),
            "draining": boolean(),
        },
        ("server_load",),
    ),
    "TenantUsage": obj(
        {
            **dict.fromkeys(("model", "since", "until", "currency"), text()),
            "price_per_node_hour": _NUMBER,
            "tenants": {"type": "array", "items": {"type": "object", "required": ["tenant", "requests"]}},
            "total": {"type": "object", "required": ["requests"]},
            "engine": {"type": "object", "description": "The whole node, not shown to who has a tenant's credential."},
        },
        ("model", "since", "until", "tenants", "total"),
    ),
    "Timeline": obj(
        {
            "model": text(),
            "now": _NUMBER,
            **dict.fromkeys(("slots", "blocks"), _COUNT),
            "settings": {"type": "object"},
            "columns": {"type": "array", "items": text()},
            "steps": {"type": "array", "items": {"type": "array", "items": {"type": ["number", "string"]}}},
        },
        ("now", "slots", "blocks", "settings", "columns", "steps"),
    ),
    "Version": {
        "type": "object",
        "required": ["version", "model", "model_version"],
        "additionalProperties": {"type": ["string", "null"]},
    },
}
