"""A command line, the environment and a config file fill one command's settings.

    command line  >  XYLITE_NAME  >  --config FILE (or XYLITE_CONFIG)  >  default

An empty variable is as good as none; a flag with an empty value is a mistake.

`-` and `_` are alike, `--no-foo` turns a switch off, lists repeat or take commas, `--foo.bar 1`
sets one key of a JSON setting, `--foo.bar+ 1` appends to it. Every mistake is a ConfigError of one
line that names the flag and where it stood.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xylite.errors import ConfigError
from xylite.flags import ALIASES, REFUSED, SHORT, Command, Setting, help_text, settings


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it stood; text is still to be read according to the setting's kind."""

    value: Any
    source: str


@dataclass(slots=True)
class _Line:
    """A command line, taken apart. `parts` are dotted settings: (name, keys, append, given)."""

    values: dict[str, _Given] = field(default_factory=dict)
    parts: list[tuple[str, list[str], bool, _Given]] = field(default_factory=list)
    config_file: str | None = None
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """The filled structs, or the help text that was asked for instead."""

    structs: tuple[Any, ...]
    warnings: tuple[str, ...] = ()
    help: str | None = None
    given: frozenset[str] = frozenset()


def parse(command: Command, argv: Sequence[str], environment: Mapping[str, str]) -> Parsed:
    """The command's structs, filled from all sources; ConfigError for the first mistake.

    environment  values by lower-case name, without XYLITE_
    """
    known = settings(*command.structs)
    line = _take_apart(command, known, argv)
    if line.help is not None:
        return Parsed((), help=help_text(command, line.help))
    others = settings(*command.others)
    given: dict[str, _Given] = {}
    if line.config_file:
        given = _from_file(f"--config {line.config_file}", line.config_file, known, others)
    elif command.environment is None and (path := environment.get("config", "").strip()):
        given = _from_file(f"XYLITE_CONFIG {path}", path, known, others)
    warnings: list[str] = []
    for name, text in environment.items():
        if not command.reads(name) or not text.strip():
            continue
        resolved = ALIASES.get(name, name)
        if resolved in known:
            given[resolved] = _Given(text, f"XYLITE_{name.upper()}")
        elif name not in ("cache_dir", "config") and resolved not in others:
            near = _near(name, known)
            hint = f"; did you mean XYLITE_{near.upper()}?" if near else ""
            warnings.append(f"XYLITE_{name.upper()} is not a setting{hint}")
    given.update(line.values)
    values = {name: _checked(known[name], g) for name, g in given.items()}
    for name, keys, append, part in line.parts:
        whole = dict(values.get(name) or known[name].default or {})
        _put(whole, keys, append, part)
        values[name] = _checked(known[name], _Given(whole, part.source))
    structs = tuple(
        s(**{n: v for n, v in values.items() if known[n].owner is s}) for s in command.structs
    )
    return Parsed(structs, tuple(warnings), given=frozenset(values))


def _take_apart(command: Command, known: Mapping[str, Setting], argv: Sequence[str]) -> _Line:
    line, waiting = _Line(), list(command.positionals)
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            for w in words:
                _positional(line, waiting, w)
            break
        if not word.startswith("-") or word == "-":
            _positional(line, waiting, word)
            continue
        spelled, equals, value = word.partition("=")
        if spelled in ("--help", "-h"):
            line.help = value
            return line
        if spelled == "--config":
            line.config_file = value if equals else _value(words, spelled)
            if not line.config_file.strip():
                raise ConfigError("--config needs a value")
            continue
        setting, keys, append, negated = _resolve(spelled, known)
        if setting.kind == "bool":
            if negated and equals:
                raise ConfigError(f"{spelled} takes no value")
            text: Any = value if equals else not negated
        elif equals or setting.kind != "list":
            text = value if equals else _value(words, spelled)
        else:
            text = [_value(words, spelled)]
            # Words after a list belong to it only if they cannot be the model still to come.
            while words and not words[0].startswith("-") and not waiting:
                text.append(words.pop(0))
        if keys:
            line.parts.append((setting.name, keys, append, _Given(text, spelled)))
            continue
        if setting.kind != "bool" and not _holds(setting, text):
            raise ConfigError(f"{spelled} needs a value")
        if setting.name in waiting:
            waiting.remove(setting.name)
        if setting.kind == "list":
            texts = text if isinstance(text, list) else [text]
            before = line.values[setting.name].value if setting.name in line.values else []
            text = [*before, *(x for t in texts for x in _items(t))]
        line.values[setting.name] = _Given(text, spelled)
    return line


def _holds(setting: Setting, text: str | list[str]) -> bool:
    """Whether a flag was given something: a shell variable that is not set leaves nothing. Blanks
    are something to a text, such as a stop string."""
    if isinstance(text, list):
        return any(map(_items, text))
    return bool(text if setting.kind == "str" else text.strip())


def _positional(line: _Line, waiting: list[str], word: str) -> None:
    if not waiting:
        raise ConfigError(f"{word!r} is one argument too many")
    name = waiting.pop(0)
    if not word:
        raise ConfigError(f"{name.upper()} is empty")
    line.values[name] = _Given(word, name.upper())


def _value(words: list[str], flag: str) -> str:
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{flag} needs a value")
    return words.pop(0)


def _resolve(spelled: str, known: Mapping[str, Setting]) -> tuple[Setting, list[str], bool, bool]:
    """The setting a word names, keys below it, whether to append there, whether it is --no-."""
    if not spelled.startswith("--"):
        name = SHORT.get(spelled[1:], "")
        if name not in known:
            raise ConfigError(f"unknown flag {spelled}; --help lists all")
        return known[name], [], False, False
    head, *keys = spelled[2:].removesuffix("+").split(".")
    append = spelled.endswith("+")
    keys = [k.replace("-", "_") for k in keys]
    name = head.replace("-", "_")
    if name in REFUSED:
        raise ConfigError(f"--{name.replace('_', '-')}: {REFUSED[name]}")
    name = ALIASES.get(name, name)
    kind = known[name].kind if name in known else None
    below_ok = all(keys) and (not keys or kind == "dict")
    append_ok = not append or bool(keys) or kind == "list"
    if kind and below_ok and append_ok:
        return known[name], keys, append, False
    positive = name.removeprefix("no_")
    if positive != name and positive in known and known[positive].kind == "bool" and not keys:
        return known[positive], [], False, True
    near = _near(name, known)
    hint = f"; did you mean --{near.replace('_', '-')}?" if near else "; --help lists all"
    raise ConfigError(f"unknown flag {spelled}{hint}")


def _near(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.6)
    return found[0] if found else None


def _from_file(
    source: str, path: str, known: Mapping[str, Setting], others: Mapping[str, Setting]
) -> dict[str, _Given]:
    """Settings of a YAML, JSON or TOML file; `max-num-seqs` and `max_num_seqs` are one key.

    source  how the file was given, for errors
    others  settings that are passed over: other commands read them
    """
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if path.endswith(".toml"):
            data: Any = tomllib.loads(raw.decode())
        else:
            data = msgspec.yaml.decode(raw)
    except OSError as e:
        raise ConfigError(f"{source}: {e.strerror}") from None
    except (ValueError, msgspec.DecodeError) as e:
        raise ConfigError(f"{source}: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: a mapping of settings is needed")
    given: dict[str, _Given] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        name = ALIASES.get(name, name)
        if name in REFUSED:
            raise ConfigError(f"{source}: {key}: {REFUSED[name]}")
        if name not in known and name in others:
            continue
        if name not in known:
            near = _near(name, known)
            hint = f"; did you mean {near.replace('_', '-')}?" if near else ""
            raise ConfigError(f"{source}: unknown setting {key}{hint}")
        given[name] = _Given(value, f"{source}: {key}")
    return given


def _checked(setting: Setting, given: _Given) -> Any:
    """The value in the field's type; ConfigError with where it stood, what it is, what is asked."""
    value = given.value
    try:
        if isinstance(value, str):
            value = _read(setting, value)
        if setting.choices and value not in setting.choices:
            raise ValueError(f"expected one of {', '.join(setting.choices)}")
        # Items of a list are text on the command line, whatever they are read as.
        as_text = setting.kind == "list" and not isinstance(given.value, dict)
        converted = msgspec.convert({setting.name: value}, setting.owner, strict=not as_text)
    except (ValueError, msgspec.ValidationError) as e:
        said = re.sub(r" - at `\$.*", "", str(e)).replace("`", "")
        said = said[:1].lower() + said[1:]
        # Readers hint at units, which helps with sizes, and not with numbers that have an end.
        if setting.expected and ("<=" in setting.limits or isinstance(e, msgspec.ValidationError)):
            said = f"expected {setting.expected}"
        raise ConfigError(
            f"{given.source}: {said}, got {given.value!r}", param=setting.name
        ) from None
    return getattr(converted, setting.name)


def _read(setting: Setting, text: str) -> Any:
    if setting.optional and text.lower() in ("auto", "none"):
        return None
    if setting.kind == "bool":
        words = {"true": True, "1": True, "yes": True, "on": True}
        words |= {"false": False, "0": False, "no": False, "off": False}
        if text.lower() not in words:
            raise ValueError("expected true or false")
        return words[text.lower()]
    if setting.kind == "int":
        return human_bytes(text) if setting.name.endswith("_bytes") else human_int(text)
    if setting.kind == "float":
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise ValueError("expected a number")
        return number
    if setting.kind == "list":
        return _items(text)
    if setting.kind == "dict":
        try:
            return json.loads(text)
        except ValueError as e:
            raise ValueError(f"expected a JSON object ({e})") from None
    return text


def _items(text: str) -> list[str]:
    return [x for x in (part.strip() for part in text.split(",")) if x]


def human_int(text: str) -> int:
    """An integer, also as 1k = 1000, 1K = 1Ki = 1024, 25.6k; k m g t are powers of 1000, K M G T
    of 1024, as vLLM reads them. ValueError if it is not a whole number."""
    found = re.fullmatch(r"(-?\d[\d_]*)(\.\d+)?([kmgt]|[KMGT]i?)?", text.strip())
    if found is None:
        raise ValueError("expected a whole number such as 4096, 4k or 4Ki")
    whole, fraction, unit = found.groups()
    return _scaled(whole, fraction, unit, 1000 if unit and unit[0].islower() else 1024)


def human_bytes(text: str) -> int:
    """A number of bytes: as `human_int`, also with units in full, in upper or lower case and after
    a space. KiB and Ki are 1024 bytes, KB is 1000; a letter alone is read as everywhere else, K is
    1024 and k is 1000. ValueError if it is not a whole number."""
    found = re.fullmatch(r"(-?\d[\d_]*)(\.\d+)?\s*(?:([kmgtKMGT])([iI])?)?([bB])?", text.strip())
    if found is None:
        raise ValueError("expected a number of bytes such as 4096, 100MiB or 1.5GB")
    whole, fraction, unit, binary, byte = found.groups()
    decimal = unit and not binary and (byte or unit.islower())
    return _scaled(whole, fraction, unit, 1000 if decimal else 1024)


def _scaled(whole: str, fraction: str | None, unit: str | None, base: int) -> int:
    """whole.fraction times base^1 for k, base^2 for m, ...; ValueError if that has a fraction."""
    factor = base ** ("kmgt".index(unit[0].lower()) + 1) if unit else 1
    number = int(whole) * factor
    if fraction:
        digits = int(fraction[1:]) * factor
        if digits % 10 ** len(fraction[1:]):
            raise ValueError("expected a whole number")
        number += (-1 if whole.startswith("-") else 1) * digits // 10 ** len(fraction[1:])
    return number


def _put(whole: dict[str, Any], keys: list[str], append: bool, part: _Given) -> None:
    """Sets whole[k0][k1]... to the part's value, read as JSON where it is JSON."""
    try:
        value = json.loads(part.value)
    except ValueError:
        value = part.value
    inner = whole
    for key in keys[:-1]:
        below = inner.get(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{part.source}: {key} is not an object, it is {below!r}")
        inner[key] = inner = dict(below)
    if append:
        before = inner.get(keys[-1], [])
        if not isinstance(before, list):
            raise ConfigError(f"{part.source}: {keys[-1]} is not a list, it is {before!r}")
        value = [*before, value]
    inner[keys[-1]] = value
