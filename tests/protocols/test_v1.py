"""KServe V1: instances in, predictions out."""

from __future__ import annotations

import pytest
from protocol_fakes import VOCAB, ByteTokenizer, context, logprob, output

from carousel.engine.errors import GenerationFailed, InvalidRequest, RequestTooLong
from carousel.engine.request import FinishReason
from carousel.protocols import v1
from carousel.protocols.common import MAX_CHARACTERS_PER_TOKEN, MAX_PROMPTS

CHAT = [{"role": "user", "content": "hi"}]


def test_every_kind_of_instance():
    instances = ["plain", {"prompt": "p"}, {"text": "t"}, {"text_input": "i"}, {"prompt": [1, 2]}, {"messages": CHAT}]
    call = v1.parse({"instances": instances}, context())
    assert [request.prompt for request in call.requests] == ["plain", "p", "t", "i", [1, 2], "<user>hi<assistant>"]
    assert [request.add_special_tokens for request in call.requests] == [True] * 5 + [False]
    assert len({request.request_id for request in call.requests}) == 6
    assert [names["prompt"] for names in call.names] == [
        "instances[0]",
        "instances[1].prompt",
        "instances[2].text",
        "instances[3].text_input",
        "instances[4].prompt",
        "instances[5].messages",
    ]


def test_own_parameters_override_the_shared_ones():
    body = {
        "instances": ["a", {"prompt": "b", "parameters": {"temperature": 0, "stop": "x"}}],
        "parameters": {"temperature": 0.7, "max_tokens": 9},
    }
    first, second = v1.parse(body, context()).requests
    assert (first.sampling.temperature, first.sampling.max_tokens, first.sampling.stop) == (0.7, 9, ())
    assert (second.sampling.temperature, second.sampling.max_tokens, second.sampling.stop) == (0.0, 9, ("x",))


def test_an_error_in_shared_parameters_is_named_there():
    body = {"instances": [{"prompt": "b", "parameters": {"max_tokens": 1}}], "parameters": {"top_p": 7}}
    with pytest.raises(InvalidRequest) as caught:
        v1.parse(body, context())
    assert caught.value.field == "parameters.top_p"


BAD = [
    ([], "body", "a JSON object"),
    ("text", "body", "a JSON object"),
    ({}, "instances", "non-empty list"),
    ({"instances": None}, "instances", "non-empty list"),
    ({"instances": []}, "instances", "a list of 1 to"),
    ({"instances": "text"}, "instances", "a list of 1 to"),
    ({"instances": ["x"] * (MAX_PROMPTS + 1)}, "instances", "a list of 1 to"),
    ({"instances": ["x"], "signature_name": "y"}, "signature_name", "known: instances, parameters"),
    ({"instances": ["x"], "instancs": []}, "instancs", "did you mean 'instances'"),
    ({"instances": ["x"], "parameters": []}, "parameters", "a JSON object"),
    ({"instances": ["x", 5]}, "instances[1]", "a string, or an object"),
    ({"instances": [None]}, "instances[0]", "a string, or an object"),
    ({"instances": [{}]}, "instances[0]", "one of prompt, text, text_input, messages"),
    ({"instances": [{"prompt": None}]}, "instances[0]", "one of prompt"),
    ({"instances": [{"prompt": "a", "text": "b"}]}, "instances[0]", "one of prompt"),
    ({"instances": [{"prompt": "a", "seed": 1}]}, "instances[0].seed", "sampling fields go into parameters"),
    ({"instances": [{"prompt": {"a": 1}}]}, "instances[0].prompt", "a string, or a non-empty list"),
    ({"instances": [{"prompt": []}]}, "instances[0].prompt", "a string, or a non-empty list"),
    ({"instances": [{"prompt": [1, VOCAB]}]}, "instances[0].prompt[1]", "from 0 to 257"),
    ({"instances": [{"prompt": [True]}]}, "instances[0].prompt[0]", "token ids"),
    ({"instances": ["ok", "x\udc00"]}, "instances[1]", "no lone surrogates"),
    ({"instances": [{"messages": []}]}, "instances[0].messages", "a list of 1 to"),
    ({"instances": [{"prompt": "x", "parameters": 5}]}, "instances[0].parameters", "a JSON object"),
]


@pytest.mark.parametrize(("body", "field", "allowed"), BAD)
def test_bad_bodies(body, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        v1.parse(body, context())
    assert caught.value.field == field
    assert allowed in caught.value.allowed


def test_prompts_that_cannot_fit_are_refused_before_tokenising():
    class Forbidden(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            raise AssertionError("tokenised a hopeless prompt")

    for prompt in ("x" * (100 * MAX_CHARACTERS_PER_TOKEN + 1), [1] * 101):
        with pytest.raises(RequestTooLong) as caught:
            v1.parse({"instances": [{"prompt": prompt}]}, context(tokenizer=Forbidden()))
        assert caught.value.field == "instances[0].prompt"


def test_predictions_have_text_reason_and_counts():
    call = v1.parse({"instances": ["a", "b", "c"]}, context())
    reasons = [FinishReason.EOS, FinishReason.LENGTH, FinishReason.TIMEOUT]
    results = [[output("hey", finish=reason, done=3, prompt=4, cached=2)] for reason in reasons]
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "cached_tokens": 2}
    assert v1.render(call, results) == {
        "predictions": [
            {"text": "hey", "finish_reason": reason, "usage": usage} for reason in ("eos", "length", "timeout")
        ]
    }


def test_logprobs_come_when_asked_for():
    call = v1.parse({"instances": ["a", "b"], "parameters": {"logprobs": 1}}, context())
    call.requests[1].sampling.logprobs = 0
    tokens = [logprob(104, -0.25, [(104, -0.25), (105, float("-inf"))]), logprob(257)]
    results = [[output("h", finish=FinishReason.STOP, logprobs=tokens)], [output("h", finish=FinishReason.STOP)]]
    first, second = v1.render(call, results)["predictions"]
    assert first["logprobs"] == [
        {
            "id": 104,
            "text": "h",
            "logprob": -0.25,
            "special": False,
            "top": [{"id": 104, "text": "h", "logprob": -0.25}],
        },
        {"id": 257, "text": "</s>", "logprob": -0.5, "special": True, "top": []},
    ]
    assert second["logprobs"] == []


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [(FinishReason.ERROR, "boom", "boom"), (FinishReason.ERROR, None, "engine failed"), (None, None, "before its end")],
)
def test_a_failed_row_fails_the_call(reason, error, message):
    call = v1.parse({"instances": ["a"]}, context())
    with pytest.raises(GenerationFailed, match=message):
        v1.render(call, [[output("x", finish=reason, error=error)]])
