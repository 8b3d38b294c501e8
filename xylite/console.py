"""A command's standard streams, which may be closed, full, or read by nobody any more, and the
signals that end it while it loads."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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
    """All of standard input; ConfigError if it is a terminal, empty, or no text."""
    if sys.stdin.isatty():
        raise ConfigError("a prompt is needed: xylite complete MODEL TEXT, or -p TEXT")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"standard input is not text in {e.encoding}: byte {e.object[e.start]:#04x}"
        ) from None
    except OSError as e:  # a directory, for one
        raise ConfigError(f"cannot read standard input: {e.strerror or e}") from None
    if not text:
        raise ConfigError("standard input is empty, and a prompt is needed")
    return text


@contextlib.contextmanager
def signals_end_loading(clean_up: Callable[[], None] | None = None) -> Iterator[None]:
    """In this block SIGINT and SIGTERM end the process at once, with code 128 + their number.

    A thread that loads a model cannot be stopped, and may take minutes. Without this, Ctrl-C would
    wait for it, and the first process of a container would not even notice SIGTERM.

    clean_up  called before
    """

    def leave(number: int, _frame: object) -> None:
        try:
            logging.getLogger("xylite").info("stopped while loading")
            if clean_up is not None:
                clean_up()
            logging.shutdown()
        finally:
            os._exit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others may not catch signals
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and `&` ask for
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
