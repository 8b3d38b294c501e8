"""Statements of a compiled program as functions: decoded once, run often."""

import re
from collections.abc import Callable
from typing import Any, Final

from . import library, scalar
from .chip import CHIP
from .cores import Core
from .memory import Fault
from .program_text import Module, Statement, names, split_top
from .statements import Env, Run, operands, pure, setter
from .views import VIEWS

PLAIN: Final = {**VIEWS, **CHIP}


class Decoder:
    """Turns statements into functions, once; running them parses nothing."""

    def __init__(self, module: Module):
        self.module = module

    def block(self, statements: list[Statement]) -> Callable[[Core, Env], list[Any] | None]:
        steps = [(self.statement(s), s.text) for s in statements]

        def run(core: Core, env: Env) -> list[Any] | None:
            for step, text in steps:
                try:
                    out = step(core, env)
                except Fault:
                    raise
                except Exception as e:  # whatever it was, the statement is named
                    raise Fault(f"{type(e).__name__}: {e} in: {text[:300]}") from e
                if out is not None:
                    return out
            return None

        return run

    def statement(self, s: Statement) -> Run:
        match = re.match(r"((?:%[\w#-]+(?::\d+)?(?:, )?)+) = (.*)", s.text)
        result, text = (match[1], match[2]) if match else (None, s.text)
        found = re.match(r"[\w.]+", text)
        name = found[0] if found else text
        if name in ("return", "func.return"):
            return lambda core, env: []
        if name == "scf.yield":
            values = operands(text.split(" : ")[0])
            return lambda core, env: [env[x] for x in values]
        if name == "scf.for":
            return self._for(result, text, s)
        if name == "scf.if":
            return self._if(result, text, s)
        if name == "scf.while":
            return self._while(result, text, s)
        if name in ("call", "func.call"):
            return self._call(text)
        if name == "arith.constant":
            value = scalar.constant(text)
            return pure(result, lambda core, env: value)
        if name.startswith(("arith.", "math.")):
            f, values = scalar.operation(name, text), operands(text.split(" : ")[0])
            return pure(result, lambda core, env: f(*(env[x] for x in values)))
        if name.startswith("affine."):
            return self._affine(result, text)
        if name in PLAIN:
            return PLAIN[name](result, text)
        if name.startswith("annotation."):
            return lambda core, env: None
        return self._unknown(text)

    def _unknown(self, text: str) -> Run:
        def run(core: Core, env: Env) -> None:
            raise Fault(f"not emulated: {text[:160]}")

        return run

    def _for(self, result: str | None, text: str, s: Statement) -> Run:
        match = re.match(
            r"scf\.for (%\w+) = (\S+) to (\S+) step (\S+)"
            r"(?:\s+iter_args\((.*?)\) -> \(.*\))?\s*(?:: \w+)?$",
            text,
        )
        assert match, text
        index, first, last, step = match.groups()[:4]
        carried = [tuple(p.split(" = ")) for p in split_top(match[5])] if match[5] else []
        body, store = self.block(s.body or []), setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            values: list[Any] = [env[start.strip()] for _, start in carried]
            for k in range(env[first], env[last], env[step]):
                env[index] = k
                for (name, _), v in zip(carried, values, strict=True):
                    env[name.strip()] = v
                out = body(core, env)
                if carried:
                    assert out is not None
                    values = out
            if carried:
                store(env, values[0] if single else values)

        return run

    def _if(self, result: str | None, text: str, s: Statement) -> Run:
        condition = operands(text)[0]
        then, other, store = self.block(s.body or []), self.block(s.other or []), setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            out = (then if env[condition] else other)(core, env)
            if result is not None:
                assert out is not None
                store(env, out[0] if single else out)

        return run

    def _while(self, result: str | None, text: str, s: Statement) -> Run:
        match = re.match(r"scf\.while(?: \((.*?)\))? :", text)
        assert match and s.body and s.other, text
        start = [tuple(p.split(" = ")) for p in split_top(match[1])] if match[1] else []
        *before, last = s.body
        condition, *passed = operands(last.text.split(" : ")[0])
        after = s.other
        inner: list[str] = []
        if after[0].text.startswith("^"):
            inner, after = re.findall(r"(%\w+):", after[0].text), after[1:]
        test, body, store = self.block(before), self.block(after), setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            values = [env[x.strip()] for _, x in start]
            while True:
                for (name, _), v in zip(start, values, strict=True):
                    env[name.strip()] = v
                test(core, env)
                out = [env[x] for x in passed]
                if not env[condition]:
                    break
                for name, v in zip(inner, out, strict=True):
                    env[name] = v
                values = body(core, env) or []
            if result is not None:
                store(env, out[0] if single else out)

        return run

    def _call(self, text: str) -> Run:
        match = re.match(r"(?:func\.)?call @(\w+)\((.*?)\) :", text)
        assert match, text
        name, args = match[1], operands(match[2])

        def run(core: Core, env: Env) -> None:
            core.calls[name] += 1
            library.call(name, [env[x] for x in args])

        return run

    def _affine(self, result: str | None, text: str) -> Run:
        match = re.match(r"affine\.(\w+) #(map\d*)\(([^)]*)\)(?:\[([^\]]*)\])?", text)
        assert match, text
        pick: Callable[[tuple[int, ...]], int] = {"apply": lambda r: r[0], "min": min, "max": max}[
            match[1]
        ]
        f, args = self.module.maps[match[2]], names(match[3]) + names(match[4])
        return pure(result, lambda core, env: pick(f(*(env[x] for x in args))))
