"""The flags of ``carousel scaler``, declared as the server's settings are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carousel.cluster.demand import MODES, Targets
from carousel.options import (
    INTEGER,
    NUMBER,
    SIZE,
    TEXT,
    Parsed,
    SettingsError,
    help_text,
    option,
    options_of,
    parse_options,
)

_PODS, _SIGNAL, _TIME = "Pods", "Signal", "Time"
_ZERO, _SERVER, _LOG = "From zero", "Server", "Logs"
_DNS_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\.?"
# key, key=value, key!=value, key in (a,b), key notin (a,b), !key, by commas: checked by the API server in the end.
_SELECTOR = r"[\w./!=,()\s-]{1,1000}"

USAGE = """usage: carousel scaler (--pod-selector LABELS | --pod-dns NAME) [FLAG ...]

An external scaler for KEDA: adds up what waits in all ready pods and says how many replicas that takes; with
--activator-port also a proxy that holds requests while the target is at zero. See docs/autoscaling.md."""


@dataclass(frozen=True, kw_only=True)
class ScalerOptions:
    """What ``carousel scaler`` can be told."""

    pod_selector: str = option(
        "", TEXT, "Labels of the pods, found through Kubernetes' API; needs a Role with pods: [list, watch].",
        group=_PODS, pattern=_SELECTOR, allowed="a label selector such as app=carousel", empty="see --pod-dns",
    )  # fmt: skip
    pod_dns: str = option(
        "", TEXT, "Name of a headless Service with the pods behind it; needs no API and no token.",
        group=_PODS, pattern=_DNS_NAME, allowed="a DNS name such as pods.models.svc", empty="see --pod-selector",
    )  # fmt: skip
    pod_namespace: str = option(
        "", TEXT, "Namespace of the pods, with --pod-selector.",
        group=_PODS, pattern=r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", allowed="a namespace", empty="the scaler's own",
    )  # fmt: skip
    pod_port: int = option(8080, INTEGER, "HTTP port of the pods.", group=_PODS, low=1, high=65535)
    pod_tls_ca: str = option(
        "", TEXT, "Authorities (PEM) of the pods' certificates, where they serve TLS.",
        group=_PODS, allowed="a file", empty="pods serve plain HTTP",
    )  # fmt: skip
    api_server: str = option(
        "", TEXT, "Address of Kubernetes' API; plain http, as of kubectl proxy, is asked without a token.",
        group=_PODS, pattern=r"https?://[^\s/]+/?", allowed="an http:// or https:// address",
        empty="the cluster's own",
    )  # fmt: skip

    scale_on: str = option(
        "queue-seconds", TEXT,
        """What the metric is: queue-seconds, the time that the queues take beside how full the batches are; requests or
        tokens, running and waiting.""",
        group=_SIGNAL, choices=MODES,
    )  # fmt: skip
    target_wait_seconds: float = option(
        5.0, NUMBER, "The queue that a new request may find, under --scale-on queue-seconds.",
        unit="seconds", group=_SIGNAL, low=0.1, high=3600,
    )  # fmt: skip
    target_occupancy: float = option(
        0.6, NUMBER, "How full a batch (or the KV memory) is when a replica counts as used up.",
        unit="share", group=_SIGNAL, low=0.05, high=1,
    )  # fmt: skip
    target_requests: float = option(
        10.0, NUMBER, "Requests of a replica, under --scale-on requests; what a held request counts in any case.",
        unit="requests", group=_SIGNAL, low=0.1, high=1e6,
    )  # fmt: skip
    target_tokens: float = option(
        2000.0, NUMBER, "Tokens of a replica, under --scale-on tokens.",
        unit="tokens", group=_SIGNAL, low=1, high=1e12,
    )  # fmt: skip

    interval_seconds: float = option(
        2.0, NUMBER, "Time between two looks at the pods.", unit="seconds", group=_TIME, low=0.1, high=60
    )
    stale_seconds: float = option(
        30.0, NUMBER, "How long the last good value is served when there is no newer one; then KEDA gets an error.",
        unit="seconds", group=_TIME, low=1, high=3600,
    )  # fmt: skip
    scale_in_seconds: float = option(
        60.0, NUMBER, "The metric is its largest value of this time, so that a short lull does not scale in.",
        unit="seconds", group=_TIME, low=0, high=3600,
    )  # fmt: skip
    idle_seconds: float = option(
        30.0, NUMBER, "How long the target stays active after the last request; KEDA's cooldownPeriod comes on top.",
        unit="seconds", group=_TIME, low=1, high=86_400,
    )  # fmt: skip

    activator_port: int = option(
        0, INTEGER, "Port of the proxy that holds requests until a pod is ready.",
        group=_ZERO, low=1, high=65535, zero="no proxy",
    )  # fmt: skip
    activator_max_requests: int = option(
        256, INTEGER, "Most requests that are held; one more gets 503.",
        unit="requests", group=_ZERO, low=1, high=100_000,
    )  # fmt: skip
    activator_max_bytes: int = option(
        64 * 2**20, SIZE, "Most bytes of bodies that no pod has answered yet; beyond them requests get 503.",
        unit="bytes", group=_ZERO, low=2**10, high=2**40,
    )  # fmt: skip
    activator_wait_seconds: float = option(
        300.0, NUMBER, "How long a request is held before it gets 503.",
        unit="seconds", group=_ZERO, low=1, high=3600,
    )  # fmt: skip
    max_request_bytes: int = option(
        32 * 2**20, SIZE, "The largest body that the proxy takes.", unit="bytes", group=_ZERO, low=2**10, high=2**30
    )
    shutdown_delay_seconds: float = option(
        0.0, NUMBER, "After SIGTERM, how long the ports stay open, not ready, while others turn elsewhere.",
        unit="seconds", group=_ZERO, low=0, high=3600,
    )  # fmt: skip
    drain_seconds: float = option(
        30.0, NUMBER, "After SIGTERM, how long answers that pass through the proxy may take.",
        unit="seconds", group=_ZERO, low=0, high=3600,
    )  # fmt: skip
    peers_dns: str = option(
        "", TEXT, "Headless Service with all replicas of this scaler behind it (publishNotReadyAddresses: true).",
        group=_ZERO, pattern=_DNS_NAME, allowed="a DNS name", empty="there is one replica",
    )  # fmt: skip

    host: str = option(
        "127.0.0.1", TEXT, "Address to listen on; 0.0.0.0 in a pod.",
        group=_SERVER, pattern=r"[A-Za-z0-9_.:\-\[\]%]+", allowed="an IP address or a host name",
    )  # fmt: skip
    scaler_port: int = option(9095, INTEGER, "Port of the gRPC service for KEDA.", group=_SERVER, low=1, high=65535)
    admin_port: int = option(
        9096, INTEGER, "Port of health, metrics, /state and POST /activate.", group=_SERVER, low=1, high=65535
    )

    log_level: str = option(
        "info", TEXT, "Least severe message that is logged.", group=_LOG, choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "auto", TEXT, "How log lines look; auto is text on a terminal and JSON elsewhere.",
        group=_LOG, choices=("auto", "text", "json"),
    )  # fmt: skip

    @property
    def targets(self) -> Targets:
        """Where the trigger's metadata says nothing."""
        return Targets(
            self.scale_on, self.target_wait_seconds, self.target_requests, self.target_tokens, self.target_occupancy
        )


def _checks(options: ScalerOptions, parsed: Parsed) -> None:
    """What single bounds cannot say."""
    if bool(options.pod_selector) == bool(options.pod_dns):
        both = "both are given" if options.pod_selector else "neither is given"
        parsed.fail(("pod_selector", "pod_dns"), f"--pod-selector, --pod-dns: one of the two is needed, {both}")
    if options.pod_dns and options.pod_namespace:
        parsed.fail(("pod_namespace",), "--pod-namespace goes with --pod-selector; a DNS name has its namespace in it")
    ports = {"--scaler-port": options.scaler_port, "--admin-port": options.admin_port}
    if options.activator_port:
        ports["--activator-port"] = options.activator_port
    if len(set(ports.values())) < len(ports):
        shown = ", ".join(f"{flag} {port}" for flag, port in ports.items())
        parsed.fail(("scaler_port", "admin_port", "activator_port"), f"{shown}: two are the same")
    if options.stale_seconds < 2 * options.interval_seconds:
        parsed.fail(
            ("stale_seconds", "interval_seconds"),
            f"--stale-seconds ({options.stale_seconds:g}) must be at least twice --interval-seconds "
            f"({options.interval_seconds:g}), or one lost answer would be an error",
        )


def load_options(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ScalerOptions, list[str]]:
    """The options, and notices for the log. The server's ``CAROUSEL_*`` variables are known and let be.

    Raises:
        SettingsError: with every problem at once.
    """
    from carousel.config import OTHER_ENV, declared_settings

    servers = {item.env for item in declared_settings()} | OTHER_ENV
    parsed = parse_options([ScalerOptions], argv, environ, other_env=servers - scaler_variables())
    for word in parsed.positionals:
        parsed.fail((), f"{word!r}: unexpected word; all are flags (see --help)")
    options = parsed.build(ScalerOptions)
    if not {"pod_selector", "pod_dns"} & {name for problem in parsed.problems for name in problem.names}:
        _checks(options, parsed)
    if parsed.problems:
        raise SettingsError(parsed.problems)
    return options, list(parsed.notices)


def scaler_variables() -> set[str]:
    """The variables of ``carousel scaler``."""
    return {item.env for item in options_of(ScalerOptions)}


def scaler_help() -> str:
    """The text of ``--help``."""
    return f"{USAGE}\n\n{help_text([ScalerOptions])}"
