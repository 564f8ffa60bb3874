# SPDX-License-Identifier: Apache-2.0
"""Which SGLang is found: the one that the interpreter imports, however it is installed, and none by guessing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.installs import Install, bundle_for, new_venv, tiny_package
from tests.support.trees import differences, listing

from ddtree_overlay import deploy, snapshots
from ddtree_overlay.config import Host
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts.transport import open_transport


#: What a release with DFlash has.
DFLASH = {"srt/__init__.py": b"", "srt/speculative/dflash_worker.py": b"DFLASH = 1\n"}

FINDER = """
import sys, importlib.util
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang":
            where = {root!r}
            init = where + "/__init__.py"
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[where])
def install():
    sys.meta_path.append(Finder)
"""


def checkout(folder: Path) -> Path:
    """A source checkout as SGLang has it: the package lies in `python/sglang`."""
    tiny_package(folder / "python", "0.5.11")
    shutil.move(folder / "python/sglang-0.5.11.dist-info", folder / "dist-info")
    return folder / "python"


def editable_metadata(site: Path, folder: Path) -> None:
    info = site / "sglang-0.5.11.dist-info"
    shutil.copytree(folder / "dist-info", info)
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{folder}", "dir_info": {"editable": True}}))


def pth(tmp_path, site):
    source = checkout(tmp_path / "checkout")
    editable_metadata(site, tmp_path / "checkout")
    (site / "__editable__.sglang.pth").write_text(f"{source}\n")
    return source / "sglang"


def finder_hook(tmp_path, site):
    source = checkout(tmp_path / "checkout")
    editable_metadata(site, tmp_path / "checkout")
    (site / "__editable___sglang_finder.py").write_text(FINDER.format(root=str(source / "sglang")))
    (site / "__editable__.sglang.pth").write_text("import __editable___sglang_finder as f; f.install()\n")
    return source / "sglang"


def symlinked_site(tmp_path, site):
    real = tmp_path / "real-site"
    shutil.move(site, real)
    site.symlink_to(real)
    tiny_package(real, "0.5.11")
    return real / "sglang"


def plain(_, site):
    tiny_package(site, "0.5.11")
    return site / "sglang"


@pytest.mark.parametrize(
    ("kind", "build"), [("wheel", plain), ("editable", pth), ("editable", finder_hook), ("symlinked", symlinked_site)]
)
def test_every_kind_of_install_is_found_pushed_and_rolled_back(tmp_path, kind, build):
    """The interpreter decides; the overlay is imported afterwards, and the rollback leaves nothing (Hyperloom#205)."""
    python, site = new_venv(tmp_path / "venv")
    root = build(tmp_path, site)
    here = Install(python, root.parent)
    before = listing(root.parent)
    bundle, files = bundle_for(root, {"srt/a.py": b"VALUE = 5\n", "srt/new/c.py": b"C = 1\n"})
    with open_transport(here.host()) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        assert (plan.root, plan.install, plan.version) == (str(root), kind, "0.5.11")
        deploy.push(transport, plan, files, operator="x")
        assert here.run("import sglang.srt.a as a; print(a.VALUE)", PYTHONDONTWRITEBYTECODE="1") == "5"
        deploy.rollback(transport, purge=True)
    assert differences(before, listing(root.parent)) == []


def test_user_site_is_found(tmp_path, monkeypatch):
    """An install in the user's site-packages counts, since the server would import it."""
    import sys
    import sysconfig

    base = Path(sys.base_prefix) / "bin/python3"
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    site = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path / "user")}))
    tiny_package(site, "0.5.11")
    with open_transport(Host(name="x", address="x", transport="local", python=str(base))) as transport:
        found = deploy.status(transport)
    assert (found.root, found.install) == (str(site / "sglang"), "user-site")


def test_no_sglang(tmp_path):
    """The message names the interpreter that cannot import it, and the key to change."""
    python, _ = new_venv(tmp_path / "venv")
    with (
        open_transport(Install(python, tmp_path).host()) as transport,
        pytest.raises(OverlayError, match="there is no SGLang") as caught,
    ):
        snapshots.snapshot_host(transport, "x", [])
    assert str(python) in caught.value.what
    assert "No module named 'sglang'" in caught.value.why
    assert caught.value.exit_code == 1


def test_an_empty_folder_that_shadows_the_package(tmp_path):
    """A left-over folder is found before an editable finder and imports as an empty namespace (sglang#33441)."""
    python, site = new_venv(tmp_path / "venv")
    finder_hook(tmp_path, site)
    (site / "sglang/__pycache__").mkdir(parents=True)
    with (
        open_transport(Install(python, site).host()) as transport,
        pytest.raises(OverlayError, match=f"shadowed by {site}/sglang"),
    ):
        snapshots.snapshot_host(transport, "x", [])


def test_the_current_folder_does_not_count(tiny, tmp_path, monkeypatch):
    """A bare `sglang` folder where the command is run changes nothing (sglang#22363, tpu-inference#3421)."""
    (tmp_path / "cwd/sglang").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    with open_transport(tiny.host()) as transport:
        assert deploy.status(transport).root == str(tiny.root)


def test_another_package_of_that_name(tmp_path):
    """A package called sglang without srt/ is not SGLang."""
    python, site = new_venv(tmp_path / "venv")
    tiny_package(site, "0.0.1", {"__init__.py": b""})
    with (
        open_transport(Install(python, site).host()) as transport,
        pytest.raises(OverlayError, match="is not SGLang"),
    ):
        deploy.status(transport)


def test_a_release_without_dflash(tmp_path):
    """SGLang 0.5.10 has no DFlash: its version and the supported ones are named, on a host and for --release."""
    python, site = new_venv(tmp_path / "venv")
    tiny_package(site, "0.5.10")
    with (
        open_transport(Install(python, site).host()) as transport,
        pytest.raises(OverlayError, match=r"SGLang 0\.5\.10 has no DFlash") as caught,
    ):
        snapshots.snapshot_host(transport, "x", [])
    assert "0.5.11" in caught.value.why
    with pytest.raises(OverlayError, match=r"SGLang 0\.5\.10 has no DFlash"):
        snapshots.snapshot_release("0.5.10", tmp_path / "cache", [])


@pytest.mark.parametrize("below", ["", "sglang"])
def test_a_folder_is_taken_with_or_without_its_last_part(wheel_site, below):
    """--root takes a package folder, or the folder that holds it."""
    manifest, files = snapshots.snapshot_root(wheel_site / below, "root-x", ["srt/server_args.py"])
    assert manifest.root == str(wheel_site / "sglang")
    assert (manifest.install, manifest.release, manifest.versions["python"]) == ("unpacked", "0.5.11", None)
    assert "srt/server_args.py" in files


def test_a_folder_behind_a_link_is_named_by_where_it_lies(tmp_path):
    """Two names of one folder are one target."""
    tiny_package(tmp_path / "real", "0.5.11", {**DFLASH, "__init__.py": b""})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    manifest, _ = snapshots.snapshot_root(tmp_path / "link", "root-x", [])
    assert manifest.root == str(tmp_path / "real/sglang")


def test_a_folder_without_sglang(tmp_path):
    """--root on anything else says what was looked for."""
    with pytest.raises(OverlayError, match=f"there is no SGLang in {tmp_path}"):
        snapshots.snapshot_root(tmp_path, "root-x", [])
