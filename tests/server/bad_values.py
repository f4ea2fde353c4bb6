"""Bad bodies for every JSON protocol: a good body, and for each of its fields the literals that must be refused.

Literals are JSON text, not Python values: NaN, a name given twice and an integer of 5,000 digits have no other form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.server.tiny_server import CHAT, GENERATE, INFER, PREDICT, STREAM, TEXT, TOKENIZE

HUGE = "1" + "0" * 400
ABSURD = "1" + "0" * 5000  # Python refuses to convert it
SURROGATE = '"\\ud800"'
NO_OBJECT = ["[]", "3", '"x"', "true"]
NO_NUMBER = ['"x"', "true", "[]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", HUGE, "-" + HUGE, ABSURD]
NO_INTEGER = [*NO_NUMBER, "1.5", "18446744073709551616"]
NO_BOOLEAN = ["1", "0", '"true"', "[]", "{}", "NaN", HUGE]
NO_TEXT = ["1", "true", "[]", "{}", "NaN", SURROGATE, '"a\\udfffb"']
NO_STOPS = ["1", "true", "{}", '[""]', "[1]", "[null]", f"[{SURROGATE}]", SURROGATE, '""', json.dumps(["x"] * 17)]
NO_STOPS += [json.dumps("x" * 513), json.dumps(["x"] * 100_000)]
NO_TOKENS = ["1", '"x"', "{}", "[-1]", "[320]", "[1.5]", "[true]", '["1"]', "[null]", f"[{HUGE}]", "[[1]]", "[NaN]"]
NO_PROMPT = ["1", "true", "{}", "NaN", SURROGATE, "[]", '""', "[320]", "[-1]", "[true]", f"[{HUGE}]", "[1.5]", "[[]]"]
NO_PROMPT += [json.dumps([1] * 513), json.dumps("x" * 600), json.dumps("x" * 600_000), json.dumps([1] * 1_000_000)]
NO_BIAS = ["1", "[]", '"x"', '{"x": 1}', '{"320": 1}', '{"-1": 1}', '{"1": "x"}', '{"1": 101}', '{"1": NaN}']
NO_BIAS += ['{"1": 1e999}', '{"1": null}', '{"1": 1, "1": 2}', f'{{"{HUGE}": 1}}', '{"\\ud800": 1}']
NO_BIAS += ["{" + ",".join(f'"{i}": 1' for i in range(100_000)) + "}"]


def _both(bad: list[str], *more: str) -> list[str]:
    return [*bad, *more]


SAMPLING: dict[str, list[str]] = {
    "temperature": _both(NO_NUMBER, "-0.1", "100.1"),
    "top_p": _both(NO_NUMBER, "0", "1.1", "-1"),
    "min_p": _both(NO_NUMBER, "-0.1", "1.1"),
    "top_k": _both(NO_INTEGER, "-2", "2147483648"),
    "repetition_penalty": _both(NO_NUMBER, "0", "-1", "101"),
    "presence_penalty": _both(NO_NUMBER, "-2.1", "2.1"),
    "frequency_penalty": _both(NO_NUMBER, "-2.1", "2.1"),
    "seed": _both(NO_INTEGER, "-9223372036854775809"),
    "min_tokens": _both(NO_INTEGER, "-1", "100000"),
    "max_tokens": _both(NO_INTEGER, "0", "-1", "513", "2147483647"),
    "stop": NO_STOPS,
    "stop_token_ids": _both(NO_TOKENS, json.dumps([1] * 100_000)),
    "logit_bias": NO_BIAS,
    "ignore_eos": NO_BOOLEAN,
    "skip_special_tokens": NO_BOOLEAN,
    "include_stop": NO_BOOLEAN,
    "priority": _both(NO_INTEGER, "2147483648", "-2147483649"),
    "deadline": _both(NO_NUMBER, "0", "-1", "1000001"),
    "timeout": _both(NO_NUMBER, "0", "-1", "1000001"),
    "cache_salt": _both(NO_TEXT, json.dumps("x" * 257)),
    "add_special_tokens": NO_BOOLEAN,
}
PARAMETERS = SAMPLING | {"n": ["2", "0", "x"[:0] or '"x"', HUGE], "logprobs": _both(NO_INTEGER, "-1", "21")}
OPENAI = SAMPLING | {
    "n": _both(NO_INTEGER, "0", "-1", "65"),
    "stream": NO_BOOLEAN,
    "stream_options": [*NO_OBJECT, '{"include_usage": true}', '{"x": 1}'],
    "return_token_ids": NO_BOOLEAN,
    "user": ["1", "[]"],
    "metadata": NO_OBJECT,
    "prompt_logprobs": _both(NO_INTEGER, "-1", "21"),
    "response_format": ['{"type": "json_object"}', '{"type": "json_schema"}', "3"],
    "best_of": ["2", '"x"'],
}
NO_MODEL = ["1", "true", "[]", '"other"', '"tiny "', '""', SURROGATE, json.dumps("x" * 100_000)]
NO_MESSAGES = [
    *("1", '"x"', "{}", "[]", "[1]", "[null]", "[[]]", "[{}]", '[{"role": "user"}]', '[{"content": "x"}]'),
    *('[{"role": 1, "content": "x"}]', '[{"role": "tool", "content": "x"}]', '[{"role": "user", "content": 1}]'),
    *('[{"role": "user", "content": null}]', '[{"role": "user", "content": []}]', f'[{{"role": {SURROGATE}}}]'),
    *(f'[{{"role": "user", "content": {SURROGATE}}}]', '[{"role": "user", "content": "x", "role": "user"}]'),
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"role": "user", "content": [{"type": "text", "text": 1}]}]',
    '[{"role": "user", "content": "x", "tool_calls": [{}]}]',
    '[{"role": "user", "content": "x", "other": 1}]',
    json.dumps([{"role": "user", "content": "x"}] * 10_000),
    json.dumps([{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]),
]
NO_TENSOR = [
    *("1", '"x"', "{}", "[]", "[1]", "[null]", "[[]]", "[{}]"),
    *(
        '[{"name": 1}]',
        '[{"name": "text_input"}]',
        '[{"name": "other", "datatype": "BYTES", "shape": [1], "data": [1]}]',
    ),
]


def _tensor(**changes: object) -> str:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    return json.dumps([{name: value for name, value in (tensor | changes).items() if value is not ...}])


NO_TENSOR += [
    *(
        _tensor(shape=shape)
        for shape in ([], [0], [2], [-1], [1, 2], [1, 1, 1], ["x"], [1.0], [True], [2**70], 1, None)
    ),
    *(_tensor(shape=shape) for shape in ([2**31, 2**31], [[1]], {}, ..., [1] * 10_000)),
    *(_tensor(datatype=kind) for kind in ("FP32", "INT64", "BOOL", "X", "", 1, None, ..., "bytes" * 1000)),
    *(
        _tensor(data=data)
        for data in ([], [1], [None], [["a", "b"]], [[["a"]]], "x", None, ..., {}, [True], ["\ud800"])
    ),
    *(_tensor(name=name) for name in ("Text_Input", "", None, ..., "\ud800")),
    *(_tensor(parameters=value) for value in (1, [], {"binary_data_size": 2}, {"binary_data_size": "x"})),
    _tensor(other=1),
    json.dumps(json.loads(_tensor()) * 2),
    json.dumps([{"name": "text_input", "datatype": "BYTES", "shape": [3000], "data": ["x"] * 3000}]),
]


@dataclass(frozen=True)
class Protocol:
    """One endpoint: a good body as JSON text per field, what its fields must not be, and where parameters stand."""

    path: str
    good: dict[str, str]
    required: tuple[str, ...]
    fields: dict[str, list[str]]
    parameters: dict[str, list[str]] = field(default_factory=dict)
    invalid: int = 400
    optional: tuple[str, ...] = ()

    def body(self, **changes: str) -> bytes:
        fields = self.good | changes
        return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()

    def cases(self) -> Iterator[tuple[str, bytes, str]]:
        """(name of the case, body, what the message must name)."""
        for name, values in self.fields.items():
            for value in values:
                yield f"{name}={value[:40]}", self.body(**{name: value}), _named(name, value)
        for name, values in self.parameters.items():
            for value in values:
                body = self.body(parameters=f'{{"{name}":{value}}}')
                yield f"parameters.{name}={value[:40]}", body, _named(f"parameters.{name}", value)
        for name in self.required:
            rest = {key: value for key, value in self.good.items() if key != name}
            missing = ("{" + ",".join(f'"{key}":{value}' for key, value in rest.items()) + "}").encode()
            yield f"no {name}", missing, name
            yield f"null {name}", self.body(**{name: "null"}), name
        for name, value in self.good.items():
            twice = self.body()[:-1] + f',"{name}":{value}}}'.encode()
            yield f"{name} twice", twice, name
        yield "unknown field", self.body(surprise="1"), "surprise"
        yield "surrogate field", self.body(**{"\\ud800": "1"}), "ud800"


def _named(path: str, value: str) -> str:
    """A body that is no JSON at all is called ``body``; what an object has twice is called by its name."""
    if any(word in value for word in ("NaN", "Infinity", ABSURD)):
        return "body"
    if '"1": 1, "1"' in value:
        return "1"
    return "role" if value.count('"role"') > 1 and len(value) < 100 else path


_LIMIT = '"max_tokens":2'
PROTOCOLS = {
    "chat": Protocol(
        CHAT,
        {"model": '"tiny"', "messages": '[{"role":"user","content":"hi"}]', "max_completion_tokens": "2"},
        ("messages",),
        OPENAI
        | {"max_completion_tokens": SAMPLING["max_tokens"], "messages": NO_MESSAGES, "model": NO_MODEL}
        | {"logprobs": NO_BOOLEAN, "top_logprobs": ["1", "-1", '"x"'], "tools": ['[{"type": "function"}]', "3"]}
        | {"chat_template_kwargs": [*NO_OBJECT, '{"messages": 1}', '{"x": []}', '{"a b": 1}']}
        | {"add_generation_prompt": NO_BOOLEAN},
    ),
    "completions": Protocol(
        TEXT,
        {"model": '"tiny"', "prompt": '"hi"', "max_tokens": "2"},
        ("prompt",),
        OPENAI
        | {"prompt": [*NO_PROMPT, '["a", 1]', '["a", ""]', json.dumps(["a"] * 3000)], "model": NO_MODEL}
        | {"logprobs": _both(NO_INTEGER, "-1", "21"), "echo": NO_BOOLEAN, "suffix": ['"x"', "1"]},
    ),
    "tokenize": Protocol(
        TOKENIZE,
        {"model": '"tiny"', "prompt": '"hi"'},
        ("prompt",),
        {"prompt": [*NO_TEXT, json.dumps("x" * 600_000)], "model": NO_MODEL, "return_token_strs": NO_BOOLEAN}
        | {"add_special_tokens": NO_BOOLEAN, "messages": ['[{"role": "user", "content": "x"}]']},
    ),
    "detokenize": Protocol(
        "/detokenize",
        {"model": '"tiny"', "tokens": "[1, 2]"},
        ("tokens",),
        {"tokens": NO_TOKENS, "model": NO_MODEL, "skip_special_tokens": NO_BOOLEAN},
    ),
    "v1": Protocol(
        PREDICT,
        {"instances": '["hi"]', "parameters": f"{{{_LIMIT}}}"},
        ("instances",),
        {
            "instances": [
                *("1", '"x"', "{}", "[]", "[1]", "[null]", "[[]]", "[{}]", '[""]', f"[{SURROGATE}]", "[true]"),
                *('[{"prompt": 1}]', '[{"prompt": "a", "text": "b"}]', '[{"prompt": "a", "temperature": 1}]'),
                *('[{"messages": []}]', '[{"prompt": [320]}]', '[{"prompt": "a", "parameters": 3}]'),
                *('["a", {"prompt": "b", "parameters": {"top_p": 7}}]', json.dumps(["a"] * 3000)),
                json.dumps([{"messages": [{"role": "user", "content": "x"}] * 10_000}]),
            ],
            "parameters": NO_OBJECT,
        },
        PARAMETERS,
    ),
    "generate": Protocol(
        GENERATE,
        {"text_input": '"hi"', "parameters": f"{{{_LIMIT}}}"},
        ("text_input",),
        {"text_input": [*NO_TEXT, '""', json.dumps("x" * 600), json.dumps("x" * 600_000)], "parameters": NO_OBJECT},
        PARAMETERS | {"details": NO_BOOLEAN, "stream": [*NO_BOOLEAN, "true"]},
        invalid=422,
    ),
    "generate_stream": Protocol(
        STREAM,
        {"text_input": '"hi"', "parameters": f"{{{_LIMIT}}}"},
        ("text_input",),
        {"text_input": [*NO_TEXT, '""', json.dumps("x" * 600)], "parameters": NO_OBJECT},
        {"temperature": SAMPLING["temperature"], "stop": NO_STOPS, "stream": ["false", "1"], "n": ["2"]},
        invalid=422,
    ),
    "infer": Protocol(
        INFER,
        {"inputs": _tensor(), "parameters": f"{{{_LIMIT}}}"},
        ("inputs",),
        {
            "inputs": NO_TENSOR,
            "parameters": NO_OBJECT,
            "id": ["1", "true", "[]", "{}", json.dumps("x" * 257), SURROGATE],
            "outputs": ["1", '"x"', "[1]", "[{}]", '[{"name": 1}]', '[{"name": "other"}]', '[{"name": "x", "y": 1}]'],
        },
        # numbers may be strings here, and times are microseconds
        {name: bad for name, bad in PARAMETERS.items() if name != "timeout"}
        | {"ignore_eos": ["1", '"yes"', "[]", "{}"], "skip_special_tokens": ["1", '"yes"'], "include_stop": ["1", "[]"]}
        | {"add_special_tokens": ["1", '"yes"'], "timeout": ["0", "-1", "1.5", '"x"', HUGE], "sequence_id": ["7"]}
        | {"timeout_seconds": ["0", "-1", '"x"'], "stop": ["1", "{}", "[1]", '""', SURROGATE]}
        | {"stop_token_ids": ["1", "{}", "[-1]", "[320]", '"[320]"', '"x"'], "binary_data_output": ["1", '"yes"']},
    ),
}
