"""xylite: an LLM server in one Python process.

The names here are the library's public face. They load on first use, so that `import xylite` and
`xylite --help` do not wait for torch.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xylite.config import EngineConfig, ServerConfig
    from xylite.llm import LLM
    from xylite.runtime.request import SamplingParams
    from xylite.text_engine import TextEngine

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "SamplingParams", "ServerConfig", "TextEngine", "__version__"]

_HOME: Final[Mapping[str, str]] = {
    "LLM": "xylite.llm",
    "EngineConfig": "xylite.config",
    "SamplingParams": "xylite.runtime.request",
    "ServerConfig": "xylite.config",
    "TextEngine": "xylite.text_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xylite' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
