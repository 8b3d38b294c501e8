"""A command whose standard streams are closed, full, in an odd encoding, or read no more."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import ROOT, fake

XYLITE = [sys.executable, "-X", "dev", "-m", "xylite"]
FULL = Path("/dev/full")
COMMANDS: Sequence[list[str]] = [
    [*XYLITE, "--version"],
    [*XYLITE, "--help"],
    [*XYLITE, "serve", "--help"],
    [*XYLITE, "bench", "serve", "--help"],
    fake("complete", "m", "text"),
]


def ended(command: Sequence[str], **streams: Any) -> tuple[int, str]:
    """Exit code and what was written to standard error."""
    child = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False, **streams
    )
    # The scripted engine says that it was closed, which it must be.
    return child.returncode, child.stderr.replace("engine closed\n", "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[-3:]))
def test_output_that_cannot_be_written_is_one_line_and_code_1(command, unbuffered):
    with FULL.open("w") as full:
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        code, said = ended(command, stdout=full, env=env)
    assert (code, said.count("\n")) == (1, 1), said
    assert said.endswith("error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[-3:]))
def test_a_reader_that_has_gone_is_no_error_to_speak_of(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        assert ended(command, stdout=writer, env=env) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (["--help"], ">&-", 0),
        (["serve", "/nowhere"], "2>&-", 2),
        (["serve", "/nowhere"], "<&- >&- 2>&-", 2),
        (["serve", "--nope"], "2>/dev/full", 2),
        (["complete", "/nowhere"], "<&-", 2),
    ],
)
def test_streams_closed_by_the_parent_change_nothing(words, closed, code):
    command = " ".join([*XYLITE, *words, closed])
    # The code is told through a pipe of its own, as the shell's streams are what is tested.
    child = subprocess.run(["sh", "-c", f"{command}; exit $?"], cwd=ROOT, timeout=60, check=False)
    assert child.returncode == code


def test_input_that_is_no_text_is_one_line_and_code_2():
    command = [*XYLITE, "complete", "/nowhere"]
    reader, writer = os.pipe()
    os.write(writer, b"na\xefve")
    os.close(writer)
    code, said = ended(command, stdin=reader)
    os.close(reader)
    assert code == 2
    assert said == ("xylite complete: error: standard input is not text in utf-8: byte 0xef\n")


def test_characters_that_the_terminal_lacks_are_replaced():
    script = (
        "from xylite import console; console.settle_streams(); console.say('1 \N{EURO SIGN} 2')"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        check=True,
    )
    assert child.stdout == b"1 ? 2"
