"""What operators and load balancers ask: liveness, readiness, load, version."""

from __future__ import annotations

from fastapi.responses import Response

from carousel.answers import Handlers, json_response
from carousel.lifecycle import RETRY_DRAINING_S, RETRY_LOADING_S, State
from carousel.predictor import MODEL_VERSION
from carousel.protocols.errors import retry_after
from carousel.telemetry.metrics import versions


class HealthRoutes(Handlers):
    """The state of the server and its engine."""

    async def livez(self) -> Response:
        state = self.lifecycle.state.value
        if self.lifecycle.live:
            return json_response({"status": "alive", "state": state})
        return json_response({"status": "dead", "state": state, "reason": self.lifecycle.failure}, 503)

    async def readyz(self) -> Response:
        state = self.lifecycle.state
        if self.lifecycle.ready:
            return json_response({"status": "ready", "state": state.value})
        seconds = RETRY_DRAINING_S if self.lifecycle.draining else RETRY_LOADING_S
        return json_response({"status": "not ready", "state": state.value}, 503, {"Retry-After": retry_after(seconds)})

    async def startupz(self) -> Response:
        """200 from the moment that the model is loaded and warm, whatever comes after; 503 before it is."""
        state = self.lifecycle.state
        if self.lifecycle.engine is not None:
            return json_response({"status": "started", "state": state.value})
        reason = {"reason": self.lifecycle.failure} if self.lifecycle.failure is not None else {}
        body = {"status": "not started", "state": state.value, **reason}
        return json_response(body, 503, {"Retry-After": retry_after(RETRY_LOADING_S)})

    async def health(self) -> Response:
        """As vLLM answers: 200 and nothing else while the engine turns, 503 before it does and when it is dead."""
        turns = self.lifecycle.engine is not None and self.lifecycle.live and self.lifecycle.state is not State.STOPPED
        return Response(status_code=200 if turns else 503)

    async def load(self) -> Response:
        """vLLM's ``server_load``, the requests in the server now, and what tells more than a count of requests."""
        stats = self.lifecycle.stats()
        return json_response(
            {
                "server_load": stats.live,
                "requests_running": stats.num_requests_running,
                "requests_waiting": stats.num_requests_waiting,
                "sequences_running": stats.num_sequences_running,
                "sequence_slots": stats.num_slots,
                "tokens_running": stats.num_tokens_running,
                "tokens_waiting": stats.num_tokens_waiting,
                "requests_admitted": stats.admitted,
                "oldest_wait_seconds": round(stats.oldest_wait_s, 3),
                "queue_seconds": round(stats.queue_seconds, 3),
                "kv_cache_usage": round(stats.kv_cache_usage, 4),
                "ready": self.lifecycle.ready,
                "draining": self.lifecycle.draining,
            }
        )

    async def version(self) -> Response:
        return json_response({**versions(), "model": self.model.name, "model_version": MODEL_VERSION})
