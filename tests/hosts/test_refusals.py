# SPDX-License-Identifier: Apache-2.0
"""Hosts that cannot be written to: each cause is named before anything is written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.agents import sabotaged
from tests.support.installs import Install, bundle_for, new_venv, tiny_package
from tests.support.sshd import SshServer
from tests.support.trees import differences, listing
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConnectionFailedError, OverlayError, RolledBackError
from ddtree_overlay.hosts.transport import open_transport


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}


def refused(transport, tiny, match):
    """Push is refused with `match`; plan and push agree, and the tree stays as it is."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    before = listing(tiny.site)
    plan = deploy.plan_push(transport, bundle, files)
    assert [b.what for b in plan.blockers]
    with pytest.raises(OverlayError, match=match) as caught:
        deploy.push(transport, plan, files, operator="x")
    assert differences(before, listing(tiny.site)) == []
    return caught.value


def server_in(namespace, tmp_path):
    """An sshd that sees the file systems as `namespace` mounts them."""
    return SshServer.start(tmp_path / "sshd", CACHE, namespace=namespace)


@pytest.mark.usefixtures("namespaces")
def test_read_only_file_system(tiny, tmp_path):
    """A read-only mount (EROFS) is named as that, not as a matter of permissions."""
    lines = f"mount --bind {tiny.site} {tiny.site}\nmount -o remount,ro,bind {tiny.site}"
    with (
        server_in(lines, tmp_path) as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        assert refused(transport, tiny, "install is read-only").exit_code == 1


@pytest.mark.usefixtures("namespaces")
def test_bind_mounted_file(tiny, tmp_path):
    """A bind-mounted file cannot be replaced (EBUSY); the others are not touched (ansible#13981, #24449)."""
    (tmp_path / "mounted.py").write_bytes((tiny.root / "srt/b.py").read_bytes())
    lines = f"mount --bind {tmp_path}/mounted.py {tiny.root}/srt/b.py"
    with (
        server_in(lines, tmp_path) as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        refused(transport, tiny, r"srt/b\.py is bind-mounted")


def in_small_tmpfs(options, tmp_path):
    """An install whose site-packages is a small tmpfs of the server's own namespace."""
    python, site = new_venv(tmp_path / "small")
    stock = tmp_path / "stock"
    tiny_package(stock, "0.5.11")
    lines = f"mount -t tmpfs -o {options} tmpfs {site}\ncp -r {stock}/. {site}/"
    return Install(python, site), Install(python, stock), lines


@pytest.mark.parametrize(
    ("options", "match"), [("size=300k", "no space left"), ("size=8m,nr_inodes=24", "no inodes left")]
)
@pytest.mark.usefixtures("namespaces")
def test_full_file_system(tmp_path, options, match):
    """Missing blocks and missing inodes are found before anything is written (nextcloud#25175, nixpkgs#61351)."""
    target, stock, lines = in_small_tmpfs(options, tmp_path)
    bundle, files = bundle_for(stock.root, {**RESULTS, "srt/big.py": b"#" * 60_000})
    with (
        server_in(lines, tmp_path) as server,
        open_transport(server.host(python=str(target.python))) as transport,
    ):
        plan = deploy.plan_push(transport, bundle, files)
        with pytest.raises(OverlayError, match=match):
            deploy.push(transport, plan, files, operator="x")
        assert deploy.status(transport).state == "pristine"


#: Somebody else fills the disk to its last byte while the line is written that would make a push count.
FILL = """
import os
fd = os.open(str(a[0].folder / "ballast"), os.O_WRONLY | os.O_CREAT, 0o644)
try:
    while True:
        os.write(fd, bytes(512))
except OSError:
"""


@pytest.mark.parametrize(
    ("then", "error"), [("raise", RolledBackError), ("os.kill(os.getpid(), 9)", ConnectionFailedError)]
)
@pytest.mark.usefixtures("namespaces")
def test_a_disk_without_a_free_byte_does_not_keep_anything_from_being_put_back(tmp_path, monkeypatch, then, error):
    """There is no room for a copy of a backup then, nor for the text of a lock (meteor-up#655)."""
    target, stock, lines = in_small_tmpfs("size=2m", tmp_path)
    for path in ("srt/a.py", "srt/b.py"):
        (stock.root / path).write_bytes(b"VALUE = 1\n" * 3000)
    bundle, files = bundle_for(stock.root, RESULTS)
    with (
        server_in(lines, tmp_path) as server,
        open_transport(server.host(python=str(target.python))) as transport,
    ):
        plan = deploy.plan_push(transport, bundle, files)
        action = f"exec({f'{FILL}    {then}'!r})"
        with sabotaged(monkeypatch, "store", "append", 1, action), pytest.raises(error):
            deploy.push(transport, plan, files, operator="x")
        deploy.rollback(transport)
        assert deploy.status(transport).state == "pristine"
        found = deploy.fetch_files(transport, RESULTS)
    assert found == {p: (stock.root / p).read_bytes() if (stock.root / p).exists() else None for p in RESULTS}


@pytest.mark.usefixtures("namespaces")
def test_overlayfs_lower_layer(tiny, tmp_path):
    """Files of a lower image layer are replaced one by one; no folder is renamed there (moby#25409: EXDEV)."""
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    venv = tiny.python.parents[1]
    lines = (
        f"mount -t tmpfs tmpfs {tmp_path}/upper\nmkdir {tmp_path}/upper/u {tmp_path}/upper/w\n"
        f"mount -t overlay overlay -o lowerdir={venv},upperdir={tmp_path}/upper/u,workdir={tmp_path}/upper/w {venv}"
    )
    bundle, files = bundle_for(tiny.root, RESULTS)
    before = listing(tiny.site)
    with (
        server_in(lines, tmp_path) as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")
        assert deploy.status(transport).state == "applied"
        assert deploy.fetch_files(transport, files) == files
        deploy.rollback(transport, purge=True)
        assert deploy.status(transport).state == "pristine"
    assert differences(before, listing(tiny.site)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_no_write_permission(tiny, tmp_path):
    """Without permission the owner, the mode and our own uid are named."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    wrapper = tmp_path / "as-nobody"
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {tiny.python} "$@"\n')
    wrapper.chmod(0o755)
    with open_transport(tiny.host(python=str(wrapper))) as transport:
        error = refused(transport, tiny, "no permission to write")
        assert "mode 0755, and this is uid 65534" in error.why
        (tiny.site).chmod(0o777)
        for folder in (tiny.root, tiny.root / "srt"):
            folder.chmod(0o777)
        # Folders can be written now, but replacing a file would change its owner.
        refused(transport, tiny, "belongs to root:root; replacing it as uid 65534 would change its owner")


def test_immutable_file(tiny, near):
    """An immutable file (chattr +i) is named before the first file is replaced."""
    target = tiny.root / "srt/b.py"
    if subprocess.run(["chattr", "+i", target], check=False, capture_output=True).returncode:
        pytest.skip("chattr does not work on this file system or needs root")
    try:
        refused(near, tiny, r"srt/b\.py is immutable")
    finally:
        subprocess.run(["chattr", "-i", target], check=True)


def test_symlinked_file_and_folder(tiny, near, tmp_path):
    """Files reached through a link inside the package belong to somebody else too (uv --link-mode symlink)."""
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_bytes((tiny.root / "srt/a.py").read_bytes())
    (tiny.root / "srt/a.py").unlink()
    (tiny.root / "srt/a.py").symlink_to(elsewhere)
    refused(near, tiny, r"srt/a\.py is reached through a symbolic link")
    assert elsewhere.read_bytes() == b"VALUE = 1\n"
    (tiny.root / "srt/a.py").unlink()
    (tiny.root / "srt/a.py").write_bytes(b"VALUE = 1\n")
    (tmp_path / "new").mkdir()
    (tiny.root / "srt/new").symlink_to(tmp_path / "new")
    refused(near, tiny, r"srt/new/c\.py is reached through a symbolic link")


def test_a_link_at_the_name_of_the_temporary_file_is_not_followed(tiny, near, tmp_path):
    """A link planted at our temporary name is taken away, and its target stays as it is (pnpm#11782)."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tiny.root / "srt/.a.py.ddtree-tmp").symlink_to(victim)
    bundle, files = bundle_for(tiny.root, RESULTS)
    deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")
    assert victim.read_text() == "precious"
    assert not list(tiny.root.rglob("*.ddtree-tmp"))


@pytest.mark.parametrize("path", ["../outside.py", "/etc/outside.py", "srt/../../outside.py"])
def test_paths_cannot_leave_the_package(near, path):
    """The agent refuses such a path whoever asks for it."""
    with pytest.raises(OverlayError, match="leaves the package"):
        near.call("fetch", {"paths": [path]})
