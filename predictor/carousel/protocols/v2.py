"""The Open Inference Protocol's ``infer``, as neutral tensors: REST and gRPC look the same from here.

Input ``text_input``: BYTES of shape [B] or [B, 1], one prompt per row. The answer has one row per prompt:
``text_output`` and ``finish_reason`` BYTES [B], ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens`` INT32
[B], and, if ``logprobs`` was asked for, ``logprobs`` BYTES [B]: JSON, a list of ``{"id", "text", "logprob",
"special"}`` with ``"top"`` where alternatives were asked for.

Sampling fields (``carousel.protocols.common.SPELLINGS``) come as request parameters or as further input tensors; a
tensor wins over a parameter of the same name.

- A tensor of shape [1] holds for all rows, [B] or [B, 1] for each its own. FP16/FP32/FP64 for numbers, any INT or UINT
  for integers (and numbers), BOOL for booleans. ``stop`` (BYTES) and ``stop_token_ids`` (integers): [S] are S stops for
  all rows, [B, S] S for each row, where empty strings and negative ids are padding. ``logit_bias`` is a parameter only.
- Parameters are scalars on this protocol's wires, and gRPC as KServe knows it has no floating-point ones: numbers and
  booleans may be strings (``"0.7"``, ``"true"``). ``stop`` is one stop string, or a JSON list of strings in a string
  (``'["\\n\\n", "END"]'``); ``stop_token_ids`` (``"[2, 7]"``) and ``logit_bias`` (``'{"42": -1.5}'``) likewise.
- ``timeout`` is Triton's: an integer of microseconds; ``timeout_seconds`` is ours. ``priority`` (lower goes first, as
  in Triton), ``deadline`` (seconds), ``cache_salt`` and ``add_special_tokens`` as everywhere.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carousel.engine.request import GenerationRequest, Output, SamplingParams
from carousel.protocols import common
from carousel.protocols import fields as read
from carousel.protocols.common import Call, Context
from carousel.protocols.fields import Values
from carousel.protocols.jsonio import dumps, refuse

TEXT_INPUT = "text_input"
_INTEGER_TYPES = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})
_FLOAT_TYPES = frozenset({"FP16", "FP32", "FP64"})
_LISTS = ("stop", "stop_token_ids")
_TENSORS = (common.SAMPLING_NAMES - {"logit_bias"}) | {"priority", "deadline", "add_special_tokens", "timeout_seconds"}
# Parts of the wire format itself, which the SDK handles; seen here, they mean nothing more.
_WIRE = frozenset({"binary_data_output", "binary_data_size", "content_type", "headers"})
_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_PARAMETERS = common.SAMPLING_NAMES | common.OPTION_NAMES | {"timeout_seconds"}
_OPTION_KINDS = {
    "priority": "integer",
    "timeout": "integer",
    "timeout_seconds": "number",
    "deadline": "number",
    "add_special_tokens": "boolean",
}
_MAX_STOPS = 64
_SHORTEST_TIMEOUT_US = 1000

INPUTS: list[dict[str, Any]] = [{"name": TEXT_INPUT, "datatype": "BYTES", "shape": [-1]}]
OUTPUTS: list[dict[str, Any]] = [
    {"name": "text_output", "datatype": "BYTES", "shape": [-1]},
    {"name": "finish_reason", "datatype": "BYTES", "shape": [-1]},
    {"name": "prompt_tokens", "datatype": "INT32", "shape": [-1]},
    {"name": "completion_tokens", "datatype": "INT32", "shape": [-1]},
    {"name": "cached_tokens", "datatype": "INT32", "shape": [-1]},
]


@dataclass(slots=True)
class V2Tensor:
    """A tensor of the protocol, whatever carried it.

    ``data``: row-major Python scalars, flat or nested as ``shape`` says; BYTES elements are ``str`` or UTF-8 ``bytes``.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class V2Request:
    """An ``infer`` request. ``outputs`` are the names of the outputs asked for, empty for all."""

    inputs: Sequence[V2Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    outputs: Sequence[str] = ()
    model_name: str | None = None


@dataclass(slots=True, kw_only=True)
class V2Call(Call):
    """A V2 request: ``requests[i]`` is row i. ``outputs`` names what the answer holds."""

    outputs: Sequence[str]


@dataclass(slots=True)
class _Input:
    """A checked tensor: where it stood, its shape, its elements flat, strings decoded."""

    path: str
    name: str
    datatype: str
    shape: list[int]
    data: list[object]

    def at(self, index: int) -> str:
        return f"{self.path}.data[{index}]" + ("" if self.name == TEXT_INPUT else f" ({self.name})")


def _flatten(path: str, data: object, depth: int = 2) -> list[object]:
    """``data`` flat, or one level of rows."""
    if not isinstance(data, (list, tuple)):
        refuse(path, data, "a list of elements, or of rows")
    flat: list[object] = []
    for item in data:
        if isinstance(item, (list, tuple)):
            if depth == 1:
                refuse(path, item, "at most two dimensions")
            flat.extend(_flatten(path, item, depth - 1))
        else:
            flat.append(item)
    return flat


def _check_elements(tensor: _Input) -> None:
    """Decode BYTES in place; refuse elements that are not of the tensor's own datatype."""
    for index, item in enumerate(tensor.data):
        if tensor.datatype == "BYTES":
            if isinstance(item, bytes):
                try:
                    tensor.data[index] = item.decode("utf-8")
                except UnicodeDecodeError as error:
                    refuse(tensor.at(index), item, f"valid UTF-8 (byte {error.start} is not)")
            elif not isinstance(item, str):
                refuse(tensor.at(index), item, "a string, as datatype BYTES says")
        elif tensor.datatype == "BOOL":
            if not isinstance(item, bool):
                refuse(tensor.at(index), item, "true or false, as datatype BOOL says")
        elif isinstance(item, bool) or not isinstance(item, int if tensor.datatype in _INTEGER_TYPES else (int, float)):
            refuse(tensor.at(index), item, f"a number, as datatype {tensor.datatype} says")


def _input(path: str, tensor: V2Tensor) -> _Input:
    datatype = tensor.datatype.upper()
    if datatype != "BYTES" and datatype != "BOOL" and datatype not in _INTEGER_TYPES | _FLOAT_TYPES:
        refuse(f"{path}.datatype", tensor.datatype, "BYTES, BOOL, FP16, FP32, FP64, or an INT or UINT type")
    shape = list(tensor.shape)
    if not shape or len(shape) > 2 or any(type(size) is not int or size < 0 for size in shape):
        refuse(f"{path}.shape", shape, "one or two sizes: [B], [B, 1] or, for lists, [B, S]")
    checked = _Input(path, tensor.name, datatype, shape, _flatten(f"{path}.data", tensor.data))
    if math.prod(shape) != len(checked.data):
        refuse(f"{path}.shape", shape, f"a shape of {len(checked.data)} elements, as many as data has")
    _check_elements(checked)
    return checked


def _inputs(request: V2Request) -> dict[str, _Input]:
    known = {TEXT_INPUT, *_TENSORS}
    inputs: dict[str, _Input] = {}
    for index, tensor in enumerate(request.inputs):
        path = f"inputs[{index}]"
        if tensor.name not in known:
            close = difflib.get_close_matches(str(tensor.name)[:80], known, n=1, cutoff=0.7)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            refuse(f"{path}.name", tensor.name, f"{TEXT_INPUT!r}, or the name of a sampling field{hint}")
        if tensor.name in inputs:
            refuse(f"{path}.name", tensor.name, "each input once")
        inputs[tensor.name] = _input(path, tensor)
    if TEXT_INPUT not in inputs:
        refuse("inputs", sorted(inputs), f"an input named {TEXT_INPUT!r}, BYTES [B] or [B, 1]")
    return inputs


def _rows(tensor: _Input) -> int:
    """The batch size that ``text_input`` sets."""
    if tensor.datatype != "BYTES":
        refuse(f"{tensor.path}.datatype", tensor.datatype, "BYTES")
    if len(tensor.shape) == 2 and tensor.shape[1] != 1:
        refuse(f"{tensor.path}.shape", tensor.shape, "[B] or [B, 1]")
    if not 0 < tensor.shape[0] <= common.MAX_PROMPTS:
        refuse(f"{tensor.path}.shape", tensor.shape, f"1 to {common.MAX_PROMPTS} rows")
    return tensor.shape[0]


def _list_row(tensor: _Input, row: int, rows: int) -> list[object]:
    """The stops of one row, padding left out."""
    if len(tensor.shape) == 1:
        items = tensor.data
    else:
        if tensor.shape[0] not in (1, rows):
            refuse(f"{tensor.path}.shape", tensor.shape, f"[S], [1, S] or [{rows}, S]")
        width = tensor.shape[1]
        start = 0 if tensor.shape[0] == 1 else row * width
        items = tensor.data[start : start + width]
    if len(items) > _MAX_STOPS:
        refuse(f"{tensor.path}.shape", tensor.shape, f"at most {_MAX_STOPS} stops per row")
    return [item for item in items if not (item == "" or (isinstance(item, int) and item < 0))]


def _tensor_values(inputs: Mapping[str, _Input], row: int, rows: int) -> Values:
    """The sampling tensors as the fields of one row."""
    values: Values = {}
    for name, tensor in inputs.items():
        if name == TEXT_INPUT:
            continue
        if name in _LISTS:
            values[name] = (f"{tensor.path} ({name})", _list_row(tensor, row, rows))
            continue
        if tensor.shape not in ([1], [1, 1], [rows], [rows, 1]):
            refuse(f"{tensor.path}.shape", tensor.shape, f"[1], [{rows}] or [{rows}, 1]")
        index = row if len(tensor.data) == rows else 0
        values[name] = (tensor.at(index), tensor.data[index])
    return values


def _parameter_values(parameters: Mapping[str, Any]) -> Values:
    given = {name: value for name, value in parameters.items() if name not in _WIRE}
    for name in _SEQUENCE & given.keys():
        if given.pop(name) not in (0, False, "", None):
            refuse(f"parameters.{name}", parameters[name], "nothing: sequences of requests are not supported")
    if "stream" in given and read.from_text(given.pop("stream"), "boolean") not in (False, None):
        allowed = "false: infer answers once; generate_stream over HTTP and ModelStreamInfer over gRPC stream"
        refuse("parameters.stream", parameters["stream"], allowed)
    values = read.read_object(given, "parameters", _PARAMETERS)
    for name, kind in _OPTION_KINDS.items():
        if name in values:
            path, value = values[name]
            values[name] = (path, read.from_text(value, kind))
    return values


def _timeout_in_seconds(values: Values) -> None:
    """Turn Triton's microseconds, or our own field, into the ``timeout`` that the other protocols have."""
    if "timeout" in values:
        path, value = values["timeout"]
        allowed = (
            f"an integer of microseconds >= {_SHORTEST_TIMEOUT_US}, as Triton defines it; timeout_seconds takes seconds"
        )
        limit = int(common.MAX_SECONDS * 1e6)
        values["timeout"] = (path, read.integer(path, value, _SHORTEST_TIMEOUT_US, limit, allowed) / 1e6)
    if "timeout_seconds" in values:
        values["timeout"] = values["timeout_seconds"]


def _outputs(request: V2Request, sampling: SamplingParams) -> list[str]:
    available = [str(output["name"]) for output in OUTPUTS]
    if sampling.logprobs is not None:
        available.append("logprobs")
    for index, name in enumerate(request.outputs):
        if name not in available:
            refuse(f"outputs[{index}].name", name, ", ".join(available))
        if name in request.outputs[:index]:
            refuse(f"outputs[{index}].name", name, "each output once")
    return list(request.outputs) or available


def parse(request: V2Request, context: Context) -> V2Call:
    """An ``infer`` request; without an ``id`` it gets one.

    Raises:
        InvalidRequest: naming the place, e.g. ``inputs[0].shape`` or ``parameters.temperature``.
        UnknownModel: ``request.model_name`` is not served.
    """
    if request.model_name is not None:
        common.check_model("model_name", request.model_name, context)
    identity = read.text("id", request.id, "a string of at most 256 characters", max_length=256) if request.id else ""
    inputs = _inputs(request)
    prompts = inputs[TEXT_INPUT]
    rows = _rows(prompts)
    parameters = _parameter_values(request.parameters)
    requests: list[GenerationRequest] = []
    all_names: list[Mapping[str, str]] = []
    call_id = identity or common.new_call_id(context)
    wanted: list[str] = []
    for row, prompt in enumerate(prompts.data):
        values = {**parameters, **_tensor_values(inputs, row, rows)}
        _timeout_in_seconds(values)
        sampling = common.read_sampling(values, context, lenient=True)
        common.one_text_only(sampling)
        options = common.read_options(values, context)
        path = prompts.at(row)
        wanted = wanted or _outputs(request, sampling.params)
        text = common.read_prompt(path, prompt, context)
        requests.append(common.new_request(context, call_id, row, text, sampling, options))
        all_names.append({**sampling.names, "prompt": path})
    return V2Call(id=call_id, context=context, requests=requests, names=all_names, outputs=wanted)


def render(call: V2Call, results: list[list[Output]]) -> list[V2Tensor]:
    """The answer's tensors, all of shape [B], in the order of :data:`OUTPUTS` or as the client asked.

    Raises:
        GenerationFailed: the engine failed on any row.
    """
    rows = [outputs[0] for outputs in results]
    reasons = [common.final_reason(output).value for output in rows]
    columns: dict[str, tuple[str, list[Any]]] = {
        "text_output": ("BYTES", [output.text for output in rows]),
        "finish_reason": ("BYTES", reasons),
        "prompt_tokens": ("INT32", [output.prompt_tokens for output in rows]),
        "completion_tokens": ("INT32", [output.completion_tokens for output in rows]),
        "cached_tokens": ("INT32", [output.cached_tokens for output in rows]),
    }
    if "logprobs" in call.outputs:
        columns["logprobs"] = (
            "BYTES",
            [
                dumps(
                    common.logprob_records(
                        call.context.tokenizer, output.logprobs or [], request.sampling.logprobs or 0
                    )
                )
                for request, output in zip(call.requests, rows, strict=True)
            ],
        )
    return [V2Tensor(name, columns[name][0], [len(rows)], columns[name][1]) for name in call.outputs]
