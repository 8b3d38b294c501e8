"""Flags made from settings structs: what each field is called, takes and means.

A flag is a field: `max_num_seqs` is `--max-num-seqs N`, XYLITE_MAX_NUM_SEQS and a config file's key
`max-num-seqs`. Field types say how a value is written; `Meta` says what help and docs print.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import inspect

from xylite.errors import ConfigError

# Other spellings of the same thing: vLLM's name where the setting has a more general one here.
ALIASES: Final[Mapping[str, str]] = {
    "gpu_memory_utilization": "device_memory_utilization",
    "num_gpu_blocks_override": "num_blocks",
    "served_model_names": "served_model_name",
}
SHORT: Final[Mapping[str, str]] = {"q": "quantization", "p": "prompt"}
REFUSED: Final[Mapping[str, str]] = {
    "trust_remote_code": "xylite never runs code that comes with a model; "
    "a model needs a family in xylite/models/"
}
HELP_WIDTH = 96

Kind = Literal["bool", "int", "float", "str", "choice", "list", "dict"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a settings struct, as a flag.

    optional  None is allowed and written "auto" or "none"
    limits    for help, such as ">= 1"
    expected  the same for errors, such as "a whole number from 0 to 65535"; "" without limits
    """

    name: str
    owner: type[msgspec.Struct]
    kind: Kind
    default: Any
    optional: bool
    choices: tuple[str, ...]
    limits: str
    group: str
    about: str
    expected: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        words = {"int": "N", "float": "X", "str": "TEXT", "list": "TEXT ...", "dict": "JSON"}
        return words.get(self.kind, "")

    @property
    def default_text(self) -> str:
        if self.default is None:
            return "auto" if re.search(r"\bauto\b", self.about, re.IGNORECASE) else "none"
        if self.kind == "bool":
            return "on" if self.default else "off"
        if self.kind == "list":
            return ",".join(map(str, self.default)) or "none"
        if self.kind == "dict":
            return json.dumps(self.default) if self.default else "none"
        return str(self.default) or "none"


@dataclass(frozen=True, slots=True)
class Command:
    """What a subcommand takes: flags for the fields of `structs`, and `positionals` by field.

    others       settings of other commands that one environment and config file may hold too
    environment  the only settings read from the environment, and no config file is; None = all
    """

    name: str
    about: str
    structs: tuple[type[msgspec.Struct], ...]
    positionals: tuple[str, ...] = ()
    others: tuple[type[msgspec.Struct], ...] = ()
    environment: tuple[str, ...] | None = None

    def reads(self, name: str) -> bool:
        """Whether XYLITE_NAME is read for this setting."""
        return self.environment is None or name in self.environment


def settings(*structs: type[msgspec.Struct]) -> dict[str, Setting]:
    """All fields of the structs by name, in order."""
    found: dict[str, Setting] = {}
    for struct in structs:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        for f in info.fields:
            assert f.name not in found, f"two settings are named {f.name}"
            found[f.name] = _setting(struct, f)
    return found


def _setting(struct: type[msgspec.Struct], f: inspect.Field) -> Setting:
    kind_of: Mapping[type, Kind] = {
        inspect.BoolType: "bool",
        inspect.IntType: "int",
        inspect.FloatType: "float",
        inspect.StrType: "str",
        inspect.LiteralType: "choice",
        inspect.VarTupleType: "list",
        inspect.DictType: "dict",
    }
    t: Any = f.type
    about, group = "", "other"
    if isinstance(t, inspect.Metadata):
        about = (t.extra_json_schema or {}).get("description", "")
        group = (t.extra or {}).get("group", "other")
        t = t.type
    optional = isinstance(t, inspect.UnionType)
    if isinstance(t, inspect.UnionType):
        (t,) = (x for x in t.types if not isinstance(x, inspect.NoneType))
    bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    given = {b: getattr(t, b) for b in bounds if getattr(t, b, None) is not None}
    limits = [f"{bounds[b]} {_shown(value)}" for b, value in given.items()]
    default = f.default
    if default is msgspec.NODEFAULT:
        default = f.default_factory() if f.default_factory is not msgspec.NODEFAULT else None
    return Setting(
        name=f.name,
        owner=struct,
        kind=kind_of[type(t)],
        default=default,
        optional=optional,
        choices=tuple(map(str, t.values)) if isinstance(t, inspect.LiteralType) else (),
        limits=" and ".join(limits),
        group=group,
        about=about,
        expected=_expected(kind_of[type(t)], given),
    )


def _shown(limit: float) -> str:
    """A number in full, as it would be written."""
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _expected(kind: Kind, given: Mapping[str, float]) -> str:
    """What a number within these limits is called."""
    noun = "a whole number" if kind == "int" else "a number"
    match given:
        case {"ge": low, "le": high}:
            return f"{noun} from {_shown(low)} to {_shown(high)}"
        case {"gt": low, "le": high}:
            return f"{noun} above {_shown(low)}, at most {_shown(high)}"
        case {"ge": low}:
            return f"{noun} of at least {_shown(low)}"
        case {"gt": low}:
            return f"{noun} above {_shown(low)}"
        case _:
            return ""


def help_text(command: Command, topic: str = "") -> str:
    """Help of a command. `topic`: "" = one line per flag, "all", a group, or a word in a flag."""
    known = settings(*command.structs)
    groups = dict.fromkeys(s.group for s in known.values())
    words = ["xylite", command.name, *(f"[{p.upper()}]" for p in command.positionals), "[flags]"]
    if not topic:
        head = f"usage: {' '.join(words)}\n\n{command.about}\n"
        foot = (
            f"--help=all explains every flag, --help=GROUP a group ({', '.join(groups)}), "
            "--help=WORD the flags with that word.\n" + _sources(command)
        )
        body = "".join(
            f"\n{group}:\n" + "".join(_brief(s) for s in known.values() if s.group == group)
            for group in groups
        )
        return f"{head}{body}\n{textwrap.fill(foot, HELP_WIDTH, break_on_hyphens=False)}\n"
    word = topic.lower().strip("-").replace("-", "_")
    picked = [s for s in known.values() if word == "all" or s.group == word] or [
        s for s in known.values() if word in s.name or word in s.about.lower()
    ]
    if not picked:
        raise ConfigError(f"--help={topic}: no group or flag; groups: {', '.join(groups)}")
    return "\n".join(_in_full(s, command.reads(s.name)) for s in picked)


def _sources(command: Command) -> str:
    """Where else settings come from."""
    if command.environment is not None:
        *most, last = (f"XYLITE_{name.upper()}" for name in command.environment)
        read = f"{', '.join(most)} and {last} are"
        return (
            f"--config FILE reads settings from YAML or TOML; of the environment only {read} read."
        )
    return (
        "--config FILE, or XYLITE_CONFIG, reads settings from YAML or TOML, XYLITE_NAME from the "
        "environment; the command line wins."
    )


def _brief(s: Setting) -> str:
    left = f"  {s.flag} {s.metavar}".rstrip() if s.kind != "choice" else f"  {s.flag} WORD"
    margin = "\n" + " " * 38
    gap = margin if len(left) > 36 else " " * (38 - len(left))
    about = textwrap.wrap(s.about, HELP_WIDTH - 38, break_on_hyphens=False)
    return f"{left}{gap}{margin.join(about)}\n"


def _in_full(s: Setting, from_environment: bool) -> str:
    others = [f"-{k}" for k, v in SHORT.items() if v == s.name]
    others += [f"--{k.replace('_', '-')}" for k, v in ALIASES.items() if v == s.name]
    negative = f", --no-{s.flag[2:]}" if s.kind == "bool" else ""
    lines = [
        f"{s.flag}{negative} {s.metavar}".rstrip()
        + (f"  (also {', '.join(others)})" if others else "")
    ]
    lines += textwrap.wrap(s.about, HELP_WIDTH - 6)
    limits = f"; {s.limits}" if s.limits else ""
    name = f"; XYLITE_{s.name.upper()}" if from_environment else ""
    lines.append(f"default {s.default_text}{limits}{name}; group {s.group}")
    return "\n      ".join(lines) + "\n"


def markdown_table(*structs: type[msgspec.Struct]) -> str:
    """The settings as a Markdown table, for the documentation."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for s in settings(*structs).values():
        value = "" if s.kind in ("bool", "choice") else f" {s.metavar}"
        choices = f" One of {', '.join(s.choices)}." if s.choices else ""
        rows.append(
            f"| `{s.flag}{value}` | {s.default_text} | {s.about}{choices} |".replace("\n", " ")
        )
    return "\n".join(rows) + "\n"
