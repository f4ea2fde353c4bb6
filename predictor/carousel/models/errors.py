"""Why a model cannot be loaded."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """A model cannot be loaded; the message names the file, the cause and what to try."""


class UnsupportedModel(ModelLoadError):
    """The architecture is not one of the decoder's. ``architecture`` and ``supported`` are names as in config.json."""

    def __init__(self, architecture: str, supported: tuple[str, ...]) -> None:
        self.architecture = architecture
        self.supported = supported
        super().__init__(f"architecture {architecture} is not supported; supported: {', '.join(supported)}")
