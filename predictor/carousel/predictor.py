"""The KServe model: life-cycle hooks, health, V1 ``predict`` and V2 ``infer`` over REST and gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kserve import InferRequest, InferResponse, Model

from carousel import tensors
from carousel.auth import TENANT_HEADER
from carousel.generation import run_all
from carousel.lifecycle import EngineLike, Lifecycle
from carousel.protocols import v1, v2
from carousel.protocols.common import Context, decode_body
from carousel.protocols.errors import UnknownModel, UnsupportedMediaType
from carousel.tenancy.quota import current_caller, priority_numbers

logger = logging.getLogger("carousel.predictor")

#: One model, one version; KServe requires none, Triton's clients may ask for it.
MODEL_VERSION = "1"


LARGE_TENSORS = 4096
"""Elements or bytes of a V2 request from which it is parsed on a thread."""

MANY_INSTANCES = 64
"""Instances or messages of a V1 body from which it is parsed on a thread."""

Parsed = TypeVar("Parsed")


def check_model(name: str, version: str | None, served: str) -> None:
    """Refuse any model or version but the one that is served.

    Raises:
        UnknownModel: with the names that exist.
    """
    if name != served:
        raise UnknownModel(name, [served])
    if version not in (None, "", MODEL_VERSION):
        raise UnknownModel(f"{name}/versions/{version}", [f"{served}/versions/{MODEL_VERSION}"])


def check_json(headers: Mapping[str, str], also: tuple[str, ...] = ()) -> None:
    """Refuse a body that declares itself something else than JSON; one that declares nothing passes.

    Raises:
        UnsupportedMediaType: with what was declared.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(encoding, "content-encoding", "identity (bodies are not compressed)")
    declared = headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind and kind not in ("application/json", "text/json", *also) and not kind.endswith("+json"):
        raise UnsupportedMediaType(declared)


def make_context(engine: EngineLike, model_name: str, headers: Mapping[str, str] | None = None) -> Context:
    """What the protocol parsers need to know of the engine and of this request. ``headers`` have lower-case names."""
    given, caller = dict(headers or {}), current_caller.get()
    # What the door says counts, whatever the client claims.
    given.pop(TENANT_HEADER, None)
    if caller is not None and caller.tenant:
        given[TENANT_HEADER] = caller.tenant
    return Context(
        tokenizer=engine.tokenizer,
        model_name=model_name,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        generation_defaults=engine.generation_defaults,
        headers=given,
        model_version=MODEL_VERSION,
        priorities=priority_numbers(caller),
    )


async def _parse(large: bool, parser: Callable[..., Parsed], *args: Any) -> Parsed:
    """``parser(*args)``; on a thread where it may take long, so that other clients' streams flow on meanwhile."""
    return await asyncio.to_thread(parser, *args) if large else parser(*args)


def _is_large(body: object) -> bool:
    """Whether a V1 body has many instances, or an instance that is a long conversation."""
    instances = body.get("instances") if isinstance(body, dict) else None
    if not isinstance(instances, list):
        return False
    return len(instances) > MANY_INSTANCES or any(
        isinstance(item, dict) and isinstance(item.get("messages"), list) and len(item["messages"]) > MANY_INSTANCES
        for item in instances
    )


class CarouselModel(Model):
    """The model that KServe's server registers.

    It is registered from the start, since KServe only registers models that say ``ready`` then; the true state is in
    :meth:`healthy`, which KServe asks before every request and for ``/v2/models/{m}/ready``.
    """

    def __init__(self, name: str, lifecycle: Lifecycle) -> None:
        super().__init__(name)
        self.lifecycle = lifecycle
        self.ready = True
        self.engine = True

    def load(self) -> bool:
        """KServe calls this on the event loop whenever the model is not healthy: it only looks."""
        return self.lifecycle.ready

    def start(self) -> None:
        """Nothing: the lifecycle began to load before KServe was imported."""

    async def start_engine(self) -> None:
        """Wait until the engine has loaded and warmed up."""
        await self.lifecycle.wait_loaded()

    def stop(self) -> None:
        """Nothing: KServe calls this before its servers have drained."""

    def stop_engine(self) -> None:
        """Nothing: the server ends the engine once everything has drained."""

    def validate(self, payload: Any) -> Any:
        """Nothing: the protocols' parsers check everything, and name what is wrong."""
        return payload

    async def healthy(self) -> bool:
        return self.lifecycle.ready

    def get_input_types(self) -> list[dict[str, Any]]:
        return [dict(item) for item in v2.INPUTS]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [dict(item) for item in v2.OUTPUTS]

    async def predict(
        self,
        payload: InferRequest | dict[str, Any] | bytes,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> InferResponse | dict[str, Any]:
        """Answer a V2 ``InferRequest`` or the body of a V1 ``:predict``.

        Raises:
            CarouselError: refused or failed; each transport answers in its own form.
        """
        engine = self.lifecycle.require()
        context = make_context(engine, self.name, headers)
        if isinstance(payload, InferRequest):
            return await self._infer(engine, context, payload)
        if isinstance(payload, bytes):  # KServe hands a body through undecoded unless the type is exactly JSON
            check_json(headers or {})
            payload = decode_body(payload)
        call = await _parse(_is_large(payload), v1.parse, payload, context)
        return v1.render(call, await run_all(engine, call))

    async def _infer(self, engine: EngineLike, context: Context, request: InferRequest) -> InferResponse:
        check_model(self.name, request.model_version, self.name)
        size = sum(len(item._raw_data or item.data or ()) for item in request.inputs)
        call = await _parse(size > LARGE_TENSORS, lambda: v2.parse(tensors.neutral_request(request), context))
        rendered = v2.render(call, await run_all(engine, call))
        return tensors.kserve_response(request, rendered, call.id, MODEL_VERSION)
