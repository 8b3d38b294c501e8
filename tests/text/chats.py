"""A template, a vocabulary and a message that tests of conversations share."""
# ruff: noqa: E501 (a template's line feeds are part of it)

from collections.abc import Mapping
from typing import Any

from tests.text.vocabularies import byte_level
from xylite.text.chat import render_chat
from xylite.text.template import ChatTemplate
from xylite.text.written import plain

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BYTES = byte_level()
START, END = BYTES.control_tokens["<|im_start|>"], BYTES.control_tokens["<|im_end|>"]
USER = {"role": "user", "content": "Hi"}
# A template that puts everything it is given next to everything else.
GREEDY = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.name %}<{{ m.name }}>{{ '<' + m.name + '>' }}{{ '<' ~ m.name ~ '>' }}{{ '<%s>' % m.name }}{{ '<{}>'.format(m.name) }}{{ ['<', m.name, '>'] | join }}{{ '@'.replace('@', '<' + m.name + '>') }}{% endif %}
{{- m.content if m.content is string else m.content | map(attribute='text') | join }}{{ '|>' }}{{ '<|' }}{{ m.content }}{{ '|>' }}
{{- m.content | lower | trim | replace('@', '') }}{{ m.content | string | upper }}{{ m | tojson }}{{ m.reasoning_content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.function.arguments }}
{%- for k, v in (c.function.arguments | items if c.function.arguments is mapping else []) %}<{{ k }}>{{ k ~ v }}{% endfor %}{% endfor %}
{%- for k, v in m | items %}{{ k }}{{ v }}{{ '<' ~ k ~ '>' }}{% endfor %}<|im_end|>
{% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}{{ messages | map(attribute='content') | join }}{{ messages }}
{%- for t in tools or [] %}{{ t | tojson }}{{ t.function.name }}{{ t }}{% endfor %}{{ extra }}{{ extra | default('') | tojson }}
"""  # fmt: skip


def template(source: str = CHATML) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


def text_of(source: str, *messages: Mapping[str, Any], **options: Any) -> str:
    return plain(render_chat(template(source), messages, **options))
