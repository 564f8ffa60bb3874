# SPDX-License-Identifier: Apache-2.0
"""`export`, and what it writes at work: apply.py under a real interpreter, the Dockerfile's lines in a real root."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import Ran, clean_environ
from tests.support.trees import differences, listing


@pytest.fixture
def ready(prepared, workspace, release_site):
    """The options of a target that is patched in the workspace and that nobody changes."""
    for name in ("snapshots", "build"):
        shutil.copytree(prepared / name, workspace / name)
    return ("--root", str(release_site / "sglang"))


@pytest.fixture(scope="session")
def one_export(prepared, release_site, tmp_path_factory):
    """An export to copy from, with a Dockerfile."""
    folder = tmp_path_factory.mktemp("export")
    words = ["export", "--root", release_site / "sglang", "--format", "dockerfile", "--out", folder / "export"]
    command = [sys.executable, "-m", "ddtree_overlay", *words]
    subprocess.run(command, cwd=prepared, env=clean_environ(folder), check=True, capture_output=True, timeout=60)
    return folder / "export"


@pytest.fixture
def exported(one_export, tmp_path):
    """An export of one's own."""
    return Path(shutil.copytree(one_export, tmp_path / "export"))


@pytest.fixture
def package(site):
    """The package folder that apply.py works on."""
    return site / "sglang"


@pytest.fixture
def apply(exported, package, tmp_path):
    """Run apply.py on `package`, as a process of its own."""

    def call(verb: str, *words: str, python: tuple[str, ...] = (sys.executable,), cwd: Path = Path("/")) -> Ran:
        done = subprocess.run(
            [*python, exported / "apply.py", verb, "--root", package, *words],
            cwd=cwd,
            env=clean_environ(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call


# Writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dir", "tar", "dockerfile"])
def test_an_export_is_written_once_and_then_left_alone(run, ready, tmp_path, form):
    """The same bundle again changes no byte and no time stamp, so a build cache stays valid."""
    words = ("export", *ready, "--format", form, "--out", str(tmp_path / "out"), "--json")
    first = run(*words)
    assert (first.code, first.json["changed"], first.json["out"]) == (0, True, str(tmp_path / "out")), first.err
    before, stamp = listing(tmp_path), (tmp_path / "out").stat()
    again = run(*words)
    assert (again.code, again.json["changed"]) == (0, False)
    assert differences(before, listing(tmp_path)) == []
    assert ((tmp_path / "out").stat().st_ino, (tmp_path / "out").stat().st_mtime_ns) == (
        stamp.st_ino,
        stamp.st_mtime_ns,
    )


def test_an_export_can_be_read_by_everybody_whatever_the_umask(run, ready, tmp_path):
    """COPY keeps the modes: with private folders an image whose USER is not root could not run it (OpenShell#475)."""
    before = os.umask(0o077)
    try:
        assert run("export", *ready, "--format", "dockerfile", "--out", str(tmp_path / "out")).code == 0
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in [tmp_path / "out", *(tmp_path / "out").rglob("*")] if p.is_dir()}
    assert modes == {0o755}


def test_an_export_of_another_kind_replaces_an_earlier_one(run, ready, exported):
    """What an export wrote may be replaced by an export, and nothing of the old one stays."""
    assert (exported / "Dockerfile").is_file()
    assert run("export", *ready, "--out", str(exported), "--format", "dir").code == 0
    assert {p.name for p in exported.iterdir()} == {"apply.py", "ddtree_agent", "layer", "manifest.json"}
    assert sorted(exported.parent.glob(".export*")) == []


def spoil_with_a_file(folder):
    (folder / "notes.txt").write_text("mine")


def spoil_with_an_edit(folder):
    (folder / "apply.py").write_text("# mine\n")


def spoil_with_an_empty_folder(folder):
    (folder / "mine").mkdir()


def spoil_with_a_link(folder):
    (folder / "apply.py").rename(folder.parent / "apply.py")
    (folder / "apply.py").symlink_to("../apply.py")


def spoil_the_mark(folder):
    (folder / "manifest.json").write_text("{}")


def be_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("mine")


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_with_a_file,
        spoil_with_an_edit,
        spoil_with_an_empty_folder,
        spoil_with_a_link,
        spoil_the_mark,
        be_a_file,
    ],
)
def test_what_no_export_wrote_is_never_replaced(run, ready, exported, spoil):
    """A file, an edit, a folder or a link of somebody else's: exit 1, named, and nothing is touched."""
    spoil(exported)
    form = "tar" if spoil is be_a_file else "dir"
    before = listing(exported.parent)
    done = run("export", *ready, "--format", form, "--out", str(exported))
    assert done.code == 1, done.err
    assert f"{exported} is no earlier export" in done.err
    assert "name another --out" in done.err
    assert differences(before, listing(exported.parent)) == []


@pytest.mark.parametrize("form", ["dockerfile", "tar"])
def test_an_export_is_written_whole_or_not_at_all(run, workspace, ready, tmp_path, form):
    """A write that fails half-way leaves the earlier export as it was, and no temporary behind."""
    out = tmp_path / "out"
    first = "dir" if form == "dockerfile" else "tar"
    assert run("export", *ready, "--format", first, "--out", str(out)).code == 0
    if form == "tar":
        # An export of another version: the same with other bytes.
        out.write_bytes(out.read_bytes().replace(b"ddtree-overlay 0.1.0", b"ddtree-overlay 9.9.9"))
    before = listing(tmp_path)
    command = [sys.executable, "-m", "ddtree_overlay", "export", *ready, "--format", form, "--out", out]
    done = subprocess.run(
        ["prlimit", "--fsize=20000", *command],
        cwd=workspace,
        env=clean_environ(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert differences(before, listing(tmp_path)) == []


def test_a_snapshot_without_a_bundle_is_refused_with_the_next_command(run, workspace, ready):
    """Exit 1: `patch` comes first."""
    shutil.rmtree(workspace / "build")
    done = run("export", *ready, "--format", "dir", "--out", "x")
    assert done.code == 1
    assert f"run ddtree-overlay patch --root {ready[1]}" in done.err


def test_a_missing_parent_folder_is_refused(run, ready):
    """Exit 2, with the command that makes it."""
    done = run("export", *ready, "--format", "tar", "--out", "/nonexistent/a b/x.tar")
    assert done.code == 2
    assert "next: mkdir -p '/nonexistent/a b'" in done.err


def test_several_hosts_have_one_export_or_none(run, workspace, prepared, tmp_path):
    """Hosts with one base share an export; with different ones nothing is written, instead of whichever came last."""
    with (workspace / "deploy.toml").open("a") as stream:
        stream.write('[hosts.ct201]\naddress = "127.0.0.1"\n')
    shutil.copytree(prepared / "build", workspace / "build")
    for name in ("ct200", "ct201"):
        shutil.copytree(next((prepared / "snapshots").iterdir()), workspace / "snapshots" / name)
    words = ("export", "--host", "ct200", "--host", "ct201", "--format", "tar", "--out", str(tmp_path / "x.tar"))
    done = run(*words)
    assert done.code == 0, done.err
    assert "ct200, ct201: overlay" in done.out
    (tmp_path / "x.tar").unlink()
    manifest = workspace / "snapshots/ct201/manifest.json"
    other = json.loads(manifest.read_text())
    patched = json.loads(next((workspace / "build").glob("*/bundle.json")).read_text())["changes"]
    edited = next(f for f in other["files"] if f["path"] == "srt/server_args.py")
    assert edited["path"] in {c["path"] for c in patched}
    text = (workspace / "snapshots/ct201/files/srt/server_args.py").read_bytes() + b"# other\n"
    (workspace / "snapshots/ct201/files/srt/server_args.py").write_bytes(text)
    edited |= {"sha256": hashlib.sha256(text).hexdigest(), "size": len(text)}
    manifest.write_text(json.dumps(other))
    assert run("patch", "--host", "ct201").code == 0
    done = run(*words)
    assert done.code == 2, done.err
    assert "these hosts need different overlays" in done.err
    assert not (tmp_path / "x.tar").exists()


# apply.py --------------------------------------------------------------------------------------------------------


def test_apply_does_the_whole_way_and_leaves_no_byte_behind(apply, run, package, exported):
    """The same transaction as over SSH: the command line sees its deployment, and its rollback takes it away."""
    site = package.parent
    pristine, export_before = listing(site), listing(exported)
    dry = apply("push", "--dry-run")
    assert (dry.code, dry.json["changed"], dry.json["would_change"]) == (0, False, True), dry.err
    assert differences(pristine, listing(site)) == []

    done = apply("push", "--operator", "ann@desk")
    assert (done.code, done.json["schema"], done.json["changed"]) == (0, 1, True), done.err
    assert (done.json["deployment"]["id"], done.json["deployment"]["operator"]) == ("d-0001", "ann@desk")
    assert "pushed as d-0001" in done.err
    seen = run("status", "--root", str(package), "--json").json
    assert (seen["state"], seen["overlay_id"]) == ("applied", done.json["overlay_id"])
    assert apply("status").json["state"] == "applied"

    pushed = listing(site)
    again = apply("push")
    assert (again.code, again.json["changed"]) == (0, False)
    assert differences(pushed, listing(site)) == []
    assert [d["operator"] for d in apply("history").json["deployments"]] == ["ann@desk"]

    back = apply("rollback", "--undo", "d-0001")
    assert (back.code, back.json["changed"], back.json["overlay_id"]) == (0, True, None), back.err
    assert apply("rollback").json["changed"] is False
    assert apply("rollback", "--purge").code == 0
    assert differences(pristine, listing(site)) == []
    assert differences(export_before, listing(exported)) == []


def test_a_drifted_file_is_a_conflict(apply, package):
    """Exit 4, the file named, nothing written; the next step can be typed as it is."""
    target = package / "srt/server_args.py"
    text = target.read_bytes() + b"# mine\n"
    target.unlink()
    target.write_bytes(text)
    before = listing(package.parent)
    done = apply("push")
    assert (done.code, done.json["ok"], done.json["error"], done.json["changed"]) == (4, False, "conflict", False)
    assert "srt/server_args.py is not as expected" in done.err
    assert differences(before, listing(package.parent)) == []


def test_another_live_deployment_is_not_undone(apply, exported, package):
    """Whoever undoes his own push does not undo the next one's (exit 4), and is told how to look."""
    assert apply("push").code == 0
    done = apply("rollback", "--undo", "d-0007")
    assert (done.code, done.json["what"]) == (4, "d-0001 is live, not d-0007")
    assert done.json["next"] == f"{sys.executable} {exported}/apply.py history --root {package}"
    assert apply("status").json["state"] == "applied"


def test_a_held_lock_ends_with_5(apply, package):
    """The kernel's lock is the one that a push over SSH holds."""
    state = package.parent / ".ddtree-overlay"
    state.mkdir()
    with (state / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        json.dump({"pid": 4711, "operator": "bob@desk", "doing": "push", "since": 0}, stream)
        stream.flush()
        done = apply("push", "--lock-wait", "0.2")
    assert (done.code, done.json["error"]) == (5, "locked")
    assert "bob@desk" in done.err


@pytest.mark.parametrize(
    ("name", "how"), [("layer/srt/server_args.py", "gone"), ("ddtree_agent/swap.py", "cut"), ("manifest.json", "cut")]
)
def test_a_damaged_export_does_not_run(apply, exported, package, name, how):
    """A copy that was cut short is refused before any of it runs: exit 1, and an answer in JSON all the same."""
    file = exported / name
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[: len(data) // 2])
    before = listing(package.parent)
    done = apply("push")
    assert (done.code, done.json["ok"], done.json["changed"]) == (1, False, False)
    assert "this export is damaged" in done.err
    assert differences(before, listing(package.parent)) == []


def test_nothing_beside_the_script_or_in_the_current_folder_is_imported(apply, exported, tmp_path):
    """A module of that name there is neither the standard library's nor the server's SGLang (uv#2500)."""
    for folder in (exported, tmp_path / "cwd"):
        folder.mkdir(exist_ok=True)
        for name in ("json.py", "argparse.py", "sglang.py"):
            (folder / name).write_text("raise SystemExit('imported from the wrong place')\n")
    for python in ((sys.executable,), (sys.executable, "-I"), (sys.executable, "-B", "-S")):
        done = apply("status", python=python, cwd=tmp_path / "cwd")
        assert done.code == 0, done.err


def test_without_sglang_the_interpreter_is_named(exported, tmp_path):
    """Exit 1; the advice is for this machine and not about deploy.toml."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", exported / "apply.py", "push"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1
    step = json.loads(done.stdout)["next"]
    assert step.startswith("run apply.py with the interpreter that starts the server")
    assert "deploy.toml" not in step
    assert tmp_path


# Dockerfile ------------------------------------------------------------------------------------------------------


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The Dockerfile as pairs of instruction and argument."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def build(context: Path, root: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What a container engine would do with the Dockerfile, in a root folder that plays the image.

    The root is this machine's in a private mount namespace, with an empty /opt; changes to installs are real.
    """
    known = {"ARG", "FROM", "COPY", "RUN"}
    ignored = (context / ".dockerignore").read_text().split()
    arguments: dict[str, str] = {}
    script = ["set -e", f"mount --rbind / {root}", f"mount -t tmpfs tmpfs {root}/opt"]
    for word, rest in instructions(context / "Dockerfile"):
        assert word in known, word
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = given.get(name, default)
        elif word == "FROM":
            assert rest == "${BASE}"
            assert arguments.pop("BASE") == "image"
        elif word == "COPY":
            source, target = rest.split()
            assert source == "."
            script += [f"mkdir -p {root}{target}", f"cp -R {shlex.quote(str(context))}/. {root}{target}"]
            script += [f"rm {root}{target}{name}" for name in ignored]
        else:
            names = [f"{name}={shlex.quote(value)}" for name, value in arguments.items()]
            script.append(f"env {' '.join(names)} chroot {root} /bin/sh -c {shlex.quote(rest)}")
    script.append(given.get("THEN", "true"))
    words = ["unshare", "-m", "--propagation", "private", "sh", "-c", "\n".join(script)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def context(exported, tmp_path):
    """A build context, and a folder to be the image's root."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        if os.environ.get("CI"):
            pytest.fail("private mount namespaces are not available")
        pytest.skip("private mount namespaces need root and unshare")
    (tmp_path / "root").mkdir()
    return exported


def test_the_dockerfile_builds_and_its_image_can_be_rolled_back(context, host_python, tmp_path):
    """Its own lines, run in a root folder: the overlay is in the image, with the state that leads back."""
    site = next((host_python.parents[1] / "lib").glob("python*/site-packages"))
    pristine = listing(site)
    given = {"BASE": "image", "PYTHON": str(host_python)}
    done = build(context, tmp_path / "root", given)
    assert done.returncode == 0, done.stderr
    files = json.loads((context / "manifest.json").read_text())["files"]
    assert {f["path"]: (site / "sglang" / f["path"]).read_bytes() for f in files} == {
        f["path"]: (context / "layer" / f["path"]).read_bytes() for f in files
    }
    again = f"chroot {tmp_path}/root {host_python} /opt/ddtree-overlay/apply.py rollback --purge"
    done = build(context, tmp_path / "root", {**given, "THEN": again})
    assert done.returncode == 0, done.stderr
    assert differences(pristine, listing(site)) == []


def test_the_build_fails_on_another_sglang(context, host_python, tmp_path):
    """A base that differs by one byte stops the build, and the image's files are as they were (Hyperloom#516)."""
    site = next((host_python.parents[1] / "lib").glob("python*/site-packages"))
    target = site / "sglang/srt/server_args.py"
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data + b"\n")
    before = listing(site)
    done = build(context, tmp_path / "root", {"BASE": "image", "PYTHON": str(host_python)})
    assert done.returncode == 4, done.stderr
    assert "srt/server_args.py is not as expected" in done.stderr
    assert differences(before, listing(site)) == []
