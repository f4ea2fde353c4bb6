"""Open Inference Protocol infer: tensors and parameters in, tensors out."""

from __future__ import annotations

import json
import math

import pytest
from protocol_fakes import context, logprob, output

from carousel.engine.errors import GenerationFailed, InvalidRequest
from carousel.engine.request import FinishReason
from carousel.protocols import v2
from carousel.protocols.common import MAX_PROMPTS
from carousel.protocols.errors import UnknownModel
from carousel.protocols.v2 import V2Request, V2Tensor


def texts(*prompts, shape=None):
    return V2Tensor("text_input", "BYTES", shape or [len(prompts)], list(prompts))


def parse(*tensors, parameters=None, ctx=None, **more):
    return v2.parse(V2Request(list(tensors), parameters or {}, **more), ctx or context())


@pytest.mark.parametrize(
    "tensor",
    [
        texts("a", "é"),
        texts(b"a", "é".encode()),
        V2Tensor("text_input", "bytes", (2, 1), [["a"], ["é"]]),
        V2Tensor("text_input", "BYTES", [2, 1], ["a", "é"]),
    ],
)
def test_text_input_of_any_form(tensor):
    call = parse(tensor)
    assert [request.prompt for request in call.requests] == ["a", "é"]
    assert [names["prompt"] for names in call.names] == ["inputs[0].data[0]", "inputs[0].data[1]"]


def test_ids_are_kept_or_made():
    assert parse(texts("a"), id="mine").id == "mine"
    assert parse(texts("a"), ctx=context({"x-request-id": "head"})).id == "head"
    assert len(parse(texts("a")).id) == 32
    with pytest.raises(InvalidRequest) as caught:
        parse(texts("a"), id="x" * 257)
    assert caught.value.field == "id"


def test_the_model_name_is_checked():
    assert parse(texts("a"), model_name="demo").requests
    with pytest.raises(UnknownModel, match="'other' is not served here; served: demo"):
        parse(texts("a"), model_name="other")


def test_sampling_tensors_shared_and_per_row():
    call = parse(
        V2Tensor("temperature", "FP32", [1], [0.5]),
        texts("a", "b"),
        V2Tensor("max_tokens", "INT32", [2, 1], [[3], [4]]),
        V2Tensor("seed", "INT64", [2], [7, 8]),
        V2Tensor("top_p", "FP64", [1, 1], [[0.9]]),
        V2Tensor("ignore_eos", "BOOL", [2], [True, False]),
        V2Tensor("presence_penalty", "INT8", [1], [1]),
        parameters={"temperature": 1.5, "top_k": 5},
    )
    first, second = (request.sampling for request in call.requests)
    assert (first.temperature, first.top_k, first.max_tokens, first.seed, first.top_p) == (0.5, 5, 3, 7, 0.9)
    assert (second.temperature, second.top_k, second.max_tokens, second.seed, second.top_p) == (0.5, 5, 4, 8, 0.9)
    assert (first.ignore_eos, second.ignore_eos) == (True, False)
    assert first.presence_penalty == 1.0


@pytest.mark.parametrize(
    ("shape", "data", "stops"),
    [
        ([1], ["x"], [("x",), ("x",)]),
        ([2], ["x", b"y"], [("x", "y"), ("x", "y")]),
        ([3], ["x", "y", ""], [("x", "y"), ("x", "y")]),
        ([1, 2], [["x", "y"]], [("x", "y"), ("x", "y")]),
        ([2, 2], [["x", ""], ["y", "z"]], [("x",), ("y", "z")]),
        ([0], [], [(), ()]),
    ],
)
def test_stop_tensors(shape, data, stops):
    call = parse(texts("a", "b"), V2Tensor("stop", "BYTES", shape, data))
    assert [request.sampling.stop for request in call.requests] == stops


def test_stop_token_tensors():
    call = parse(texts("a", "b"), V2Tensor("stop_token_ids", "INT32", [2, 2], [[1, -1], [2, 3]]))
    assert [request.sampling.stop_token_ids for request in call.requests] == [{1}, {2, 3}]


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ('["a", "b"]', ("a", "b")),
        ("[]", ()),
        ("END", ("END",)),
        ("[END]", ("[END]",)),
        ("[1]", ("[1]",)),
        ("[", ("[",)),
        ('{"a": 1}', ('{"a": 1}',)),
        ("a,b", ("a,b",)),
        (["a", "b"], ("a", "b")),
    ],
)
def test_stop_as_a_parameter(given, stops):
    assert parse(texts("a"), parameters={"stop": given}).requests[0].sampling.stop == stops


def test_parameters_as_strings_for_carriers_without_numbers():
    call = parse(
        texts("a"),
        parameters={
            "temperature": "0.7",
            "max_tokens": "20",
            "ignore_eos": "True",
            "stop_token_ids": "[2, 7]",
            "logit_bias": '{"42": -1.5}',
            "priority": "-2",
            "deadline": "1.5",
            "add_special_tokens": "false",
            "timeout_seconds": "4",
        },
    )
    request = call.requests[0]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos) == (0.7, 20, True)
    assert request.sampling.stop_token_ids == {2, 7}
    assert request.sampling.logit_bias == {42: -1.5}
    assert (request.priority, request.deadline_s, request.add_special_tokens) == (-2, 1.5, False)
    assert request.timeout_s == 4.0


def test_tritons_timeout_is_in_microseconds():
    assert parse(texts("a"), parameters={"timeout": 2_500_000}).requests[0].timeout_s == 2.5
    for microseconds in (30, 0, 1.5, "soon", True, 10**18):
        with pytest.raises(InvalidRequest, match="timeout_seconds takes seconds") as caught:
            parse(texts("a"), parameters={"timeout": microseconds})
        assert caught.value.field == "parameters.timeout"


def test_what_the_wire_adds_means_nothing_more():
    parameters = {"binary_data_output": True, "sequence_id": 0, "sequence_start": False, "sequence_end": None}
    assert parse(texts("a"), parameters=parameters).requests
    with pytest.raises(InvalidRequest, match="sequences of requests") as caught:
        parse(texts("a"), parameters={"sequence_id": 5})
    assert caught.value.field == "parameters.sequence_id"


TEMPERATURE = "inputs[1].data[0] (temperature)"
BAD = [
    ([], "inputs", "text_input"),
    ([V2Tensor("temperature", "FP32", [1], [1.0])], "inputs", "text_input"),
    ([V2Tensor("text_inptu", "BYTES", [1], ["x"])], "inputs[0].name", "did you mean 'text_input'"),
    ([V2Tensor("zzz", "BYTES", [1], ["x"])], "inputs[0].name", "name of a sampling field"),
    ([V2Tensor("logit_bias", "BYTES", [1], ["x"])], "inputs[0].name", "sampling field"),
    ([texts("a"), texts("b")], "inputs[1].name", "each input once"),
    ([V2Tensor("text_input", "STRING", [1], ["x"])], "inputs[0].datatype", "BYTES"),
    ([V2Tensor("text_input", "INT32", [1], [5])], "inputs[0].datatype", "BYTES"),
    ([V2Tensor("text_input", "BYTES", [], [])], "inputs[0].shape", "one or two sizes"),
    ([V2Tensor("text_input", "BYTES", [1, 1, 1], ["x"])], "inputs[0].shape", "one or two sizes"),
    ([V2Tensor("text_input", "BYTES", [-1], ["x"])], "inputs[0].shape", "one or two sizes"),
    ([V2Tensor("text_input", "BYTES", [True], ["x"])], "inputs[0].shape", "one or two sizes"),
    ([V2Tensor("text_input", "BYTES", [1.0], ["x"])], "inputs[0].shape", "one or two sizes"),
    ([V2Tensor("text_input", "BYTES", [2], ["x"])], "inputs[0].shape", "a shape of 1 elements"),
    ([V2Tensor("text_input", "BYTES", [10**18], ["x"])], "inputs[0].shape", "a shape of 1 elements"),
    ([V2Tensor("text_input", "BYTES", [1, 2], ["x", "y"])], "inputs[0].shape", "[B] or [B, 1]"),
    ([V2Tensor("text_input", "BYTES", [0], [])], "inputs[0].shape", "1 to 2048 rows"),
    ([texts(*["x"] * (MAX_PROMPTS + 1))], "inputs[0].shape", "1 to 2048 rows"),
    ([V2Tensor("text_input", "BYTES", [1], "x")], "inputs[0].data", "a list of elements"),
    ([V2Tensor("text_input", "BYTES", [1], None)], "inputs[0].data", "a list of elements"),
    ([V2Tensor("text_input", "BYTES", [1], [[["x"]]])], "inputs[0].data", "at most two dimensions"),
    ([texts("ok", b"\xff")], "inputs[0].data[1]", "valid UTF-8 (byte 0"),
    ([texts("ok", 5)], "inputs[0].data[1]", "a string"),
    ([texts(None)], "inputs[0].data[0]", "a string"),
    ([texts("\udc00")], "inputs[0].data[0]", "surrogates"),
    ([texts("a"), V2Tensor("temperature", "FP32", [1], ["x"])], TEMPERATURE, "a number"),
    ([texts("a"), V2Tensor("temperature", "FP32", [1], [True])], TEMPERATURE, "a number"),
    ([texts("a"), V2Tensor("temperature", "FP32", [1], [math.nan])], TEMPERATURE, "a number from 0"),
    ([texts("a"), V2Tensor("temperature", "FP32", [1], [-1.0])], TEMPERATURE, "a number from 0"),
    ([texts("a"), V2Tensor("temperature", "BOOL", [1], [True])], TEMPERATURE, "a number from 0"),
    ([texts("a"), V2Tensor("temperature", "BYTES", [1], ["hot"])], TEMPERATURE, "a number from 0"),
    ([texts("a"), V2Tensor("ignore_eos", "BOOL", [1], [1])], "inputs[1].data[0] (ignore_eos)", "BOOL"),
    ([texts("a"), V2Tensor("max_tokens", "INT32", [1], [1.5])], "inputs[1].data[0] (max_tokens)", "INT32"),
    ([texts("a", "b", "c"), V2Tensor("seed", "INT32", [2], [1, 2])], "inputs[1].shape", "[1], [3] or [3, 1]"),
    ([texts("a", "b", "c"), V2Tensor("stop", "BYTES", [2, 1], ["x", "y"])], "inputs[1].shape", "[S], [1, S] or [3, S]"),
    ([texts("a"), V2Tensor("stop", "BYTES", [65], ["x"] * 65)], "inputs[1].shape", "at most 64"),
    ([texts("a"), V2Tensor("stop", "INT32", [1], [5])], "inputs[1] (stop)[0]", "a string"),
    ([texts("a"), V2Tensor("stop_token_ids", "INT32", [1], [9999])], "inputs[1] (stop_token_ids)[0]", "token ids"),
    ([texts("a", "b"), V2Tensor("top_p", "FP32", [2], [0.5, 2])], "inputs[1].data[1] (top_p)", "a number > 0"),
]


@pytest.mark.parametrize(("tensors", "field", "allowed"), BAD)
def test_bad_tensors_are_named_with_their_place(tensors, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        parse(*tensors)
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("parameters", [{"stop_token_ids": "2,7"}, {"logit_bias": "x"}, {"stop_token_ids": "[2"}])
def test_lists_in_strings_must_be_json(parameters):
    with pytest.raises(InvalidRequest) as caught:
        parse(texts("a"), parameters=parameters)
    assert caught.value.field == f"parameters.{next(iter(parameters))}"


def rows(*reasons):
    return [[output(f"t{i}", finish=r, done=2 + i, prompt=5, cached=i)] for i, r in enumerate(reasons)]


def test_the_answer_has_one_row_per_prompt():
    call = parse(texts("a", "b", shape=[2, 1]))
    tensors = v2.render(call, rows(FinishReason.EOS, FinishReason.TIMEOUT))
    assert [(t.name, t.datatype, t.shape, t.data) for t in tensors] == [
        ("text_output", "BYTES", [2], ["t0", "t1"]),
        ("finish_reason", "BYTES", [2], ["eos", "timeout"]),
        ("prompt_tokens", "INT32", [2], [5, 5]),
        ("completion_tokens", "INT32", [2], [2, 3]),
        ("cached_tokens", "INT32", [2], [0, 1]),
    ]
    assert [{"name": t.name, "datatype": t.datatype, "shape": [-1]} for t in tensors] == v2.OUTPUTS


def test_only_the_requested_outputs_in_their_order():
    call = parse(texts("a"), outputs=["finish_reason", "text_output"])
    assert [t.name for t in v2.render(call, rows(FinishReason.STOP))] == ["finish_reason", "text_output"]
    with pytest.raises(InvalidRequest) as caught:
        parse(texts("a"), outputs=["text_output", "logprobs"])
    assert caught.value.field == "outputs[1].name"


def test_logprobs_are_json_in_a_tensor():
    call = parse(texts("a"), parameters={"logprobs": 0})
    results = [[output("h", finish=FinishReason.STOP, logprobs=[logprob(104)])]]
    tensor = v2.render(call, results)[-1]
    assert (tensor.name, tensor.datatype, tensor.shape) == ("logprobs", "BYTES", [1])
    assert json.loads(tensor.data[0]) == [{"id": 104, "text": "h", "logprob": -0.5, "special": False}]


def test_a_failed_row_fails_the_call():
    with pytest.raises(GenerationFailed):
        v2.render(parse(texts("a", "b")), rows(FinishReason.EOS, FinishReason.ERROR))


@pytest.mark.parametrize("given", [True, "true", 1, "yes"])
def test_infer_does_not_stream_and_says_what_does(given):
    with pytest.raises(InvalidRequest) as caught:
        parse(texts("a"), parameters={"stream": given})
    assert caught.value.field == "parameters.stream"
    assert "generate_stream" in caught.value.allowed


@pytest.mark.parametrize("given", [False, "false", None])
def test_a_stream_parameter_that_asks_for_nothing_passes(given):
    assert len(parse(texts("a"), parameters={"stream": given}).requests) == 1
