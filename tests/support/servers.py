# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that imports the installed tree and answers as SGLang does, and ways to restart it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.installs import Install, bundle_for
from tests.support.ports import free_port
from tests.support.waiting import HANG, patience, until

from ddtree_overlay.config import Health
from ddtree_overlay.manifest import OVERLAY_ID_PATH, Bundle, overlay_id_module


#: What the overlay's code makes of the server. A dumb one generates from when the file `awake` is in its folder, and
#: while `held` is there no server begins to listen.
MODES = ("well", "crash", "dumb", "dflash", "mute")

_SERVER = """
import http.server, json, os, sys, time


def there(name):
    return os.path.exists(os.path.join(os.path.dirname(__file__), name))


port = int(sys.argv[1])
try:
    from sglang.srt.speculative.ddtree.overlay_id import OVERLAY_ID
    from sglang.srt.speculative.ddtree.tree import MODE
except ImportError:
    OVERLAY_ID, MODE = None, "base"
if MODE == "crash" or there("broken"):
    print("CUDA error: api_key='hush-hush'", flush=True)
    sys.exit(3)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if MODE == "mute":
            time.sleep(600)
        algorithm = {"base": None, "dflash": "DFLASH"}.get(MODE, "DDTREE")
        info = {"speculative_algorithm": algorithm, "api_key": "hush-hush", "pid": os.getpid()}
        if OVERLAY_ID:
            info["speculative_ddtree_overlay_id"] = OVERLAY_ID
        dumb = MODE == "dumb" and not there("awake")
        known = {"/get_server_info": (200, info), "/health_generate": (503 if dumb else 200, {})}
        code, answer = known.get(self.path, (404, {}))
        if "KEY" in os.environ and self.headers.get("Authorization") != "Bearer " + os.environ["KEY"]:
            code, answer = (401, {}) if not self.path.startswith("/health") else (code, answer)
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


while there("held"):
    time.sleep(0.02)
end = time.monotonic() + 60
while True:
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        break
    except OSError:
        if time.monotonic() > end:
            raise
        time.sleep(0.05)
server.serve_forever()
"""

_RESTART = """#!/bin/sh
echo "${DDTREE_OVERLAY_ID-unset}" >> FOLDER/restarts
[ -f FOLDER/pid ] && kill $(cat FOLDER/pid) 2>/dev/null
PYTHON FOLDER/sglang_server.py PORT >> FOLDER/server.log 2>&1 &
echo $! > FOLDER/pid
"""

#: As systemd with Restart=always: starts a server that ends again, gives its unit up after three starts, and then
#: refuses to start it until reset-failed.
_SYSTEMCTL = """#!/bin/sh
echo "$*" >> FOLDER/systemctl.log
start() {
    starts=$(cat FOLDER/starts 2>/dev/null || echo 0)
    if [ $starts -ge 3 ]; then
        touch FOLDER/failed
        return 1
    fi
    echo $((starts + 1)) > FOLDER/starts
    FOLDER/restart
}
supervise() {
    while [ "$(cat FOLDER/generation)" = $$ ]; do
        alive=$(tr -d '\\0' < /proc/$(cat FOLDER/pid)/cmdline 2>/dev/null)
        [ -n "$alive" ] || start || exit
        sleep 0.1
    done
}
case "$1" in
reset-failed) rm -f FOLDER/starts FOLDER/failed;;
is-failed) test -f FOLDER/failed;;
restart)
    echo $$ > FOLDER/generation
    if ! start; then
        echo "Job for $2 failed: Start request repeated too quickly." >&2
        exit 1
    fi
    supervise > /dev/null 2>&1 &
esac
"""


@dataclass(frozen=True)
class Server:
    """A server of the SGLang that `install` holds; its files are in `folder`."""

    install: Install
    folder: Path
    port: int
    #: How long each start took.
    starts: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def create(cls, install: Install, folder: Path) -> Server:
        """Write the server and its restart scripts; nothing runs yet."""
        folder.mkdir()
        server = cls(install, folder, free_port())
        (folder / "sglang_server.py").write_text(_SERVER)
        server._script("restart", _RESTART)
        (folder / "bin").mkdir()
        server._script("bin/systemctl", _SYSTEMCTL)
        shutil.copytree(install.root, folder / "pristine")
        return server

    def _script(self, name: str, text: str) -> None:
        words = {"FOLDER": self.folder, "PYTHON": self.install.python, "PORT": self.port}
        for word, value in words.items():
            text = text.replace(word, str(value))
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def restart(self) -> tuple[str, ...]:
        """A restart command that works."""
        return (str(self.folder / "restart"),)

    def health(self, timeout: float = HANG, **more: Any) -> Health:
        """How to ask the server; `timeout` is as much longer as a start takes longer than on an idle machine."""
        return Health(self.url, patience(timeout, max(self.starts, default=0.0)), **more)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def overlay(self, mode: str = "well", mark: str = "") -> tuple[Bundle, dict[str, bytes]]:
        """An overlay that makes the server behave as `mode`; `mark` makes it another one."""
        pristine = self.folder / "pristine"
        results = {
            "srt/a.py": (pristine / "srt/a.py").read_bytes() + b"DDTREE = 1\n",
            "srt/speculative/ddtree/__init__.py": b"",
            "srt/speculative/ddtree/tree.py": f"MODE = {mode!r}\nMARK = {mark!r}\n".encode(),
        }
        bundle, _ = bundle_for(pristine, results)
        return bundle_for(pristine, {**results, OVERLAY_ID_PATH: overlay_id_module(bundle.overlay_id)})

    def start(self) -> dict[str, Any]:
        """Start it by its own restart script, and wait until it answers; gives what it says."""
        began = time.monotonic()
        subprocess.run(self.restart, check=True, timeout=HANG)
        found = until(self.heard, said=(self.folder / "server.log").read_text)
        self.starts.append(time.monotonic() - began)
        return found

    def heard(self) -> dict[str, Any]:
        """As `info`; empty while nobody answers, or somebody is ended in the middle of an answer."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return self.info()
        return {}

    def runs(self, overlay_id: str | None) -> dict[str, Any]:
        """Wait until the server reports `overlay_id`; gives what it says."""

        def seen() -> dict[str, Any]:
            found = self.heard()
            return found if found and found.get("speculative_ddtree_overlay_id") == overlay_id else {}

        return until(seen, said=(self.folder / "server.log").read_text)

    def info(self) -> dict[str, Any]:
        """What the server says of itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)
        try:
            connection.request("GET", "/get_server_info")
            return dict(json.loads(connection.getresponse().read()))
        finally:
            connection.close()

    def restarts(self) -> list[str]:
        """The overlay id that each restart was told."""
        path = self.folder / "restarts"
        return path.read_text().splitlines() if path.exists() else []

    def stop(self) -> None:
        """End it."""
        (self.folder / "generation").write_text("none")
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
