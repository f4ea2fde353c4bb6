"""Every route of the server, before KServe's own: the first match serves.

A handler parses with ``protocols``, submits to the engine and renders with ``protocols``. What these refuse is an
exception, which ``http_errors`` answers in the form of the path's protocol. ``openapi`` describes the same paths, and a
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response

from carousel import docs_page, openapi
from carousel.answers import json_response
from carousel.dataplane import CarouselDataPlane
from carousel.predictor import CarouselModel
from carousel.routes_health import HealthRoutes
from carousel.routes_kserve import KServeRoutes
from carousel.routes_openai import OpenAIRoutes
from carousel.routes_page import PageRoutes
from carousel.routes_usage import UsageRoutes
from carousel.telemetry.usage import UsageBook

Handler = Callable[..., Any]


class Routes:
    """The handlers of one server, by protocol."""

    def __init__(
        self, model: CarouselModel, data_plane: CarouselDataPlane, allow_unload: bool, book: UsageBook
    ) -> None:
        self.openai = OpenAIRoutes(model)
        self.kserve = KServeRoutes(model, data_plane, allow_unload)
        self.health = HealthRoutes(model)
        self.usage = UsageRoutes(model, book)

    def table(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler) of each route."""
        return [*self._openai_table(), *self._kserve_table(), *self._health_table()]

    def _openai_table(self) -> list[tuple[str, str, Handler]]:
        routes = self.openai
        table: list[tuple[str, str, Handler]] = []
        for prefix in ("/openai/v1", "/v1"):
            table += [
                ("POST", f"{prefix}/chat/completions", routes.chat),
                ("POST", f"{prefix}/completions", routes.completion),
                ("GET", f"{prefix}/models", routes.models),
                ("GET", f"{prefix}/models/{{model_name}}", routes.model_card),
            ]
        for prefix in ("", "/openai/v1", "/v1"):
            table += [
                ("POST", f"{prefix}/tokenize", routes.tokenize),
                ("POST", f"{prefix}/detokenize", routes.detokenize),
            ]
        return table

    def _kserve_table(self) -> list[tuple[str, str, Handler]]:
        routes = self.kserve
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/", routes.live),
            ("POST", "/v1/models/{model_name}:predict", routes.predict),
            ("POST", "/v1/models/{model_name}:explain", routes.explain),
            ("GET", "/v2", routes.server_metadata),
            ("GET", "/v2/health/live", routes.server_live),
            ("GET", "/v2/health/ready", routes.server_ready),
            ("GET", "/v2/models", routes.model_names),
            ("GET", "/v2/models/stats", routes.all_statistics),
            ("POST", "/v2/repository/index", routes.index),
            ("POST", "/v2/repository/models/{model_name}/load", routes.load),
            ("POST", "/v2/repository/models/{model_name}/unload", routes.unload),
        ]
        for model in ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"):
            table += [
                ("GET", model, routes.model_metadata),
                ("GET", f"{model}/ready", routes.model_ready),
                ("GET", f"{model}/config", routes.model_config),
                ("GET", f"{model}/stats", routes.model_statistics),
                ("POST", f"{model}/infer", routes.infer),
                ("POST", f"{model}/generate", routes.generate),
                ("POST", f"{model}/generate_stream", routes.generate_stream),
            ]
        return table

    def _health_table(self) -> list[tuple[str, str, Handler]]:
        routes = self.health
        return [
            ("GET", "/livez", routes.livez),
            ("GET", "/readyz", routes.readyz),
            ("GET", "/startupz", routes.startupz),
            ("GET", "/health", routes.health),
            ("GET", "/load", routes.load),
            ("GET", "/version", routes.version),
            ("GET", "/usage", self.usage.usage),
            ("GET", "/timeline", self.usage.timeline),
        ]


def mount(app: FastAPI, routes: Routes, *, docs: bool = False, page: PageRoutes | None = None) -> None:
    """Add the routes to ``app``, with ``docs`` also ``/docs``, and the live page. To be called before KServe's own."""
    router = APIRouter()
    if page is not None:
        for method, path, handler in page.table(routes.kserve.live):
            router.add_api_route(path, handler, methods=[method], response_model=None)
    for method, path, handler in routes.table():
        router.add_api_route(path, handler, methods=[method], response_model=None)
    model_name = routes.health.model.name
    document = openapi.document(model_name)

    async def openapi_json() -> Response:
        return json_response(document)

    async def docs_html() -> Response:
        return HTMLResponse(docs_page.render(document))

    router.add_api_route(openapi.PATH, openapi_json, methods=["GET"], response_model=None)
    if docs:
        router.add_api_route("/docs", docs_html, methods=["GET"], response_model=None)
    app.include_router(router)
