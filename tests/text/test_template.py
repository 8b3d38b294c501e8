"""Templates render as in transformers, and their rendering ends."""

import time
import tracemalloc
from datetime import datetime
from typing import Any

import pytest

from tests.text.conftest import conversations, rows
from xylite.errors import ConfigError, RequestError
from xylite.text.chat import prepare_messages
from xylite.text.template import ChatTemplate
from xylite.text.written import plain, spans_of

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Our own templates; what they print is checked against what the public ones print.
FAMILIES = {
    "ChatML (vLLM)": """\
{% for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}
{%- if not loop.last or add_generation_prompt or m.role == 'user' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "Llama-3 (chat_templates)": """\
{{- '<|begin_of_text|>' -}}
{% for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' -}}
{% endfor %}
{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "Llama-2 (chat_templates)": """\
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {%- set ns.system = '<<SYS>>\\n' + m.content.strip() + '\\n<</SYS>>\\n\\n' -%}
    {%- continue -%}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {{ bos_token + '[INST] ' + ns.system + m.content.strip() + ' [/INST]' }}
    {%- set ns.system = '' -%}
  {%- else -%}
    {{ ' ' + m.content.strip() + ' ' + eos_token }}
  {%- endif -%}
{%- endfor -%}""",
    "Gemma (chat_templates)": """\
{% macro turn(role, text) -%}
<start_of_turn>{{ role }}
{{ text | trim }}<end_of_turn>
{% endmacro %}
{% set ns = namespace(first='') %}
{% for m in messages %}
{% if m.role == 'system' %}{% set ns.first = m.content ~ '\\n\\n' %}
{% else %}
{{- turn('model' if m.role == 'assistant' else m.role, ns.first ~ (m.content | trim)) -}}
{% set ns.first = '' %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}""",
    "Vicuna (chat_templates)": """\
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ m.content.strip() + '\\n\\n' }}
  {%- elif m.role == 'user' -%}{{ 'USER: %s\\n' % m.content.strip() }}
  {%- else -%}{{ 'ASSISTANT: {}{}\\n'.format(m.content.strip(), eos_token) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}""",
    "Zephyr (chat_templates)": """\
{%- for m in messages -%}
{{ ['<|' + m.role + '|>', m.content.strip() + eos_token, ''] | join('\\n') }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}""",
    "Qwen2.5": """\
{%- set start, end = '<|im_start|>', '<|im_end|>\\n' %}
{%- set has_system = messages[0].role == 'system' %}
{{- start + 'system\\n' }}
{{- messages[0].content if has_system else 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- end }}
{%- for m in (messages[1:] if has_system else messages) %}
    {{- start + ('user' if m.role == 'tool' else m.role) }}
    {%- if m.content and m.role != 'tool' %}{{ '\\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
    {%- endfor %}
    {%- if m.role == 'tool' %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% endif %}
    {{- end }}
{%- endfor %}
{%- if add_generation_prompt %}{{ start + 'assistant\\n' }}{% endif %}""",
}  # fmt: skip

CONSTRUCTS = {
    "tojson keeps letters and angle brackets": "{{ messages | tojson }}",
    "tojson with options": "{{ messages[0] | tojson(indent=2, sort_keys=true) }}{{ messages[0] | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "items of a mapping": "{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}{% for k, v in messages[0].items() %}{{ k ~ v }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, out='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.out = ns.out + m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.out }}",
    "macros with defaults and callers": "{% macro f(a, b='<b>') %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{{ f('x') }}{{ f(messages[0].content, b=3) }}{% call f('y') %}!{% endcall %}",
    "recursive macro": "{% macro down(n) %}{{ n }}{% if n %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(20) }}",
    "whitespace control": "  {% if true %}  \n  {%- set x = 1 %}\n\n a {{- 'b' -}}  c\n{# note #}\n  {% endif %}\nend\n",
    "set block and filter block": "{% set x %}<{{ messages[0].role }}>{% endset %}{{ x }}{% filter upper %}{{ x }}z{% endfilter %}",
    "tests": "{{ messages is iterable }}{{ messages[0].content is string }}{{ none is none }}{{ y is defined }}{{ messages[0] is mapping }}{{ 3 is number }}{{ 'a' in ['a'] }}",
    "undefined is empty": "[{{ nothing }}][{{ messages[0].nothing }}][{{ messages[0]['none'] | default('d') }}]",
    "string methods": "{% set c = messages[0].content %}{{ c.split(' ') }}{{ c.strip().upper() }}{{ c.replace('<', '[') }}{{ c.startswith('H') }}{{ c.find('>') }}{{ ', '.join(['a', c]) }}{{ c[1:3] }}{{ c[::-1] }}{{ c * 2 }}",
    "methods in a loop": "{% for m in messages %}{{ m.content.replace('a', 'b', 1) }}{{ '-'.join(m.role) }}{{ m.role.center(9) }}{{ '{}{x}'.format(loop.index, x=m.role) }}{{ '%s' % m.role }}{{ m.role.zfill(12) }}{{ m.get('role') }}{% endfor %}",
    "filters": "{% set c = messages[0].content %}{{ c | upper | trim }}{{ c | length }}{{ c | first }}{{ c | last }}{{ c | list }}{{ c | replace('a', 'b') }}{{ c | indent(2) }}{{ [3, 1] | sort | join('-') }}{{ messages | map(attribute='role') | join('|') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ c | string | title }}{{ '7' | int + 1 }}{{ 2.567 | round(1) }}{{ [1, 2] | sum }}{{ 'a%sb' | format(c) }}{{ c | e }}{{ c | safe }}{{ c | center(40) }}",
    "loop variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "loop over a filtered list": "{% for m in messages if m.role != 'user' %}{{ m.role }}{% else %}none{% endfor %}{% for m in messages | reverse %}{{ m.role }}{% endfor %}{% for i in range(3, 0, -1) %}{{ i }}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "arithmetic": "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ -3 + 1 }}{{ 'ab' * 3 }}{{ [1] * 2 + [3] }}{{ 10 / 4 }}{{ 2 ** -1 }}",
    "printed values": "{{ none }}{{ true }}{{ 1.0 }}{{ [1, 'a', none] }}{{ {'k': messages[0].content} }}{{ (1,) }}",
    "constants given to filters": "{{ 'ab' | upper }}{{ ('a' ~ 'b') | length }}{{ 'x' if 1 > 2 else 'y' }}{{ '%d-%s' % (3, 'q') }}{{ '{:>4}|{k}'.format(7, k='v') }}",
    "defaults of the context": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ bos_token }}{{ pad_token }}",
}  # fmt: skip

MESSAGES = [
    {"role": "user", "content": "Hi <b> & \u4f60\u597d 'x' \"q\"  "},
    {"role": "assistant", "content": "<think>a</think>\nb"},
    {"role": "user", "content": "again"},
]


def in_transformers(source: str, messages: list[Any], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **{**TOKENS, **variables})
    return rendered[0]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    template = ChatTemplate(source, TOKENS)
    defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
    return template.render({**defaults, "messages": messages, **variables})


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_construct_renders_as_in_transformers(name: str):
    got = render(CONSTRUCTS[name])
    assert plain(got) == in_transformers(CONSTRUCTS[name], MESSAGES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_prints_what_the_public_template_prints(name: str):
    seen = 0
    for row in (r for r in rows("chat_template_renderings.jsonl") if r["template"] == name):
        case = conversations()[row["case"]]
        flag = case.get("add_generation_prompt", True)
        tools = case.get("tools")
        got = render(FAMILIES[name], case["messages"], tools=tools, add_generation_prompt=flag)
        assert got == row["rendered"], row["case"]
        assert got == in_transformers(
            FAMILIES[name], case["messages"], tools=tools, add_generation_prompt=flag
        )
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_wrote_is_marked_and_nothing_else(name: str):
    template = ChatTemplate(FAMILIES[name], TOKENS)
    messages = [{"role": "system", "content": "\u4e00"}, {"role": "user", "content": "\u4e01"}]
    out = template.render(
        {
            "messages": prepare_messages(messages, template),
            "tools": None,
            "add_generation_prompt": True,
        }
    )
    marked = "".join(plain(out)[a:b] for a, b in spans_of(out))
    assert marked == out.replace("\u4e00", "").replace("\u4e01", "")


def test_clock_can_be_given():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2025, 1, 2))
    assert template.render({}) == "2025-01-02"
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render({}).isdigit()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% for k, v in messages | items %}{% endfor %}", "mapping"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[0].content | int + none }}", "TypeError"),
        ("{{ nothing | tojson }}", "TypeError"),
        ("{% include 'x' %}", "loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
        ("{{ raise_exception.__globals__['x'] }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
    ],
)
def test_errors_while_rendering_are_a_request_error(source: str, message: str):
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "line 1"),
        ("\n{{ a b }}", "line 2"),
        ("{{ x | nonesuch }}", "nonesuch"),
        ("{% do x %}", "do"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile"),
        ("x" * (2**20 + 1), "1048577 characters"),
        ("{% break %}", "does not compile"),
    ],
    ids=["open", "words", "filter", "tag", "deep", "long", "break"],
)
def test_text_that_is_no_template_is_a_config_error(source: str, message: str):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source, {})


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without calls": "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion with calls": "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
    "long text": "{{ 'a' * 1000000000 }}",
    "long text, other way": "{{ 1000000000 * 'a' }}",
    "long list": "{{ [1] * 1000000000 }}",
    "doubling text": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list of itself, printed": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "list of itself, as json": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "list of itself, as string": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | string }}",
    "list of itself, trimmed": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | trim }}",
    "list of itself, formatted": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % (ns.x,) }}{{ '{}'.format(ns.x) }}",
    "large power": "{{ 9 ** 99999 }}{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
    "repeated squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "wide filter": "{{ 'x' | center(1000000000) }}",
    "wide method": "{{ 'x'.center(1000000000) }}",
    "wide tabs": "{{ ('\\t' * 1000000).expandtabs(10000) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide brace": "{{ '{:>1000000000}'.format(1) }}",
    "wide nested brace": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "many wide braces": "{{ ('{0:>9999}' * 100000).format(1) }}",
    "indentation": "{{ ('\\n' * 1000000) | indent(9999) }}",
    "indentation by text": "{{ ('\\n' * 1000000) | indent('a' * 9999) }}",
    "replacement": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replacement filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('a' * 100000).join(range(99999) | map('string') | list) }}",
    "join filter": "{{ range(99999) | join('a' * 100000) }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "precision": "{{ 1.5 | round(1000000000) }}",
    "sum of lists": "{{ ([[1, 2]] * 100000) | sum(start=[]) }}",
    "words": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 1000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_template_is_stopped_before_it_takes_time_or_memory(name: str):
    tracemalloc.start()
    begin = time.thread_time()
    try:
        with pytest.raises(RequestError):
            template = ChatTemplate(BOMBS[name], {}, time_limit_s=0.2)
            template.render({"messages": MESSAGES})
        assert time.thread_time() - begin < 1.5
        assert tracemalloc.get_traced_memory()[1] < 400e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '%*d' % (9, 1) }}", "width given as an argument"),
        ("{{ '{:{}}'.format(1, 9) }}", "width given as an argument"),
        ("{{ '%10001d' % 1 }}", "uses 10001; the limit here is 10000"),
        ("{{ 'x' | center(10001) }}", "uses 10001; the limit here is 10000"),
        ("{{ messages | tojson(indent=17) }}", r"indent=17\): the limit is 16"),
        ("{{ 'a' * 33554433 }}", "more than 33554432 characters"),
        ("{{ [[1]] | sum(start=[]) }}", "sums something other than numbers"),
    ],
)
def test_refusal_says_which_limit(source: str, message: str):
    with pytest.raises(RequestError, match=message):
        render(source)


def test_long_conversation_is_within_the_limits():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "What is 2+2? " * 20} for i in range(2000)
    ]
    for source in FAMILIES.values():
        assert len(render(source, messages)) > 500_000


def test_how_a_template_takes_content_is_read_from_it():
    strings = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert (strings.parts, strings.strings) == (False, True)
    for source in (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% for p in c | list %}{{ p.text }}{% endfor %}{% endfor %}",
    ):  # fmt: skip
        parts = ChatTemplate(source, {})
        assert (parts.parts, parts.strings) == (True, False)
    both = ChatTemplate(
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        {},
    )
    assert (both.parts, both.strings) == (True, True)
