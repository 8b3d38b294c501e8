"""The OpenAI-compatible HTTP interface of one engine."""

from xylite.http.server import make_app, serve

__all__ = ["make_app", "serve"]
