"""Conversations that are refused, each by a name for what is wrong."""

from typing import Any

import pytest

from tests.text.chats import BYTES, CHATML, USER, template, text_of
from xylite.errors import RequestError
from xylite.text import chat
from xylite.text.chat import encode_chat, render_chat
from xylite.text.written import plain


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'; this model takes text"),
        ({"type": "input_audio"}, "'input_audio'"),
        ({"type": ["x"]}, "of type"),
        ({"type": "text"}, "has no text, got "),
        ({"type": "text", "text": None}, "has no text, got "),
        (7, "has no text, got "),
    ],
)
def test_parts_that_are_no_text_are_named(part: Any, message: str):
    content = [{"type": "text", "text": "a"}, part]
    with pytest.raises(RequestError, match=message) as caught:
        text_of(CHATML, USER, {"role": "user", "content": content})
    assert (caught.value.param or "").startswith("messages[1].content[1]")


@pytest.mark.parametrize("role", [None, "", "a b", "user\n", "x" * 65, 7, "<|im_end|>"])
def test_roles_are_words(role: Any):
    with pytest.raises(RequestError, match=r"messages\[0\].role must be a word") as caught:
        text_of(CHATML, {"role": role, "content": "a"})
    assert caught.value.param == "messages[0].role"


def test_refusal_of_the_template_is_its_own_message():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match=r"^roles must alternate user/assistant$") as caught:
        text_of(source, USER, USER)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


def test_continuing_and_prompting_exclude_each_other():
    with pytest.raises(RequestError, match="cannot both be true") as caught:
        text_of(CHATML, USER, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].content | length }}"])
def test_message_that_is_not_printed_cannot_be_continued(source: str):
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="does not print the last message"):
        text_of(source, USER, **flags)


def test_model_without_template_takes_no_messages():
    with pytest.raises(RequestError, match="has no chat template") as caught:
        encode_chat(BYTES, None, [USER])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "key",
    [
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("chat_template", "bos_token", "eos_token", "pad_token", "raise_exception", "namespace"),
    ],
)
def test_reserved_template_arguments_are_refused(key: str):
    with pytest.raises(RequestError, match=f"may not set '{key}'") as caught:
        text_of(CHATML, USER, template_kwargs={key: 1})
    assert caught.value.param == f"chat_template_kwargs.{key}"


def test_limits_of_a_conversation_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RequestError, match="messages is empty"):
        text_of(CHATML)
    with pytest.raises(RequestError, match="has 8193 entries, the limit is 8192"):
        text_of(CHATML, *[USER] * (chat.MAX_MESSAGES + 1))
    monkeypatch.setattr(chat, "MAX_CHAT_CHARS", 100)
    with pytest.raises(RequestError, match="more than 100 characters"):
        text_of(CHATML, {"role": "user", "content": "x" * 101})
    with pytest.raises(RequestError, match="more than 100 characters"):
        text_of(CHATML, USER, template_kwargs={"a": {"x" * 60: "y" * 60}})
    monkeypatch.setattr(chat, "MAX_CHAT_VALUES", 100)
    with pytest.raises(RequestError, match="100 values"):
        text_of(CHATML, USER, tools=[{"a": [1] * 101}])


def test_prompt_that_is_too_long_for_sure_is_refused_before_encoding():
    message = {"role": "user", "content": "x" * 1000}
    assert len(encode_chat(BYTES, template(), [message], max_tokens=1000)) > 1000
    with pytest.raises(RequestError, match="maximum context length is 80 tokens") as caught:
        encode_chat(BYTES, template(), [message], max_tokens=80)
    assert caught.value.code == "context_length_exceeded"


def test_deep_nesting_is_refused():
    deep: Any = 1
    for _ in range(chat.MAX_NESTING + 5):
        deep = [deep]
    with pytest.raises(RequestError, match="nests deeper than 100"):
        text_of(CHATML, USER, tools=[{"a": deep}])


@pytest.mark.parametrize("message", [7, "x", None, ["a"]])
def test_message_that_is_no_object_is_named(message: Any):
    with pytest.raises(RequestError, match=r"messages\[1\] must be an object, got "):
        text_of(CHATML, USER, message)


@pytest.mark.parametrize("calls", [7, "x", [1], {"a": 1}])
def test_tool_calls_that_are_no_list_of_objects_are_named(calls: Any):
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls must be a list"):
        text_of(CHATML, {"role": "assistant", "tool_calls": calls})


def test_tools_are_objects():
    with pytest.raises(RequestError, match=r"tools\[0\] must be an object, got 7"):
        text_of(CHATML, USER, tools=[7])


@pytest.mark.parametrize("content", [7, {"a": 1}, True])
def test_content_of_another_type_is_named(content: Any):
    with pytest.raises(RequestError, match=r"messages\[0\].content must be"):
        text_of(CHATML, {"role": "user", "content": content})


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_content_may_be_missing_only_beside_something_else(content: dict[str, Any]):
    t = template("{% for m in messages %}[{{ m.content }}]{{ m.tool_calls|length }}{% endfor %}")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call], **content}
    assert plain(render_chat(t, [message])) == "[]1"
    if content != {"content": ""}:
        for role in ("user", "assistant", "tool"):
            with pytest.raises(RequestError, match="neither content nor tool_calls"):
                render_chat(t, [{"role": role, "tool_calls": [], **content}])
