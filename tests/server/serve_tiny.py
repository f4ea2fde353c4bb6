"""A server process around the real engine on the tiny model: ``HTTP GRPC [step_ms=N] [SETTING=VALUE ...]``."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.engine.tiny import tiny_settings
    from tests.server.harness import tiny_factory

    from carousel.config import Settings
    from carousel.server import serve

    options = dict(word.split("=", 1) for word in sys.argv[3:])
    step_s = float(options.pop("step_ms", 0)) / 1000
    kinds = {field.name: type(getattr(Settings(), field.name)) for field in fields(Settings)}
    changes = {name: kinds[name](value) for name, value in options.items()}
    settings = tiny_settings(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), log_format="json", **changes)
    sys.exit(serve(settings, engine_factory=tiny_factory([], step_s)))
