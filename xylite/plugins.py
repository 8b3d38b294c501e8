"""Plug-ins by name: a plug-in of a kind is a module of that kind's package, nothing more."""

import importlib
import pkgutil
from types import ModuleType

from xylite.errors import ConfigError


def names(kind: str) -> list[str]:
    """The names available under `xylite.KIND`, sorted."""
    package = importlib.import_module(f"xylite.{kind}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg)


def find(kind: str, name: str) -> ModuleType:
    """The module `xylite.KIND.NAME`; ConfigError listing what exists if there is none."""
    available = names(kind)
    if name not in available:
        raise ConfigError(f"no {kind} named {name!r}; available: {', '.join(available) or 'none'}")
    return importlib.import_module(f"xylite.{kind}.{name}")
