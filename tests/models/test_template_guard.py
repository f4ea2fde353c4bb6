"""Chat templates are bounded: hostile ones end at once with a reason, real ones do not notice."""

from __future__ import annotations

import resource

import pytest

from carousel.engine.errors import InvalidRequest
from carousel.models.chat import ChatTemplate

USER = [{"role": "user", "content": "hello\nthere"}]


@pytest.fixture(scope="module", autouse=True)
def peak_before_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def render(source: str, messages: list[dict[str, str]] = USER, **extra: object) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True, **extra)


DOUBLE = "{% set n = namespace(v=V) %}{% for i in range(60) %}{% set n.v = E %}{% endfor %}{{ n.v|length }}"
BIG = "{% set s = 'x' * 16000000 %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a filtered loop": "{% set l = range(99999)|list %}"
    "{% for a in l %}{% for b in l if b < 0 %}{% endfor %}{% endfor %}",
    "macro recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "endless text": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "times": "{{ 'x' * 10000000000 }}",
    "times from the left": "{{ 10000000000 * 'x' }}",
    "list times": "{{ ([0] * 10000000000)|length }}",
    "power": "{{ 10 ** 1000000000 }}",
    "tower": "{{ 9 ** (9 ** 9) }}",
    "a number by steps": "{% set n = namespace(v=10) %}"
    "{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}{{ n.v }}",
    "doubled text": DOUBLE.replace("V", "'x'").replace("E", "n.v ~ n.v"),
    "doubled by plus": DOUBLE.replace("V", "'x'").replace("E", "n.v + n.v"),
    "doubled list": DOUBLE.replace("V", "[1]").replace("E", "n.v + n.v"),
    "nested list": DOUBLE.replace("V", "[1]").replace("E", "[n.v, n.v]").replace("n.v|length", "n.v"),
    "nested dict": DOUBLE.replace("V", "1").replace("E", "{'a': n.v, 'b': n.v}").replace("|length", "|tojson"),
    "nested tuple": DOUBLE.replace("V", "1").replace("E", "(n.v, n.v)").replace("n.v|length", "n.v == n.v"),
    "nested by dict()": DOUBLE.replace("V", "1").replace("E", "dict(a=n.v, b=n.v)").replace("n.v|length", "n.v"),
    "replace": BIG + "{{ s.replace('x', s) }}",
    "replace filter": BIG + "{{ s|replace('x', s) }}",
    "replace nothing": BIG + "{{ s.replace('', s) }}",
    "join": BIG + "{{ s.join(range(9999)|list) }}",
    "join filter": BIG + "{{ range(9999)|join(s) }}",
    "join the same": BIG + "{{ ([s] * 10000)|join }}",
    "map": BIG + "{{ ([s] * 10000)|map('upper')|list|length }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "center": "{{ 'x'|center(10000000000) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10000000000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
    "tojson indent": "{{ [1]|tojson(indent=10000000000) }}",
    "batch": "{{ [1]|batch(10000000000, 0)|list }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "sum": "{{ (range(99999)|map('string')|batch(1)|list)|sum(start=[]) }}",
    "slices": BIG + "{% for i in range(99999) %}{% set y = s[:] %}{% endfor %}",
    "upper": BIG + "{% for i in range(99999) %}{% set y = s.upper() %}{% endfor %}",
    "trim": BIG + "{% for i in range(99999) %}{% set y = s|trim %}{% endfor %}",
    "compare": BIG + "{% for i in range(99999) %}{% set y = s == s ~ 'a' %}{% endfor %}",
    "a long source": "{# " + "x" * 2_000_000 + " #}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "raised text": "{{ raise_exception('x' * 10000000) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "no template": "{% for %}",
}
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "builtins": "{{ strftime_now.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "map attribute": "{{ [raise_exception]|map(attribute='__globals__')|list }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "the meter": "{% set meter_tick.x = 1 %}{{ namespace.__init__.__globals__ }}",
    "a generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
}


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.models.template_guard.MAX_WORK", 100_000)


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_with_a_reason(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(HOSTILE[name])
    assert caught.value.field == "messages"
    assert "chat template" in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ESCAPES)
def test_the_sandbox_holds(name: str) -> None:
    try:
        text = render(ESCAPES[name])
    except InvalidRequest:
        return
    assert not any(word in text for word in ("<class", "root:", "<function", "<module", "{'__name__'", "<jinja2.env"))


def test_memory_was_bounded(peak_before_kib: int) -> None:
    """What the hostile ones above took, beyond the process's peak before them."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before_kib < 800 * 1024


def test_what_real_templates_do_is_let_through() -> None:
    source = """{%- set ns = namespace(found=false, text='') -%}
{%- for m in messages -%}
{%- if loop.first and m.role == 'system' %}{% set ns.found = true %}{% endif -%}
{%- set content = m['content'] if m.content is string else m.content|map(attribute='text')|join('\n') -%}
{{- '<|' + m['role'] + '|>' + '\n' + content|trim + ('<|end|>' ~ loop.index) * 1 -}}
{%- for k, v in {'a': [1, 2], 'b': (3, 4)}.items() %}{{ k }}={{ v|tojson(indent=4) }}{{ v[-1:] }}{% endfor -%}
{%- set ns.text = ns.text ~ content.split('\n')[-1].upper() -%}
{%- endfor -%}
{{ ns.text }}{{ '%s %5.2f **%s**' % ('a', 1.5, 'b') }}{{ '{:>4}'.format('x') }}{{ messages|length }}{{ 7 // 2 ** 2 }}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{{ 'a\nb'|indent(2) }}{{ [3, 1]|sort|first }}"""
    text = render(source, [{"role": "system", "content": "be\nkind"}, *USER])
    assert text.startswith("<|system|>\nbe\nkind<|end|>1a=[\n    1,\n    2\n][2]b=[\n")
    assert text.endswith("KINDTHEREa  1.50 **b**   x21<|assistant|>a\n  b1")


def test_a_long_conversation_is_let_through() -> None:
    source = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content|trim ~ '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 500}] * 4096
    assert len(render(source, messages)) == 4096 * (8 + 2499 + 1)


@pytest.mark.usefixtures("small_budget")
def test_the_budget_is_each_renderings_own() -> None:
    template = ChatTemplate({"default": "{% for i in range(9000) %}{% endfor %}{{ messages[0].content }}"}, {})
    for _ in range(12):  # together more than one may spend
        assert template.render([{"role": "user", "content": "x"}], add_generation_prompt=True) == "x"
