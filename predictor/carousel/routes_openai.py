"""OpenAI's routes, and tokenize and detokenize, which the field's engines put beside them."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request
from fastapi.responses import Response

from carousel.answers import EventStream, Handlers, json_response, parse, read_json
from carousel.generation import LONG_TEXT, run_all
from carousel.predictor import CarouselModel, check_model
from carousel.protocols import openai, tokenize


class OpenAIRoutes(Handlers):
    """Chat and text completions, models, tokens."""

    def __init__(self, model: CarouselModel) -> None:
        super().__init__(model)
        self.created = int(time.time())

    async def chat(self, request: Request) -> Response:
        body = await read_json(request)
        engine, context = self.context(request)
        call = await parse(request, openai.parse_chat, body, context)
        if call.stream:
            return EventStream(engine, call, openai.stream_chat)
        return json_response(openai.render_chat(call, await run_all(engine, call)))

    async def completion(self, request: Request) -> Response:
        body = await read_json(request)
        engine, context = self.context(request)
        call = await parse(request, openai.parse_completion, body, context)
        if call.stream:
            return EventStream(engine, call, openai.stream_completion)
        return json_response(openai.render_completion(call, await run_all(engine, call)))

    async def models(self, request: Request) -> Response:
        """OpenAI's list and KServe V1's in one body, since ``/v1/models`` is the path of both."""
        _, context = self.context(request)
        return json_response({**openai.models_body(context, self.created), "models": [self.model.name]})

    async def model_card(self, model_name: str, request: Request) -> Response:
        """OpenAI's model card with KServe V1's ``name`` and ``ready``; 503 while it is not ready."""
        check_model(model_name, None, self.model.name)
        _, context = self.context(request)
        return json_response({**openai.model_body(context, self.created), "name": model_name, "ready": True})

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request)
        _, context = self.context(request)
        return await _run(await parse(request, tokenize.parse_tokenize, body, context))

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request)
        _, context = self.context(request)
        return await _run(await parse(request, tokenize.parse_detokenize, body, context))


async def _run(call: tokenize.TokenizeCall | tokenize.DetokenizeCall) -> Response:
    """The answer; a long text is worked on in a thread, so that others' streams flow on."""
    return json_response(call.run() if call.size <= LONG_TEXT else await asyncio.to_thread(call.run))
