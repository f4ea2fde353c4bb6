"""KServe's data plane with the true state of the engine, where KServe answers constants."""

from __future__ import annotations

from typing import Any

from kserve.errors import ModelNotFound, ServerNotLive
from kserve.model_repository import ModelRepository
from kserve.protocol.dataplane import DataPlane

from carousel.lifecycle import Lifecycle
from carousel.predictor import MODEL_VERSION
from carousel.telemetry.metrics import versions
from carousel.telemetry.statistics import RequestStatistics

EXTENSIONS = (
    "model_repository",
    "model_repository_extension",
    "binary_tensor_data",
    "model_configuration",
    "statistics",
    "parameters",
    "generate",
)
PLATFORM = "carousel"
_TRITON_TYPES = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL"}  # the others are TYPE_ and their name


class CarouselDataPlane(DataPlane):
    """Liveness, readiness and metadata that follow the engine."""

    def __init__(self, model_registry: ModelRepository, lifecycle: Lifecycle, statistics: RequestStatistics) -> None:
        super().__init__(model_registry=model_registry)
        self.lifecycle = lifecycle
        self._statistics = statistics

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
        model = self._model(model_name)
        return {
            "name": model_name,
            "versions": [MODEL_VERSION],
            "platform": PLATFORM,
            "inputs": model.get_input_types(),
            "outputs": model.get_output_types(),
        }

    def model_config(self, model_name: str) -> dict[str, Any]:
        """What Triton's model configuration extension says of a model; ``dims`` are whole shapes.

        Raises:
            ModelNotFound: for a name that is not registered.
        """
        model = self._model(model_name)
        return {
            "name": model_name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": 0,
            "input": [_triton_tensor(item) for item in model.get_input_types()],
            "output": [_triton_tensor(item) for item in model.get_output_types()],
        }

    def model_statistics(self, model_name: str) -> dict[str, Any]:
        """What Triton's statistics extension says of a model: counts and nanoseconds since the start.

        Raises:
            ModelNotFound: for a name that is not registered.
        """
        self._model(model_name)
        return self._statistics.answer(model_name, MODEL_VERSION)

    def _model(self, name: str) -> Any:
        model = self.model_registry.get_model(name)
        if model is None:
            raise ModelNotFound(name)
        return model


def _triton_tensor(tensor: dict[str, Any]) -> dict[str, Any]:
    kind = _TRITON_TYPES.get(tensor["datatype"], f"TYPE_{tensor['datatype']}")
    return {"name": tensor["name"], "data_type": kind, "dims": tensor["shape"]}
