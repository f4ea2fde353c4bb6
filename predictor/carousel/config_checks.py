"""What single bounds cannot say of the settings: flags of other servers, and values that do not go together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from carousel.options import Compatibility, Problem

if TYPE_CHECKING:
    from carousel.config import Settings

_CLIENT = "it concerns calls from a transformer to a predictor, and this is the predictor"
COMPATIBILITY = (
    Compatibility(
        "--workers",
        "one process owns the model and its batch; scale with replicas instead",
        accepted=("1",),
    ),
    Compatibility("--task", "it serves text generation", accepted=("text_generation", "text-generation", "generate")),
    Compatibility("--max-threads", "gRPC calls run on the event loop, not on threads"),
    Compatibility("--max-asyncio-workers", "generation runs on the engine's thread, not on asyncio's workers"),
    Compatibility("--event-loop", "uvloop is taken where it is installed"),
    Compatibility("--enable-latency-logging", "latencies are in /metrics", switch=True),
    Compatibility("--configure-logging", "see --log-level and --log-format", switch=True),
    Compatibility("--log-config-file", "see --log-level and --log-format"),
    Compatibility("--access-log-format", "see --log-level and --log-format"),
    Compatibility("--disable-log-requests", "requests are never logged with their content", switch=True),
    Compatibility("--grpc-max-send-message-length", "answers are never larger than gRPC allows"),
    Compatibility("--grpc-max-receive-message-length", "see --max-request-bytes"),
    Compatibility("--predictor-host", _CLIENT),
    Compatibility("--protocol", _CLIENT),
    Compatibility("--predictor-protocol", _CLIENT),
    Compatibility("--predictor-use-ssl", _CLIENT, switch=True),
    Compatibility("--predictor-request-timeout-seconds", _CLIENT),
    Compatibility("--predictor-request-retries", _CLIENT),
    Compatibility("--enable-predictor-health-check", _CLIENT, switch=True),
    Compatibility("--backend", "there is one engine"),
    Compatibility("--trust-remote-code", "code from model repositories is never run", switch=True),
)


def cross_checks(settings: Settings) -> Iterable[Problem]:
    """What single bounds cannot say. Each problem names the settings it is about."""
    s = settings
    if s.max_batch_sequences > s.max_batch_tokens:
        yield Problem(
            ("max_batch_sequences", "max_batch_tokens"),
            f"--max-batch-sequences ({s.max_batch_sequences}) must not exceed --max-batch-tokens "
            f"({s.max_batch_tokens}): each sequence on the batch takes at least one token of every step",
        )
    if s.grpc and s.http_port == s.grpc_port:
        yield Problem(
            ("http_port", "grpc_port", "grpc"),
            f"--http-port and --grpc-port are both {s.http_port}: choose two ports, or --no-grpc",
        )
    if s.tenant_weights and s.policy != "fair":
        yield Problem(
            ("tenant_weights", "policy"),
            f"--tenant-weights only means something with --policy fair, and the policy is {s.policy}",
        )
    if s.tenant_weights and s.tenant_policy:
        yield Problem(
            ("tenant_weights", "tenant_policy"),
            "--tenant-weights and --tenant-policy both: the policy file has the weights, too",
        )
    if s.batching == "static" and s.policy == "priority":
        yield Problem(
            ("batching", "policy"),
            "--policy priority preempts, which --batching static never does: choose fcfs, fair or deadline",
        )
    if s.max_queue_tokens and s.max_model_len and s.max_queue_tokens < s.max_model_len:
        yield Problem(
            ("max_queue_tokens", "max_model_len"),
            f"--max-queue-tokens ({s.max_queue_tokens}) must not be below --max-model-len ({s.max_model_len}), "
            "or the longest prompts could never wait",
        )
    if s.device == "cpu" and s.dtype == "float16":
        yield Problem(
            ("device", "dtype"),
            "--dtype float16 does not run on --device cpu: choose float32 or bfloat16, or auto",
        )
    if s.device.startswith("cuda") and s.quantization == "int8":
        yield Problem(("device", "quantization"), "--quantization int8 runs on --device cpu only: choose none, or auto")
    if s.tensor_parallel_size > 1 and ":" in s.device:
        yield Problem(
            ("device", "tensor_parallel_size"),
            f"--tensor-parallel-size {s.tensor_parallel_size} takes the first GPUs, not {s.device}: choose --device "
            "cuda, and which GPUs are visible by CUDA_VISIBLE_DEVICES",
        )
    if s.tensor_parallel_size > 1 and s.deterministic:
        yield Problem(
            ("tensor_parallel_size", "deterministic"),
            "--deterministic runs on one device only: libraries add what several have as the amount suits them",
        )
    if s.kv_cache_dtype == "fp8" and s.device == "cpu":
        yield Problem(("device", "kv_cache_dtype"), "--kv-cache-dtype fp8 runs on GPUs only, and --device is cpu")
    if s.kv_cache_dtype in ("float32", "bfloat16") and s.device.startswith("cuda"):
        yield Problem(
            ("device", "kv_cache_dtype"),
            f"--kv-cache-dtype {s.kv_cache_dtype} is for --device cpu: on a GPU choose auto, that of --dtype, or fp8",
        )
    if s.deterministic and s.device == "cpu":
        yield Problem(("device", "deterministic"), "--deterministic runs on GPUs only, and --device is cpu")
    if "://" not in s.model and not Path(s.model).expanduser().exists():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", s.model)
        hint = f"; a model of the Hugging Face Hub is written hf://{s.model}" if hub else ""
        yield Problem(
            ("model",), f"--model / CAROUSEL_MODEL: got {s.model!r}, which is no file or directory here{hint}"
        )
    yield from _file_checks(s)


def _file_checks(s: Settings) -> Iterable[Problem]:
    """Of the settings that name files."""
    for name in ("cache_dir", "usage_log"):
        folder = getattr(s, name)
        if folder and Path(folder).expanduser().is_file():
            flag, variable = "--" + name.replace("_", "-"), f"CAROUSEL_{name.upper()}"
            yield Problem((name,), f"{flag} / {variable}: {folder!r} is a file, not a directory")
    if bool(s.tls_certificate) != bool(s.tls_key):
        given, lacks = ("--tls-certificate", "--tls-key") if s.tls_certificate else ("--tls-key", "--tls-certificate")
        yield Problem(("tls_certificate", "tls_key"), f"{given} without {lacks}: TLS needs both")
    if s.tls_client_ca and not s.tls_certificate:
        yield Problem(
            ("tls_client_ca", "tls_certificate"), "--tls-client-ca without --tls-certificate and --tls-key: TLS is off"
        )
    for name in ("api_keys", "tenant_policy", "tls_certificate", "tls_key", "tls_client_ca"):
        path = getattr(s, name)
        if path and not Path(path).exists():
            flag, variable = "--" + name.replace("_", "-"), f"CAROUSEL_{name.upper()}"
            yield Problem((name,), f"{flag} / {variable}: got {path!r}, which does not exist here")
