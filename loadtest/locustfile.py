"""What locust is given: ``locust -f loadtest/locustfile.py --host http://127.0.0.1:8080``. See README.md beside it."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
for folder in (_ROOT, _ROOT / "predictor"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from loadtest import plugin  # noqa: E402
from loadtest.users import (  # noqa: E402
    ChatUser,
    CompletionsUser,
    GenerateUser,
    GrpcStreamUser,
    GrpcUser,
    InferUser,
)

plugin.install()

__all__ = ["ChatUser", "CompletionsUser", "GenerateUser", "GrpcStreamUser", "GrpcUser", "InferUser"]
