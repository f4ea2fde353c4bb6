"""How long a step will take: a small linear model, fitted online to the steps that really ran.

    seconds = c0 + c1 * tokens + c2 * attended

``tokens`` is what the linear layers see, ``attended`` the query-key pairs that attention touches. Fitted by recursive
least squares with exponential forgetting (Haykin, *Adaptive Filter Theory*, ch. 10), so that it follows a machine
whose speed drifts. The scheduler asks it how many prompt tokens fit beside the decodes of a step.
"""

from __future__ import annotations

import numpy as np

_FORGETTING = 0.98
_MIN_SAMPLES = 4
# Brings the features to about 1, so that one initial covariance suits all three.
_SCALE = np.array([1.0, 1e-2, 1e-5])


def attended(num_new_tokens: int, context_before: int) -> int:
    """Query-key pairs of a chunk of ``num_new_tokens`` behind ``context_before`` computed tokens (causal)."""
    return num_new_tokens * context_before + num_new_tokens * (num_new_tokens + 1) // 2


class StepCostModel:
    """Predicts step seconds from tokens and attended pairs. Cheap: microseconds per update."""

    def __init__(self) -> None:
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * 1e3
        self._samples = 0

    @property
    def ready(self) -> bool:
        """Whether enough steps were seen for :meth:`predict` to mean something."""
        return self._samples >= _MIN_SAMPLES

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Learn from a step that ran."""
        features = np.array([1.0, num_tokens, num_attended]) * _SCALE
        if self.ready:
            # One stolen time slice must not teach the model that all steps are slow.
            seconds = min(seconds, 3.0 * max(self.predict(num_tokens, num_attended), 1e-4))
        gain = self._covariance @ features / (_FORGETTING + features @ self._covariance @ features)
        self._weights = self._weights + gain * (seconds - features @ self._weights)
        covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / _FORGETTING
        # Directions that no step excites would otherwise grow without bound (covariance wind-up).
        self._covariance = covariance if np.trace(covariance) < 1e6 else self._covariance
        self._samples += 1

    def predict(self, num_tokens: int, num_attended: int) -> float:
        """Seconds that a step of this size is expected to take."""
        weights = np.maximum(self._weights, 0.0) * _SCALE
        return float(weights[0] + weights[1] * num_tokens + weights[2] * num_attended)

    def max_chunk(self, target_s: float, num_tokens: int, num_attended: int, context_before: int, limit: int) -> int:
        """The most prompt tokens, at most ``limit``, that keep a step within ``target_s``.

        Args:
            target_s: seconds the step may take.
            num_tokens, num_attended: what the step holds already.
            context_before: computed tokens that the new chunk will attend to.
            limit: upper bound, and the answer while the model is not :attr:`ready`.
        """
        if not self.ready:
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            pairs = num_attended + attended(middle, context_before)
            if self.predict(num_tokens + middle, pairs) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low
