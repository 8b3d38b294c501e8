"""The OpenAI-compatible HTTP interface of one engine."""

from xylite.http.listen import Listener
from xylite.http.server import make_app, serve

__all__ = ["Listener", "make_app", "serve"]
