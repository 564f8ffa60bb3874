# SPDX-License-Identifier: Apache-2.0
"""Input that nobody means: refused with a message, as text and as JSON, and never with a traceback."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from ddtree_overlay import deploy
from ddtree_overlay.cli import cli


@pytest.mark.parametrize("value", ["inf", "nan", "1e12"])
def test_a_timeout_that_no_clock_can_count_is_refused(run, value):
    """Exit 2 for what would overflow in a socket or never end."""
    done = run("status", "--host", "ct200", "--timeout", value, "--json")
    assert done.code == 2
    assert "--timeout" in done.json["what"]


@pytest.mark.parametrize(
    "text",
    [
        "[hosts.ct200]\ntimeout = inf",
        "[hosts.ct200]\ntimeout = nan",
        '[hosts.ct200]\naddress = "a..b"',
        '[hosts.ct200]\naddress = "a\\u0000b"',
        '[hosts.ct200]\nuser = "a\\u0000b"',
        '[hosts.ct200]\nknown_hosts = "a\\u0000b"',
        '[hosts.ct200]\nidentity_file = "a\\u0000b"',
        f"x = {'[' * 3000}",
    ],
)
def test_values_that_cannot_be_meant_are_refused_as_configuration(run, workspace, text):
    """Exit 2 and the file's name, before anything is connected to."""
    (workspace / "deploy.toml").write_text(text)
    done = run("status", "--host", "ct200", "--json")
    assert done.code == 2, done.err
    assert str(workspace / "deploy.toml") in done.json["what"]


@pytest.mark.parametrize("change", [{"versions": None}, {"files": [{"path": 5, "sha256": "x", "size": 1}]}])
def test_a_manifest_with_wrong_types_is_damaged(run, patched_root, workspace, change):
    """The manifest is named, with the command that makes a new one."""
    path = next((workspace / "snapshots").glob("*/manifest.json"))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    done = run("patch", "--root", str(patched_root), "--json")
    assert done.code == 4, done.err
    assert f"{path} is damaged" in done.json["what"]


def test_a_warning_names_its_host_once(run, workspace):
    """`ct200:` stands before what a start-up file prints, not `ct200: ct200:`."""
    noisy = ["sh", "-c", 'echo welcome; exec "$@"', "sh"]
    (workspace / "deploy.toml").write_text(
        f'[hosts.ct200]\ntransport = "local"\npython = "{sys.executable}"\nexec_prefix = {json.dumps(noisy)}\n'
    )
    done = run("status", "--host", "ct200")
    assert "warning: ct200: a start-up file of the login shell prints 'welcome'" in done.err


def test_doctor_examines_a_host_whatever_is_damaged_here(run, patched_root, workspace):
    """A bundle or a manifest that cannot be read is a warning: the host can be looked at without it."""
    for name in ("build/*/bundle.json", "snapshots/*/manifest.json"):
        next(workspace.glob(name)).write_text("{")
    done = run("doctor", "--root", str(patched_root), "--json")
    assert done.json["command"] == "doctor", done.err
    assert done.err.count("is damaged; its files are left out") == 2


def test_json_goes_through_a_stream_that_only_takes_ascii(run, workspace):
    """A name with an umlaut in an error is escaped, not a UnicodeEncodeError."""
    (workspace / "deploy.toml").write_text('[hosts.ct200]\n"prüf" = "ü"\n', encoding="utf-8")
    done = run("status", "--host", "ct200", "--json", PYTHONIOENCODING="ascii")
    assert done.code == 2, done.err
    assert "prüf" in done.json["what"]


@pytest.mark.parametrize("verbose", [False, True])
def test_a_fault_of_our_own_is_an_error_like_any_other(monkeypatch, patched_root, verbose):
    """Exit 1 and JSON; the traceback shows with -vv only."""

    def fail(_transport):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(deploy, "status", fail)
    flags = ["-vv"] if verbose else []
    done = CliRunner().invoke(cli, ["status", "--root", str(patched_root), "--json", *flags])
    assert done.exit_code == 1
    assert "fault in ddtree-overlay: ZeroDivisionError: by nothing" in json.loads(done.stdout)["what"]
    assert ("Traceback" in done.stderr) == verbose
