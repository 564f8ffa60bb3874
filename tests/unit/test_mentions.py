# SPDX-License-Identifier: Apache-2.0
"""What counts as a mention: names and widths, and each way to take the algorithm as data, on files of a few lines."""

from __future__ import annotations

import pytest

from ddtree_overlay.verify.mentions import WATCHED, Place, mentions_in


SOURCE = b'''\
"""DFLASH here is prose."""
from sglang.dflash import DFlashThing, dflash as flat  # DFLASH


class DFlashWorker:
    """DFLASH."""

    def run(self, dflash_size, args):
        self.speculative_eagle_topk = args.get().speculative_eagle_topk
        if self.algorithm.is_dflash() or self.name == "DFLASH":
            raise ValueError("DFLASH cannot do this", f"DFLASH {dflash_size}")
        return f(dflash_size=1, x=getattr(args, "speculative_num_draft_tokens"))
'''


def _mentions(text: str) -> dict[str, int]:
    """The mentions of a file whose body is `text`."""
    found = mentions_in("srt/x.py", text.encode())
    return {mention: count for mentions in found.values() for mention, count in mentions.counts.items()}


def test_mentions_are_written_by_what_they_are():
    """Names by their dotted form and role, strings without blanks; comments, docstrings and messages not at all."""
    found = mentions_in("srt/x.py", SOURCE)

    assert set(found) == {Place("srt/x.py", "<module>"), Place("srt/x.py", "DFlashWorker.run")}
    assert dict(found[Place("srt/x.py", "<module>")].counts) == {
        "import sglang.dflash": 1,
        "import DFlashThing": 1,
        "alias dflash as flat": 1,
        "class DFlashWorker": 1,
    }
    assert dict(found[Place("srt/x.py", "DFlashWorker.run")].counts) == {
        "param dflash_size": 1,
        "self.speculative_eagle_topk =": 1,
        "args.get().speculative_eagle_topk": 1,
        "self.algorithm.is_dflash()": 1,
        '"DFLASH"': 1,
        "dflash_size": 1,
        "dflash_size=": 1,
        '"speculative_num_draft_tokens"': 1,
    }


def test_shifted_lines_and_other_layout_change_nothing():
    """A table survives a reformatted release."""
    moved = b"\n\n" + SOURCE.replace(
        b"self.algorithm.is_dflash() or", b"(\n            self.algorithm.is_dflash()\n        ) or"
    )

    before, after = mentions_in("srt/x.py", SOURCE), mentions_in("srt/x.py", moved)

    assert {p: m.counts for p, m in before.items()} == {p: m.counts for p, m in after.items()}


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("w = get_spec().speculative_num_draft_tokens", "get_spec().speculative_num_draft_tokens"),
        ("w = resolving_view(a).speculative_eagle_topk", "resolving_view().speculative_eagle_topk"),
        ("w = max_speculative_num_draft_tokens()", "max_speculative_num_draft_tokens()"),
        ('declare_resolution(a, "_handle_dflash", speculative_eagle_topk=1)', "speculative_eagle_topk="),
        ('declare_resolution(a, "_handle_dflash", x=1)', '"_handle_dflash"'),
        ("w = resolve_num_tokens_per_req(phase='x')", "resolve_num_tokens_per_req()"),
        (
            "w = algo.get_num_tokens_per_req_for_target_verify(4, True)",
            "algo.get_num_tokens_per_req_for_target_verify()",
        ),
        ("if info.custom_mask is None: pass", "info.custom_mask"),
        ("FAST = frozenset({SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.DFLASH})", "SpeculativeAlgorithm.DFLASH"),
        ('FAST = {"EAGLE", "DFLASH"}', '"DFLASH"'),
        ('Kind = Literal["EAGLE", "DFLASH"]', '"DFLASH"'),
        ('match name:\n    case "DFLASH": pass', '"DFLASH"'),
        ("match algo:\n    case SpeculativeAlgorithm.DFLASH: pass", "SpeculativeAlgorithm.DFLASH"),
        ('register_backend("DFLASH", make)', '"DFLASH"'),
        ('ask = getattr(algo, "is_dflash_family")', '"is_dflash_family"'),
        ("x = _DflashSampler()", "_DflashSampler()"),
        ("if batch.spec_algorithm not in _FAST: pass", "in _FAST"),
        ("if (args.speculative_algorithm or '').upper() in names.FAST: pass", "in names.FAST"),
        ("limit = LIMITS[args.speculative_algorithm]", "[args.speculative_algorithm]"),
        ("limit = LIMITS.get(spec_algo)", "[spec_algo]"),
        ("limit = LIMITS[self.spec_algorithm.name.lower()]", "[self.spec_algorithm.name.lower()]"),
        ("label = self.speculative_algorithm.name", "self.speculative_algorithm.name"),
        ('path = f"kernels/{args.speculative_algorithm}.so"', 'f"{args.speculative_algorithm}"'),
        (
            "if args.speculative_algorithm.upper().startswith('D'): pass",
            "args.speculative_algorithm.upper().startswith()",
        ),
        ("if 'FLASH' in args.speculative_algorithm: pass", "in args.speculative_algorithm"),
        ("ask = getattr(batch.spec_algorithm, 'is_' + kind)", "getattr(batch.spec_algorithm)"),
        ("for algo in SpeculativeAlgorithm: pass", "each SpeculativeAlgorithm"),
        ("names = frozenset(a.name for a in SpeculativeAlgorithm)", "each SpeculativeAlgorithm"),
        ("names = sorted(SpeculativeAlgorithm)", "each SpeculativeAlgorithm"),
        ("names = SpeculativeAlgorithm.__members__", "each SpeculativeAlgorithm"),
    ],
)
def test_every_way_to_depend_on_the_algorithm_is_a_mention(text, mention):
    """Also where no list of names shows it; and the snapshot takes the file in the first place."""
    assert WATCHED.search(text.encode())
    assert _mentions(text)[mention] == 1


@pytest.mark.parametrize(
    "text",
    [
        "if args.speculative_algorithm == 'EAGLE': pass",
        "if args.speculative_algorithm in ('EAGLE', 'NGRAM'): pass",
        "if batch.spec_algorithm.is_eagle(): pass",
        "logger.info(f'{args.speculative_algorithm} starts')",
        "raise ValueError(f'{args.speculative_algorithm} cannot')",
        "raise ValueError(f'{batch.spec_algorithm.name} cannot')",
        "assert ok, f'{args.speculative_algorithm} cannot'",
        "algo = SpeculativeAlgorithm.from_string(args.speculative_algorithm)",
        "name = args.speculative_algorithm.upper()",
    ],
)
def test_what_treats_ddtree_as_dflash_by_itself_is_none(text):
    """A comparison with another name has one answer for both, and a message decides nothing."""
    assert _mentions(text) == {}
