# SPDX-License-Identifier: Apache-2.0
"""A padded pair (benchmarks/pad_pair.py) in the real engine: the tokens and drafts of the small one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.engine import harness
from tests.engine.scenarios import CALLS
from tests.engine.test_decode import accept_length, outputs


#: More layers, a hidden state that is no multiple, groups of three instead of two, wider heads, more tokens.
SHAPE = "6,3,160,6,2,64,256,300"
ARMS = {"DFLASH": {}, "DDTREE": {"speculative_ddtree_budget": 16}}


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, padded in every direction."""
    out = tmp_path_factory.mktemp("padded")
    script = harness.PROJECT / "benchmarks/pad_pair.py"
    subprocess.run([harness.ENGINE_PYTHON, script, harness.PAIR, out, "--like", SHAPE], check=True, timeout=900)
    return out


def decode(site: Path, pair: Path, algorithm: str, folder: Path) -> dict[str, Any]:
    model = {"model_path": str(pair / "target"), "speculative_draft_model_path": str(pair / "draft")}
    return harness.decode(site, harness.engine_args(algorithm, **ARMS[algorithm] | model), CALLS, folder)


@pytest.mark.parametrize("algorithm", ARMS)
def test_a_padded_pair_says_and_accepts_what_the_pair_does(
    site: Path, padded: Path, algorithm: str, tmp_path: Path
) -> None:
    """Token for token in float32, in as many steps."""
    config = json.loads((padded / "target/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (160, 6, 300)
    large = decode(site, padded, algorithm, tmp_path / "padded")
    small = decode(site, harness.PAIR, algorithm, tmp_path / "small")
    assert outputs(large) == outputs(small)
    assert accept_length(large) == accept_length(small)


def read(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor of a checkpoint in one file."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {name: (entry["dtype"], entry["data_offsets"]) for name, entry in header.items() if name[0] != "_"}
    return {name: (kind, data[start + first : start + last]) for name, (kind, (first, last)) in tensors.items()}


def test_a_pair_padded_in_another_type_is_rounded_as_an_engine_rounds_it(padded: Path, tmp_path: Path) -> None:
    """A pair in float32 for an engine in bfloat16: half as large, and only norms are rounded behind a factor."""
    script = harness.PROJECT / "benchmarks/pad_pair.py"
    command = [harness.ENGINE_PYTHON, script, harness.PAIR, tmp_path, "--like", SHAPE, "--dtype", "bfloat16"]
    subprocess.run(command, check=True, timeout=900)
    for part in ("target", "draft"):
        assert json.loads((tmp_path / part / "config.json").read_text())["dtype"] == "bfloat16"
        small = read(tmp_path / part)
        for name, (kind, data) in read(padded / part).items():
            words = numpy.frombuffer(data, "<u4")
            nearest = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2")
            assert (kind, small[name][0]) == ("F32", "BF16")
            off = numpy.abs(numpy.frombuffer(small[name][1], "<u2").astype(int) - nearest)
            assert off.max() <= (1 if name.endswith("norm.weight") else 0), name


def test_a_cut_pair_has_fewer_tokens_and_can_be_written_over(tmp_path: Path) -> None:
    """`gpu_prove ranks` cuts a pair that others share, and whose folders nobody may write to."""
    pair, out = tmp_path / "pair", tmp_path / "cut"
    shutil.copytree(harness.PAIR, pair)
    folders = (pair, pair / "target", pair / "draft")
    for folder in folders:
        folder.chmod(0o555)
    script = harness.PROJECT / "scripts/gpu_proofs/cut_pair.py"
    try:
        subprocess.run([harness.ENGINE_PYTHON, script, pair, out, "37"], check=True, timeout=900)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    for part in ("target", "draft"):
        size = json.loads((harness.PAIR / part / "config.json").read_text())["vocab_size"]
        assert json.loads((out / part / "config.json").read_text())["vocab_size"] == size - 37
        assert (out / part).stat().st_mode & 0o200
    # SGLang refuses a mask token that its target does not have; the pair's is its last.
    draft = json.loads((out / "draft/config.json").read_text())
    assert draft["dflash_config"]["mask_token_id"] == draft["vocab_size"] - 1
    assert (out / "target/model.safetensors").stat().st_size < (pair / "target/model.safetensors").stat().st_size
