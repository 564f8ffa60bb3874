# SPDX-License-Identifier: Apache-2.0
"""Restart, prove, and go back when that fails: the second half of a push, on the host and under the same lock.

Everything is decided here, so that a lost connection leaves the host proven or put back, never in between. If this very
process is killed, the deployment stays pending and `trial.json` says how far it came.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import Any

from . import restarting, rolling, states, transaction
from .asking import Heard, ask, read_key
from .common import Refusal
from .locate import Site, locate
from .proving import Before, Proof, Want, judge, replaced, seen, watch
from .store import Store
from .telling import Waiting, tell


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]
Trial = dict[str, Any]
#: As in `ddtree_overlay.manifest`.
ID_MODULE = "srt/speculative/ddtree/overlay_id.py"
BASE = "base"


def look(trial: Trial) -> Before:
    """What the server says, and which processes there are, before anything is changed."""
    return Before(ask(trial["url"], read_key(trial["api_key_file"])), seen())


def check(trial: Trial) -> None:
    """Refuse what can be known to go wrong before anything is written.

    Raises:
        Refusal: `failed`.
    """
    restarting.refuse_missing(trial)
    key = read_key(trial["api_key_file"])
    heard = ask(trial["url"], key)
    if heard.kind in ("foreign", "denied"):
        step = "set api_key_file in [hosts.NAME.health]" if heard.kind == "denied" else "correct the url of `health`"
        raise Refusal(
            "failed",
            f"the live server at {trial['url']} cannot be asked what it runs: {heard.text}",
            why="nothing was changed; a restart whose result cannot be seen could not be undone",
            next_step=f"{step} in deploy.toml",
        )
    if not heard.told:
        tell(f"no server answers at {trial['url']} now: {heard.text}")


def rehearse(args: dict[str, Any], _: bytes) -> Answer:
    """Whether a restart could be run and its result be seen; says what the server runs now. Changes nothing."""
    check(args["trial"])
    return {"heard": look(args["trial"]).heard.text}, b""


def refuse_mute(paths: list[str]) -> None:
    """Refuse an overlay that no server could report.

    Raises:
        Refusal: `failed`.
    """
    if ID_MODULE not in paths:
        raise Refusal(
            "failed",
            "this bundle was built by an earlier version: a server could not report it",
            why=f"it has no {ID_MODULE}; nothing was changed",
            next_step="ddtree-overlay snapshot {target} && ddtree-overlay patch {target}",
        )


class Case:
    """One trial on one host; its lock is held."""

    def __init__(self, site: Site, store: Store, args: dict[str, Any]) -> None:
        self.site = site
        self.store = store
        self.trial: Trial = args["trial"]
        self.operator: str = args["operator"]
        self.key = read_key(self.trial["api_key_file"])
        #: What the server said last.
        self.heard = Heard("down", "nobody has asked yet")

    def want(self, record: Record | None) -> Want:
        """What the server reports once it runs `record` (None: the base)."""
        if record is not None and ID_MODULE in record["files"]:
            return Want(record["overlay_id"], ("DDTREE",))
        return Want(None)

    def want_again(self, record: Record | None, before: Before) -> Want:
        """What it reports once it runs `record` as it did before: with the same algorithm, whichever that was."""
        want, heard = self.want(record), before.heard
        return (
            replace(want, algorithms=(heard.algorithm,)) if heard.overlay_id == want.overlay_id and heard.told else want
        )

    def prove(self, record: Record | None, want: Want, before: Before, *, restart: bool) -> tuple[Proof, list[str]]:
        """Restart if asked to, and watch; gives the proof and the last lines of the restart's output."""
        name = record["id"] if record else BASE
        done = None
        if restart:
            states.begin(self.store, name, self.operator, "the server was restarted")
            tell(f"restarting the server for {name}")
            done = self._restart(record)
        if done is None or done.ok:
            states.begin(self.store, name, self.operator, "the server was waited for")
            heard, answers, waited = watch(self.trial, self.key, want)
        else:
            heard, waited = ask(self.trial["url"], self.key), 0.0
            answers = (heard.text,)
        self.heard = heard
        verdict, why, touched = judge(heard, want, before, done, changed=replaced(before.processes, seen()))
        proof = Proof(verdict == "live", verdict, why, round(waited, 1), answers, touched)
        return proof, list(done.output) if done else []

    def _restart(self, record: Record | None) -> restarting.Restarted:
        waiting = Waiting(time.monotonic())
        environment = {"DDTREE_OVERLAY_ID": record["overlay_id"] if record else ""}
        return restarting.restart(self.trial, self.store.folder, environment, waiting.tell)


def after_push(
    site: Site, store: Store, args: dict[str, Any], name: str, before: Before, *, swapped: bool
) -> dict[str, Any]:
    """Try the deployment `name`, which is live on the disk; gives the proof.

    A server that reports it already is left alone, unless its files were `swapped` just now: one that kept running
    through a rollback and a push of the same overlay has not shown that it comes up with them.

    Raises:
        Refusal: `rolled-back` when it failed and the old state serves again, `incomplete` when that does not serve
            either, `failed` when a deployment that had been good before does not come up: that stays.
    """
    case = Case(site, store, args)
    record = store.record(name)
    known = states.states(store.events())[name]
    want = case.want(record)
    heard = before.heard
    if heard.kind == "up" and want.met_by(heard) and not swapped:
        why = f"the server runs {heard.named()} already and generates; it was not restarted"
        proof, output = Proof(True, "live", why, 0.0, (heard.text,), False), list[str]()
    else:
        proof, output = case.prove(record, want, before, restart=True)
    if proof.ok:
        if known != "good":
            _mark(case, "good", record, proof.why)
        states.end(store)
        return proof.as_dict()
    tell(f"{name}: {proof.why}")
    if known == "good":
        states.end(store)
        raise Refusal(
            "failed",
            f"the server does not come up, with {name}, which was good before: {proof.why}",
            why=_because(proof, output),
            next_step=f"look for the cause outside of the overlay; {_by_hand(case, record)}",
        )
    _go_back(case, record, proof, output, before)
    raise AssertionError("unreachable")


def _go_back(case: Case, record: Record, proof: Proof, output: list[str], before: Before) -> None:
    """Put the files back, restart if anything may run the new code, and say what became of it."""
    name = record["id"]
    to = record["previous"] or BASE
    if proof.restarted:
        # First of all: whoever finds this host after a crash must not take the deployment for untried.
        _mark(case, "bad", record, proof.why)
    states.begin(case.store, name, case.operator, f"it was rolled back to {to}")
    tell(f"rolling back to {to}")
    try:
        rolling.go_back(case.site, case.store, case.operator, to=to, note=f"by itself: {proof.why}")
    except (Refusal, OSError) as e:
        states.end(case.store)
        step = e.next_step if isinstance(e, Refusal) else ""
        raise Refusal(
            "incomplete",
            f"{name} failed, and its files could not be put back: {e}",
            why="; ".join(filter(None, [f"{name}: {proof.why}", _because(proof, output)])),
            next_step="; ".join(filter(None, [step, "ddtree-overlay rollback {target} --restart"])),
        ) from e
    target = case.store.record(to) if to != BASE else None
    now = Before(case.heard, seen())
    after, more = case.prove(target, case.want_again(target, before), now, restart=proof.restarted)
    states.end(case.store)
    # A server that nothing has touched is as it was, whatever it runs: it may be older than what was there before.
    if after.ok or (not proof.restarted and after.verdict == "unrestarted"):
        tell(f"{to}: {after.why}")
        raise Refusal(
            "rolled-back",
            f"{name} was rolled back: {proof.why}",
            why="; ".join(filter(None, [_because(proof, output), f"{to} is back in place: {after.why}"])),
            next_step=_after_rollback(case, proof),
        )
    reasons = _because(after, more)
    with_old = f"{to}: {reasons}" if reasons else ""
    late = "" if before.heard.told else " (no server answered before the push either)"
    raise Refusal(
        "incomplete",
        f"{name} failed, its files were put back, but the server does not come up with {to}{late}: {after.why}",
        why="; ".join(filter(None, [f"{name}: {proof.why}", _because(proof, output), with_old])),
        next_step=_by_hand(case, target),
    )


def _mark(case: Case, kind: str, record: Record, note: str) -> None:
    """As `states.mark`; a full disk must not end a trial half-way."""
    try:
        states.mark(case.store, kind, record, operator=case.operator, note=note)
    except OSError as e:
        tell(f"{record['id']} is {kind}, but the history could not be written: {e.strerror or e}")


def _after_rollback(case: Case, proof: Proof) -> str:
    if proof.verdict == "unrestarted":
        words = " && ".join(restarting.manual(case.trial)[-1:])
        return f"correct `restart` in deploy.toml, which restarts nothing now: {words}"
    log = shlex.quote(str(case.store.folder / restarting.LOG))
    return f"read the server's log, and {log} on the host; then ddtree-overlay history {{target}}"


def _because(proof: Proof, output: list[str]) -> str:
    """What is known beside `proof.why`."""
    heard = f" (before that: {', then '.join(proof.answers[:-1])})" if len(proof.answers) > 1 else ""
    parts = [f"after waiting {proof.waited:.0f} s for the server{heard}" if proof.waited else ""]
    parts += [f"the restart said: {' / '.join(output[-5:])}"] if output else []
    return "; ".join(filter(None, parts))


def _by_hand(case: Case, record: Record | None) -> str:
    """The lines that bring the server up and show whether it is well, to be copied into a shell on the host."""
    reset = [f"{line} || true" for line in restarting.manual(case.trial)[:-1]]
    start = restarting.manual(case.trial)[-1]
    header = '-H "Authorization: Bearer $(cat {})" '.format(shlex.quote(case.trial["api_key_file"])) if case.key else ""
    ask_it = f"curl -fsS {header}{shlex.quote(case.trial['url'].rstrip('/') + '/server_info')}"
    log = f"tail {shlex.quote(str(case.store.folder / restarting.LOG))}"
    wanted = f"overlay {record['overlay_id']}" if record else "no overlay id"
    lines = "\n".join([*reset, start, log, f"{ask_it}  # should report {wanted}"])
    return f"# on the host:\n{lines}\n# here:\nddtree-overlay status {{target}}"


def after_rollback(site: Site, store: Store, args: dict[str, Any], before: Before) -> dict[str, Any]:
    """Restart the server after a rollback that the operator asked for; gives the proof.

    Raises:
        Refusal: `incomplete` when the server does not come up, or was not restarted.
    """
    case = Case(site, store, args)
    record = store.current()
    proof, output = case.prove(record, case.want(record), before, restart=True)
    states.end(store)
    if proof.ok:
        return proof.as_dict()
    raise Refusal(
        "incomplete",
        f"the files are back at {record['id'] if record else BASE}, but the server is not: {proof.why}",
        why=_because(proof, output),
        next_step=_by_hand(case, record),
    )


def prove(args: dict[str, Any], _: bytes) -> Answer:
    """Restart if `restart`, and watch for the deployment `deployment` (None: the base), which must be the live one."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    check(args["trial"])
    with transaction.session(store, args["operator"], "proof", args["lock_wait"], version=site.version):
        record = store.current()
        live = record["id"] if record else None
        if live != args["deployment"]:
            raise Refusal(
                "conflict",
                f"{live or BASE} is live here, not {args['deployment'] or BASE}",
                why="nothing was restarted",
                next_step="ddtree-overlay history {target}",
            )
        case = Case(site, store, args)
        before = look(case.trial)
        proof, output = case.prove(record, case.want(record), before, restart=args["restart"])
        states.end(store)
    return {
        "proof": {
            **proof.as_dict(),
            "why": "; ".join(filter(None, [proof.why, "" if proof.ok else _because(proof, output)])),
        }
    }, b""
