# SPDX-License-Identifier: Apache-2.0
"""`tune`: measure a running server over budgets and concurrencies, and recommend flags."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ddtree_overlay.cli.options import SERVED, App, Seconds, verb
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.errors import ConfigError, UsageError
from ddtree_overlay.reports import counted, row


if TYPE_CHECKING:
    from ddtree_overlay.tuning.client import Api
    from ddtree_overlay.tuning.outcome import Outcome
    from ddtree_overlay.tuning.plan import Run, Settings
    from ddtree_overlay.tuning.prompts import Prompt
    from ddtree_overlay.tuning.served import Served


#: Patience with one request, where no host says otherwise.
_SECONDS = 60.0


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers with commas between them, each once and in order; click calls it."""
    words = value.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,4}\s*", word) and 1 <= int(word) <= 1024 for word in words):
        raise click.BadParameter(f"{value!r} is no list of numbers between 1 and 1024, such as 1,4,16", ctx, param)
    return tuple(sorted({int(word) for word in words}))


def _number(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which is neither above nor below a limit; click calls it."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a temperature", ctx, param)
    return value


def _one_server(app: App, fleet: Fleet, **given: Any) -> int:  # noqa: ARG001  what `verb` passes
    raise UsageError(
        "tune measures one server at a time", next_step=f"name one of them: --host {fleet.targets[0].name}"
    )


@verb(
    targets=SERVED,
    fleet=_one_server,
    example="ddtree-overlay tune --host ct200\n"
    "  ddtree-overlay tune --url http://127.0.0.1:30000 --prompts mine.json --concurrency 1,8,32",
)
@click.option(
    "--prompts", type=click.Path(path_type=Path), metavar="FILE", help="Measure with these; see docs/tune.md."
)
@click.option(
    "--concurrency",
    callback=_numbers,
    default="1,4,16",
    show_default=True,
    metavar="NUMBERS",
    help="Requests in flight.",
)
@click.option("--arms", metavar="NAMES", help="Of what the server has, only these: chain, auto, budgets.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Runs of each arm.")
@click.option("--requests", type=click.IntRange(1, 10000), default=8, show_default=True, help="Of a run, at least.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1, 100000), default=128, show_default=True, help="Of a request, at most."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 10), default=0.0, callback=_number, show_default=True, help="0 is greedy."
)
@click.option("--ignore-eos", is_flag=True, help="Decode on to --max-new-tokens always.")
@click.option(
    "--seconds", type=Seconds(1, 86400), default=600.0, show_default=True, help="Be done by then, with what there is."
)
@click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the server's API key.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="The plot [default: tune-NAME.png].")
@click.option("--no-plot", is_flag=True, help="Write no plot.")
@click.option("--anyway", is_flag=True, help="Measure beside the requests of others.")
def tune(
    app: App,
    target: Target,
    *,
    prompts: Path | None,
    concurrency: tuple[int, ...],
    arms: str | None,
    seconds: float,
    api_key_env: str | None,
    plot: Path | None,
    no_plot: bool,
    anyway: bool,
    **how: Any,
) -> int:
    """Measure a running DDTREE server and recommend flags.

    Sends prompts with each budget that the server has captured, with the chain and with its own choice, at each
    concurrency, in turns. Prints tokens/s, accept length and latencies, writes a plot, and says which flags fit and
    whether the spread allows to say so. --host takes the address from `health` in deploy.toml, through SSH where the
    server listens on the host's loopback device only. Ctrl-C ends it with what was measured (exit 130).
    """
    from ddtree_overlay.tuning import plots
    from ddtree_overlay.tuning.measuring import Measurer
    from ddtree_overlay.tuning.outcome import Outcome
    from ddtree_overlay.tuning.plan import Settings, plan_runs
    from ddtree_overlay.tuning.prompts import check
    from ddtree_overlay.tuning.served import choose_arms, read_server

    end = time.monotonic() + seconds
    settings = Settings(concurrency, **how)
    if no_plot and plot:
        raise UsageError("--plot and --no-plot exclude each other", next_step="leave one of them out")
    if plot:
        plots.check(plot)
    chosen = _prompts(prompts)
    with _reached(app, target, _key(api_key_env)) as api:
        served = read_server(api.server_info(), api.url)
        check(chosen, served, f"{target.command('tune')} --prompts FILE with lists of token ids")
        runs = plan_runs(choose_arms(served, _names(arms)), settings)
        _warn(app, served, settings, chosen)
        measurer = Measurer(api, chosen, settings, end, anyway)
        running = measurer.others()
        if running is None:
            app.screen.warn("the server does not say how busy it is; requests of others would not be noticed")
        elif running:
            app.screen.warn(f"measuring beside {counted(running, 'request')} of others")
        with app.screen.progress(len(runs)) as step:
            found = measurer.measure(runs, lambda run: step(_doing(run, settings)))
    outcome = Outcome.of(target.name, served, settings, prompts=len(chosen), runs=runs, found=found)
    outcome.require_something()
    written = _draw(app, outcome, plot) if outcome.cells and not no_plot else None
    if found.error is not None:
        app.screen.complain(found.error)
    lines = [*outcome.lines(), *([row(("plot: ", "dim"), str(written))] if written else [])]
    return app.finish("tune", {**outcome.as_dict(), "plot": str(written) if written else None}, lines, outcome.code)


def _draw(app: App, outcome: Outcome, plot: Path | None) -> Path | None:
    """Write the plot; the file, or None with a warning. What was measured must not be lost over it."""
    from ddtree_overlay.tuning import plots

    if not plots.available():
        app.screen.warn(f"no plot, because matplotlib is not installed: {plots.INSTALL}")
        return None
    path = plot or app.workspace.root / f"tune-{_stem(outcome.name)}.png"
    try:
        plots.write(path, outcome.title, outcome.cells)
    except OSError as e:
        app.screen.warn(f"no plot: {path}: {e.strerror or e}")
    except KeyboardInterrupt:
        app.screen.warn("no plot: interrupted")
    except Exception as e:
        app.screen.trace()
        app.screen.warn(f"no plot: {type(e).__name__}: {e}")
    else:
        return path
    return None


def _stem(name: str) -> str:
    """The name of a target as part of a file's: of `[::1]:30000` it is `ipv6-1-30000`."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name.replace("[", "ipv6-")).strip("-")


@contextlib.contextmanager
def _reached(app: App, target: Target, key: str) -> Iterator[Api]:
    """The server of the target: directly, or through its host."""
    from ddtree_overlay.config_keys import is_loopback
    from ddtree_overlay.tuning.client import Api, travels_open

    url = target.url or _health_url(target)
    seconds = app.timeout or (target.host.timeout if target.host else _SECONDS)
    host = target.host
    if host is None or host.transport == "local" or not is_loopback(urlsplit(url).hostname or ""):
        if key and travels_open(url):
            app.screen.warn(f"the API key travels unencrypted to {urlsplit(url).hostname}")
        yield Api(url, seconds, key)
        return
    from ddtree_overlay.hosts.tunnel import Tunnel

    app.screen.note(f"{target.name}: through SSH to {url}")
    with Tunnel(host, accept_new=app.accept_new) as tunnel:
        for text in tunnel.warnings:
            app.screen.warn(f"{target.name}: {text}")
        yield Api(url, seconds, key, tunnel.dial, tunnel.fault)


def _health_url(target: Target) -> str:
    if target.place.health is None:
        raise ConfigError(
            f"{target.name}: deploy.toml does not say where its server listens",
            next_step=f'write url = "http://127.0.0.1:30000", as the host sees it, into [hosts.{target.name}.health], '
            "or name the server with --url",
        )
    return target.place.health.url


def _key(name: str | None) -> str:
    """The API key in the environment variable `name`; it is printed nowhere."""
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise UsageError(
        f"--api-key-env {name}: " + ("it does not hold a key: one word of ASCII text" if key else "it is not set"),
        next_step=f"export {name}=… and run it again",
    )


def _prompts(path: Path | None) -> tuple[Prompt, ...]:
    from ddtree_overlay.tuning import prompts

    if path is None:
        return prompts.built_in()
    try:
        with path.open("rb") as stream:
            data = stream.read(prompts.MOST_BYTES + 1)
    except OSError as e:
        raise UsageError(f"--prompts {path}: {e.strerror or e}", next_step="name another file") from e
    if len(data) > prompts.MOST_BYTES:
        raise UsageError(
            f"--prompts {path} is larger than {prompts.MOST_BYTES >> 20} MiB", next_step="take a part of it"
        )
    return prompts.parse(data, str(path))


def _names(arms: str | None) -> tuple[str, ...]:
    return () if arms is None else tuple(word.strip() for word in arms.split(","))


def _warn(app: App, served: Served, settings: Settings, chosen: Sequence[Prompt]) -> None:
    """Say what makes the figures mean something else than they seem to."""
    beyond = [c for c in settings.concurrencies if served.most and c > served.most]
    if beyond:
        app.screen.warn(
            f"the server runs {served.most} requests at once: of {', '.join(map(str, beyond))} at a time, the rest wait"
        )
    if any(not p.is_text for p in chosen):
        app.screen.warn(
            "the prompts are token ids: SGLang before 0.5.17 does not check them, and one beyond the vocabulary ends it"
        )


def _doing(run: Run, settings: Settings) -> str:
    round_ = "warm-up" if run.warm_up else f"round {run.round} of {settings.rounds}"
    return f"{round_}, {run.concurrency} at a time: {run.arm.name}"
