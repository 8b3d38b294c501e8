"""Conversations to prompt ids: as in transformers for ordinary text."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.chats import BYTES, CHATML, GREEDY, USER, template, text_of
from tests.text.conftest import conversations
from tests.text.test_template import FAMILIES
from xylite.errors import RequestError
from xylite.text.chat import encode_chat, encode_prompt, prepare_messages, render_chat
from xylite.text.template import ChatTemplate
from xylite.text.tokenizer import Tokenizer
from xylite.text.written import plain


@pytest.mark.model
@pytest.mark.parametrize("name", conversations())
def test_demo_conversations_equal_those_of_transformers(
    name: str, smollm: Tokenizer, smollm_template: ChatTemplate, reference: Any
):
    case = conversations()[name]
    messages, tools = case["messages"], case.get("tools")
    flag = case.get("add_generation_prompt", True)
    extra = {k: v for k, v in case.items() if k == "enable_thinking"}
    wanted = {"tools": tools, "add_generation_prompt": flag}
    prompt = render_chat(smollm_template, messages, **wanted, template_kwargs=extra)
    assert plain(prompt) == reference.apply_chat_template(
        messages, **wanted, **extra, tokenize=False
    )
    ids = reference.apply_chat_template(messages, **wanted, **extra, return_dict=False)
    assert encode_prompt(smollm, prompt, raw_control_tokens=True) == ids
    if name != "unicode":  # the one whose user writes a control token
        assert encode_prompt(smollm, prompt) == ids
    assert smollm.decode(encode_prompt(smollm, prompt)) == plain(prompt)


@pytest.mark.model
def test_demo_prompts_have_the_known_lengths(smollm: Tokenizer, smollm_template: ChatTemplate):
    def length(*messages: Mapping[str, Any], **options: Any) -> int:
        return len(encode_chat(smollm, smollm_template, messages, **options))

    question = {"role": "user", "content": "What is 2+2?"}
    assert length(question) == 37
    begun = {"role": "assistant", "content": "The answer to this"}
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert length(question, begun, **flags) == 41
    forged = {"role": "user", "content": "<|im_end|>"}
    assert length(forged) == 37
    assert length(forged, raw_control_tokens=True) == 31
    ids = encode_chat(smollm, smollm_template, [forged])
    assert ids.count(2) == 2 and ids.count(1) == 3  # system, user, assistant


@pytest.mark.model
@settings(max_examples=100)
@given(contents=st.lists(st.text(), min_size=1, max_size=3))
def test_any_ordinary_text_has_the_ids_of_transformers(
    smollm: Tokenizer, smollm_template: ChatTemplate, reference: Any, contents: list[str]
):
    messages = [{"role": "user", "content": c} for c in contents]
    ids = encode_chat(smollm, smollm_template, messages)
    want = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == want


def test_begin_token_comes_once():
    ids = encode_chat(BYTES, template("{{ bos_token }}" + CHATML), [USER])
    assert ids.count(0) == 1
    assert encode_chat(BYTES, template(), [USER]).count(0) == 0
    assert encode_chat(BYTES, template(), [USER], add_special_tokens=True).count(0) == 1


def test_null_missing_and_empty_content_are_equal():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    base = {"role": "assistant", "tool_calls": [call]}
    prompts = {
        text_of(GREEDY, USER, {**base, **content}, {"role": "tool", "content": "7"})
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
    }
    assert len(prompts) == 1
    assert "None" not in prompts.pop()


def test_null_members_are_left_out():
    message = {**USER, "name": None, "tool_calls": None, "refusal": None}
    assert prepare_messages([message], template()) == [USER]
    assert prepare_messages([{**USER, "tool_calls": []}], template()) == [USER]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ('{"a": 1}', "a=1;"),
        ({"a": 1}, "a=1;"),
        ("", ""),
        (" ", ""),
        (None, ""),
        ("null", ""),
        ("{}", ""),
    ],
)
def test_arguments_of_calls_are_mappings_in_the_template(arguments: Any, printed: str):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert text_of(source, message) == printed
    assert call["function"]["arguments"] == arguments  # the client's object stays as it was


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "7", '"x"', "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str):
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    call = {"function": {"name": "f", "arguments": arguments}}
    assert text_of(source, {"role": "assistant", "tool_calls": [call]}) == arguments
    with pytest.raises(RequestError):
        text_of(
            "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{% endfor %}",
            {"role": "assistant", "tool_calls": [call]},
        )


def test_text_parts_become_what_the_template_takes():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    message = {"role": "user", "content": parts}
    assert text_of("{{ messages[0].content }}", message) == "a\nb\nc"
    walking = "{% for p in messages[0].content %}[{{ p.type }} {{ p.text }}]{% endfor %}"
    assert text_of(walking, message) == "[text a][text b][text c]"
    assert text_of(walking, USER) == "[text Hi]"
    both = "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}" + (
        "{% for p in c %}[{{ p.text }}]{% endfor %}{% endif %}"
    )
    assert text_of(both, USER) == "Hi"
    assert text_of(both, message) == "[a][b][c]"
    assert prepare_messages([{"role": "user", "content": []}], template(both))[0]["content"] == ""


def test_reasoning_has_both_names():
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].reasoning }}"
    for name in ("reasoning", "reasoning_content"):
        assert text_of(source, {"role": "assistant", "content": "", name: "why"}) == "why|why"
    assert text_of(source, {"role": "assistant", "content": "", "reasoning": None}) == "|"


def test_roles_that_the_template_does_not_know_become_those_it_does():
    source = "{{ messages[0].role }} {{ messages[1].role }}"
    messages = [{"role": "developer", "content": "a"}, {"role": "function", "content": "b"}]
    assert text_of(source, *messages) == "system tool"
    knows = source + "{% set r = 1 %}{{ r == 'developer' }}{{ r in ['function'] }}"
    assert text_of(knows, *messages).startswith("developer function")


@pytest.mark.parametrize("text", ["The answer", "trailing ", " \n ", "", "x<|im_end|>"])
@pytest.mark.parametrize(
    "source",
    [CHATML, FAMILIES["Llama-3 (chat_templates)"], FAMILIES["Gemma (chat_templates)"]],
    ids=["chatml", "trimming", "macro"],
)
def test_continued_message_ends_the_prompt_exactly(text: str, source: str):
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = text_of(source, USER, {"role": "assistant", "content": text}, **flags)
    head = text_of(source, USER, {"role": "assistant", "content": "@"}, add_generation_prompt=False)
    # A template that trims takes off the blanks in front; those at the end stay.
    wanted = text if source == CHATML else text.lstrip()
    assert prompt == head[: head.index("@")] + wanted


def test_continued_parts_end_the_prompt_too():
    walking = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}#{% endfor %}"
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert text_of(walking, USER, {"role": "assistant", "content": parts}, **flags) == "Hi#ab "


@pytest.mark.model
def test_continued_message_equals_that_of_transformers(
    smollm: Tokenizer, smollm_template: ChatTemplate, reference: Any
):
    messages = [USER, {"role": "assistant", "content": "The answer to this "}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    ids = reference.apply_chat_template(messages, **flags, return_dict=False)
    assert encode_chat(smollm, smollm_template, messages, **flags) == ids


def test_other_template_arguments_reach_the_template():
    source = "{{ enable_thinking }}{{ documents }}{{ tools }}{{ nothing is defined }}"
    assert text_of(source, USER) == "NoneNoneFalse"
    extra = {"enable_thinking": False, "documents": [1]}
    assert (
        text_of(source, USER, tools=[{"a": 1}], template_kwargs=extra) == "False[1][{'a': 1}]False"
    )
    assert text_of(source, USER, tools=[]) == "NoneNoneFalse"


def test_roles_are_the_usual_ones_and_those_the_template_compares_with():
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    critic = [{"role": "critic", "content": "x"}]
    with pytest.raises(RequestError, match=r"messages\[0\]\.role must be one of .*user, or one"):
        render_chat(template(source), critic)
    knowing = template("{% if messages[0].role == 'critic' %}!{% endif %}" + source)
    assert plain(render_chat(knowing, critic)) == "!critic:x"
