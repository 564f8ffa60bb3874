# SPDX-License-Identifier: Apache-2.0
"""A rename of whatever the overlay reads of SGLang's objects is found, however the object is known; nothing else is."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support import wheels

from ddtree_overlay import receivers
from ddtree_overlay.patching import modules_of, wanted_paths
from ddtree_overlay.releases import KNOWN, known
from ddtree_overlay.verify.attributes import check_attributes
from ddtree_overlay.verify.definitions import read_module
from ddtree_overlay.verify.findings import Tally
from ddtree_overlay.verify.symbols import Symbols
from ddtree_overlay.verify.uses import check_calls


OURS = "srt/speculative/ddtree/ours.py"
SGLANG = {
    "srt/model_executor/mixin.py": """\
class Mixin:
    def attach(self, pool):
        self.token_to_kv_pool, self.spare = pool, None
""",
    "srt/model_executor/model_runner.py": """\
from sglang.srt.model_executor.mixin import Mixin

class ModelRunner(Mixin):
    limit = 3

    def __init__(self, server_args):
        self.server_args = server_args
        setattr(self, "late", 1)

    @property
    def sampler(self):
        return None

    def __getattr__(self, name):
        return getattr(self.server_args, name)
""",
    "srt/server_args.py": """\
from dataclasses import dataclass

@dataclass
class ServerArgs:
    page_size: int = 1
""",
    "srt/managers/schedule_batch.py": "class Req:\n    rid: str\n\nclass ScheduleBatch:\n    reqs: list\n",
    "srt/other.py": "class Thing:\n    size = 1\n\ndef thing() -> Thing:\n    return Thing()\n",
}


def tally_of(code: str, files: dict[str, str] | None = None, **given: object) -> Tally:
    """What the check says of one module of ours beside this SGLang."""
    sources = {**(SGLANG if files is None else files), OURS: code}
    symbols = Symbols({path: text.encode() for path, text in sources.items()}, frozenset())
    tally = Tally()
    check_attributes(symbols, OURS, tally, **given)
    return tally


def missing(code: str, files: dict[str, str] | None = None) -> list[tuple[int | None, str]]:
    """Line and message of each finding."""
    return [(f.line, f.message.rpartition(": ")[2]) for f in tally_of(code, files).findings]


@pytest.mark.parametrize(
    "code",
    [
        "def f(model_runner):\n    return model_runner.{}",
        "def f(model_runner: Any):\n    return model_runner.{}",
        "def f(worker: 'ModelRunner'):\n    return worker.{}",
        "def f(it: ModelRunner | None):\n    return it.{}",
        "def f(it: Optional[ModelRunner] = None):\n    return it.{}",
        "def f(it):\n    return it.model_runner.{}",
        "def f(it):\n    return it._model_runner.{}",
        "def f(it):\n    runner_of = it.model_runner\n    return runner_of.{}",
        "def f(it):\n    one, two = 1, it.model_runner\n    return two.{}",
        "def f(found):\n    for model_runner in found:\n        model_runner.{}",
        "def f(model_runner):\n    def g():\n        return model_runner.{}\n    return g",
        "def f(model_runner):\n    return getattr(model_runner, '{}')",
        "def f(model_runner):\n    return getattr(model_runner, NAME)\nNAME = '{}'",
        "def f(model_runner):\n    setattr(model_runner, NAME, 1)\nNAME = '{}'",
        "def f(model_runner):\n    model_runner.{} = 1",
        "def f(model_runner):\n    return replace(model_runner, {}=1)",
        "from sglang.srt.model_executor.model_runner import ModelRunner\ndef f():\n    it = ModelRunner(1)\n    it.{}",
        "class A:\n    def f(self, it):\n        self.model_runner = it\n        self.model_runner.{}",
    ],
)
def test_an_object_is_known_by_its_name_annotation_origin_or_constructor(code: str):
    """And what its class has not is found; what a `__getattr__` may pass on is not written down."""
    for name in ("limit", "server_args", "late", "sampler", "token_to_kv_pool", "spare", "attach"):
        assert missing(code.format(name)) == []

    ((line, message),) = missing(code.format("gone"))

    assert message == "gone in class ModelRunner"
    lines = code.splitlines()
    assert line is not None
    assert "{}" in lines[line - 1] or "NAME" in lines[line - 1]


def test_result_of_a_function_is_known_by_its_name_or_its_annotation():
    """`reading()` gives the arguments, whatever it says itself."""
    imported = "from sglang.srt.other import thing\n"

    assert missing("def f(it):\n    return reading(it).page_size + reading(it).gone") == [
        (2, "gone in class ServerArgs")
    ]
    assert missing(f"{imported}def f():\n    return thing().size + thing().gone") == [(3, "gone in class Thing")]


def test_arguments_set_by_name_are_looked_up():
    """`settle(server_args, page_size=1)` sets what a release may have renamed."""
    assert missing("settle(1, page_size=2, gone=3)") == [(1, "gone in class ServerArgs")]


@pytest.mark.parametrize(
    "code",
    [
        "def f(model_runner):\n    if hasattr(model_runner, 'gone'):\n        return model_runner.gone",
        "NAME = 'gone'\ndef f(model_runner):\n    return getattr(model_runner, NAME, None) and model_runner.gone",
        "def f(model_runner):\n    model_runner.ddtree_most = 1",
        "def f(model_runner: torch.Tensor):\n    return model_runner.gone",
        "def f(model_runner: ModelRunner | torch.Tensor):\n    return model_runner.gone",
        "@triton.jit\ndef kernel(batch):\n    req = batch.to(1)\n    return req.gone",
        "def f(anything):\n    return anything.gone",
        "def f(model_runner):\n    return model_runner.__dict__",
    ],
)
def test_what_is_asked_for_ours_or_unknown_is_no_finding(code: str):
    """A guard is the overlay's own way to say that not every release has it."""
    assert missing(code) == []


def test_call_of_what_is_asked_for_is_no_finding():
    """Where a method may be missing, so may its signature."""
    guarded = "def f(model_runner):\n    return model_runner.gone() if hasattr(model_runner, 'gone') else 1"
    sources = {**SGLANG, OURS: guarded, "srt/b.py": "def f(model_runner):\n    model_runner.gone()"}
    symbols = Symbols({path: text.encode() for path, text in sources.items()}, frozenset())
    tally = Tally()

    for path in (OURS, "srt/b.py"):
        check_calls(symbols, path, tally)

    assert [f.path for f in tally.findings] == ["srt/b.py"]


def test_object_whose_base_is_not_in_the_snapshot_is_counted():
    """What cannot be known is no finding, and is not hidden."""
    files = {path: text for path, text in SGLANG.items() if "mixin" not in path}

    tally = tally_of("def f(model_runner):\n    return model_runner.limit, model_runner.gone", files)

    assert (tally.findings, tally.attributes, tally.unseen) == ([], 2, 1)


def test_snapshot_without_all_namespaces_of_the_arguments_decides_nothing():
    """One that an older command line took lacks modules that the arguments are assembled from."""
    fields = "srt/arg_groups/fields"
    record = (
        "from sglang.srt.arg_groups.fields.spec import Spec\nfrom sglang.srt.arg_groups.fields.memory import Memory\n"
        "class ServerArgs:\n    pass\nServerArgs = build(ServerArgs, Spec, Memory)\n"
    )
    files = {"srt/server_args.py": record, f"{fields}/spec.py": "class Spec:\n    budget: int = 1\n"}
    whole = {**files, f"{fields}/memory.py": "class Memory:\n    page_size: int = 1\n"}
    code = "def f(server_args):\n    return server_args.budget + server_args.page_size + server_args.gone"

    assert missing(code, files) == []
    assert missing(code, whole) == [(2, "gone in class ServerArgs")]


def test_inserted_statements_alone_are_looked_at():
    """SGLang's own code is SGLang's to know."""
    code = "def f(model_runner):\n    model_runner.upstream\n    model_runner.ours\n"
    symbols = Symbols(
        {**{path: text.encode() for path, text in SGLANG.items()}, "srt/a.py": code.encode()}, frozenset()
    )
    tally = Tally()
    (function,) = symbols.tree("srt/a.py").body
    assert isinstance(function, ast.FunctionDef)

    check_attributes(symbols, "srt/a.py", tally, only=function.body[1:])

    assert [(f.path, f.line) for f in tally.findings] == [("srt/a.py", 3)]


def test_table_of_receivers_names_classes_that_it_has():
    """And no class that nothing leads to."""
    named = {*receivers.RECEIVERS.values(), *receivers.KEYWORDS.values()}

    assert named <= set(receivers.CLASSES)


@pytest.mark.parametrize("name", sorted(receivers.CLASSES))
def test_every_class_of_the_table_is_in_some_release(name: str):
    """A place that no release has would decide nothing."""
    for place in receivers.CLASSES[name]:
        path, _, cls = place.partition(" ")
        found = [text for row in (KNOWN[0], KNOWN[4], KNOWN[-1]) if (text := _source(row.version, path)) is not None]
        assert any(cls == "*" or f"class {cls}" in text for text in found), place


def _source(version: str, path: str) -> str | None:
    row = known(version)
    assert row is not None
    found = {**wheels.package(version), **modules_of(row)}.get(path)
    return None if found is None else found.decode()


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Of a release that several tests look at, each file is parsed for the first of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree_overlay.verify.symbols.read_module", functools.cache(read_module))
        yield


@functools.cache
def wanted() -> frozenset[str]:
    return wanted_paths()


def messages(
    version: str, name: str, *, without: str | None = None, rename: tuple[str, str, str] | None = None
) -> set[str]:
    """What is found in our modules that name something of SGLang, for a release and less what our edits would give it.

    Args:
        version: The release.
        name: What is looked for; modules without it cannot ask for it.
        without: A variant of ours that is left out.
        rename: A file of the release, a name in there, and what the name is now.
    """
    row = known(version)
    assert row is not None
    row = replace(row, variants=tuple(variant for variant in row.variants if variant != without))
    files = {**wheels.snapshot(wanted(), version)[1], **modules_of(row)}
    if rename is not None:
        path, old, new = rename
        assert old.encode() in files[path]
        files[path] = files[path].replace(old.encode(), new.encode())
    symbols, tally = Symbols(files, wanted()), Tally()
    naming = [path for path in modules_of(row) if name.encode() in files[path]]
    for path in naming:
        check_attributes(symbols, path, tally)
        check_calls(symbols, path, tally)
    return {f.message.rpartition(": ")[2] for f in tally.findings}


@pytest.mark.parametrize(
    ("version", "variant", "renamed"),
    [
        ("0.5.13", "0.5.13", "check_finished in class Req"),
        ("0.5.19", "0.5.19", "get_model_config in class ServerArgs"),
        ("0.5.16", "0.5.16", "mambaish_config in class ModelRunner"),
    ],
)
def test_rename_that_a_release_made_is_found_without_the_variant_that_answers_it(
    version: str, variant: str, renamed: str
):
    """Names like `get_model_config` were missed when an engine started, and by no check."""
    name = renamed.partition(" ")[0]

    assert renamed in messages(version, name, without=variant)
    assert renamed not in messages(version, name)


@pytest.mark.parametrize(
    ("version", "path", "old", "new"),
    [
        ("0.5.11", "srt/model_executor/model_runner.py", "sliding_window_size", "window_size"),
        ("0.5.11", "srt/model_executor/model_runner_kv_cache_mixin.py", "self.max_running_requests", "self.most"),
        ("0.5.17", "srt/sampling/sampling_batch_info.py", "is_all_greedy", "all_greedy"),
        ("0.5.23", "srt/arg_groups/fields/schedule.py", "max_running_requests", "max_requests"),
        ("0.5.23", "srt/model_executor/model_runner.py", "kv_index_translator", "kv_translator"),
        # Of steps that draft nothing, by the mixins of the worker.
        ("0.5.14", "srt/speculative/dflash_info_v2.py", "verified_id", "bonus"),
        ("0.5.23", "srt/speculative/dflash_info_v2.py", "bonus_tokens", "bonus"),
        ("0.5.23", "srt/speculative/dflash_worker_v2.py", "_validate_phase1_sampling_support", "_validate"),
        ("0.5.23", "srt/model_executor/forward_batch_info.py", "compute_spec_mrope_positions", "compute_positions"),
    ],
)
def test_rename_in_a_published_release_is_found(version: str, path: str, old: str, new: str):
    """In the classes of both generations, with their real mixins, fields and properties."""
    name = old.removeprefix("self.")

    assert any(message.startswith(f"{name} in class ") for message in messages(version, name, rename=(path, old, new)))
