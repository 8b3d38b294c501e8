"""Chat templates and tokenizers that made other servers fail, from file to prompt ids."""

import pytest

from tests.end_to_end.conftest import served
from tests.end_to_end.smollm2 import ALPHA, CHAT
from tests.end_to_end.variants import tiny, variant
from xylite.config import ServerConfig
from xylite.errors import ConfigError

pytestmark = pytest.mark.model

CHATS = "/v1/chat/completions"
BOS = 1

ALTERNATING = """\
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate: user, assistant, user, ...') -}}
{%- endif -%}
{{- '[' + m.role + ']' + m.content -}}
{%- endfor -%}
"""

CALLS = """\
{%- for m in messages -%}
{{- '[' + m.role + ']' + (m.content or '') -}}
{%- for call in m.tool_calls or [] -%}
{{- call.function.name -}}
{%- for name, value in call.function.arguments|items -%}
{{- ' ' + name + '=' + value|tojson -}}
{%- endfor -%}
{%- endfor -%}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def tiny_dir(smollm2_dir, tmp_path_factory):
    return tiny(smollm2_dir, tmp_path_factory.mktemp("templates") / "tiny")


@pytest.fixture
def serving(tiny_dir, tmp_path):
    """serving(template=..., settings...) -> a server of a tiny model with that template."""

    def start(template=None, server=None, model=tiny_dir, **settings):
        if template is not None:
            (tmp_path / "template.jinja").write_text(template, encoding="utf-8")
            settings["chat_template"] = str(tmp_path / "template.jinja")
        return served(model, server, load_format="dummy", **settings)

    return start


async def prompt_of(client, messages, **options):
    """What the model is given for a conversation, as text."""
    ids = (await client.post("/tokenize", {"messages": messages, **options}))["tokens"]
    answer = await client.chat(messages, max_tokens=1, return_token_ids=True, **options)
    assert answer["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)
    return client.engine.decode(ids)


def adding_bos(content):
    """tokenizer.json of a tokenizer that begins every text with its begin token."""
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}
        },
    }
    return content


async def test_begin_token_comes_once_whoever_adds_it(serving, tiny_dir, tmp_path):
    model = variant(
        tiny_dir,
        tmp_path / "adding",
        tokenizer=adding_bos,
        tokenizer_config=lambda c: {**c, "add_bos_token": True},
    )
    async with serving(model=model) as client:
        plain = await client.complete(ALPHA, 1, return_token_ids=True)
        assert plain["choices"][0]["prompt_token_ids"][0] == BOS
        assert plain["usage"]["prompt_tokens"] == 8
        without = await client.complete(ALPHA, 1, add_special_tokens=False)
        assert without["usage"]["prompt_tokens"] == 7
        # The template writes its own begin token, so the tokenizer adds none.
        answer = await client.chat(CHAT, max_tokens=1, return_token_ids=True)
        assert answer["usage"]["prompt_tokens"] == 37
        assert answer["prompt_token_ids"] == await client.engine.render(CHAT)
        assert answer["prompt_token_ids"][:2] != [BOS, BOS]
        asked = await client.chat(CHAT, max_tokens=1, add_special_tokens=True)
        assert asked["usage"]["prompt_tokens"] == 38


async def test_refusal_of_the_template_is_400_in_its_own_words(serving):
    user, assistant = ({"role": r, "content": "x"} for r in ("user", "assistant"))
    async with serving(ALTERNATING) as client:
        assert await prompt_of(client, [user, assistant, user]) == "[user]x[assistant]x[user]x"
        for messages in ([user, user], [assistant], [user, assistant, assistant]):
            for body in ({}, {"stream": True}):
                error = (await client.post(CHATS, {"messages": messages, **body}, 400))["error"]
                assert error["type"] == "invalid_request_error"
                assert "roles must alternate: user, assistant, user, ..." in error["message"]
        assert await prompt_of(client, [user]) == "[user]x"


async def test_faulty_template_is_the_requests_error_and_not_the_engines(serving):
    async with serving("{{ messages[0].content.nothing.at.all }}") as client:
        error = (await client.post(CHATS, {"messages": CHAT}, 400))["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert len((await client.complete(ALPHA, 2))["choices"]) == 1


ARGUMENTS = [
    ('{"a":1,"b":[true,null]}', " a=1 b=[true, null]"),
    ("", ""),
    ("null", ""),
    (None, ""),
    ({"a": {"b": "c"}}, ' a={"b": "c"}'),
    ('{"a":"<|im_end|>"}', ' a="<|im_end|>"'),
]


def with_call(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]


async def test_arguments_of_calls_reach_the_template_as_a_mapping(serving):
    async with serving(CALLS) as client:
        for arguments, printed in ARGUMENTS:
            turns = with_call(arguments)
            assert await prompt_of(client, turns) == f"[user]x[assistant]f{printed}[tool]4"
            ids = (await client.post("/tokenize", {"messages": turns}))["tokens"]
            assert not {0, 1, 2} & set(ids), "a control token was forged"


async def test_arguments_that_are_no_object_are_never_a_server_error(serving):
    async with serving(CALLS) as client:
        for arguments in ("{bad", "[1]", "5", '"text"'):
            body = {"messages": with_call(arguments), "max_tokens": 1}
            async with client.http.post(CHATS, json=body) as response:
                assert response.status in (200, 400), await response.text()
                if response.status == 400:
                    error = (await response.json())["error"]
                    assert error["type"] == "invalid_request_error"


async def test_control_tokens_of_users_act_only_if_the_operator_wants_it(serving):
    turn = [{"role": "user", "content": "<|im_end|>"}]
    for raw, num in ((False, 37), (True, 31)):
        async with serving(server=ServerConfig(raw_control_tokens=raw)) as client:
            answer = await client.chat(turn, max_tokens=1)
            assert answer["usage"]["prompt_tokens"] == num
            # A prompt for /v1/completions is the model's own language: nothing is escaped there.
            plain = await client.complete("<|im_end|>", 1)
            assert plain["usage"]["prompt_tokens"] == 1


async def test_end_of_the_continued_message_survives_any_template(serving):
    trimming = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}"
    options = {"continue_final_message": True, "add_generation_prompt": False}
    async with serving(trimming) as client:
        for text in ("The answer", "The answer ", "The answer\n\n", "</s>"):
            turns = [*CHAT, {"role": "assistant", "content": text}]
            got = await prompt_of(client, turns, **options)
            assert got == f"[user]What is 2+2?</s>\n[assistant]{text}"


async def test_template_that_is_none_or_missing_stops_the_start(serving, tiny_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"template\.jinja.*line 1"):
        async with serving("{% for %}"):
            pass
    with pytest.raises(ConfigError, match="chat_template .*nothing.jinja: cannot be read: No such"):
        async with serving(chat_template=str(tmp_path / "nothing.jinja")):
            pass
    model = variant(tiny_dir, tmp_path / "without", without="chat_template.jinja")
    async with serving(model=model) as client:
        error = (await client.post(CHATS, {"messages": CHAT}, 400))["error"]
        assert "chat template" in error["message"]
        assert len((await client.complete(ALPHA, 2))["choices"]) == 1
