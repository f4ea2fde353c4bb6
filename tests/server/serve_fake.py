"""A server process around the fake engine: ``HTTP GRPC [delay=S] [gate=FILE] [fail=TEXT] [OPTION ...]``.

Further options are drain=S, leave=S (the shutdown delay) and unload=1. Until the file ``gate`` exists, the model loads.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fake_engine import FakeEngine, fake_factory

from carousel.config import Settings
from carousel.server import serve

options = dict(word.split("=", 1) for word in sys.argv[3:])


def prepare(engine: FakeEngine) -> None:
    while "gate" in options and not Path(options["gate"]).exists():
        time.sleep(0.02)
    if "fail" in options:
        raise RuntimeError(options["fail"])
    engine.delay_s = float(options.get("delay", 0))


if __name__ == "__main__":
    settings = Settings(
        model="fake", model_name="fake", http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]),
        drain_seconds=float(options.get("drain", 5)), log_format="json",
        shutdown_delay_seconds=float(options.get("leave", 0)), allow_unload="unload" in options,
    )  # fmt: skip
    sys.exit(serve(settings, engine_factory=fake_factory(prepare)))
