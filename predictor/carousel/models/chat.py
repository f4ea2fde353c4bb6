"""Chat templates: a model's Jinja program that turns messages into its prompt, run in a sandbox.

The environment is the one that templates are written for, ``transformers``': blocks trimmed, ``tojson`` without HTML
escapes, ``raise_exception``, ``strftime_now``, loop controls and the ``generation`` tag (which marks text for training
and is transparent here).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from carousel.engine.errors import InvalidRequest

from .template_guard import GuardedEnvironment, compile_guarded


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates want the local date


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.guard_filters()
    return environment


def _why(error: Exception) -> str:
    """The reason, of a length that an answer can carry: a template may raise anything."""
    text = str(error)
    return text if len(text) <= 300 else text[:299] + "…"


class ChatTemplate:
    """The template(s) of a model.

    Args:
        templates: by name; ``default`` is used, or ``tool_use``, where there is one, for requests with tools.
        variables: what every rendering sees beside the messages: the special tokens' texts (``bos_token``, ...).
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.sources = dict(templates)
        self._variables = dict(variables)
        self._compiled: dict[str, tuple[GuardedEnvironment, jinja2.Template]] = {}
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **extra: Any) -> str:
        """The prompt. ``extra`` are template variables: ``tools``, ``documents``, ``enable_thinking``, ...

        InvalidRequest on the field ``messages`` if there are none, or if the template refuses or cannot digest them.
        """
        if not messages:
            raise InvalidRequest("messages", messages, "at least one message")
        name = "tool_use" if extra.get("tools") and "tool_use" in self.sources else "default"
        # Clients send null for what they leave out; templates test for absence, or would print "None".
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {"tools": None, "documents": None} | self._variables | extra
        try:
            with self._lock:
                if name not in self._compiled:
                    environment = _environment()
                    self._compiled[name] = environment, compile_guarded(environment, self.sources[name])
            environment, template = self._compiled[name]
            given = {"messages": plain, "add_generation_prompt": add_generation_prompt}
            return environment.run(template, variables | given)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                "messages", plain, f"none: the model's chat template is broken ({_why(error)})"
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", plain, f"what the model's chat template takes: {_why(error)}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                "messages", plain, f"what the model's chat template takes ({type(error).__name__}: {_why(error)})"
            ) from error
