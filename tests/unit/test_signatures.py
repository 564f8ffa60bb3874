# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast

import pytest

from ddtree_overlay.verify.signatures import of_callee, of_function
from ddtree_overlay.verify.symbols import Class, Function, Missing, Symbols, Unknown


def mismatch(definition: str, call: str) -> str | None:
    node = ast.parse(f"def f({definition}): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    signature = of_function(Function("x.py", node))
    assert signature is not None
    expression = ast.parse(f"f({call})", mode="eval").body
    assert isinstance(expression, ast.Call)
    return signature.mismatch(expression)


@pytest.mark.parametrize(
    "definition", ["a, b=1, *, c, d=2", "a, /, b=1", "*args, k", "a, **kw", "", "a, b=1, *args, c=2, **kw"]
)
@pytest.mark.parametrize(
    "call", ["", "1", "1, 2", "1, 2, 3", "a=1", "1, a=2", "1, c=3", "b=2, a=1", "c=1, k=2, z=3", "1, b=2, d=4, c=5"]
)
def test_verdict_is_pythons_own(definition: str, call: str):
    """A call fits exactly when Python would make it."""
    names: dict[str, object] = {}
    exec(f"def f({definition}): pass", names)
    try:
        eval(f"f({call})", names)
        fits = True
    except TypeError:
        fits = False

    assert (mismatch(definition, call) is None) == fits


@pytest.mark.parametrize("call", ["*xs", "**kw", "1, *xs", "*xs, c=1", "1, **kw"])
def test_unpacked_arguments_are_taken_to_fit(call: str):
    """What is behind a star cannot be seen."""
    assert mismatch("a, b, *, c=0", call) is None


def test_wrong_keyword_beside_unpacked_ones_is_found():
    """What can be seen is checked."""
    assert mismatch("a, *, c=0", "*xs, z=1") == "there is no argument 'z'"


CLASSES = """
from dataclasses import dataclass, field, KW_ONLY
from typing import ClassVar
import torch

@dataclass
class Base:
    a: int
    b: int = 1
    n: ClassVar[int] = 2
    hidden: int = field(default=0, init=False)

@dataclass
class Child(Base):
    a: str
    c: list = field(default_factory=list)
    _: KW_ONLY
    d: int = field()

class Plain:
    def __init__(self, x, *, y=1): ...

class Heir(Plain): ...

class Module(torch.nn.Module):
    def forward(self): ...

class New:
    def __new__(cls, x): ...

def one(): ...
if one:
    def two(): ...
else:
    def two(x): ...
"""


def constructor(name: str):
    symbols = Symbols({"m.py": CLASSES.encode()}, frozenset())
    found = symbols.resolve("sglang.m", name)
    assert isinstance(found, Class)
    return of_callee(symbols, found)


@pytest.mark.parametrize(
    ("name", "positional", "required"),
    [
        ("Base", ("a", "b"), {"a"}),
        ("Child", ("a", "b", "c"), {"a", "d"}),
        ("Plain", ("x",), {"x"}),
        ("Heir", ("x",), {"x"}),
    ],
)
def test_constructor_takes_inherited_fields_and_arguments(name: str, positional: tuple[str, ...], required: set[str]):
    """Dataclass fields keep the order of their first definition."""
    signature = constructor(name)

    assert signature is not None
    assert signature.positional == positional
    assert signature.required == required


@pytest.mark.parametrize("name", ["Module", "New"])
def test_constructor_that_cannot_be_seen_is_undecidable(name: str):
    """A base from another package, or `__new__`."""
    assert constructor(name) is None


def test_names_follow_re_exports_and_stars():
    """Through packages, aliases and `*`; a circle is missing, an absent module unknown unless it was asked for."""
    files = {
        "a/__init__.py": b"from .b import f as g\nfrom sglang.a.c import *\nfrom sglang.far import thing\n",
        "a/b.py": b"def f(): ...\n",
        "a/c.py": b"from sglang.a.d import h\nfrom torch import x\n",
        "a/d.py": b"from sglang.a.c import h\nclass K: ...\n",
    }
    symbols = Symbols(files, frozenset({"gone.py", "gone/__init__.py"}))

    assert isinstance(symbols.resolve("sglang.a", "g"), Function)
    assert isinstance(symbols.resolve("sglang.a.d", "K"), Class)
    assert isinstance(symbols.resolve("sglang.a", "x"), Unknown)
    assert isinstance(symbols.resolve("sglang.a", "thing"), Unknown)
    assert isinstance(symbols.resolve("sglang.a", "nothing"), Missing)
    assert isinstance(symbols.resolve("sglang.a", "h"), Missing)
    assert isinstance(symbols.module("sglang.gone"), Missing)
    assert isinstance(symbols.module("sglang.elsewhere"), Unknown)


def test_an_import_for_types_alone_hides_no_definition():
    """`managers/utils.py` of SGLang imports its own class from whoever imports it there."""
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sglang.user import A, B\nclass A:\n    pass\n"
    )
    symbols = Symbols({"srt/a.py": source.encode()}, frozenset())

    assert isinstance(symbols.resolve("sglang.srt.a", "A"), Class)
    assert isinstance(symbols.resolve("sglang.srt.a", "B"), Unknown)


def test_conditional_definition_is_undecidable():
    """Of two definitions nobody knows which one runs."""
    assert isinstance(Symbols({"m.py": CLASSES.encode()}, frozenset()).resolve("sglang.m", "two"), Unknown)
