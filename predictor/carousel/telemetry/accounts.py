"""All that counts what requests took, as the server has it: sums, log and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from carousel.engine.meter import RequestUsage
from carousel.telemetry.tenant_metrics import TenantMetrics
from carousel.telemetry.usage import Price, UsageBook
from carousel.telemetry.usage_log import UsageLog
from carousel.tenancy.policy import PolicyFile

if TYPE_CHECKING:
    from carousel.config import Settings


class Accounts:
    """Of one server. ``log`` is open, or None where there is none."""

    def __init__(self, settings: Settings, policies: PolicyFile, log: UsageLog | None = None) -> None:
        price = Price(settings.price_per_node_hour, settings.price_currency)
        self.log = log
        self.book = UsageBook(settings.model_name, price)
        self.metrics = TenantMetrics(settings.model_name, price, settings.tenant_labels, policies, log)

    def meters(self) -> list[Callable[[RequestUsage], None]]:
        """Whom the engine tells of each request's usage, from now on."""
        self.book.begin()
        return [self.book, self.metrics, *([self.log] if self.log is not None else [])]

    def close(self) -> None:
        """Nothing more will be counted: the log is written to its end."""
        self.metrics.unregister()
        if self.log is not None:
            self.log.close()
