"""The `xylite` command: serve a model, complete one prompt, measure a server or the device.

Exit codes: 0 done, 1 something failed while running, 2 wrong flags or settings, 128 + N stopped by
signal N (130 = Ctrl-C).
Torch, aiohttp and the engine are imported by the command that needs them, so help comes at once.
"""

import asyncio
import contextlib
import difflib
import gc
import json
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

import xylite
from xylite import console
from xylite.command_line import Parsed, parse
from xylite.config import (
    DEMO_MODEL,
    EngineConfig,
    ServerConfig,
    about,
    environment,
    speculative,
)
from xylite.errors import ConfigError, RequestError, XyliteError
from xylite.flags import Command

if TYPE_CHECKING:
    from xylite.text_engine import TextEngine

log = logging.getLogger("xylite")

STATS_PERIOD_S = 10.0
# A loop that shares its process with a device thread waits for the GIL up to this long.
SWITCH_INTERVAL_S = 0.0005


class CompleteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one completion; None = the model's own default."""

    prompt: Annotated[
        str | None, about("The text to go on from; auto reads standard input.", "completion")
    ] = None
    chat: Annotated[
        bool, about("Send the prompt as a user's message, in the chat template.", "completion")
    ] = False
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        about("Most tokens to generate; auto is 256 at most, as many as fit.", "completion"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        about("Randomness; 0 = always the most likely.", "completion"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about("Share of probability to draw from.", "completion"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        about("Most likely tokens to draw from; 0 = all.", "completion"),
    ] = None
    stop: Annotated[str | None, about("Text that ends the answer.", "completion")] = None


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is tuned: as `serve` would run it."""

    model: Annotated[
        str, about("As for serve: its shapes and formats are what counts.", "tuning")
    ] = DEMO_MODEL
    device: Annotated[
        str, about("auto, or a device by name and index, such as cpu or npu:0.", "tuning")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about("Type of weights; auto takes the checkpoint's own.", "tuning"),
    ] = "auto"
    quantization: Annotated[
        str | None, about("Quantise linear weights at load: a format's name.", "tuning")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        about("Where weights come from; dummy makes random ones from config.json.", "tuning"),
    ] = "auto"
    num_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        about("CPU threads; auto is what this process may use.", "tuning"),
    ] = None


USAGE: Final = """usage: xylite COMMAND [flags]

  serve [MODEL]            serve a model over the OpenAI API
  complete [MODEL] [TEXT]  complete one prompt in this process, without a server
  tune [MODEL]             measure the fastest tiles for a model on this device, for later starts
  bench serve              send load to a server and report latencies and throughput

`xylite COMMAND --help` shows a command's flags, `xylite --version` the version.
"""

SERVE: Final = Command(
    "serve",
    "Serves MODEL (a directory or .gguf file; none = the demo model) over the OpenAI API.",
    (EngineConfig, ServerConfig),
    ("model",),
)
COMPLETE: Final = Command(
    "complete",
    "Completes one prompt with MODEL in this process and prints the text as it comes.",
    (CompleteConfig, EngineConfig),
    ("model", "prompt"),
    others=(ServerConfig,),
)
TUNE: Final = Command(
    "tune",
    "Measures which tiles and cache blocks are fastest for MODEL's linear layers on this device, "
    "and keeps them in the cache directory, where the next start finds them.",
    (TuneConfig,),
    ("model",),
    others=(EngineConfig, ServerConfig),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; usage errors are one line on stderr."""
    if argv is None:
        console.settle_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    commands: Mapping[str, Callable[[Sequence[str]], int]] = {
        "serve": serve,
        "complete": complete,
        "tune": tune,
        "bench serve": bench_serve,
    }
    name = words.pop(0) if words else "--help"
    if name == "bench" and words and not words[0].startswith("-"):
        name = f"bench {words.pop(0)}"
    texts = dict.fromkeys(("--version", "-V"), f"xylite {xylite.__version__}\n")
    texts |= dict.fromkeys(("--help", "-h", "help", "bench"), USAGE)
    if name not in commands and name not in texts:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
        return _fail("xylite", f"no command {name!r}; {hint}", 2)
    try:
        if name in texts:
            console.say(texts[name])
            return 0
        return commands[name](words)
    except ConfigError as e:
        return _fail(f"xylite {name}", e.message, 2)
    except XyliteError as e:
        return _fail(f"xylite {name}", e.message, 1)
    except BrokenPipeError:
        return 1  # whoever read our output has what they wanted
    except KeyboardInterrupt:
        return 130


def _fail(program: str, message: str, code: int) -> int:
    console.complain(f"{program}: error: {message}")
    return code


def _parsed(command: Command, words: Sequence[str]) -> Parsed | None:
    """The command's settings, after its warnings were printed; None after help was."""
    parsed = parse(command, words, environment())
    if parsed.help is None:
        for warning in parsed.warnings:
            console.complain(f"xylite {command.name}: warning: {warning}")
        return parsed
    console.say(parsed.help)
    return None


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.captureWarnings(True)


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Runs `work` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


# serve


def serve(words: Sequence[str]) -> int:
    """`xylite serve`: load the model, listen, log what goes on, drain at SIGTERM."""
    parsed = _parsed(SERVE, words)
    if parsed is None:
        return 0
    engine_config, server_config = parsed.structs
    _set_up_logging(server_config.log_level)
    # For this process only: as a library, xylite leaves its host's interpreter as it is.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    code = _run(_serve(engine_config, server_config))
    if any(t.name.startswith("xylite-device") for t in threading.enumerate()):
        # The device hangs, and the interpreter would wait for its thread for ever.
        logging.shutdown()
        os._exit(code)
    return code


def settle() -> None:
    """Take what lives as long as the process out of garbage collection: looking through the model,
    torch and all modules again would stop every stream for a tenth of a second."""
    gc.collect()
    gc.freeze()


async def _serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    from xylite.http import Listener, server
    from xylite.text_engine import TextEngine

    listener = Listener(config)
    await listener.bind()
    with contextlib.closing(listener):
        async with contextlib.AsyncExitStack() as stack:
            with console.signals_end_loading(listener.close):
                engine = await stack.enter_async_context(TextEngine(engine_config))
                settle()
            stats = None
            if not config.disable_log_stats:
                stats = asyncio.create_task(_log_stats(engine, STATS_PERIOD_S))
            try:
                return await server.serve(
                    engine,
                    config,
                    ready=lambda url: log.info("%s", summary(engine, url, config)),
                    listener=listener,
                )
            finally:
                if stats is not None:
                    stats.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await stats


def summary(engine: "TextEngine", url: str, server: ServerConfig) -> str:
    """What runs and where, for the start of the log."""
    config, now = engine.config, engine.snapshot()
    num_blocks, block_size = now["num_blocks"], now["block_size"]
    tokens = num_blocks * block_size
    longest = engine.limits.max_model_len
    context = f"{longest} tokens, at most {config.max_num_seqs} sequences"
    if longest == tokens:
        context = f"{longest} tokens (all that KV holds), at most {config.max_num_seqs} sequences"
    rows = {
        "model": f"{engine.model_names[0]} ({config.model})",
        "dtype": config.dtype,
        "weights": config.quantization,
        "device": config.device,
        "drafts": _drafts(config),
        "context": context,
        "KV": f"{num_blocks} block{'s'[: num_blocks > 1]} of {block_size} = {tokens} tokens",
        "URL": url,
    }
    lines = "".join(f"\n  {name:<8} {text}" for name, text in rows.items() if text)
    return f"xylite {xylite.__version__} is ready{lines}\n  try      {example(engine, url, server)}"


def _drafts(config: EngineConfig) -> str | None:
    """How tokens are drafted; None if they are not."""
    if config.speculative_config is None:
        return None
    drafting = speculative(config.speculative_config)
    from_model = f" by {drafting.model}" if drafting.model else ""
    return f"{drafting.method}{from_model}, up to {drafting.num_speculative_tokens} tokens"


def example(engine: "TextEngine", url: str, server: ServerConfig) -> str:
    """A curl command that asks the served model something; the shell fills in the key."""
    body = {
        "model": engine.model_names[0],
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
    }
    # An address that means "all of them" is none to connect to.
    for wildcard, loopback in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("", "127.0.0.1")):
        url = url.replace(f"://{wildcard}:", f"://{loopback}:")
    where = f"{url}/v1/chat/completions"
    if url.startswith("unix://"):
        path = shlex.quote(url.removeprefix("unix://"))
        where = f"--unix-socket {path} http://localhost/v1/chat/completions"
    data = shlex.quote(json.dumps(body))
    key = '-H "Authorization: Bearer $XYLITE_API_KEY" ' if server.api_key else ""
    return f"curl {where} {key}-H 'Content-Type: application/json' -d {data}"


async def _log_stats(engine: "TextEngine", period_s: float) -> None:
    clock = asyncio.get_running_loop().time
    before, then = engine.snapshot(), clock()
    while True:
        await asyncio.sleep(period_s)
        now, at = engine.snapshot(), clock()
        line = stats_line(before, now, at - then)
        if line is not None:
            log.info("%s", line)
        before, then = now, at


def stats_line(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> str | None:
    """Throughput between two snapshots of the engine; None if nothing happened."""
    prompt = now["prompt_tokens"] - before["prompt_tokens"]
    generated = now["generation_tokens"] - before["generation_tokens"]
    if not (prompt or generated or now["num_running"] or now["num_waiting"]):
        return None
    queries = now["prefix_queries"] - before["prefix_queries"]
    hits = now["prefix_hits"] - before["prefix_hits"]
    rate = f"{hits / queries:.1%}" if queries else "-"
    return (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
        f"running {now['num_running']}, waiting {now['num_waiting']}, "
        f"KV use {now['kv_usage']:.1%}, prefix hits {rate}"
    )


# complete


def complete(words: Sequence[str]) -> int:
    """`xylite complete`: one prompt, in process, text on stdout as it comes."""
    parsed = _parsed(COMPLETE, words)
    if parsed is None:
        return 0
    config, engine_config = parsed.structs
    if config.prompt is None:
        config = msgspec.structs.replace(config, prompt=console.standard_input())
    _set_up_logging("warning")
    return _run(_complete(engine_config, config))


async def _complete(engine_config: EngineConfig, config: CompleteConfig) -> int:
    from xylite.runtime.request import SamplingParams
    from xylite.text_engine import TextEngine

    assert config.prompt is not None
    names = ("max_tokens", "temperature", "top_p", "top_k")
    asked = {name: getattr(config, name) for name in names}
    given = {name: value for name, value in asked.items() if value is not None}
    async with contextlib.AsyncExitStack() as stack:
        with console.signals_end_loading():
            engine = await stack.enter_async_context(TextEngine(engine_config))
        params = SamplingParams(
            **{
                "default_max_tokens": 256,
                **engine.sampling_defaults,
                **given,
                "stop": () if config.stop is None else (config.stop,),
            }
        )
        prompt: str | list[int] = config.prompt
        try:
            if config.chat:
                prompt = await engine.render([{"role": "user", "content": config.prompt}])
            async for event in engine.generate(prompt, params):
                console.say(event.text)
                if event.error is not None:
                    raise event.error
        except RequestError as e:
            raise ConfigError(f"{_place(e.param or '')}: {e.message}", param=e.param) from None
    console.say("\n")
    return 0


def _place(param: str) -> str:
    """What on the command line is to blame for a field of a request."""
    if param in ("max_tokens", "temperature", "top_p", "top_k", "stop"):
        return f"--{param.replace('_', '-')}"
    return "--chat" if param.startswith("messages") else "PROMPT"


# tune


def tune(words: Sequence[str]) -> int:
    """`xylite tune`: a line per linear layer and range of rows, then where the choices are."""
    parsed = _parsed(TUNE, words)
    if parsed is None:
        return 0
    from xylite import tune as tuning

    (config,) = parsed.structs
    _set_up_logging("warning")
    path, results = tuning.tune(EngineConfig(**msgspec.structs.asdict(config)))
    for line in tuning.lines(results):
        console.say(line + "\n")
    console.say(f"Written to {path}, which the next start on this device reads.\n")
    return 0


# bench


def bench_serve(words: Sequence[str]) -> int:
    """`xylite bench serve`: load on a running server, a table and optionally JSON."""
    from xylite.bench.serve import BENCH_SERVE, run

    parsed = _parsed(BENCH_SERVE, words)
    if parsed is None:
        return 0
    (config,) = parsed.structs
    return _run(run(config))
