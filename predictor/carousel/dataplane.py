"""KServe's data plane with the true state of the engine, where KServe answers constants."""

from __future__ import annotations

from typing import Any

from kserve.errors import ModelNotFound, ServerNotLive
from kserve.model_repository import ModelRepository
from kserve.protocol.dataplane import DataPlane

from carousel.lifecycle import Lifecycle
from carousel.predictor import MODEL_VERSION
from carousel.telemetry.metrics import versions

EXTENSIONS = ("model_repository_extension", "binary_tensor_data", "generate")


class CarouselDataPlane(DataPlane):
    """Liveness, readiness and metadata that follow the engine."""

    def __init__(self, model_registry: ModelRepository, lifecycle: Lifecycle) -> None:
        super().__init__(model_registry=model_registry)
        self.lifecycle = lifecycle

    async def live(self) -> dict[str, str]:
        """``{"status": "alive"}``.

        Raises:
            ServerNotLive: when the engine is dead or stuck.
        """
        if not self.lifecycle.live:
            raise ServerNotLive(self.lifecycle.failure)
        return {"status": "alive"}

    async def ready(self) -> bool:
        return self.lifecycle.ready

    def metadata(self) -> dict[str, Any]:
        return {"name": "carousel", "version": versions()["version"], "extensions": list(EXTENSIONS)}

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs of a model.

        Raises:
            ModelNotFound: for a name that is not registered.
        """
        model = self.model_registry.get_model(model_name)
        if model is None:
            raise ModelNotFound(model_name)
        return {
            "name": model_name,
            "versions": [MODEL_VERSION],
            "platform": "carousel",
            "inputs": model.get_input_types(),
            "outputs": model.get_output_types(),
        }
