"""Chat messages: the OpenAI form, checked and flattened to what a chat template takes."""

from __future__ import annotations

from typing import Any

from carousel.engine.errors import InvalidRequest
from carousel.protocols import fields as read
from carousel.protocols.common import Context, read_prompt
from carousel.protocols.jsonio import refuse

MAX_MESSAGES = 4096
MAX_PARTS = 1024
# "developer" is OpenAI's newer word for "system"; templates know only the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What clients copy back from an answer, always null or empty when the answer was plain text.
_EMPTY_ONLY = ("refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id", "reasoning_content")
_KNOWN = ("role", "content", "name", *_EMPTY_ONLY)
_CONTENT = f"a string, or a list of 1 to {MAX_PARTS} {{'type': 'text', 'text': ...}} parts"
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "chat_template", "tokenize"})


def _part(path: str, value: object) -> str:
    if not isinstance(value, dict):
        refuse(path, value, "a part {'type': 'text', 'text': ...}")
    kind = value.get("type")
    if kind != "text":
        refuse(f"{path}.type", kind, "'text'; images, audio and files are not supported")
    part = read.read_object(value, path, ("type", "text", "cache_control"))
    if "text" not in part:
        refuse(f"{path}.text", None, "a string")
    return read.text(*part["text"])


def _content(path: str, value: object) -> str:
    if isinstance(value, str):
        return read.text(path, value)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        refuse(path, value, _CONTENT)
    return "\n".join(_part(f"{path}[{index}]", part) for index, part in enumerate(value))


def _message(path: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        refuse(path, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{path}.role", role, ", ".join(sorted(_ROLES)) + "; tools and functions are not supported")
    message = read.read_object(value, path, _KNOWN)
    for name in _EMPTY_ONLY:
        if name in message and message[name][1] not in ("", []):
            refuse(message[name][0], message[name][1], "null or absent: not supported")
    if "content" not in message:
        refuse(f"{path}.content", None, _CONTENT)
    plain = {"role": _ROLES[role], "content": _content(*message["content"])}
    if "name" in message:
        plain["name"] = read.text(*message["name"], "a string of at most 128 characters", max_length=128)
    return plain


def _template_arguments(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, value, "an object of arguments for the chat template")
    for name, item in value.items():
        if name in _RESERVED or not name.isidentifier():
            refuse(read.join(path, name), item, "names of the template's own switches, such as 'enable_thinking'")
        if item is not None and not isinstance(item, (bool, int, float, str)):
            refuse(read.join(path, name), item, "true, false, a number or a string")
    return dict(value)


def render_messages(path: str, value: object, context: Context, values: read.Values | None = None) -> str:
    """The prompt text that the model's chat template makes of ``messages``.

    Args:
        path: where the messages stand in the body.
        value: the messages as received.
        context: gives the tokenizer.
        values: further fields of the body; ``add_generation_prompt`` and ``chat_template_kwargs`` are used.

    Raises:
        InvalidRequest: a malformed message, a model without chat template, or messages that its template refuses.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        refuse(path, value, f"a list of 1 to {MAX_MESSAGES} messages")
    messages = [_message(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if not context.tokenizer.has_chat_template:
        refuse(path, value, "nothing: this model has no chat template; use the completions endpoint")
    values = values or {}
    generation = True
    if "add_generation_prompt" in values:
        generation = read.boolean(*values["add_generation_prompt"])
    extra: dict[str, Any] = {}
    if "chat_template_kwargs" in values:
        extra = _template_arguments(*values["chat_template_kwargs"])
    try:
        prompt = context.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **extra)
    except InvalidRequest as error:
        refuse(path, error.value, error.allowed)
    except Exception as error:  # templates raise what they like: "roles must alternate", undefined variables
        roles = ", ".join(message["role"] for message in messages[:8])
        reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
        raise InvalidRequest(path, f"roles {roles}", f"what the model's chat template accepts ({reason})") from error
    prompt_text = read_prompt(path, prompt, context)
    assert isinstance(prompt_text, str)
    return prompt_text
