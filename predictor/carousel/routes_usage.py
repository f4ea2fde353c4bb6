"""What was used, by whom, and what it costs; and what the steps did that it was used in."""

from __future__ import annotations

import time

from fastapi.responses import Response

from carousel.answers import Handlers, json_response
from carousel.doctor import timeline_of
from carousel.predictor import CarouselModel
from carousel.telemetry.usage import UsageBook, shown_tenant
from carousel.tenancy.quota import tied_tenant


class UsageRoutes(Handlers):
    """``/usage`` and ``/timeline``. Unlike ``/metrics`` they need a key where the server has keys."""

    def __init__(self, model: CarouselModel, book: UsageBook) -> None:
        super().__init__(model)
        self._book = book

    async def usage(self) -> Response:
        """Sums since the start. Who calls with a tenant's own credential sees that tenant alone."""
        tenant = tied_tenant()
        only = None if tenant is None else shown_tenant(tenant)
        return json_response(self._book.summary(self.lifecycle.stats(), only))

    async def timeline(self) -> Response:
        """What the last steps did, for ``carousel doctor``: counts and times, of nobody in particular."""
        engine = self.lifecycle.require()
        stats, settings = engine.stats(), self.lifecycle.settings
        steps = list(engine.timeline.steps)
        found = timeline_of(steps, settings, stats.num_slots, stats.num_blocks, time.monotonic(), self.model.name)
        return json_response(found)
