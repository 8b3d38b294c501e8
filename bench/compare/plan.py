"""Engines by turns: repeat, engine, workload. Every repeat of an engine is a fresh process, and a
run that others disturbed is made again."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.compare import machine, offline, online, report
from bench.compare.offline import Case, EngineFailed, Figures
from bench.compare.online import Load
from bench.compare.peers import Engine
from bench.compare.report import number

WORKLOADS: Final = ("edit", "quote", "json", "chat", "random")


class Disturbed(Exception):
    """The machine is not quiet and does not become so."""


@dataclass
class Recorder:
    """Takes samples and keeps them.

    noise       cores that others may use during a run that counts as clean
    tries       runs of a workload and repeat, at most, to get a clean one
    patience_s  how long to wait for a quiet machine before each run
    allow_noise go on where the machine does not become quiet, instead of Disturbed
    """

    noise: float
    tries: int
    patience_s: float
    allow_noise: bool
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failures: list[str] = field(default_factory=list[str])

    @contextmanager
    def noting_failure(self, repeat: int) -> Iterator[None]:
        """An engine that fails loses the rest of this repeat; the others go on."""
        try:
            yield
        except EngineFailed as e:
            self.failures.append(f"repeat {repeat}: {e}")
            print(f"failed: {e}", file=sys.stderr)

    def require_quiet(self) -> None:
        """Wait for a quiet machine; Disturbed if it stays busy and noise is not allowed."""
        others = machine.wait_quiet(self.noise, self.patience_s)
        if others < self.noise:
            return
        who = "; ".join(machine.busiest()) or "unknown"
        message = f"other processes use {others:.2f} cores ({who}), the limit is {self.noise}"
        if not self.allow_noise:
            raise Disturbed(f"{message}; --allow-noise measures all the same")
        print(f"warning: {message}", file=sys.stderr)

    def take(self, engine: str, workload: str, repeat: int, run: Callable[[], Figures]) -> None:
        """Samples of one run; made again while others disturb it."""
        for attempt in range(self.tries):
            self.require_quiet()
            watch = machine.Watch()
            figures = run()
            others = watch.others()
            clean = others < self.noise
            self.samples.append(
                {
                    "engine": engine,
                    "workload": workload,
                    "repeat": repeat,
                    "attempt": attempt,
                    "figures": {k: round(v, 3) for k, v in figures.items()},
                    "others": others,
                    "clean": clean,
                }
            )
            shown = ", ".join(f"{k} {number(v)}" for k, v in figures.items())
            print(
                f"[{repeat}] {engine:<24} {workload:<13} {shown}"
                + ("" if clean else f"   (others used {others:.2f} cores)"),
                flush=True,
            )
            if clean:
                return


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every part of a comparison needs."""

    model: Path
    threads: int
    logs: Path
    repeats: int
    vocab_size: int
    recorder: Recorder

    def log(self, engine: Engine, part: str) -> Path:
        return self.logs / f"{engine.name.replace(' ', '-')}-{part}.log"


def run_offline(
    setting: Setting, engines: Sequence[Engine], cases: Sequence[Case]
) -> dict[str, Mapping[str, str]]:
    """Offline samples; returns the versions that children told."""
    versions: dict[str, Mapping[str, str]] = {}
    for repeat in range(setting.repeats):
        for engine in engines:
            log = setting.log(engine, "offline")
            with (
                setting.recorder.noting_failure(repeat),
                offline.session(engine, setting.model, setting.threads, log) as (measure, told),
            ):
                versions[engine.name] = told
                for case in cases:

                    def run(case: Case = case, measure: offline.Measure = measure) -> Figures:
                        return measure(case.asked)

                    if engine.tools is None:  # llama.cpp's tools warm up by themselves
                        measure(case.warm_up())
                    setting.recorder.take(engine.name, case.name, repeat, run)
    return versions


def speculation_cases(
    workloads: Sequence[str], at_once: Sequence[int], new: int, requests: int | None = None
) -> list[Case]:
    """Requests of each kind, so many at once: twice as many in all, 8 at least."""
    return [
        Case(
            report.DRAFTING_WORKLOAD.format(workload, count),
            {
                "workload": workload,
                "concurrency": count,
                "number": requests or max(2 * count, 8),
                "new": new,
            },
        )
        for count in at_once
        for workload in workloads
    ]


def run_speculation(
    setting: Setting, plain: Engine, drafting: Engine, cases: Sequence[Case]
) -> Mapping[str, str]:
    """Samples with and without drafts, from two engines in one process by turns; its versions.

    Before a case is measured, both answer it once: how long iterations of each size take, which
    decides how much is drafted, is learnt then.
    """
    log = setting.log(drafting, "speculation")
    versions: dict[str, str] = {}
    with (
        setting.recorder.noting_failure(0),
        offline.session(drafting, setting.model, setting.threads, log) as (measure, told),
    ):
        versions |= told
        for case in cases:
            for drafts in (0, 1):
                measure({**case.asked, "drafts": drafts})
            for repeat in range(setting.repeats):
                for drafts in (0, 1) if repeat % 2 == 0 else (1, 0):

                    def run(asked: Mapping[str, Any] = {**case.asked, "drafts": drafts}) -> Figures:
                        return measure(asked)

                    name = drafting.name if drafts else plain.name
                    setting.recorder.take(name, case.name, repeat, run)
    return versions


def run_start(setting: Setting, engines: Sequence[Engine], repeat: int) -> None:
    """Samples of the start alone."""
    for engine in engines:

        def run(engine: Engine = engine) -> Figures:
            with online.server(engine, setting.threads, setting.log(engine, "server")) as server:
                return _start_figures(server)

        with setting.recorder.noting_failure(repeat):
            setting.recorder.take(engine.name, "start", repeat, run)


def _start_figures(server: online.Server) -> Figures:
    return {"first_token_s": server.first_token_s, "idle_rss_mib": server.idle_rss_mib()}


def run_online(
    setting: Setting,
    engines: Sequence[Engine],
    loads: Sequence[Load],
    max_output: int | None = None,
) -> None:
    """Samples under load; each server is warmed up by a few requests of every kind first."""
    salt = 0
    for repeat in range(setting.repeats):
        for engine in engines:
            log = setting.log(engine, "server")
            with (
                setting.recorder.noting_failure(repeat),
                online.server(engine, setting.threads, log) as server,
            ):
                for trace in dict.fromkeys(load.trace for load in loads):
                    salt += 1
                    warm = Load(trace, 2, 2)
                    server.load(_items(setting, warm, salt, max_output), warm.concurrency)
                for load in loads:

                    def run(load: Load = load, server: online.Server = server) -> Figures:
                        nonlocal salt
                        salt += 1
                        items = _items(setting, load, salt, max_output)
                        return server.load(items, load.concurrency)

                    setting.recorder.take(engine.name, load.name, repeat, run)


def _items(setting: Setting, load: Load, salt: int, max_output: int | None) -> list[Any]:
    return online.requests(load, salt, setting.vocab_size, max_output)


def check_start(setting: Setting, engine: Engine) -> str | None:
    """Why the engine's server does not start; None if it does. Files, kernels and tables that a
    first start makes are then there."""
    try:
        with online.server(engine, setting.threads, setting.log(engine, "server")):
            return None
    except (EngineFailed, OSError) as e:
        return str(e)


def check_child(setting: Setting, engine: Engine) -> str | None:
    """The same for its offline child."""
    asked = offline.WARM_UP
    if engine.baseline is not None:
        asked = {**speculation_cases(["random"], [1], 4, 1)[0].asked, "drafts": 1}
    try:
        log = setting.log(engine, "offline")
        with offline.session(engine, setting.model, setting.threads, log) as (measure, _):
            measure(asked)
            return None
    except (EngineFailed, OSError) as e:
        return str(e)
