# SPDX-License-Identifier: Apache-2.0
"""A second algorithm registers with the same named pieces: the code of docs/new_algorithm.md, on published wheels."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.engine import harness
from tests.support import wheels

from ddtree_overlay.edits.base import Edit
from ddtree_overlay.edits.spec_info import EXAMPLE, SPEC_INFO
from ddtree_overlay.patching import build_release
from ddtree_overlay.releases import RELEASES


PAGE = Path(__file__).parents[2] / "docs/new_algorithm.md"
MODULE = "srt/speculative/toychain.py"

#: What the patched SGLang is asked, in the engine's environment.
ASK = """
import argparse, json
from types import SimpleNamespace
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as Algorithm

toy = Algorithm.from_string("TOYCHAIN")
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
words = ["--model-path", "m", "--speculative-algorithm", "TOYCHAIN", "--speculative-toychain-greeting", "good day"]
chosen = parser.parse_args(words)
print(json.dumps({
    "name": toy.name,
    "predicates": [toy.is_toychain(), toy.is_dflash(), Algorithm.DFLASH.is_toychain(), Algorithm.DFLASH.is_dflash()],
    "values": [m.name for m in Algorithm],
    "worker": toy.create_worker(SimpleNamespace(disable_overlap_schedule=True)).__name__,
    "chosen": [chosen.speculative_algorithm, chosen.speculative_toychain_greeting],
    "default": ServerArgs.speculative_toychain_greeting,
}))
"""


def code_of_the_page() -> dict[str, str]:
    """The page's blocks of Python by the file name in their first line."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return dict(blocks)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The page's modules by name, imported from files as somebody would write them."""
    folder = tmp_path_factory.mktemp("page")
    modules: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("first_generation", "second_generation"):
            path = folder / f"{name}.py"
            path.write_text(code_of_the_page()[path.name])
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            modules[name] = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, modules[name])
            spec.loader.exec_module(modules[name])
        yield modules


@functools.cache
def patched(module: ModuleType, version: str) -> dict[str, bytes]:
    """The files that the page's edits make of the wheel, its own module among them."""
    row = replace(RELEASES[0], version=version, edits=module.EDITS)
    added = {MODULE: code_of_the_page()[MODULE].encode()}
    return build_release(row, wheels.package(version), added).files


@pytest.mark.parametrize(("name", "version"), [("first_generation", "0.5.11"), ("second_generation", "0.5.17")])
def test_the_page_patches_a_published_wheel_and_comes_off_to_the_byte(page: dict[str, Any], name: str, version: str):
    """Every block compiles, and every edit fits its file exactly once."""
    base = wheels.package(version)
    files = patched(page[name], version)
    for path, data in files.items():
        compile(data, path, "exec", dont_inherit=True)
    for edit in page[name].EDITS:
        assert edit.remove(files[edit.path]) == base[edit.path]
        assert b"toychain" in files[edit.path].lower()


def test_the_real_sglang_knows_the_algorithm_of_the_page(page: dict[str, Any], tmp_path: Path):
    """The patched 0.5.11 is imported in the engine's environment: name, predicates, worker, flag and default."""
    if not harness.ENGINE_PYTHON.exists() and not os.environ.get("CI"):
        pytest.skip("no engine: make engine")
    site = tmp_path / "site"
    harness.unpack_wheel(wheels.wheel("0.5.11"), site)
    for path, data in patched(page["first_generation"], "0.5.11").items():
        (site / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
        (site / "sglang" / path).write_bytes(data)
    done = subprocess.run(
        [harness.ENGINE_PYTHON, "-c", ASK],
        env=harness.engine_environment(site),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(site)
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {
        "name": "TOYCHAIN",
        "predicates": [True, True, False, True],
        "values": ["DFLASH", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NONE", "TOYCHAIN"],
        "worker": "DFlashWorker",
        "chosen": ["TOYCHAIN", "good day"],
        "default": "hello",
    }


def test_two_algorithms_share_a_file(page: dict[str, Any]):
    """Both are members, existing members keep their values, and each counts as DFLASH and not as the other."""
    toy: Edit = page["first_generation"].SPEC_INFO
    patched = toy.apply(SPEC_INFO.apply(EXAMPLE.before.encode()))

    names: dict[str, Any] = {}
    exec(compile(patched, "spec_info.py", "exec"), names)
    algorithm = names["SpeculativeAlgorithm"]
    assert [(m.name, m.value) for m in algorithm] == [("DFLASH", 1), ("NONE", 2), ("DDTREE", 3), ("TOYCHAIN", 4)]
    for one, other in ((algorithm.DDTREE, "is_toychain"), (algorithm.TOYCHAIN, "is_ddtree")):
        assert one.is_dflash()
        assert not getattr(one, other)()


def test_algorithms_come_off_in_reverse_order(page: dict[str, Any]):
    """The last one on is the first one off; each removal is exact."""
    toy: Edit = page["first_generation"].SPEC_INFO
    ddtree = SPEC_INFO.apply(EXAMPLE.before.encode())
    both = toy.apply(ddtree)

    assert toy.remove(both) == ddtree
    assert SPEC_INFO.remove(toy.remove(both)) == EXAMPLE.before.encode()
