"""The OpenAPI document is true: it lists the routes that there are, and the server answers as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.specs.openapi import checks
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Running, serving_fake

from carousel import docs_page, openapi, openapi_schemas
from carousel.protocols import common

DOCUMENT = openapi.document("fake")
OPERATIONS = [(method, path) for path, item in DOCUMENT["paths"].items() for method in item]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
# These are turned away on purpose, and say so in their documented form.
REFUSED = {"/v1/models/{model_name}:explain": 501, "/v2/repository/models/{model_name}/unload": 403}
# The same handlers once more, under another path.
TWICE = r"^/openai/v1/|^/v1/(de)?tokenize|/versions/"
BODILESS = r":explain$|/(un)?load$"
EXAMPLES = 6


@pytest.fixture(scope="module")
def short_server() -> Iterator[Running]:
    """A server with /docs, whose model ends soon, whatever max_tokens and n say."""

    def shorten(engine: FakeEngine) -> None:
        engine.max_model_len = 64

    with serving_fake(shorten, grpc=False, log_level="critical", enable_docs=True) as running:
        yield running


def test_every_route_is_in_the_document_and_nothing_else(short_server):
    server = short_server.servers[0]
    app = server.build_app(server.registered_models.get_model("fake"))
    routes = {
        (method.lower(), re.sub(r":\w+}", "}", path))
        for path, methods in _routes(app.routes)
        for method in methods
    }  # fmt: skip
    page = {("get", "/page/events"), ("post", "/page/demo"), ("get", "/page/{name}")}
    assert routes - {("get", "/docs")} - page == set(OPERATIONS)


def _routes(routes) -> Iterator[tuple[str, set[str]]]:
    for route in routes:
        if hasattr(route, "methods"):
            yield route.path, route.methods
        else:
            yield from _routes(route.original_router.routes)


def test_the_document_is_served_as_it_is_and_valid(short_server):
    assert httpx.get(short_server.url + "/openapi.json").json() == DOCUMENT
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_the_fields_are_those_of_the_parsers():
    assert openapi_schemas.SAMPLING.keys() == common.SAMPLING_NAMES
    assert openapi_schemas.OPTIONS.keys() == common.OPTION_NAMES


def test_every_schema_is_used():
    names = set(DOCUMENT["components"]["schemas"])
    used = set(re.findall(r"#/components/schemas/(\w+)", str(DOCUMENT)))
    assert used == names


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_examples_work(short_server, method, path):
    operation = DOCUMENT["paths"][path][method]
    url = path.replace("{model_name}", "fake").replace("{model_version}", "1")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    response = httpx.request(method, short_server.url + url, json=body)
    assert response.status_code == REFUSED.get(path, 200), response.text
    if body is not None:  # every operation with a body has an example, and streams where it can
        streams = "text/event-stream" in operation["responses"]["200"]["content"]
        if streams and "stream" in path:
            assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", openapi.CHAT, "ChatChunk"),
        ("/v1/completions", openapi.COMPLETION, "CompletionAnswer"),
        ("/v1/models/fake:predict", openapi.PREDICT, "PredictEvent"),
        ("/v2/models/fake/generate_stream", openapi.GENERATE, "GenerateEvent"),
    ],
)
def test_events_are_what_the_document_says(short_server, path, body, name):
    import json

    import jsonschema

    body = body if path.startswith("/v2") else {**body, "stream": True}
    validator = jsonschema.Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})
    events = httpx.post(short_server.url + path, json=body).text.split("\n\n")
    payloads = [event.removeprefix("data: ") for event in events if event and event != "data: [DONE]"]
    assert len(payloads) >= 3
    for payload in payloads:
        validator.validate(json.loads(payload))


def _schema(mode: GenerationMode) -> schemathesis.BaseSchema:
    generation = GenerationConfig(modes=[mode], max_examples=EXAMPLES)
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


SCHEMAS = {mode: _schema(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)}
HYPOTHESIS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@SCHEMAS[GenerationMode.POSITIVE].exclude(path_regex=TWICE).parametrize()
@HYPOTHESIS
def test_answers_to_good_requests_conform(short_server, case):
    _check(short_server, case)


@(
    SCHEMAS[GenerationMode.NEGATIVE]
    .exclude(path_regex=TWICE)
    .exclude(path_regex=BODILESS, method="POST")
    .exclude(method="GET")
    .parametrize()
)
@HYPOTHESIS
def test_answers_to_bad_requests_conform(short_server, case):
    _check(short_server, case)


def _check(server: Running, case: schemathesis.Case) -> None:
    for name in ("model_name", "model_version"):
        if name in (case.path_parameters or {}) and len(str(case.path_parameters[name])) % 4:
            case.path_parameters[name] = {"model_name": "fake", "model_version": "1"}[name]  # mostly the served one
    excused = REFUSED.get(case.operation.path) == 501
    case.call_and_validate(base_url=server.url, checks=CHECKS[1:] if excused else CHECKS, timeout=10)


# /docs


def test_the_docs_page_loads_nothing(short_server):
    page = httpx.get(short_server.url + "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text == docs_page.render(DOCUMENT)
    assert not re.search(r"(?:src|href)=\"(?!#|/openapi\.json\")|<script|@import|url\(", page.text)
    for path in DOCUMENT["paths"]:
        assert path in page.text
    for name in ("ChatChunk", "CompletionAnswer", "PredictEvent", "GenerateEvent"):
        assert f'text/event-stream: <a href="#schema-{name}">' in page.text


def test_the_docs_page_is_off_unless_asked_for(server):
    assert httpx.get(server.url + "/docs").status_code == 404
    assert httpx.get(server.url + "/openapi.json").status_code == 200
