"""What the functions that statements become are made of."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .cores import Core

Env = dict[str, Any]
# Runs one statement; a list (operands of yield or return) ends the block.
Run = Callable[[Core, Env], list[Any] | None]


def operands(text: str) -> list[str]:
    """The names of values in a text, in order."""
    return re.findall(r"%[\w#-]+", text)


def integer(env: Env, name: str) -> int:
    """What a name or a number stands for."""
    return env[name] if name.startswith("%") else int(name)


def integers(env: Env, items: Sequence[str]) -> list[int]:
    return [integer(env, x) for x in items]


def setter(result: str | None) -> Callable[[Env, Any], None]:
    """Gives a statement's result its name, or its results `%x:n` the names %x#0 to %x#n-1."""
    if result is None:
        return lambda env, value: None
    if ":" in result:
        base = result.split(":")[0]

        def store_all(env: Env, values: Any) -> None:
            for k, v in enumerate(values):
                env[f"{base}#{k}"] = v

        return store_all
    return lambda env, value: env.__setitem__(result, value)


def pure(result: str | None, f: Callable[[Core, Env], Any]) -> Run:
    """A statement that computes one value."""
    store = setter(result)
    return lambda core, env: store(env, f(core, env))
