"""Every error that xylite raises on purpose, and the HTTP answer each one becomes.

XyliteError
  ConfigError       a setting or a model file is wrong; start-up stops
  RequestError      400: the client's request is wrong
    ModelNotFound   404
    TooLarge        413
  Unauthorized      401
  Forbidden         403
  Overloaded        503: come back later
  EngineError       500: this request failed for a reason that is not the client's
    DeadlineExceeded  504
    Closed            503: the engine was closed
"""

import errno
import os
import reprlib
import stat
from collections.abc import Sequence
from typing import Any


class XyliteError(Exception):
    """Base of all deliberate errors.

    `status` is the HTTP status, `type` the error type in OpenAI's words, `code` a short machine
    string, `param` the field that caused it. The message is safe to show to a client.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(XyliteError):
    """A setting, a weight file or a model directory that cannot be used as given."""

    type = "config_error"


class RequestError(XyliteError):
    """A request that breaks a rule; the message names the field, the limit and the value."""

    status = 400
    type = "invalid_request_error"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class TooLarge(RequestError):
    """The request body is larger than the server accepts."""

    status = 413
    code = "request_too_large"


class Unauthorized(XyliteError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(XyliteError):
    """The caller is known but may not do this, or the Host header is not one of ours."""

    status = 403
    type = "permission_error"


class Overloaded(XyliteError):
    """The server cannot take this request now. `retry_after_s` estimates when it can."""

    status = 503
    type = "server_error"
    code = "queue_full"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0):
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class EngineError(XyliteError):
    """This request failed inside the engine. Internals go to the log, not into the message."""


class Closed(EngineError):
    """The engine was closed; another server may be in its place."""

    status = 503
    code = "closed"


class DeadlineExceeded(EngineError):
    """The request's time limit passed before its first byte."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


def file_reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, in plain words and without repeating its path."""
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8 text"
    return f"cannot be read: {error.strerror or error}"


def file_size(path: str) -> int:
    """Bytes of a file, at the end of links too.

    raises   OSError, also if it is not a regular file: to open a pipe would wait for whoever writes
             to it, to read a device might never end
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return found.st_size


def check_list(name: str, value: Any, items: str) -> None:
    """RequestError unless value is a list, a tuple or the like; texts and bytes are none.

    items  what it should hold, in words
    """
    # memoryview is a Sequence, too.
    kinds = (str, bytes, bytearray, memoryview)
    if issubclass(type(value), kinds) or not issubclass(type(value), Sequence):
        raise RequestError(f"{name} must be a list of {items}, got {short(value)}", param=name)


def short(value: object) -> str:
    """A value as Python writes it, cut for an error."""
    cut = reprlib.Repr()
    cut.maxstring = cut.maxother = cut.maxlong = 60
    cut.maxlist = cut.maxtuple = cut.maxdict = cut.maxset = cut.maxfrozenset = 20
    try:
        return cut.repr(value)[:40]
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
