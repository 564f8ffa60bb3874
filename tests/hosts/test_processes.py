# SPDX-License-Identifier: Apache-2.0
"""Command lines of running servers: shown, but without the secrets on them."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest
from tests.support.installs import bundle_for
from tests.support.waiting import AGES

from ddtree_overlay import deploy, doctor
from ddtree_overlay.remote.processes import without_secrets


@pytest.mark.parametrize("option", [["--api-key", "SECRET123"], ["--api-key=SECRET123"]], ids=["two words", "one word"])
def test_secrets_on_a_command_line_do_not_leave_the_host(tiny, near, option):
    """`--api-key` of a running server shows in no answer: doctor, plan, status, with or without --json."""
    code = f"import sglang, time; print(1, flush=True); time.sleep({AGES})"
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    words = [tiny.python, "-c", code, *option, "--port", "30000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as server:
        assert server.stdout
        server.stdout.readline()
        try:
            answers = [
                doctor.diagnose(near, []).facts,
                dataclasses.asdict(deploy.plan_push(near, bundle, files)),
                dataclasses.asdict(deploy.status(near)),
            ]
        finally:
            server.kill()
    for answer in answers:
        text = json.dumps(answer, default=str)
        assert f'"pid": {server.pid}' in text
        assert "--port 30000" in text
        assert "SECRET123" not in text


def test_only_values_of_secret_options_are_hidden():
    """Key, token, password and secret in any spelling; an option without a value hides nothing of the next one."""
    line = (
        b"x --Admin-API-Key a --hf-token=b --ssl-keyfile-password c --client_secret d --tokenizer-path e --key --tp 2"
    )
    shown = b"x --Admin-API-Key *** --hf-token=*** --ssl-keyfile-password *** --client_secret *** "
    assert b" ".join(without_secrets(line.split())) == shown + b"--tokenizer-path e --key --tp 2"
