"""OpenAI's protocol in one place: chat completions, text completions, models.

``finish_reason`` is ``stop`` (end of turn, stop string or stop token; ``stop_reason`` says which stop) or ``length``.
"""

from __future__ import annotations

from typing import Any

from carousel.protocols.common import Context
from carousel.protocols.openai_chat import parse_chat, render_chat, stream_chat
from carousel.protocols.openai_common import OpenAICall
from carousel.protocols.openai_completions import parse_completion, render_completion, stream_completion

__all__ = [
    "OpenAICall",
    "model_body",
    "models_body",
    "parse_chat",
    "parse_completion",
    "render_chat",
    "render_completion",
    "stream_chat",
    "stream_completion",
]


def model_body(context: Context, created: int) -> dict[str, Any]:
    """One model card; ``created`` in Unix seconds, ``max_model_len`` in tokens."""
    return {
        "id": context.model_name,
        "object": "model",
        "created": created,
        "owned_by": "carousel",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.max_model_len,
    }


def models_body(context: Context, created: int) -> dict[str, Any]:
    """The answer of ``/models``."""
    return {"object": "list", "data": [model_body(context, created)]}
