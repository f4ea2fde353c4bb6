"""How long a step will take: a small linear model, fitted online to the steps that really ran.

    seconds = c0 + c1 * tokens + c2 * attended

``tokens`` is what the linear layers see, ``attended`` the query-key pairs that attention touches. Fitted by recursive
least squares with exponential forgetting (Haykin, *Adaptive Filter Theory*, ch. 10), so that it follows a machine
whose speed drifts. The scheduler asks it how many prompt tokens fit beside the decodes of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

_FORGETTING = 0.98
_MIN_SAMPLES = 4
# Brings the features to about 1, so that one initial covariance suits all three.
_SCALE = (1.0, 1e-2, 1e-5)
_START, _MOST = 1e3, 1e6  # of the covariance: its diagonal at first, and its trace


def attended(num_new_tokens: int, context_before: int) -> int:
    """Query-key pairs of a chunk of ``num_new_tokens`` behind ``context_before`` computed tokens (causal)."""
    return num_new_tokens * context_before + num_new_tokens * (num_new_tokens + 1) // 2


class StepCostModel:
    """Predicts step seconds from tokens and attended pairs.

    In plain floats: for so few numbers numpy takes ten times as long, while the device idles.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[_START if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._samples = 0

    @property
    def ready(self) -> bool:
        """Whether enough steps were seen for :meth:`predict` to mean something."""
        return self._samples >= _MIN_SAMPLES

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Learn from a step that ran."""
        features = (1.0, num_tokens * _SCALE[1], num_attended * _SCALE[2])
        if self.ready:
            # One stolen time slice must not teach the model that all steps are slow.
            seconds = min(seconds, 3.0 * max(self.predict(num_tokens, num_attended), 1e-4))
        # The covariance is symmetric: its product with the features, from either side.
        spread = [_dot(row, features) for row in self._covariance]
        strength = 1.0 / (_FORGETTING + _dot(spread, features))
        step = strength * (seconds - _dot(self._weights, features))
        self._weights = [weight + step * one for weight, one in zip(self._weights, spread, strict=True)]
        self._samples += 1
        covariance = [
            [(value - strength * own * other) / _FORGETTING for value, other in zip(row, spread, strict=True)]
            for row, own in zip(self._covariance, spread, strict=True)
        ]
        # Directions that no step excites would otherwise grow without bound (covariance wind-up).
        if covariance[0][0] + covariance[1][1] + covariance[2][2] < _MOST:
            self._covariance = covariance

    def predict(self, num_tokens: int, num_attended: int) -> float:
        """Seconds that a step of this size is expected to take."""
        fixed, per_token, per_pair = self._weights
        seconds = max(per_token, 0.0) * _SCALE[1] * num_tokens + max(per_pair, 0.0) * _SCALE[2] * num_attended
        return max(fixed, 0.0) + seconds

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


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
