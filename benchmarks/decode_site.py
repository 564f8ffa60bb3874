# SPDX-License-Identifier: Apache-2.0
"""What `decode.py` prepares before engines start: the patched site, the padded pair; and what machine it is."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode_engines import environment, gpu_check


@contextlib.contextmanager
def patched(options: argparse.Namespace, workdir: Path) -> Iterator[None]:
    """Patch the site with the product's verbs and take the patch away again, unless it is patched already."""
    if options.patched:
        yield
        return
    for verb, *flags in (["snapshot"], ["patch"], ["verify"], ["push", "--yes"]):
        gpu_check.product(options, workdir, verb, *flags)
    try:
        yield
    finally:
        gpu_check.product(options, workdir, "rollback", "--yes")


class Padding(threading.Thread):
    """Makes the padded pair beside the patching, if one is wanted.

    Attributes:
        facts: For the result; empty when nothing is padded.
        failure: What went wrong.
    """

    def __init__(self, options: argparse.Namespace, workdir: Path) -> None:
        super().__init__()
        self._options, self._out = options, workdir / "padded"
        self.facts: dict[str, Any] = {}
        self.failure = ""

    def run(self) -> None:
        """Run `pad_pair.py`, which needs torch."""
        options = self._options
        if not options.padded_like:
            return
        start, script = time.monotonic(), Path(__file__).resolve().parent / "pad_pair.py"
        command = [options.python, str(script), str(options.pair), str(self._out), "--like", options.padded_like]
        # What engines on a GPU load: a pair in float32 would be twice as large to read.
        command += [] if options.cpu else ["--dtype", "bfloat16"]
        done = subprocess.run(command, env=environment(options), capture_output=True, text=True, check=False)
        self.failure = done.stderr[-2000:] if done.returncode else ""
        self.facts = {"like": options.padded_like, "seconds": time.monotonic() - start}


def compile_site(options: argparse.Namespace) -> None:
    """Byte-compile the site on all cores: several engines would each do it on one."""
    command = [options.python, "-m", "compileall", "-q", "-j", str(os.cpu_count()), str(options.site)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured on."""
    code = (
        "import json, torch; "
        "gpu = torch.cuda.is_available(); "
        "name = torch.cuda.get_device_name() if gpu else 'CPU'; "
        "free = torch.cuda.mem_get_info()[0] if gpu else 0; "
        "print(json.dumps({'device': name, 'torch': torch.__version__, 'free': free}))"
    )
    done = subprocess.run([options.python, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1]) | {"cores": os.cpu_count()}
