"""Chat templates, compiled once and rendered for one conversation at a time."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from xylite.errors import ConfigError, RequestError
from xylite.text.sandbox import Budget, Sandbox
from xylite.text.written import written

RENDER_TIME_LIMIT_S = 1.0
MAX_SOURCE_CHARS = 2**20

# What an expression may raise on values it was not written for.
_EXPRESSION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template. Rendering is thread-safe.

    source           the template's text
    special_tokens   the model's, by the names templates use: {"bos_token": "<s>", ...}
    parts            whether the template walks over the parts of a message's content
    strings          whether it takes content that is one string
    compared         the strings it compares values with, such as the roles it knows
    raises           ConfigError if the text is not a template
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        time_limit_s: float = RENDER_TIME_LIMIT_S,
    ):
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(
                f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE_CHARS}"
            )
        self.source = source
        self.special_tokens = {k: written(v) for k, v in special_tokens.items()}
        self._time_limit_s = time_limit_s
        self._sandbox = Sandbox(now)
        try:
            self._template = self._sandbox.from_string(source)
            tree = self._sandbox.parse(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"the chat template does not compile: line {e.lineno}: {e}") from e
        except (*_EXPRESSION_ERRORS, SyntaxError, MemoryError) as e:
            raise ConfigError(f"the chat template does not compile: {e}") from e
        self.parts = _walks_content(tree)
        self.strings = not self.parts or any(t.name == "string" for t in tree.find_all(nodes.Test))
        self.compared = frozenset(
            c.value
            for comparison in tree.find_all(nodes.Compare)
            for c in comparison.find_all(nodes.Const)
            if isinstance(c.value, str)
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for these variables, knowing what the template wrote of it.

        May take up to the time limit of CPU time: call it in a thread, not in an event loop.
        RequestError with the template's own message if it refuses the conversation.
        """
        budget = Budget(deadline=time.thread_time() + self._time_limit_s)
        self._sandbox.in_thread.budget = budget
        try:
            return self._template.render({**self.special_tokens, **variables})
        except RecursionError:
            raise RequestError("the chat template nests too deeply", param="messages") from None
        except jinja2.TemplateError as e:
            raise RequestError(e.message or "the chat template failed", param="messages") from e
        except _EXPRESSION_ERRORS as e:
            raise RequestError(
                f"the chat template cannot render these messages: {type(e).__name__}: {e}",
                param="messages",
            ) from e
        finally:
            del self._sandbox.in_thread.budget


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )


def _walks_content(tree: nodes.Template) -> bool:
    """Whether a loop of the template goes over `message.content`, or a name that stands for it."""
    names = {"content"}  # by custom also the parameter of macros
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node):
            names.add(assign.target.name)
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        while isinstance(over, nodes.Filter) and over.node is not None:
            over = over.node
        if _is_content(over) or (isinstance(over, nodes.Name) and over.name in names):
            return True
    return False
