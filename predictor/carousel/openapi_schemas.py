"""The schemas of ``/openapi.json``: what goes in and out, protocol by protocol.

Requests refuse what they do not know, and a null counts as absent. Where the protocols' own tables list names
(sampling fields, unsupported fields), the schemas are made from those tables, so that they cannot drift apart.
"""

from __future__ import annotations

from typing import Any

from carousel.engine.request import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from carousel.protocols import common, openai_common, tokenize
from carousel.protocols.messages import MAX_MESSAGES

Schema = dict[str, Any]

_INT32 = 2**31 - 1


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def text(description: str = "", **more: Any) -> Schema:
    return _described({"type": "string", **more}, description)


def integer(low: int, high: int, description: str = "") -> Schema:
    return _described({"type": "integer", "minimum": low, "maximum": high}, description)


def number(low: float, high: float, description: str = "") -> Schema:
    return _described({"type": "number", "minimum": low, "maximum": high}, description)


def boolean(description: str = "") -> Schema:
    return _described({"type": "boolean"}, description)


def array(items: Schema, description: str = "", **more: Any) -> Schema:
    return _described({"type": "array", "items": items, **more}, description)


def obj(properties: dict[str, Schema], required: tuple[str, ...] = (), description: str = "", **more: Any) -> Schema:
    """An object that holds nothing else."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    if required:
        schema["required"] = list(required)
    return _described(schema, description)


def nullable(schema: Schema) -> Schema:
    """``schema`` or null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    described = {"description": schema["description"]} if "description" in schema else {}
    return {**described, "anyOf": [{k: v for k, v in schema.items() if k != "description"}, {"type": "null"}]}


def optional(properties: dict[str, Schema]) -> dict[str, Schema]:
    """The same properties, each of which may be null, which is as good as absent."""
    return {name: nullable(schema) for name, schema in properties.items()}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


_COUNT = {"type": "integer", "minimum": 0}
_TOKEN_ID = {"type": "integer", "minimum": 0}
QUEUE_TIME = {"type": "number", "minimum": 0, "description": "Seconds before the request was first computed."}
_TOKEN_IDS = array(_TOKEN_ID)
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": common.MAX_SECONDS}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}

#: Every sampling field that the protocols share, under each of its spellings.
SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 100, "0 is greedy."),
    "top_k": integer(-1, _INT32, "0 or -1: all tokens."),
    "top_p": number(1e-9, 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": {
        "type": "object",
        "description": "Token id to what is added to its logit.",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "seed": integer(-(2**63), 2**64 - 1, "Equal seeds give equal answers."),
    "n": integer(1, MAX_CHOICES, "Choices per prompt; more than 1 only on OpenAI's paths."),
    "logprobs": integer(0, MAX_LOGPROBS, "Alternatives per token; 0: only the chosen one."),
    "prompt_logprobs": integer(0, MAX_LOGPROBS, "The same for the prompt; only on OpenAI's paths, not streamed."),
    "min_tokens": integer(0, _INT32),
    "max_tokens": integer(1, _INT32),
    "max_new_tokens": integer(1, _INT32, "Another name of max_tokens."),
    "stop": {
        "description": "Texts that end the answer and are left out of it.",
        "anyOf": [_STOP_TEXT, array(_STOP_TEXT, maxItems=MAX_STOP_STRINGS)],
    },
    "stop_token_ids": array(_TOKEN_ID, "Tokens that end the answer."),
    "ignore_eos": boolean("Go on to max_tokens."),
    "include_stop": boolean("Leave the stop in the text."),
    "include_stop_str_in_output": boolean("Another name of include_stop."),
    "skip_special_tokens": boolean("On unless switched off."),
}
OPTIONS: dict[str, Schema] = {
    "priority": integer(-(2**31), _INT32, "Lower goes first, under --policy priority."),
    "deadline": {**_SECONDS, "description": "Seconds to the first token that --policy deadline aims at."},
    "timeout": {**_SECONDS, "description": "Seconds until the answer ends with what it has, and reason timeout."},
    "cache_salt": text("Prompts share cached prefixes only under equal salts.", maxLength=256),
    "add_special_tokens": boolean("Whether tokenising adds BOS and the like."),
}
PARAMETERS = optional({**SAMPLING, **OPTIONS})


def _only(value: object) -> Schema:
    return {"const": value}


def _refused(table: dict[str, tuple[object, ...]]) -> dict[str, Schema]:
    """Fields that are known and not supported: only the values that ask for nothing pass."""
    schemas: dict[str, Schema] = {}
    for name, noops in table.items():
        allowed: list[object] = []
        for value in (*noops, None):
            if value not in allowed:  # JSON's 1 and 1.0 are the same number
                allowed.append(value)
        schemas[name] = {"description": "Not supported.", "enum": allowed}
    return schemas


_IGNORED: dict[str, Schema] = {
    name: nullable({"type": "object" if kind is dict else "string", "description": "Accepted, without effect."})
    for name, kind in openai_common.IGNORED.items()
}
_STREAMING = optional(
    {
        "stream": boolean("Server-sent events, the last one `[DONE]`."),
        "stream_options": obj(
            optional(
                {
                    "include_usage": boolean("A last chunk with the usage of all choices."),
                    "continuous_usage_stats": boolean("The usage so far in every chunk."),
                    "include_obfuscation": boolean("Accepted, without effect."),
                }
            ),
            description="Only together with stream.",
        ),
    }
)
_MODEL = {"model": nullable(text("The served model; may be left out."))}
_OPENAI: dict[str, Schema] = {
    **{name: schema for name, schema in PARAMETERS.items() if name != "max_new_tokens"},
    **_STREAMING,
    **_MODEL,
    **_IGNORED,
    "return_token_ids": nullable(boolean()),
}

_TEXT_PART = obj(
    {"type": _only("text"), "text": text(), "cache_control": {"description": "Accepted, without effect."}},
    ("type", "text"),
)
_EMPTY: Schema = {"description": "Null or empty.", "enum": [None, "", []]}
_MESSAGE = obj(
    {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [text(), array(_TEXT_PART, minItems=1)]},
        "name": nullable(text(maxLength=128)),
        **dict.fromkeys(
            ("refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id", "reasoning_content"),
            _EMPTY,
        ),
    },
    ("role", "content"),
)
_MESSAGES = array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES)
_TEMPLATE = optional(
    {
        "add_generation_prompt": boolean(),
        "chat_template_kwargs": {
            "type": "object",
            "description": "The template's own switches, such as enable_thinking.",
            "additionalProperties": {"type": ["boolean", "integer", "number", "string", "null"]},
        },
    }
)
_PROMPT = {"anyOf": [text(), array(_TOKEN_ID, minItems=1)]}
_PROMPTS = {"anyOf": [text(), array(_TOKEN_ID, minItems=1), array(_PROMPT, minItems=1, maxItems=common.MAX_PROMPTS)]}

_USAGE = obj(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": obj({"cached_tokens": _COUNT}, ("cached_tokens",)),
        "queue_time": QUEUE_TIME,
    },
    ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
)
_LOGPROB = {"type": ["number", "null"]}
_CHAT_TOKEN = {"token": text(), "bytes": array({"type": "integer"}), "logprob": _LOGPROB}
_CHAT_LOGPROBS = obj(
    {
        "content": array(
            obj({**_CHAT_TOKEN, "top_logprobs": array(obj(_CHAT_TOKEN, tuple(_CHAT_TOKEN)))}, tuple(_CHAT_TOKEN))
        ),
        "refusal": {"type": "null"},
    },
    ("content",),
)
_TEXT_LOGPROBS = obj(
    {
        "tokens": array(text()),
        "token_logprobs": array(_LOGPROB),
        "top_logprobs": array({"type": ["object", "null"], "additionalProperties": _LOGPROB}),
        "text_offset": array(_COUNT),
    },
    ("tokens", "token_logprobs", "top_logprobs", "text_offset"),
)
_PROMPT_LOGPROBS = array({"type": ["object", "null"]}, "Per prompt token: token id to logprob, rank and text.")
_REASON = {"enum": ["stop", "length"]}
_STOP_REASON = {"type": ["string", "integer", "null"], "description": "The stop that was found."}


def _answer(kind: str, choice: dict[str, Schema], required: tuple[str, ...], more: dict[str, Schema]) -> Schema:
    properties = {
        "id": text(),
        "object": _only(kind),
        "created": _COUNT,
        "model": text(),
        "choices": array(obj(choice, required)),
        **more,
    }
    return obj(properties, ("id", "object", "created", "model", "choices"))


_CHAT_CHOICE = {
    "index": _COUNT,
    "message": obj({"role": _only("assistant"), "content": text(), "refusal": {"type": "null"}}, ("role", "content")),
    "logprobs": nullable(_CHAT_LOGPROBS),
    "finish_reason": _REASON,
    "stop_reason": _STOP_REASON,
    "token_ids": _TOKEN_IDS,
}
_TEXT_CHOICE = {
    "index": _COUNT,
    "text": text(),
    "logprobs": nullable(_TEXT_LOGPROBS),
    "finish_reason": nullable(_REASON),
    "stop_reason": _STOP_REASON,
    "token_ids": _TOKEN_IDS,
    "prompt_logprobs": _PROMPT_LOGPROBS,
}
_DELTA_CHOICE = {
    "index": _COUNT,
    "delta": obj({"role": text(), "content": text(), "refusal": {"type": "null"}}),
    "logprobs": nullable(_CHAT_LOGPROBS),
    "finish_reason": nullable(_REASON),
    "stop_reason": _STOP_REASON,
    "token_ids": _TOKEN_IDS,
}
_CARD = {
    "id": text(),
    "object": _only("model"),
    "created": _COUNT,
    "owned_by": text(),
    "root": text(),
    "parent": {"type": "null"},
    "max_model_len": _COUNT,
}

OPENAI: dict[str, Schema] = {
    "Message": _MESSAGE,
    "ChatRequest": obj(
        {
            **_OPENAI,
            **_TEMPLATE,
            **_refused(openai_common.UNSUPPORTED_CHAT),
            "messages": _MESSAGES,
            "max_completion_tokens": nullable(integer(1, _INT32, "Another name of max_tokens.")),
            "logprobs": nullable(boolean("Whether to report log probabilities.")),
            "top_logprobs": nullable(integer(0, MAX_LOGPROBS, "Alternatives per token; only together with logprobs.")),
        },
        ("messages",),
    ),
    "ChatAnswer": _answer(
        "chat.completion",
        _CHAT_CHOICE,
        ("index", "message", "finish_reason"),
        {"usage": ref("Usage"), "prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    "ChatChunk": _answer("chat.completion.chunk", _DELTA_CHOICE, ("index", "delta"), {"usage": nullable(ref("Usage"))}),
    "CompletionRequest": obj(
        {
            **_OPENAI,
            **_refused(openai_common.UNSUPPORTED_TEXT),
            "prompt": _PROMPTS,
            "max_tokens": nullable(integer(0, _INT32, "16 unless given; 0 only with echo, to score a prompt.")),
            "echo": nullable(boolean("Whether the text begins with the prompt.")),
        },
        ("prompt",),
    ),
    "CompletionAnswer": _answer(
        "text_completion", _TEXT_CHOICE, ("index", "text", "finish_reason"), {"usage": nullable(ref("Usage"))}
    ),
    "Usage": _USAGE,
    "ModelCard": obj({**_CARD, "name": text("As KServe V1 has it."), "ready": _only(True)}, ("id", "name", "ready")),
    "ModelList": obj(
        {
            "object": _only("list"),
            "data": array(obj(_CARD, ("id", "object", "created", "owned_by"))),
            "models": array(text(), "As KServe V1 has it."),
        },
        ("object", "data", "models"),
    ),
    "TokenizeRequest": {
        **obj(
            {
                **_MODEL,
                **_TEMPLATE,
                **_refused(tokenize.UNSUPPORTED),
                "prompt": nullable(text()),
                "messages": nullable(_MESSAGES),
                "add_special_tokens": nullable(boolean("On for a prompt, off for messages.")),
                "return_token_strs": nullable(boolean()),
            }
        ),
        "oneOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
        ],
    },
    "TokenizeAnswer": obj(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _TOKEN_IDS,
            "token_strs": nullable(array(text())),
        },
        ("count", "max_model_len", "tokens", "token_strs"),
    ),
    "DetokenizeRequest": obj(
        {**_MODEL, "tokens": _TOKEN_IDS, "skip_special_tokens": nullable(boolean("Off unless switched on."))},
        ("tokens",),
    ),
    "DetokenizeAnswer": obj({"prompt": text()}, ("prompt",)),
    "OpenAIError": obj(
        {
            "error": obj(
                {
                    "message": text("Names field, value and what is allowed."),
                    "type": text(),
                    "param": {"type": ["string", "null"], "description": "The field, as the client spelled it."},
                    "code": {"type": ["string", "null"]},
                },
                ("message", "type", "param", "code"),
            )
        },
        ("error",),
    ),
}
