"""A command's standard streams, which may be closed, full, or read by nobody any more."""

import contextlib
import os
import sys
from typing import Any, Final

from xylite.errors import ConfigError, XyliteError

_MODES: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}


def settle_streams() -> None:
    """Make the standard streams of this process safe to use; call it before anything is opened.

    A stream that the parent closed becomes the null device, else the next file or socket would get
    its number, and be written to or closed as if it were that stream. Characters that an output's
    encoding lacks are replaced, bytes of the input that are no text are an error.
    """
    for number, (name, mode) in enumerate(_MODES.items()):
        stream: Any = getattr(sys, name)
        if stream is None:
            _to_null(number)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)
        elif name == "stdout":
            stream.reconfigure(errors="replace")
        elif name == "stdin":
            stream.reconfigure(errors="strict")


def say(text: str) -> None:
    """Write to standard output at once.

    BrokenPipeError if its reader has gone, XyliteError if it takes no more for another reason.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as e:
        # What is left in the buffer would be an error once more when the interpreter exits.
        _to_null(sys.stdout.fileno())
        if isinstance(e, BrokenPipeError):
            raise
        raise XyliteError(f"cannot write to standard output: {e.strerror or e}") from None


def _to_null(number: int) -> None:
    """Let a file descriptor be the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def complain(text: str) -> None:
    """A line on standard error, for whoever reads it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def standard_input() -> str:
    """All of standard input; ConfigError if it is a terminal, or no text."""
    if sys.stdin.isatty():
        raise ConfigError("a prompt is needed: xylite complete MODEL TEXT, or -p TEXT")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"standard input is not text in {e.encoding}: byte {e.object[e.start]:#04x}"
        ) from None
    except OSError as e:  # a directory, for one
        raise ConfigError(f"cannot read standard input: {e.strerror or e}") from None
