"""The chart's alerts under promtool, of which a laptop need have none: the kit's Prometheus brings it.

The tests are those of tests/helm; without promtool they are skipped with a line that says what to do.
"""

from __future__ import annotations

from tests.helm.test_chart_metrics import (  # noqa: F401  (collected here too)
    test_alerts_fire_when_they_should_and_only_then,
    test_every_alert_has_a_scene_in_which_it_fires,
    test_rules_are_rules_to_prometheus,
    test_the_scaler_s_signal_in_promql,
)
