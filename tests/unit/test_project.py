# SPDX-License-Identifier: Apache-2.0
"""What the project's own configuration must keep in step with its files."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[2]


def test_every_python_script_is_formatted_and_linted():
    """A script without a suffix is seen by ruff only when it is named."""
    named = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["extend-include"]
    scripts = (p for p in (PROJECT / "scripts").iterdir() if p.is_file() and not p.suffix)
    python = {f"scripts/{p.name}" for p in scripts if b"python" in p.read_bytes().partition(b"\n")[0]}

    assert set(named) == python


def test_the_overlay_names_every_module_of_its_own():
    """Its package says where a thing lives, kernels and references by their suffix."""
    folder = PROJECT / "overlay"
    told = (folder / "srt/speculative/ddtree/__init__.py").read_text("utf-8")
    names = {p.stem for p in folder.rglob("*.py") if not p.stem.endswith(("_kernel", "_reference", "__init__"))}

    assert len(names) > 50
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", told)) == []


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("snapshots/sglang-0.5.11/manifest.json", True),
        ("snapshots/sglang-0.5.11/files/srt/server_args.py", False),
        ("snapshots/ct200/manifest.json", False),
        ("snapshots/sglang-gpu1/manifest.json", False),
        ("snapshots/ct200/files/srt/server_args.py", False),
    ],
)
def test_only_the_manifests_of_releases_are_under_version_control(tmp_path, path, kept):
    """Neither a line of SGLang nor what a private host looks like gets into a commit by `git add .`."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    shutil.copy(PROJECT / ".gitignore", tmp_path)
    done = subprocess.run(["git", "check-ignore", "--quiet", path], cwd=tmp_path, check=False)

    assert done.returncode == (1 if kept else 0)


def test_every_command_that_a_message_advises_names_its_target():
    """What a user copies from a message must run as it stands."""
    advised = re.compile(
        r"(?<!`)ddtree-overlay (?:snapshot|patch|verify|diff|push|rollback|status|history|doctor|tune)\b(?! [-{])"
    )
    loose = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        # Docstrings and the examples of the help are no messages.
        prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        prose |= {id(k.value) for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg == "example"}
        inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else getattr(node, "value", None)
            if isinstance(text, str) and not {id(node)} & (prose | inner) and advised.search(text):
                loose.append(f"{path.name}:{node.lineno}: {text}")

    assert loose == []


def test_no_message_is_printed_with_a_placeholder():
    """In an error's texts only `{target}` is filled in, and only in the next step, once a command has a target."""
    loose = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            if not re.search(r"(Error|Refusal|Problem|Finding)$", ast.unparse(call.func)):
                continue
            later = {id(n) for k in call.keywords if k.arg == "next_step" for n in ast.walk(k.value)}
            inner = (n for n in ast.walk(call) if isinstance(n, ast.Call))
            later |= {id(n.args[0]) for n in inner if getattr(n.func, "attr", "") == "replace"}
            for node in ast.walk(call):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    held = set(re.findall(r"\{[a-z_.]+\}", node.value)) - ({"{target}"} if id(node) in later else set())
                    loose += [f"{path.name}:{node.lineno}: {text}" for text in sorted(held)]

    assert loose == []


def test_a_next_step_that_begins_with_a_command_goes_on_behind_a_sign():
    """Prose that is not behind `#` or `;` would be arguments of the command, or another command."""
    prose = re.compile(r", (?:then|or|when|and)\b| first\b| alone\b| and (?:run|commit)\b| puts | takes | to see ")
    loose = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "next_step":
                text = re.sub(r"""^f?['"]|['"]$""", "", ast.unparse(node.value))
                command = re.split(r"  #|;|\\n", text)[0]
                if re.match(r"(?:run )?(?:ddtree-overlay |rm |\{target\.command|\{shlex)", command) and (
                    command.startswith("run ") or prose.search(command)
                ):
                    loose.append(f"{path.name}:{node.value.lineno}: {text}")

    assert loose == []


def test_words_about_where_a_command_runs_stand_behind_a_sign():
    """`on the host: COMMAND` cannot be pasted; `COMMAND  # on the host`, or the words on a line before it, can."""
    loose = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if re.search(r"""(?:["']|then |: )on the host[:,] """, line):
                loose.append(f"{path.name}:{number}: {line.strip()}")

    assert loose == []


@pytest.mark.parametrize("script", ["setup", "engine_env"])
def test_pip_shows_its_errors_and_keeps_its_warnings_to_itself(script):
    """They would stand before the first line of what was asked for: twice quiet, and not three times."""
    text = (PROJECT / "scripts" / script).read_text("utf-8")
    calls = re.findall(r"^.*pip.* install (.*)$", text, re.MULTILINE)

    assert calls and [c for c in calls if not c.startswith("-qq ")] == []
