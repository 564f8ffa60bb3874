# SPDX-License-Identifier: Apache-2.0
"""A tree that is fine, of a tiny SGLang and a tiny overlay, to plant faults in for `verify` to find."""

from __future__ import annotations

import dataclasses

from tests.support import small

from ddtree_overlay.patching import Patched, build_release
from ddtree_overlay.verify import Finding, verify_release


SERVER_ARGS = "srt/server_args.py"
WORKER = "srt/speculative/dflash_worker.py"
ARGS = "srt/speculative/ddtree/args.py"
TREE_WORKER = "srt/speculative/ddtree/worker.py"


class Tree:
    """A base and its bundle, both open to sabotage."""

    def __init__(self) -> None:
        self.base = small.base()
        self.overlay = small.overlay()

    def change(self, path: str, old: str, new: str) -> Tree:
        """Sabotage SGLang or the overlay before patching."""
        files = self.overlay if path in self.overlay else self.base
        assert old.encode() in files[path]
        files[path] = files[path].replace(old.encode(), new.encode())
        return self

    def patched(self) -> Patched:
        """What patching makes of it."""
        return build_release(small.RELEASE, self.base, self.overlay)

    def findings(self, patched: Patched | None = None, **manifest: object) -> list[Finding]:
        """Everything `verify` says, the manifest changed as given."""
        seen = dataclasses.replace(small.manifest(self.base), **manifest)
        return verify_release(
            small.RELEASE, small.sites(), seen, self.base, patched or self.patched(), mirrors=small.mirrors(self.base)
        )

    def errors(self, patched: Patched | None = None, **manifest: object) -> list[Finding]:
        """What blocks a push."""
        return [f for f in self.findings(patched, **manifest) if f.severity == "error"]


def edited(patched: Patched, path: str, old: str, new: str) -> Patched:
    """Sabotage the result of patching."""
    assert old.encode() in patched.files[path]
    return Patched(patched.bundle, {**patched.files, path: patched.files[path].replace(old.encode(), new.encode())})
