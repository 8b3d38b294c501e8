"""Messages to prompt ids: what clients send, as chat templates expect it, rendered and encoded.

Control tokens count only where the template wrote them. A client's `<|im_end|>` stays seven
characters of text, in a message as in a tool's result, a function's name or a template argument,
and also if it comes together only in the rendered prompt.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from xylite.errors import RequestError, check_list, short
from xylite.text.template import ChatTemplate
from xylite.text.tokenizer import Tokenizer
from xylite.text.written import plain, spans_of, written

MAX_MESSAGES = 8192
MAX_CHAT_CHARS = 16 * 2**20  # of all strings in messages, tools and template arguments
MAX_CHAT_VALUES = 10**6  # strings, numbers, lists and objects in them
MAX_NESTING = 100

# Roles that templates put into control tokens, as in '<|' + role + '|>'.
ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")
)
# What a message may hold instead of content. "" is content: an answer may have been empty.
_INSTEAD = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")
_TEXT_PARTS = ("text", "refusal", "thinking")
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# What template_kwargs may not set, besides special tokens (NAME_token): the conversation itself,
# options of transformers' apply_chat_template, and the names that templates rely on.
RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "loop"),
        *("raise_exception", "strftime_now", "additional_special_tokens", "extra_special_tokens"),
        *(
            "range",
            "dict",
            "namespace",
            "cycler",
            "joiner",
            "lipsum",
            "caller",
            "varargs",
            "kwargs",
        ),
    )
)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    raw_control_tokens: bool = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Prompt ids of a conversation; for ordinary text those of transformers' apply_chat_template.

    add_special_tokens  add the tokenizer's BOS though templates write it themselves
    template_kwargs     further variables for the template
    raw_control_tokens  control tokens in client text act as such: clients can forge turns
    max_tokens          refuse a prompt that is longer for sure before encoding it
    raises              RequestError: no template, the template refuses, or a limit is broken

    Takes up to the template's time limit and the time of encoding: call it in a thread.
    """
    prompt = render_chat(
        template,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )
    return encode_prompt(
        tokenizer,
        prompt,
        add_special_tokens=add_special_tokens,
        raw_control_tokens=raw_control_tokens,
        max_tokens=max_tokens,
    )


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str,
    *,
    add_special_tokens: bool = False,
    raw_control_tokens: bool = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Ids of what `render_chat` gave: control tokens where the template wrote them, else text."""
    text = plain(prompt)
    if max_tokens is not None and tokenizer.too_long(text, max_tokens):
        raise RequestError(
            f"This model's maximum context length is {max_tokens} tokens. However, your messages "
            f"have {len(text)} characters, which is more for sure.",
            param="messages",
            code="context_length_exceeded",
        )
    if raw_control_tokens:
        return tokenizer.encode(text, add_special_tokens)
    spans = [s for a, b in spans_of(prompt) for s in tokenizer.control_spans(text, a, b)]
    return tokenizer.encode_marked(text, spans, add_special_tokens)


def render_chat(
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt as text that knows what the template wrote of it; see `encode_chat`."""
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take messages; send a prompt to "
            "/v1/completions, or start the server with --chat-template FILE",
            param="messages",
            code="no_chat_template",
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message cannot both be true",
            param="continue_final_message",
        )
    extra = _checked_kwargs(template_kwargs or {})
    if tools is not None:
        check_list("tools", tools, "objects")
    for i, tool in enumerate(tools or ()):
        if not _is_object(tool):
            raise RequestError(
                f"tools[{i}] must be an object, got {short(tool)}", param=f"tools[{i}]"
            )
    _check_size("messages", messages, "tools", tools, "chat_template_kwargs", extra)
    conversation = prepare_messages(messages, template)
    mark = ""
    if continue_final_message:
        # The prompt is cut where this mark comes out; clients cannot guess its random part.
        mark = f"\ue000{secrets.token_hex(16)}\ue001"
        conversation[-1] = _with_mark(conversation[-1], mark, len(conversation) - 1)
    prompt = template.render(
        {
            "documents": None,
            **extra,
            "messages": conversation,
            "tools": [dict(t) for t in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    if not mark:
        return prompt
    end = prompt.rfind(mark)
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template does not print the last message as it is",
            param="continue_final_message",
        )
    return prompt[:end]


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """Messages as sent by OpenAI clients, in the form that templates of Hugging Face expect.

    Content is one string, or a list of parts if the template walks over parts; null and missing
    are "" beside tool calls, and refused without. Roles are the usual ones and those that the
    template compares with. Arguments of tool calls are objects. Members that are null are left
    out. The reasoning of a turn is there under both names. `developer` becomes `system`, and
    `function` becomes `tool`, unless the template compares with that role itself.
    """
    check_list("messages", messages, "objects")
    if not messages:
        raise RequestError("messages is empty: at least one is needed", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}", param="messages"
        )
    return [_prepared(i, m, template) for i, m in enumerate(messages)]


def _is_object(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _prepared(index: int, message: Any, template: ChatTemplate) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not _is_object(message):
        raise RequestError(f"{where} must be an object, got {short(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(
            f"{where}.role must be a word of 1 to 64 characters, such as user, got {role!r:.80}",
            param=f"{where}.role",
        )
    if role not in ROLES and role not in template.compared:
        raise RequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, or one that the chat "
            f"template knows; got {role!r}",
            param=f"{where}.role",
        )
    if message.get("content") is None and not any(message.get(k) for k in _INSTEAD):
        raise RequestError(f"{where} has neither content nor tool_calls", param=f"{where}.content")
    if role not in template.compared:
        role = {"developer": "system", "function": "tool"}.get(role, role)
    out = {str(k): v for k, v in message.items() if v is not None}
    out["role"] = written(role) if role in ROLES else role
    out["content"] = _content(where, message.get("content"), template)
    reasoning = next(
        (r for k in ("reasoning_content", "reasoning") if isinstance(r := message.get(k), str)),
        None,
    )
    if reasoning is not None:
        out["reasoning_content"] = out["reasoning"] = reasoning
    calls = out.pop("tool_calls", None)
    if calls:
        out["tool_calls"] = _tool_calls(where, calls)
    if _is_object(call := out.get("function_call")):
        out["function_call"] = _with_parsed_arguments(call)
    return out


def _content(where: str, content: Any, template: ChatTemplate) -> str | list[dict[str, str]]:
    if content is None or content == []:
        content = ""
    if isinstance(content, str):
        return content if template.strings else [{"type": "text", "text": content}]
    if not _is_list(content):
        raise RequestError(
            f"{where}.content must be a string or a list of parts, got {short(content)}",
            param=f"{where}.content",
        )
    texts: list[str] = []
    for i, part in enumerate(content):
        # A part may be a bare string; otherwise its text stands under the name of its type.
        kind = part.get("type", "text") if _is_object(part) else "text"
        text = part if isinstance(part, str) else None
        if _is_object(part) and isinstance(kind, str):
            text = part.get(kind)
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"{where}.content[{i}] is of type {kind!r:.80}; this model takes text only",
                param=f"{where}.content[{i}]",
            )
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{i}] has no text, got {short(part)}",
                param=f"{where}.content[{i}].{kind}",
            )
        texts.append(text)
    if template.parts:
        return [{"type": "text", "text": t} for t in texts]
    return "\n".join(texts)  # as vLLM does


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not _is_list(calls) or not all(map(_is_object, calls)):
        raise RequestError(
            f"{where}.tool_calls must be a list of objects, got {short(calls)}",
            param=f"{where}.tool_calls",
        )
    out: list[dict[str, Any]] = []
    for call in calls:
        call = {k: v for k, v in call.items() if v is not None}
        if _is_object(function := call.get("function")):
            call["function"] = _with_parsed_arguments(function)
        out.append(call)
    return out


def _with_parsed_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object; what is no JSON object stays as it is."""
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            parsed = arguments
        if parsed is None or _is_object(parsed):
            arguments = parsed
    return {**function, "arguments": {} if arguments is None else arguments}


def _with_mark(message: dict[str, Any], mark: str, index: int) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if not content:
        raise RequestError(
            f"continue_final_message: messages[{index}] has no text to continue",
            param="continue_final_message",
        )
    last = {**content[-1], "text": content[-1]["text"] + mark}
    return {**message, "content": [*content[:-1], last]}


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in kwargs:
        if key in RESERVED_KWARGS or key.endswith("_token"):
            raise RequestError(
                f"chat_template_kwargs may not set {key!r:.80}",
                param=f"chat_template_kwargs.{key:.80}",
            )
    return kwargs


def _check_size(*named: Any) -> None:
    """RequestError if the strings, or the number of values, in what a client sent are too many."""
    chars = values = 0
    for name, root in zip(named[::2], named[1::2], strict=True):
        level: list[Any] = [root]
        for depth in range(MAX_NESTING + 2):
            below: list[Any] = []
            for x in level:
                if isinstance(x, str):
                    chars += len(x)
                elif _is_object(x):
                    chars += sum(len(str(key)) for key in x)
                    below += x.values()
                elif _is_list(x):
                    below += x
            values += len(level)
            if chars > MAX_CHAT_CHARS or values > MAX_CHAT_VALUES:
                raise RequestError(
                    f"messages, tools and chat_template_kwargs together have more than "
                    f"{MAX_CHAT_CHARS} characters or {MAX_CHAT_VALUES} values",
                    param=name,
                )
            if depth > MAX_NESTING:
                raise RequestError(f"{name} nests deeper than {MAX_NESTING} levels", param=name)
            level = below
            if not level:
                break
