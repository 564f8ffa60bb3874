# SPDX-License-Identifier: Apache-2.0
"""Carry out a plan of runs on a live server, within a bound of time, and keep what was measured whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_overlay.errors import OverlayError
from ddtree_overlay.reports import counted
from ddtree_overlay.tuning.cells import Measured, Reply, Sample
from ddtree_overlay.tuning.client import Api
from ddtree_overlay.tuning.flight import Pool
from ddtree_overlay.tuning.plan import Run, Settings, pick
from ddtree_overlay.tuning.prompts import Prompt
from ddtree_overlay.tuning.served import AUTO, Arm, running_requests, steps_by_choice


#: How long a server may take to say that our own requests are over, and then to become quiet again.
_SETTLE_SECONDS, _QUIET_SECONDS = 2.0, 15.0
_PAUSE_SECONDS = 0.1
Tell = Callable[[Run], None]


class BusyError(OverlayError):
    """Somebody else's requests run on the server."""


@dataclass(slots=True)
class Measurer:
    """Measures one server.

    Args:
        api: How to reach it.
        prompts: What is sent.
        settings: How it is measured.
        end: When it has to be over, by `time.monotonic`.
        anyway: Measure beside others' requests.
    """

    api: Api
    prompts: Sequence[Prompt]
    settings: Settings
    end: float
    anyway: bool = False

    def measure(self, runs: Sequence[Run], tell: Tell) -> Measured:
        """Carry out `runs`; `tell` hears of each before it starts. Faults and Ctrl-C end it and are in the result."""
        found = Measured()
        with Pool(self.api) as pool:
            try:
                self._try_prompts(pool, runs)
                self._carry_out(pool, runs, found, tell)
            except KeyboardInterrupt:
                found.stopped, found.interrupted = "interrupted", True
            except OverlayError as e:
                found.stopped, found.error = e.what, e
        return found

    def others(self) -> int | None:
        """How many requests the server has before any of ours; None when it does not say.

        Raises:
            BusyError: It has some, and nobody said `anyway`.
        """
        running = running_requests(self.api.load())
        if running and not self.anyway:
            raise BusyError(
                f"the server at {self.api.url} is busy: {counted(running, 'request')} running or waiting",
                why="figures taken beside other traffic say nothing about a budget, and a batch with requests that ask "
                "for none takes the server's own",
                next_step="run it again when the server is idle, or with --anyway",
            )
        return running

    def _try_prompts(self, pool: Pool, runs: Sequence[Run]) -> None:
        """Send every prompt that will be used once, for a token: one that is refused is found before it costs minutes.

        Raises:
            OverlayError: The server does not answer one well, or the time is up.
        """
        of_one = [run for run in runs if run.arm == runs[0].arm]  # the others get the same
        used = {p.name: p for run in of_one for p in pick(self.prompts, run, self.settings.size(run.concurrency))}
        first = Arm("first", None)
        bodies = [self._body(p, first, tokens=1) for p in used.values()]
        flight = pool.fly(bodies, max(self.settings.concurrencies), self.end)
        if not flight.whole:
            raise self._late("every prompt was tried once")
        for prompt, reply in zip(used.values(), flight.replies, strict=True):
            if reply.error:
                self.api.server_info()  # a server that is gone is another fault
                raise OverlayError(
                    f"the server does not answer {prompt.name}",
                    why=reply.error,
                    next_step="take it out or shorten it (--prompts FILE), or correct the server, then run it again",
                )

    def _carry_out(self, pool: Pool, runs: Sequence[Run], found: Measured, tell: Tell) -> None:
        took: dict[int, float] = {}
        hopeless: set[tuple[int, str]] = set()
        before = self._steps()
        for run in runs:
            if (run.concurrency, run.arm.name) in hopeless:
                continue
            expected = 0.0 if run.warm_up else took.get(run.concurrency, 0.0)
            if time.monotonic() + expected >= self.end:
                found.stopped = "the time is up"
                return
            tell(run)
            bodies = self._bodies(run)
            flight = pool.fly(bodies, run.concurrency, self.end)
            if not flight.whole:
                found.stopped = "the time is up"
                return
            if not run.warm_up:
                took[run.concurrency] = flight.seconds
            failed = all(r.error for r in flight.replies)
            if failed:
                self._after_failure(flight.replies)
                hopeless.add((run.concurrency, run.arm.name))
            quiet = failed or self._quiet(found)
            after = self._steps() if before is not None else None
            chosen = {name: n - (before or {}).get(name, 0) for name, n in (after or {}).items()}
            before = after
            if quiet and (failed or not run.warm_up):
                # A server that was restarted counts from zero again.
                told = {name: n for name, n in chosen.items() if n > 0}
                found.samples.append(Sample(run, flight.seconds, flight.replies, told))

    def _steps(self) -> dict[str, int] | None:
        """What the server has counted so far."""
        return steps_by_choice(self.api.server_info())

    def _after_failure(self, replies: Sequence[Reply]) -> None:
        """After a run in which nothing was answered well: a server that is gone ends the measurement.

        Raises:
            OverlayError: It does not answer any more.
        """
        try:
            self.api.server_info()
        except OverlayError as e:
            e.why = "; ".join(filter(None, (e.why, f"before that: {replies[0].error}")))
            raise

    def _quiet(self, found: Measured) -> bool:
        """Whether nobody else's requests ran at the end of a run; waits for them to end.

        Raises:
            BusyError: They do not.
        """
        if self.anyway:
            return True
        start = time.monotonic()
        while running := running_requests(self.api.load()):
            if time.monotonic() > min(self.end, start + _QUIET_SECONDS):
                found.disturbed += 1
                raise BusyError(
                    f"the server became busy: {counted(running, 'request')} of others running or waiting",
                    why=f"they did not end within {_QUIET_SECONDS:.0f} s",
                    next_step="run it again when the server is idle, or with --anyway",
                )
            time.sleep(_PAUSE_SECONDS)
        quiet = time.monotonic() < start + _SETTLE_SECONDS
        found.disturbed += not quiet
        return quiet

    def _bodies(self, run: Run) -> list[dict[str, object]]:
        # What chooses by itself learns from its own steps: it gets a whole run.
        if run.warm_up and run.arm.name != AUTO:
            return [self._body(p, run.arm, tokens=16) for p in pick(self.prompts, run, run.concurrency)]
        return [self._body(p, run.arm) for p in pick(self.prompts, run, self.settings.size(run.concurrency))]

    def _body(self, prompt: Prompt, arm: Arm, *, tokens: int | None = None) -> dict[str, object]:
        return {**prompt.body, "sampling_params": self.settings.sampling(arm, most=tokens)}

    def _late(self, what: str) -> OverlayError:
        return OverlayError(
            f"the time was up before {what}",
            next_step="give it more with --seconds, or fewer prompts or concurrencies",
        )
