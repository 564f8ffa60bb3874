# SPDX-License-Identifier: Apache-2.0
"""What the modules of a snapshot define: names, re-exports, classes and their members, looked up without importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddtree_overlay.modules import PACKAGE, imports, is_sglang, module_of, paths_of
from ddtree_overlay.receivers import CLASSES
from ddtree_overlay.verify.definitions import FunctionNode, Module, attributes_of, dotted_tail, read_module


#: Bases from other packages that add no members a call could mean.
_PLAIN_BASES = frozenset({"object", "ABC", "Protocol", "Generic"})
#: Bases from other packages, and the members that they add.
_OUTSIDE_BASES = {
    **dict.fromkeys(_PLAIN_BASES, frozenset[str]()),
    **dict.fromkeys(("Enum", "IntEnum"), frozenset({"name", "value"})),
    "Struct": frozenset[str](),
    "Module": frozenset({"buffers", "children", "eval", "forward", "modules", "parameters", "to", "training"}),
}


@dataclass(frozen=True, slots=True)
class Missing:
    """The name is not there; `what` says which part."""

    what: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The snapshot cannot tell: the name is there or may be, but its definition is elsewhere or made at run time."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method."""

    path: str
    node: FunctionNode


@dataclass(frozen=True, slots=True)
class Class:
    """A class."""

    path: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True)
class Submodule:
    """A module."""

    name: str


Symbol = Function | Class | Submodule | Unknown | Missing


class Symbols:
    """The modules of a snapshot with the overlay laid over it.

    Args:
        files: Package-relative path to bytes. A module that is absent here is taken to be absent from the package if
            `wanted` names it, and to be unknown otherwise.
        wanted: Paths the snapshot was asked for.
    """

    def __init__(self, files: Mapping[str, bytes], wanted: frozenset[str]) -> None:
        self._files = files
        self._wanted = wanted
        self._modules: dict[str, Module | None] = {}
        self._members: dict[ast.ClassDef, frozenset[str]] = {}
        self._listed: dict[str, tuple[Class, ...]] = {}
        self._folders = {"/".join(parts[:i]) for parts in (p.split("/") for p in files) for i in range(1, len(parts))}

    def module(self, name: str) -> Symbol:
        """The module `name`, `Missing`, or `Unknown`."""
        if self._load(name) is not None or self._is_namespace(name):
            return Submodule(name)
        return Missing(f"module {name}") if self._wanted.issuperset(paths_of(name)) else Unknown()

    def resolve(self, module: str, name: str, _seen: frozenset[tuple[str, str]] = frozenset()) -> Symbol:
        """What `from module import name` gives, followed through re-exports."""
        loaded = self._load(module)
        submodule = self.module(f"{module}.{name}")
        if loaded is None:
            return submodule if self._is_namespace(module) else self.module(module)
        if (module, name) in _seen:
            return Missing(f"{name} in {module}: its imports go in a circle")
        seen = _seen | {(module, name)}
        bound = loaded.bindings.get(name)
        if bound:
            return self._bound(loaded, name, bound, seen)
        if isinstance(submodule, Submodule):
            return submodule
        unsure = "__getattr__" in loaded.bindings
        for star in loaded.stars:
            found = self.resolve(star, name, seen) if is_sglang(star) else Unknown()
            if not isinstance(found, (Missing, Unknown)):
                return found
            unsure = unsure or isinstance(found, Unknown)
        return Unknown() if unsure else Missing(f"{name} in {module}")

    def constant(self, module: str, name: str) -> object:
        """The value of a constant of a module, followed through one import; None when it is no literal."""
        loaded = self._load(module)
        for node in () if loaded is None else loaded.bindings.get(name, ()):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                return node.value.value
            if isinstance(node, ast.ImportFrom) and loaded is not None:
                for taken in imports(node, loaded.path):
                    if taken.bound == name and taken.name is not None and taken.module != module:
                        return self.constant(taken.module, taken.name)
        return None

    def tree(self, path: str) -> ast.Module:
        """The parsed file at `path`."""
        loaded = self._load(module_of(path))
        assert loaded is not None
        return loaded.tree

    def bases(self, cls: Class) -> Iterator[Class | Unknown]:
        """The class and its bases, nearest first; `Unknown` for a base the snapshot does not hold."""
        yield cls
        for base in cls.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self.expression(cls.path, expression)
            if isinstance(found, Class):
                yield from self.bases(found)
            elif dotted_tail(expression) not in _PLAIN_BASES:
                yield Unknown()

    def member(self, cls: Class, name: str, *, skip_own: bool = False) -> Symbol:
        """The method `name` of a class or its bases; `Unknown` also for attributes, whose value cannot be seen."""
        unsure = False
        for base in list(self.bases(cls))[1 if skip_own else 0 :]:
            if isinstance(base, Unknown):
                unsure = True
                continue
            own = [n for n in base.node.body if isinstance(n, FunctionNode) and n.name == name]
            if own:
                return Function(base.path, own[-1]) if len(own) == 1 and not unsure else Unknown()
            if not {name, "__getattr__"}.isdisjoint(self._attributes(base.node)):
                return Unknown()
        return Unknown() if unsure or name.startswith("__") else Missing(f"{name} in class {cls.node.name}")

    def writes(self, cls: Class, name: str) -> bool | None:
        """Whether a class or a base of it writes a member down; None: it does not, but has a base that is not seen.

        What a `__getattr__` may come up with is not written down.
        """
        if name in self._attributes(cls.node) or name.startswith("__"):
            return True
        unseen = False
        for base in cls.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self.expression(cls.path, expression)
            if isinstance(found, Class):
                written = self.writes(found, name)
            else:
                outside = _OUTSIDE_BASES.get(dotted_tail(expression))
                written = None if outside is None else name in outside
            if written:
                return True
            unseen = unseen or written is None
        return None if unseen else False

    def listed(self, name: str) -> tuple[Class, ...]:
        """The classes behind a name of the table of receivers; none when the snapshot may not hold all of them."""
        if name not in self._listed:
            places = [place.partition(" ")[::2] for place in CLASSES.get(name, ())]
            self._listed[name] = tuple(cls for path, wanted in places for cls in self._classes_at(path, wanted))
            absent = {module_of(path) for path, _ in places if path not in self._files}
            known = {path for path, _ in places if path in self._files}
            # A snapshot that was taken when the table had less: what is there asks for what is not.
            if any(taken in absent for path in known for taken in self._imported_at_once(path)):
                self._listed[name] = ()
        return self._listed[name]

    def _imported_at_once(self, path: str) -> Iterator[str]:
        """Modules that a module imports from when it is imported itself."""
        for statement in self.tree(path).body:
            if isinstance(statement, ast.ImportFrom):
                yield from (taken.module for taken in imports(statement, path))

    def _classes_at(self, path: str, name: str) -> Iterator[Class]:
        """Classes of a module, whatever else it binds their names to."""
        loaded = self._load(module_of(path))
        for node in () if loaded is None else loaded.tree.body:
            if isinstance(node, ast.ClassDef) and name in ("*", node.name):
                yield Class(path, node)

    def expression(self, path: str, node: ast.expr) -> Symbol:
        """What a dotted name at module level means."""
        if isinstance(node, ast.Name):
            found = self.resolve(module_of(path), node.id)
            return Unknown() if isinstance(found, Missing) else found
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            return self.expression(path, ast.Name(node.value))
        if isinstance(node, ast.Attribute):
            owner = self.expression(path, node.value)
            if isinstance(owner, Submodule):
                return self.resolve(owner.name, node.attr)
        return Unknown()

    def _bound(self, loaded: Module, name: str, bound: list[ast.stmt], seen: frozenset[tuple[str, str]]) -> Symbol:
        if len(bound) > 1:
            return Unknown()
        node = bound[0]
        if isinstance(node, FunctionNode):
            return Function(loaded.path, node)
        if isinstance(node, ast.ClassDef):
            return Class(loaded.path, node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for taken in imports(node, loaded.path):
                if taken.bound == name and taken.name is None:
                    return Submodule(taken.module if taken.bound != PACKAGE else PACKAGE)
                if taken.bound == name and taken.name is not None:
                    return self.resolve(taken.module, taken.name, seen)
        return Unknown()

    def _attributes(self, node: ast.ClassDef) -> frozenset[str]:
        if node not in self._members:
            self._members[node] = attributes_of(node)
        return self._members[node]

    def _load(self, name: str) -> Module | None:
        if name not in self._modules:
            path = next((p for p in paths_of(name) if p in self._files), None)
            self._modules[name] = None if path is None else read_module(path, self._files[path])
        return self._modules[name]

    def _is_namespace(self, name: str) -> bool:
        folder = "/".join(name.split(".")[1:])
        return not folder or folder in self._folders
