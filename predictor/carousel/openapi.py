"""The OpenAPI document of the server, written down rather than derived: handlers read and check bodies themselves.

``tests/server/test_openapi.py`` holds it to the routes and, with schemathesis, to what the server answers.
"""

from __future__ import annotations

from typing import Any

from carousel import openapi_kserve, openapi_schemas
from carousel.auth import is_open_route
from carousel.openapi_schemas import Schema, ref
from carousel.telemetry.metrics import versions

PATH = "/openapi.json"
_ERRORS = {
    400: "A field is wrong: the message names field, value and what is allowed.",
    401: "The server wants an API key, and this is none.",
    403: "Switched off; the message names the setting.",
    404: "No such model or version.",
    408: "The body did not arrive within --read-timeout-seconds.",
    413: "The body is larger than --max-request-bytes.",
    415: "The body declares itself something else than JSON.",
    422: "A field is wrong: the message names field, value and what is allowed.",
    429: "The queue is full, or the tenant has used up a quota.",
    500: "The engine failed.",
    501: "Not implemented, and it will not be.",
    503: "Loading, draining or dead; the message says which.",
    504: "The request's own timeout passed.",
}
_WAIT = {"Retry-After": {"description": "Seconds to wait.", "required": True, "schema": {"type": "string"}}}
_BODY = (400, 408, 413, 415)  # what any path with a body may answer
_WORK = (429, 500, 503)  # what any path that generates may answer

CHAT = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a carousel?"}],
    "max_tokens": 40,
    "temperature": 0,
}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 20, "seed": 1}
PREDICT = {"instances": ["The sea is", {"prompt": "The sky is"}], "parameters": {"max_tokens": 16}}
INFER = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["The sea is", "The sky is"]}],
    "parameters": {"max_tokens": 16, "temperature": 0},
}
GENERATE = {"text_input": "Once upon a time", "parameters": {"max_tokens": 20, "temperature": 0.7, "seed": 1}}


class _Builder:
    """Collects operations. ``form`` is the schema of a protocol's errors."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.paths: dict[str, dict[str, Any]] = {}

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        tag: str,
        answer: Schema | None,
        *,
        body: str | None = None,
        example: object = None,
        errors: tuple[int, ...] = (),
        form: str = "Error",
        stream: str | None = None,
        binary: bool = False,
        body_required: bool = True,
    ) -> None:
        operation: dict[str, Any] = {
            "summary": summary,
            "tags": [tag],
            "operationId": _operation_id(method, path),
            "responses": {"200": {"description": "OK"}},
        }
        content: dict[str, Any] = {} if answer is None else {"application/json": {"schema": answer}}
        if stream is not None:
            data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(stream)}
            if stream != "GenerateEvent":
                data = {"anyOf": [data, {"const": "[DONE]"}]}
            event = {"type": "object", "required": ["data"], "properties": {"data": data}}
            content["text/event-stream"] = {"schema": {**event, "description": "Each event."}}
        if binary:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        if content:
            operation["responses"]["200"]["content"] = content
        if body is not None:
            media: dict[str, Any] = {"schema": ref(body)}
            if example is not None:
                media["example"] = example
            operation["requestBody"] = {"required": body_required, "content": {"application/json": media}}
        parameters = [self._path_parameter(name) for name in ("model_name", "model_version") if f"{{{name}}}" in path]
        if parameters:
            operation["parameters"] = parameters
        if not is_open_route(method, path):
            operation["security"] = [{}, {"key": []}]  # the server decides whether it wants one
            errors = (*errors, 401)
        for status in sorted(set(errors)):
            operation["responses"][str(status)] = _error(status, form)
        self.paths.setdefault(path, {})[method.lower()] = operation

    def _path_parameter(self, name: str) -> dict[str, Any]:
        example = self.model_name if name == "model_name" else "1"
        return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": example}


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(":", "/").replace(".", "_").split("/")
    return "_".join([method.lower(), *filter(None, words)])


def _error(status: int, form: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": ref(form)}},
    }
    if status in (429, 503):
        answer["headers"] = _WAIT
    return answer


def _openai(add: Any, model: str) -> None:
    chat, completion = {"model": model, **CHAT}, {"model": model, **COMPLETION}
    for prefix in ("/openai/v1", "/v1"):
        for path, summary, name, example in (
            ("chat/completions", "Chat", "Chat", chat),
            ("completions", "Text completion", "Completion", completion),
        ):
            add(
                "POST", f"{prefix}/{path}", summary, "OpenAI", ref(f"{name}Answer"),
                body=f"{name}Request", example=example, errors=(*_BODY, *_WORK, 404, 504), form="OpenAIError",
                stream="ChatChunk" if name == "Chat" else "CompletionAnswer",
            )  # fmt: skip
        form = "OpenAIError" if prefix == "/openai/v1" else "Error"
        add("GET", f"{prefix}/models", "The served model", "OpenAI", ref("ModelList"), errors=(503,), form=form)
        add(
            "GET", f"{prefix}/models/{{model_name}}", "The model's card, once it is ready", "OpenAI",
            ref("ModelCard"), errors=(404, 503), form=form,
        )  # fmt: skip
    for prefix in ("", "/openai/v1", "/v1"):
        add(
            "POST", f"{prefix}/tokenize", "Text or a chat to tokens", "Tokens", ref("TokenizeAnswer"),
            body="TokenizeRequest", example={"prompt": "What is a carousel?", "return_token_strs": True},
            errors=(*_BODY, 404, 503), form="OpenAIError",
        )  # fmt: skip
        add(
            "POST", f"{prefix}/detokenize", "Tokens to text", "Tokens", ref("DetokenizeAnswer"),
            body="DetokenizeRequest", example={"tokens": [72, 105]}, errors=(*_BODY, 404, 503), form="OpenAIError",
        )  # fmt: skip


def _v1(add: Any) -> None:
    add(
        "POST", "/v1/models/{model_name}:predict", "Generate for each instance", "KServe V1", ref("PredictAnswer"),
        body="PredictRequest", example=PREDICT, errors=(*_BODY, *_WORK, 404), stream="PredictEvent",
    )  # fmt: skip
    add("POST", "/v1/models/{model_name}:explain", "Not implemented", "KServe V1", None, errors=(404, 501))


def _v2(add: Any) -> None:
    tag = "KServe V2"
    add("GET", "/v2", "Server metadata", tag, ref("ServerMetadata"))
    add("GET", "/v2/health/live", "Whether the engine turns", tag, ref("Live"), errors=(503,))
    add("GET", "/v2/health/ready", "Whether requests are taken", tag, ref("Ready"), errors=(503,))
    add("GET", "/v2/models", "The served model", tag, ref("ModelNames"))
    add("GET", "/v2/models/stats", "Triton's statistics", tag, ref("Statistics"))
    for model in ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"):
        add("GET", model, "Model metadata", tag, ref("ModelMetadata"), errors=(404,))
        add("GET", f"{model}/ready", "Whether the model is ready", tag, ref("ModelReady"), errors=(404, 503))
        add("GET", f"{model}/stats", "Triton's statistics of the model", tag, ref("Statistics"), errors=(404,))
        add("GET", f"{model}/config", "Triton's model configuration", tag, ref("ModelConfig"), errors=(404,))
        add(
            "POST", f"{model}/infer", "Generate for each row; tensors may be binary", tag, ref("InferAnswer"),
            body="InferRequest", example=INFER, errors=(*_BODY, *_WORK, 404), binary=True,
        )  # fmt: skip
        errors = (408, 413, 415, 422, *_WORK, 404)
        add(
            "POST", f"{model}/generate", "Generate", tag, ref("GenerateAnswer"),
            body="GenerateRequest", example=GENERATE, errors=errors,
        )  # fmt: skip
        add(
            "POST", f"{model}/generate_stream", "Generate, as server-sent events", tag, None,
            body="GenerateStreamRequest", example=GENERATE, errors=errors, stream="GenerateEvent",
        )  # fmt: skip
    repository = "/v2/repository"
    add(
        "POST", f"{repository}/index", "The models of the repository", tag, ref("Index"),
        body="IndexRequest", example={"ready": True}, errors=(400, 408, 413), body_required=False,
    )  # fmt: skip
    model = f"{repository}/models/{{model_name}}"
    add("POST", f"{model}/load", "Whether the model is loaded", tag, ref("Loaded"), errors=(404, 503))
    add("POST", f"{model}/unload", "Unload the model, if --allow-unload", tag, ref("Unloaded"), errors=(403, 404))


def _health(builder: _Builder) -> None:
    add = builder.add
    add("GET", "/", "Alive, as KServe V1 has it", "Health", ref("Alive"), errors=(503,))
    add("GET", "/livez", "Whether the engine turns; for liveness probes", "Health", ref("State"))
    add("GET", "/readyz", "Whether requests are taken; for readiness probes", "Health", ref("State"))
    add("GET", "/startupz", "Whether the model is loaded; for startup probes", "Health", ref("State"))
    for path in ("/livez", "/readyz", "/startupz"):
        not_so = {"description": "Not so.", "content": {"application/json": {"schema": ref("State")}}}
        builder.paths[path]["get"]["responses"]["503"] = not_so
    add("GET", "/health", "As vLLM has it: nothing but a status", "Health", None)
    builder.paths["/health"]["get"]["responses"]["503"] = {"description": "Loading, stopped or dead."}
    add("GET", "/load", "Requests and tokens in the server", "Health", ref("Load"))
    add("GET", "/usage", "What each tenant used, and what it costs", "Health", ref("TenantUsage"))
    add("GET", "/timeline", "What the last steps did, for carousel doctor", "Health", ref("Timeline"), errors=(503,))
    add("GET", "/version", "Versions", "Health", ref("Version"))
    add("GET", "/metrics", "Prometheus metrics", "Health", None)
    builder.paths["/metrics"]["get"]["responses"]["200"]["content"] = {
        "text/plain": {"schema": {"type": "string"}},
        "application/openmetrics-text": {"schema": {"type": "string"}},
    }
    add("GET", PATH, "This document", "Health", {"type": "object"})


def document(model_name: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1, with examples that name ``model_name``."""
    builder = _Builder(model_name)
    _openai(builder.add, model_name)
    _v1(builder.add)
    _v2(builder.add)
    _health(builder)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Carousel",
            "version": versions()["version"],
            "description": "A KServe predictor for large language models. Any answer carries x-request-id.",
        },
        "paths": builder.paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Wanted where the server has API keys."}
            },
            "schemas": {
                **openapi_schemas.OPENAI,
                **openapi_kserve.V1,
                **openapi_kserve.V2,
                **openapi_kserve.HEALTH,
            },
        },
    }
