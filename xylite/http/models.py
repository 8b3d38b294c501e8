"""What is served, how it is, and its tokenizer: every route that generates nothing."""

from typing import Any

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

from xylite import __version__
from xylite.errors import ModelNotFound, Overloaded, RequestError
from xylite.http.body import read_json
from xylite.http.chat import render
from xylite.http.protocol import DetokenizeRequest, TokenizeRequest
from xylite.http.service import SERVICE, Service, engine_dead
from xylite.http.token_text import strings_of, text_of

MAX_DETOKENIZE = 1_000_000


def json_response(body: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", status=status
    )


def _card(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": name,
        "object": "model",
        "created": engine.created,
        "owned_by": "xylite",
        "root": engine.model_names[0],
        "parent": None,
        "max_model_len": engine.limits.max_model_len,
        "permission": [],
    }


def _require_loaded(service: Service) -> None:
    """Overloaded while the engine does not know its own model yet."""
    if service.engine.state == "loading":
        service.require_ready()


async def list_models(request: web.Request) -> web.Response:
    """Every name of the model."""
    service = request.app[SERVICE]
    _require_loaded(service)
    cards = [_card(service, name) for name in service.engine.model_names]
    return json_response({"object": "list", "data": cards})


async def retrieve_model(request: web.Request) -> web.Response:
    """One name of the model; names may hold slashes."""
    service = request.app[SERVICE]
    _require_loaded(service)
    name = request.match_info["id"]
    if name not in service.engine.model_names:
        raise ModelNotFound(f"The model {name[:100]!r} does not exist", param="model")
    return json_response(_card(service, name))


async def health(request: web.Request) -> web.Response:
    """Whether the process works: 200 also while loading or draining, 503 when the engine died."""
    service = request.app[SERVICE]
    if service.engine.state == "dead":
        raise engine_dead()
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Whether requests may be sent here: 503 while loading and draining. A full queue is 200."""
    service = request.app[SERVICE]
    try:
        service.require_ready()
    except Overloaded as e:
        # A probe is not a client: nothing to retry.
        return json_response({"status": e.code}, status=503)
    return json_response({"status": "ready"})


async def show_version(request: web.Request) -> web.Response:
    """The server's version."""
    return json_response({"version": __version__})


async def root(request: web.Request) -> web.Response:
    """Something for clients that look whether anyone is there."""
    return json_response({"name": "xylite"})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus metrics, in the format the scraper asks for."""
    service = request.app[SERVICE]
    encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(
        body=encode(service.metrics.registry), headers={hdrs.CONTENT_TYPE: content_type}
    )


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt or of a conversation."""
    service = request.app[SERVICE]
    asked = await read_json(request, TokenizeRequest)
    _require_loaded(service)
    service.model_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", param="prompt")
    engine = service.engine
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        ids = await engine.encode(asked.prompt, add_special_tokens=special)
    else:
        ids = await render(service, asked, tools=asked.tools, special=asked.add_special_tokens)
    body: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": engine.limits.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if asked.return_token_strs:
        body["token_strs"] = msgspec.Raw(await strings_of(engine, ids, service.slices))
    return json_response(body)


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids, control tokens included."""
    service = request.app[SERVICE]
    asked = await read_json(request, DetokenizeRequest)
    _require_loaded(service)
    service.model_name(asked.model)
    ids = asked.tokens
    if ids is None:
        raise RequestError("tokens is missing", param="tokens")
    if len(ids) > MAX_DETOKENIZE:
        raise RequestError(
            f"tokens has {len(ids)} entries, the limit is {MAX_DETOKENIZE}", param="tokens"
        )
    return json_response({"prompt": await text_of(service.engine, ids)})
