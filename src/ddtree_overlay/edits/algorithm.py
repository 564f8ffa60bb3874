# SPDX-License-Identifier: Apache-2.0
"""The pieces that register a speculative algorithm, by name: member, predicate, worker, fields, flags, handler, gates.

DDTREE is registered with them, release by release; `docs/new_algorithm.md` registers another one. Each piece gives one
insertion, or a few, for the `Edit` of the file that it belongs to: nothing here knows a file or a release. Anchors that
differ from release to release are arguments; `Insertion.moved` makes one release's piece from another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddtree_overlay.edits.anchors import Anchor, AtStart, Before
from ddtree_overlay.edits.base import Insertion, add_enum_member, add_field, add_method, insert_statements


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A speculative algorithm that builds on one of SGLang's.

    Args:
        name: Name of its enum member and value of `--speculative-algorithm`: upper case.
        like: Name of the algorithm that it builds on: it counts as that one wherever that one is asked for.
        package: Module or package, below `sglang.srt`, of the functions that the pieces call.
    """

    name: str
    like: str
    package: str

    @property
    def predicate(self) -> str:
        """The method of `SpeculativeAlgorithm` that holds for it alone."""
        return f"is_{self.name.lower()}"

    @property
    def prefix(self) -> str:
        """What the names of its fields begin with."""
        return f"speculative_{self.name.lower()}_"

    def chosen_in(self, owner: str) -> str:
        """The condition under which `owner`, an expression for the server's arguments, has chosen it."""
        return f'{owner}.speculative_algorithm == "{self.name}"'

    def calling(self, call: str, statement: str) -> str:
        """Statements that import a function of its own and use it.

        Args:
            call: `module:function`, the module relative to `package`; `:function` for the package itself.
            statement: What to do, with `{function}` for the function's name.
        """
        module, _, function = call.partition(":")
        path = f"{self.package}.{module}" if module else self.package
        return f"from {path} import {function}\n\n{statement.format(function=function)}\n"


def register_member(algorithm: Algorithm, *, why: str) -> tuple[Insertion, Insertion, Insertion]:
    """The enum member, the predicate of the algorithm it builds on that holds for it too, and its own predicate.

    Args:
        algorithm: The algorithm.
        why: Completes the comment "NAME …": why it counts as the other one.
    """
    member = add_enum_member(
        "SpeculativeAlgorithm", algorithm.name, reason="`from_string` finds an algorithm by the name of its member."
    )
    count = insert_statements(
        f"SpeculativeAlgorithm.is_{algorithm.like.lower()}",
        AtStart(),
        f"# {algorithm.name} {why}\nif self.{algorithm.predicate}():\n    return True\n",
        reason=f"Draft model set-up, aux hidden states, graphs and admission must treat {algorithm.name} as "
        f"{algorithm.like}.",
    )
    predicate = add_method(
        "SpeculativeAlgorithm",
        f"def {algorithm.predicate}(self) -> bool:\n    return self == SpeculativeAlgorithm.{algorithm.name}\n",
        after=f"is_{algorithm.like.lower()}",
        reason=f"The places that differ from {algorithm.like} ask for {algorithm.name} by this name.",
    )
    return member, count, predicate


def register_worker(algorithm: Algorithm, call: str, *, reason: str, arguments: str = "") -> Insertion:
    """The branch of the worker factory, above that of the algorithm it builds on.

    Args:
        algorithm: The algorithm.
        call: The function that gives the worker's class, as in `Algorithm.calling`.
        reason: As in `Insertion`.
        arguments: Names that the factory has at hand and the function is to be given.
    """
    return insert_statements(
        "SpeculativeAlgorithm.create_worker",
        Before(f"if self.is_{algorithm.like.lower()}(): ..."),
        _when(f"self.{algorithm.predicate}()", algorithm.calling(call, f"return {{function}}({arguments})")),
        reason=reason,
        blank_before=1,
    )


def register_fields(
    algorithm: Algorithm, fields: Mapping[str, tuple[str, str]], *, after: str, reason: str, scope: str = "ServerArgs"
) -> Insertion:
    """The fields of the server's arguments, in order.

    Args:
        algorithm: The algorithm.
        fields: Name without the prefix -> annotation and default, both as Python.
        after: The field that they stand behind.
        reason: As in `Insertion`.
        scope: The class of the arguments.
    """
    lines = [f"{algorithm.prefix}{name}: {kind} = {default}" for name, (kind, default) in fields.items()]
    return add_field(scope, lines, after=after, reason=reason)


def register_flags(
    algorithm: Algorithm, call: str, *, anchor: Anchor, reason: str, scope: str = "ServerArgs.add_cli_args"
) -> Insertion:
    """A call that adds the flags to the parser, and the name to `--speculative-algorithm` where that has `choices`."""
    return insert_statements(scope, anchor, algorithm.calling(call, "{function}(parser)"), reason=reason)


def register_start(
    algorithm: Algorithm, call: str, *, scope: str, anchor: Anchor, reason: str, owner: str = "self"
) -> Insertion:
    """A call with the server's arguments, whichever algorithm is chosen, before SGLang completes them."""
    code = algorithm.calling(call, f"{{function}}({owner})")
    return insert_statements(scope, anchor, code, reason=reason, blank_before=1)


def register_gate(
    algorithm: Algorithm,
    call: str,
    *,
    scope: str,
    anchor: Anchor,
    reason: str,
    condition: str = "",
    statement: str = "{function}(self)",
    blank_before: int = 0,
    blank_after: int = 0,
) -> Insertion:
    """A call under the condition that the algorithm is chosen: a check, a choice, or an answer of its own.

    Args:
        algorithm: The algorithm.
        call: The function, as in `Algorithm.calling`; it raises `ValueError` for what cannot be served.
        scope: As in `Insertion`.
        anchor: As in `Insertion`.
        reason: As in `Insertion`.
        condition: Default: the arguments, `self`, have chosen it.
        statement: What to do with the function: `return {function}()` answers in SGLang's place.
        blank_before: As in `Insertion`.
        blank_after: As in `Insertion`.
    """
    code = _when(condition or algorithm.chosen_in("self"), algorithm.calling(call, statement))
    return insert_statements(scope, anchor, code, reason=reason, blank_before=blank_before, blank_after=blank_after)


def register_answer(
    algorithm: Algorithm, value: str, *, scope: str, anchor: Anchor, reason: str, owner: str
) -> Insertion:
    """A constant answer where SGLang asks for the algorithm by its name."""
    return insert_statements(scope, anchor, f"if {algorithm.chosen_in(owner)}:\n    return {value}\n", reason=reason)


def borrow_handler(
    algorithm: Algorithm, enter: str, leave: str, *, scope: str, before: Anchor, after: Anchor, reasons: tuple[str, str]
) -> tuple[Insertion, Insertion]:
    """Two calls around the branch that completes the arguments of the algorithm it builds on.

    `enter` gives the arguments that algorithm's name, so that the branch runs; `leave` gives them their own again.

    Args:
        algorithm: The algorithm.
        enter: The function above the branch, as in `Algorithm.calling`.
        leave: The function below it.
        scope: As in `Insertion`.
        before: The gap above the branch.
        after: The gap below it.
        reasons: As in `Insertion`, for each of the two.
    """
    flag = algorithm.predicate
    above = f"{flag} = {algorithm.chosen_in('self')}\n{_when(flag, algorithm.calling(enter, '{function}(self)'))}"
    below = _when(flag, algorithm.calling(leave, "{function}(self)"))
    return (
        insert_statements(scope, before, above, reason=reasons[0], blank_before=1),
        insert_statements(scope, after, below, reason=reasons[1], blank_before=1),
    )


def _when(condition: str, code: str) -> str:
    body = "".join(f"    {line}\n" if line else "\n" for line in code.splitlines())
    return f"if {condition}:\n{body}"
