"""KServe V1: instances in, predictions out."""

from __future__ import annotations

import pytest
from protocol_fakes import VOCAB, ByteTokenizer, context, logprob, output, read_events, script

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


# streaming


async def streamed(body, *scripts):
    call = v1.parse(body, context())
    assert call.stream
    return await read_events(v1.stream_events(call, scripts))


async def test_a_stream_says_which_instance_each_piece_belongs_to_and_ends_with_done():
    events = await streamed(
        {"instances": ["a", "b"], "stream": True},
        script(output("x", done=1), output("", done=1), output("y", done=2, finish=FinishReason.LENGTH)),
        script(output("z", done=1, finish=FinishReason.EOS, cached=2)),
    )
    assert events[-1] == "[DONE]"
    pieces = [event["predictions"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces if piece["index"] == 0) == "xy"
    assert [piece for piece in pieces if piece["index"] == 1] == [
        {
            "index": 1,
            "text": "z",
            "finish_reason": "eos",
            "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "cached_tokens": 2},
        }
    ]
    assert sum("finish_reason" in piece for piece in pieces) == 2


async def test_a_stream_carries_logprobs_even_without_text():
    body = {"instances": ["a"], "stream": True, "parameters": {"logprobs": 0}}
    first = output("", done=1, token_ids=[195], logprobs=[logprob(195)])
    events = await streamed(body, script(first, output("é", done=2, finish=FinishReason.LENGTH, logprobs=[])))
    assert events[0]["predictions"][0]["logprobs"][0]["id"] == 195
    assert len(events) == 3


@pytest.mark.parametrize("reason", [FinishReason.TIMEOUT, FinishReason.CANCELLED])
async def test_a_stream_says_that_it_was_cut_short(reason):
    events = await streamed({"instances": ["a"], "stream": True}, script(output("x", done=1, finish=reason)))
    assert events[0]["predictions"][0]["finish_reason"] == reason.value
    assert events[1:] == ["[DONE]"]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (output(finish=FinishReason.ERROR, error="the device fell off"), "the device fell off"),
        (RuntimeError("secret"), "internal error; the server's log has the cause"),
        (output("", done=1), "the answer ended before its end"),
    ],
)
async def test_a_failure_in_a_stream_is_an_event_before_done(last, said):
    events = await streamed({"instances": ["a"], "stream": True}, script(output("x", done=1), last))
    assert events[-2:] == [{"error": said}, "[DONE]"]


def test_stream_is_a_boolean():
    with pytest.raises(InvalidRequest) as caught:
        v1.parse({"instances": ["a"], "stream": "yes"}, context())
    assert caught.value.field == "stream"
    assert not v1.parse({"instances": ["a"], "stream": False}, context()).stream
