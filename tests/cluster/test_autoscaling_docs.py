"""docs/autoscaling.md says of flags, metadata keys and defaults what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from carousel.cluster.scaler_grpc import read_metadata
from carousel.cluster.scaler_options import ScalerOptions
from carousel.cluster.simulate import Policy
from carousel.cluster.simulate_command import SimulateOptions
from carousel.config import Settings
from carousel.options import options_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "autoscaling.md").read_text("utf-8")


def test_every_flag_that_it_names_exists() -> None:
    known = {item.flag for cls in (ScalerOptions, SimulateOptions, Settings) for item in options_of(cls)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - {"--as"}
    assert named <= known
    assert {item.flag for item in options_of(ScalerOptions) if item.group in ("Signal", "From zero")} - named <= {
        "--activator-max-requests", "--activator-max-bytes", "--activator-wait-seconds", "--max-request-bytes",
        "--drain-seconds",
    }  # fmt: skip


def test_the_table_s_keys_flags_and_defaults_are_the_code_s() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `--([\w-]+)` \| `?([\w.-]+)`? \|", TEXT, re.MULTILINE)
    assert len(rows) == 5
    defaults = ScalerOptions()
    for key, flag, shown in rows:
        value = getattr(defaults, flag.replace("-", "_"))
        assert (f"{value:g}" if isinstance(value, float) else value) == shown
        assert read_metadata({key: shown}, defaults.targets) == defaults.targets


def test_what_was_simulated_is_what_is_shipped() -> None:
    scaler, simulated = ScalerOptions(), SimulateOptions()
    for name in ("target_wait_seconds", "target_occupancy", "target_requests", "target_tokens", "scale_in_seconds"):
        assert getattr(scaler, name) == getattr(simulated, name), name
    policy: Any = Policy("queue-seconds", scaler.targets)
    assert (policy.window_s, policy.hpa_window_s) == (simulated.scale_in_seconds, simulated.hpa_window_seconds)
    assert f"stabilizationWindowSeconds: {policy.hpa_window_s:g}" in TEXT


def test_its_pictures_are_there() -> None:
    for name in re.findall(r"\]\((autoscaling-\w+\.svg)\)", TEXT):
        assert (DOCS / name).read_text("utf-8").startswith("<svg ")
