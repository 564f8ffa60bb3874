# SPDX-License-Identifier: Apache-2.0
"""State that was damaged on the host: it is named, nothing is lost, and there is a way out."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.support.installs import bundle_for
from tests.support.trees import differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConflictError, OverlayError, UsageError
from ddtree_overlay.hosts.transport import open_transport


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/speculative/ddtree/tree.py": b"C = 1\n"}


def pushed(transport, root, results=RESULTS):
    bundle, files = bundle_for(root, results)
    return deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")


def tear(history):
    history.write_bytes(history.read_bytes()[:-5])


LOSSES = {"torn": tear, "empty": lambda h: h.write_bytes(b""), "gone": lambda h: h.unlink()}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_deployment_without_its_line_in_the_history_is_not_pristine(tiny, near, lose):
    """Status names the deployment, and a push does not build on it; both write nothing."""
    pushed(near, tiny.root)
    lose(tiny.state / "history.jsonl")
    before = listing(tiny.site)
    found = deploy.status(near)
    assert found.state == "unrecorded"
    assert "all 2 files of d-0001 are in place" in found.reason
    with pytest.raises(ConflictError, match="d-0001 is in place, but the history"):
        pushed(near, tiny.root, {"srt/b.py": b"VALUE = 9\n"})
    assert differences(before, listing(tiny.site)) == []


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("purge", [False, True])
def test_rollback_goes_by_the_record_when_the_history_is_lost(tiny, near, lose, purge):
    """The base comes back byte for byte before any backup is removed."""
    before, site = listing(tiny.root), listing(tiny.site)
    pushed(near, tiny.root)
    lose(tiny.state / "history.jsonl")
    assert "history on the host is damaged" in " ".join(deploy.plan_rollback(near, purge=purge).warnings)
    assert deploy.rollback(near, purge=purge).undone == ("d-0001",)
    assert differences(before, listing(tiny.root)) == []
    if purge:
        assert differences(site, listing(tiny.site)) == []
    else:
        assert [(d.id, d.undone is None) for d in deploy.history(near)] == [("d-0001", False)]
        assert deploy.status(near).state == "pristine"


def test_an_overlay_without_any_state_folder_is_not_pristine(tiny, near):
    """With the folder gone nobody knows the base: status says so, and rollback refuses with what to do."""
    pushed(near, tiny.root)
    shutil.rmtree(tiny.state)
    found = deploy.status(near)
    assert found.state == "unrecorded"
    assert "no deployment in" in found.reason
    with pytest.raises(ConflictError, match="nothing on the host says what was there before") as caught:
        deploy.rollback(near, purge=True)
    assert "pip install --force-reinstall --no-deps sglang==" in caught.value.next_step


BAD_LINES = {
    "garbage": b"garbage\n",
    "number": b"5\n",
    "bytes": b"\xff\xfe\n",
    "time": b'{"event":"push","id":"d-0001","overlay_id":"o","operator":"x","note":"","current":"d-0001",'
    b'"before":null,"txn":1,"time":1e300}\n',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_damaged_line_of_the_history_is_named(tiny, near, line):
    """Path, line number, and the command that takes the line out; after it everything works again."""
    pushed(near, tiny.root)
    path = tiny.state / "history.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + line)
    for ask in (deploy.status, deploy.history, deploy.plan_rollback, deploy.rollback):
        with pytest.raises(OverlayError, match=r"history\.jsonl:2") as caught:
            ask(near)
        assert "Traceback" not in caught.value.why
        assert f"sed -i.bak 2d {path}" in caught.value.next_step
    assert path.read_bytes() == good + line
    path.write_bytes(good)
    assert deploy.status(near).state == "applied"


@pytest.mark.parametrize("text", ['{"txn": ', "{}", "5", '{"txn": 1, "event": {}, "moves": []}'])
def test_a_damaged_journal_is_named(tiny, near, text):
    """Nothing is guessed from it; with it out of the way the record of the deployment is the way back."""
    before = listing(tiny.root)
    pushed(near, tiny.root)
    journal = tiny.state / "journal.json"
    journal.write_text(text)
    for ask in (deploy.status, deploy.plan_rollback, deploy.rollback):
        with pytest.raises(OverlayError, match=r"journal\.json") as caught:
            ask(near)
        assert "Traceback" not in caught.value.why
        assert f"mv {journal}" in caught.value.next_step
    journal.rename(journal.with_name("journal.json.damaged"))
    deploy.rollback(near)
    assert differences(before, listing(tiny.root)) == []


@pytest.mark.parametrize("text", ["{}", "5", "[", None])
def test_a_damaged_record_is_named(tiny, near, text):
    """The live deployment's record is what a rollback needs: without it nothing is touched, and the history shows."""
    pushed(near, tiny.root)
    path = tiny.state / "deployments/d-0001/manifest.json"
    path.unlink() if text is None else path.write_text(text)
    before = listing(tiny.site)
    for ask in (deploy.status, deploy.plan_rollback, lambda t: deploy.rollback(t, purge=True)):
        with pytest.raises(OverlayError, match="the record of d-0001 is damaged") as caught:
            ask(near)
        assert "Traceback" not in caught.value.why
        assert str(path) in caught.value.next_step
    assert [d.id for d in deploy.history(near)] == ["d-0001"]
    assert differences(before, listing(tiny.site)) == []


@pytest.mark.parametrize("name", ["d-old", "d-0001.bak"])
def test_folders_that_are_not_ours_are_left_alone(tiny, near, name):
    """A copy somebody made beside the deployments neither stops a push nor is removed by one."""
    pushed(near, tiny.root)
    copy = tiny.state / "deployments" / name
    shutil.copytree(tiny.state / "deployments/d-0001", copy)
    before = listing(copy)
    assert pushed(near, tiny.root, {"srt/b.py": b"VALUE = 9\n"}).id == "d-0002"
    assert differences(before, listing(copy)) == []


def test_a_push_of_what_somebody_else_has_just_pushed_is_up_to_date(tiny, near):
    """Two operators with the same plan: the second finds everything in place, which is no conflict."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    with open_transport(tiny.host()) as other:
        plan, same = (deploy.plan_push(t, bundle, files) for t in (near, other))
        assert deploy.push(near, plan, files, operator="ann", lock_wait=5).id == "d-0001"
        assert deploy.push(other, same, files, operator="bob", lock_wait=5).operator == "ann"
    assert len(deploy.history(near)) == 1
    assert [json.loads(e)["event"] for e in (tiny.state / "history.jsonl").read_text().splitlines()] == ["push"]


@pytest.mark.parametrize("to", ["nonsense", "d-old", "", "d-0001.bak"])
def test_what_cannot_be_an_id_is_a_usage_error(near, to):
    """Exit code 2, before the host is asked."""
    with pytest.raises(UsageError, match="is no deployment") as caught:
        deploy.plan_rollback(near, to=to)
    assert caught.value.exit_code == 2
