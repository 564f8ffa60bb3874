# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import io
import json
import re
import sys
import tarfile
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import small

from ddtree_overlay import answers, export, patching
from ddtree_overlay.cli import cli
from ddtree_overlay.hosts import protocol
from ddtree_overlay.manifest import canonical_json, sha256
from ddtree_overlay.remote import remarks, standalone


@pytest.fixture(scope="module")
def patched():
    return patching.build_release(small.RELEASE, small.base(), small.overlay())


@pytest.fixture(scope="module")
def files(patched):
    return export.export_files(patched.bundle, patched.files)


def test_the_manifest_says_what_every_file_is_and_replaces(patched, files):
    """Path, digest before and after, size and mode of each; and the ids by which hosts are compared."""
    manifest = json.loads(files["manifest.json"])
    assert (manifest["schema"], manifest["release"]) == (1, "0.5.11")
    assert (manifest["overlay_id"], manifest["base_id"]) == (patched.bundle.overlay_id, patched.bundle.base_id)
    rows = {f["path"]: (f["base_sha256"], f["sha256"], f["size"], f["mode"]) for f in manifest["files"]}
    base = small.base()
    assert rows == {
        p: (sha256(base[p]) if p in base else None, sha256(d), len(d), "0644") for p, d in patched.files.items()
    }
    assert {p: files[f"layer/{p}"] for p in rows} == patched.files
    assert manifest["contents"] == {p: sha256(d) for p, d in files.items() if p != "manifest.json"}


def test_equal_bundles_give_equal_bytes(patched):
    """Whatever the order of the files in memory: a layer can be compared, cached and signed."""
    backwards = dict(reversed(patched.files.items()))
    one = export.export_files(patched.bundle, patched.files, dockerfile=True)
    two = export.export_files(patched.bundle, backwards, dockerfile=True)
    assert list(one.items()) == list(two.items())
    assert export.to_tar(one) == export.to_tar(dict(reversed(two.items())))


def test_a_tar_file_tells_nothing_about_who_made_it_and_when(patched, files):
    """One folder at its top, names in order, no time, no owner; apply.py alone can be executed."""
    with tarfile.open(fileobj=io.BytesIO(export.to_tar(files))) as archive:
        members = archive.getmembers()
    names = [m.name for m in members]
    assert names == sorted(names)
    assert {n.partition("/")[0] for n in names} == {f"ddtree-overlay-{patched.bundle.overlay_id}"}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.isreg()) for m in members} == {(0, 0, 0, "", "", True)}
    assert [n for n, m in zip(names, members, strict=True) if m.mode != 0o644] == [n for n in names if "apply.py" in n]


def test_an_earlier_export_is_known_by_its_manifest(files):
    """Its digests are given back for a manifest that export wrote, and for nothing else."""
    own = files["manifest.json"]
    assert export.recorded(own) == {p: sha256(d) for p, d in files.items()}
    for other in (b"", b"{}", b"[]", b"\xff", own.replace(b"export", b"import"), own + b"\n", b'{"kind": "x"}'):
        assert export.recorded(other) == {}


def test_only_a_tar_file_that_export_wrote_is_one(files):
    """Another tar file, a longer one and a compressed one are somebody else's."""
    own = export.to_tar(files)
    assert export.is_tar(own)
    with_more = {**files, "notes.txt": b"mine"}
    for other in (b"", own[:-1], own + b"\0", export.to_tar({"manifest.json": b'{"overlay_id": "x"}'})):
        assert not export.is_tar(other)
    assert not export.is_tar(export.to_tar(with_more))


@given(st.dictionaries(st.text("abc/.é ", min_size=1, max_size=120).filter(lambda p: p[-1] != "/"), st.binary()))
def test_any_layer_goes_into_a_tar_file_and_is_found_there(layer):
    """Whatever the names and bytes are, they come out as they went in."""
    layer = {**layer, "manifest.json": canonical_json({"overlay_id": "0" * 12})}
    with tarfile.open(fileobj=io.BytesIO(export.to_tar(layer))) as archive:
        found = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive}
    assert found == layer


def test_exit_codes_of_the_script_are_those_of_the_command_line():
    """Each kind of refusal ends with the code that it has over SSH."""
    codes = {kind: error.exit_code for kind, error in protocol._KINDS.items()}
    assert {kind: standalone.EXIT_CODES.get(kind, standalone.FAILED) for kind in codes} == codes


def test_the_script_is_python_3_9_and_standard_library_only():
    """It is read by the host's interpreter, whatever that is."""
    tree = ast.parse(
        (resources.files("ddtree_overlay") / "exported/apply.py").read_text("utf-8"), feature_version=(3, 9)
    )
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert all(n.partition(".")[0] in sys.stdlib_module_names for n in names), names


def test_what_only_an_export_needs_is_not_sent_over_ssh():
    """Every call carries the agent's modules; these are not among them, but they are in an export."""
    _, modules = protocol._agent_source()
    assert {"agent", "pushing"} <= json.loads(modules).keys()
    assert not {"standalone", "remarks", "options", "loader"} & json.loads(modules).keys()


@pytest.mark.parametrize("ephemeral", [True, False])
def test_an_overlay_in_a_container_is_said_to_be_lost(ephemeral):
    """Only where the package lies in the layer that goes with the container, and with what becomes of it."""
    container = {"ephemeral": ephemeral, "kind": "docker", "filesystem": "overlay"}
    found = remarks.on_host({"unfinished": "", "root": "/x/sglang", "container": container}, "it is lost; export it")
    assert found == ["/x/sglang lies in the throw-away layer of a docker container: it is lost; export it"] * ephemeral


def test_a_push_into_a_container_names_a_command_that_exists():
    """The warning ends with the way to keep the overlay, for this very target."""
    _, _, command = answers.fate("--host ct200").rpartition("ddtree-overlay ")
    words = command.split()
    with cli.commands[words[0]].make_context(words[0], words[1:]) as context:
        assert (context.params["host"], context.params["form"]) == (("ct200",), "dockerfile")


def test_no_advice_of_the_script_is_about_deploy_toml(files, tmp_path):
    """Whoever runs apply.py has none: the agent's next steps that name it are told in the script's words."""
    local = standalone.Export(tmp_path, json.loads(files["manifest.json"])).local
    sources = [f.read_text("utf-8") for f in (resources.files("ddtree_overlay") / "remote").iterdir() if f.is_file()]
    steps = [s for text in sources for s in re.findall(r'(?<=")(?:correct|set) [^"]* deploy\.toml[^"]*(?=")', text)]
    assert len(steps) >= 6
    assert [s for s in steps if "deploy.toml" in local(s)] == []


def test_a_refusal_has_one_name_over_ssh_and_on_the_machine():
    """`error` in the JSON of `apply.py` is what the command line says."""
    named = {kind: error.__name__ for kind, error in protocol._KINDS.items()}

    assert {kind: standalone.NAMES.get(kind, "OverlayError") for kind in named} == named
    assert {k: e.exit_code for k, e in protocol._KINDS.items() if e.exit_code != 1} == standalone.EXIT_CODES
