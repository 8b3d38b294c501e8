"""Writes the generated parts of README.md: `python -m tests.write_readme`, or `make docs`."""

from pathlib import Path

from xylite.config import EngineConfig, ServerConfig
from xylite.flags import markdown_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->"


def with_settings(text: str) -> str:
    """README's text with the settings table as the structs have it now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown_table(EngineConfig, ServerConfig)}{END}{after}"


if __name__ == "__main__":
    README.write_text(with_settings(README.read_text()))
