# SPDX-License-Identifier: Apache-2.0
"""Every refusal that a user can meet: exit code, message, next step, and the same as JSON."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.commands import Ran, clean_environ, refused
from tests.support.trees import differences, listing
from tests.support.wheels import CACHE

from ddtree_overlay import deploy, errors
from ddtree_overlay.cli import cli
from ddtree_overlay.patching import SUPPORTED_RELEASES
from ddtree_overlay.wheels import wheel_of


RELEASE = "0.5.11"
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.OverlayError)]

#: The keys of every failure.
FAILED = ["schema", "command", "ok", "exit_code", "error", "what", "why", "next"]


def test_unknown_host_is_refused_with_a_suggestion(run):
    """Exit 2, the likely name and the known ones."""
    refused(run("status", "--host", "ct20"), 2, "unknown host 'ct20' (did you mean 'ct200'?)")


def test_unknown_config_key_is_refused_with_a_suggestion(run, workspace):
    """Exit 2; a typing mistake in deploy.toml does not go unnoticed."""
    (workspace / "deploy.toml").write_text("[hosts.ct200]\nprot = 22\n")

    refused(run("status", "--host", "ct200"), 2, "unknown key 'prot' in [hosts.ct200] (did you mean 'port'?)")


def test_broken_toml_is_refused_with_file_and_line(run, workspace):
    """Exit 2, `file:line:` first."""
    (workspace / "deploy.toml").write_text("[hosts.ct200]\nport = \n")

    refused(run("status", "--host", "ct200"), 2, f"{workspace / 'deploy.toml'}:2: broken TOML")


def test_missing_config_file_is_refused(run, tmp_path):
    """A file named with --config must exist."""
    refused(run("status", "--host", "ct200", "--config", str(tmp_path / "none.toml")), 2, "cannot read")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("status",), "no target was named"),
        (("snapshot", "--host", "ct200", "--release", "0.5.11"), "--host and --release exclude each other"),
        (("push", "--release", "0.5.11"), "--release"),
        (("snapshot", "--release", "0.5.11", "--python", "x"), "--python does not go with --release"),
        (("status", "--root", "/nonexistent/sglang"), "no such folder"),
        (("status", "--host", "ct200", "--timeout", "0"), "--timeout"),
        (("push", "--host", "ct200", "--lock-wait", "nan"), "nan is not a number of seconds"),
        (("rollback", "--host", "ct200", "--lock-wait", "inf"), "inf is not in the range"),
        (("confirm", "--host", "ct200", "--lock-wait", "inf"), "inf is not in the range"),
        (("status", "--host", "ct200", "--workdir", "/nonexistent"), "no such folder"),
        (("stauts",), "stauts"),
        (("--host", "ct200", "status"), "--host stands before the verb"),
        (("status", "--host", "root@ct200"), "a host is named by its table in deploy.toml"),
    ],
)
def test_bad_arguments_are_refused(run, words, text):
    """Exit 2 on stderr, and the same error as one JSON object with --json."""
    refused(run(*words), 2, text)
    done = run(*words, "--json")
    assert done.code == 2
    assert done.json["schema"] == 1
    assert done.json["exit_code"] == 2
    assert text in done.json["what"]
    assert list(done.json) == FAILED
    assert done.json["command"] == next((word for word in words if word in cli.commands), None)


def test_a_missing_option_is_named_in_one_line(run):
    """click writes each choice on a line of its own, behind a tab."""
    refused(run("export", "--release", "0.5.11", "--out", "x"), 2, "Missing option '--format'. Choose from: dir, tar")
    refused(run("export", "--release", "0.5.11", "--out", "x"), 2, "next: ddtree-overlay export --help\n")


@pytest.mark.parametrize("flags", [(), ("--python", "/nope")], ids=["file", "flag"])
def test_the_interpreter_is_to_be_named_where_it_was(run, workspace, flags):
    """A flag goes before deploy.toml, which then is not the place to correct it."""
    (workspace / "deploy.toml").write_text('[hosts.near]\ntransport = "local"\npython = "/no/such"\n')
    step = "next: name with --python the interpreter" if flags else "next: set `python` in deploy.toml to the interp"
    refused(run("status", "--host", "near", *flags), 1, step)


def test_a_folder_names_its_interpreter_by_the_flag(run, site):
    """No table of deploy.toml belongs to it."""
    where = ("--root", str(site / "sglang"), "--python", "/nope")
    refused(run("status", *where), 1, "next: name with --python the interpreter")


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("flags", [(), ("--json",), ("--quiet",)], ids=["plain", "json", "quiet"])
def test_every_error_class_decides_the_exit_code(monkeypatch, error, flags, workspace):
    """No failing path ends with 0, with or without --json (patch-package#143, composer-patches#626)."""

    def fail(_transport):
        raise error("it broke", why="because", next_step="try this")

    monkeypatch.setattr(deploy, "status", fail)
    done = CliRunner().invoke(cli, ["status", "--host", "ct200", "--workdir", str(workspace), *flags])

    assert done.exit_code == error.exit_code != 0
    assert error.exit_code in errors.EXIT_CODES
    assert "error: it broke\n  why:  because\n  next: try this\n" in done.stderr
    assert bool(done.stdout) == ("--json" in flags)
    if done.stdout:
        said = json.loads(done.stdout)
        assert list(said) == FAILED
        assert (said["command"], said["error"]) == ("status", error.__name__)


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_failing_verb_names_itself(run, verb):
    """`command` is in the JSON of a failure as in that of a success."""
    done = run(verb, "--host", "nobody", "--json")

    assert done.code == 2
    assert list(done.json) == FAILED
    assert done.json["command"] == verb
    assert done.json["error"] in {"ConfigError", "UsageError"}


def test_verbs_that_need_a_snapshot_name_the_command(run):
    """A user who skips a step gets the next command."""
    refused(run("patch", "--host", "ct200"), 1, "next: ddtree-overlay snapshot --host ct200\n")
    refused(run("verify", "--release", "0.5.11"), 1, "next: ddtree-overlay snapshot --release 0.5.11\n")


def test_push_without_a_bundle_names_both_commands(run, site):
    """A user who skips two steps gets both."""
    root = site / "sglang"

    refused(
        run("push", "--root", str(root), "--yes"),
        1,
        f"next: ddtree-overlay snapshot --root {root} && ddtree-overlay patch --root {root}",
    )


def test_advised_commands_can_be_pasted_into_a_shell(run, patched_root, tmp_path, workspace):
    """A path with blanks is quoted, and what says where to work is not forgotten; the host's own words included."""
    odd = tmp_path / "my packages"
    odd.symlink_to(patched_root.parent)
    where = ("--root", f"{odd}/sglang", "--python", sys.executable, "--workdir", str(workspace))
    pasted = f"--root '{odd}/sglang' --python {sys.executable} --workdir {workspace}"
    shutil.rmtree(workspace / "snapshots")

    refused(run("patch", *where), 1, f"next: ddtree-overlay snapshot {pasted}\n")
    refused(run("rollback", *where, "--to", "x"), 2, f"next: ddtree-overlay history {pasted}")
    refused(run("rollback", *where, "--to", "d-0009"), 1, f"next: ddtree-overlay history {pasted}")


def test_verify_without_a_bundle_names_patch(run, site):
    """A snapshot alone cannot be verified."""
    root = str(site / "sglang")
    assert run("snapshot", "--root", root).code == 0

    refused(run("verify", "--root", root), 1, f"next: ddtree-overlay patch --root {root}\n")


def test_push_without_a_terminal_is_refused(run, patched_root, site):
    """Exit 2 and the same command with --yes; stdin is never read for an answer."""
    before = listing(site)

    done = run("push", "--root", str(patched_root), stdin="y\n")

    refused(done, 2, "standard input is not a terminal", f"next: ddtree-overlay push --root {patched_root} --yes")
    assert "Plan: " in done.out
    assert not differences(before, listing(site))


def test_workspace_that_cannot_be_written_is_refused(run, site, workspace):
    """Exit 1 with the path, no traceback, when this machine is the problem."""
    (workspace / "snapshots").write_text("a file where a folder must be")

    refused(run("snapshot", "--root", str(site / "sglang")), 1, str(workspace / "snapshots"))


def test_folder_without_sglang_is_refused(run, tmp_path):
    """Exit 1 when the folder holds no SGLang."""
    (tmp_path / "empty").mkdir()

    refused(run("snapshot", "--root", str(tmp_path / "empty")), 1, "sglang")


def test_sglang_without_dflash_is_refused(run, site):
    """Exit 1, naming the version and the supported ones (0.5.10 has no DFlash)."""
    for name in ("dflash_worker.py", "dflash_worker_v2.py"):
        (site / "sglang/srt/speculative" / name).unlink(missing_ok=True)
    info = site / "sglang-0.5.11.dist-info"
    info.rename(site / "sglang-0.5.10.dist-info")
    for name, pattern, text in (
        ("METADATA", "Version: 0.5.11", "Version: 0.5.10"),
        ("RECORD", r".*/dflash_worker(_v2)?\.py,.*\n", ""),
    ):
        file = site / "sglang-0.5.10.dist-info" / name
        changed = re.sub(pattern, text, file.read_text(), count=1)
        # The file is a link to the package cache.
        file.unlink()
        file.write_text(changed)

    refused(run("snapshot", "--root", str(site / "sglang")), 1, "0.5.10", "0.5.11")


@pytest.mark.parametrize(
    ("version", "text"),
    [("0.5.10", "has no DFlash"), *((v, "is not supported") for v in ("0.9.9", "", "banana", "../x"))],
)
def test_unsupported_release_is_refused(run, workspace, version, text):
    """Exit 1 with the supported ones, before pip is asked: it would list every version that it knows."""
    for verb in ("snapshot", "patch", "verify"):
        done = run(verb, "--release", version)
        refused(
            done,
            1,
            f"SGLang {version} {text}",
            f"supported: {', '.join(SUPPORTED_RELEASES)}",
            f"--release {SUPPORTED_RELEASES[-1]}",
        )
        assert "pip " not in done.err.replace(f"pip install sglang=={SUPPORTED_RELEASES[-1]}", "")
    assert not (workspace / ".cache").exists()


@pytest.mark.parametrize("words", [("snapshot",), ("verify", "--try"), ("patch", "--try"), ("patch",)])
def test_release_with_a_v_is_told_which_was_meant(run, words):
    """What is advised can be typed as it stands."""
    done = run(*words, "--release", "v0.5.17")

    refused(done, 1, "SGLang v0.5.17 is not supported (did you mean 0.5.17?)", "next: --release 0.5.17\n")


@pytest.mark.usefixtures("project_cache")
def test_stale_patches_are_a_difference(run, workspace):
    """Exit 3 when patches/ is not what the edits give, 0 once it is, and --check writes nothing."""
    assert run("snapshot", "--release", "0.5.11").code == 0
    refused(run("patch", "--release", "0.5.11", "--check"), 3, "missing: ", "ddtree-overlay patch --release 0.5.11")
    assert not (workspace / "patches").exists()
    assert not (workspace / "build").exists()
    assert run("patch", "--release", "0.5.11").code == 0
    assert run("patch", "--release", "0.5.11", "--check").code == 0
    one = next((workspace / "patches/sglang-0.5.11").glob("*.patch"))
    one.write_bytes(one.read_bytes() + b"\n")

    refused(run("patch", "--release", "0.5.11", "--check"), 3, f"stale: {one}")


@pytest.fixture
def project_cache(workspace: Path) -> None:
    """Give the workspace the downloaded wheel of the project."""
    folder = workspace / ".cache/wheels"
    folder.mkdir(parents=True)
    wheel = wheel_of(RELEASE, CACHE)
    (folder / wheel.name).symlink_to(wheel)


def test_held_lock_is_refused(run, patched_root, site):
    """Exit 5 while another deployment holds the lock, and the way to wait for it."""
    assert run("push", "--root", str(patched_root), "--yes").code == 0
    before = listing(site)
    with open(site / ".ddtree-overlay/lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(run("rollback", "--root", str(patched_root), "--yes"), 5, "--lock-wait")

    assert not differences(before, listing(site))
    assert run("rollback", "--root", str(patched_root), "--yes").code == 0


def test_read_only_install_is_refused(patched_root, site, workspace, tmp_path):
    """Exit 1 before anything is tried, in a mount namespace of its own where the package is mounted read-only."""
    mount = f"mount --bind {site} {site} && mount -o remount,ro,bind {site}"
    words = ["unshare", "--mount", "sh", "-c", f'{mount} || exit 77; exec "$@"', "sh"]
    command = [*words, sys.executable, "-m", "ddtree_overlay", "push", "--root", str(patched_root), "--yes"]
    options = {"cwd": workspace, "env": clean_environ(tmp_path / "home"), "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=240, **options)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        assert not os.environ.get("CI"), "CI runs as root, where a private mount must be possible"
        pytest.skip("a private mount needs root")

    refused(Ran(done.returncode, done.stdout, done.stderr), 1, "read-only")


def test_exit_code_stays_right_when_stdout_is_closed(workspace):
    """A closed stdout, or a reader that has gone, changes nothing about the verdict (patch-package#241)."""
    base = f"cd {workspace} && {sys.executable} -m ddtree_overlay"
    for tail in (">&-", "> /dev/null", "| true"):
        for words, code in (
            ("status --host ct20", 2),
            ("status --host ct20 --json", 2),
            ("--version", 0),
            ("--help", 0),
        ):
            command = f"set -o pipefail; {base} {words} {tail}; exit ${{PIPESTATUS[0]}}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
            assert done.returncode == code, (words, tail, done.stderr)
            assert "Traceback" not in done.stderr
            assert "BrokenPipe" not in done.stderr
