# SPDX-License-Identifier: Apache-2.0
"""Check `host`: the patched files compile, import and show their flags under the interpreter that serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_overlay.hosts.transport import Transport
from ddtree_overlay.manifest import Manifest
from ddtree_overlay.modules import module_of
from ddtree_overlay.patching import Patched
from ddtree_overlay.verify.findings import Finding


#: What `launch_server --help` must show.
FLAGS = (
    "--speculative-ddtree-budget",
    "--speculative-ddtree-topk-cap",
    "--speculative-ddtree-chain-seed",
    "--speculative-ddtree-allow-hybrid-unsafe",
    "DDTREE",
)

#: Seconds: importing torch and every model from a cold disk takes minutes.
PROBE_TIMEOUT = 300.0


def verify_on_host(transport: Transport, manifest: Manifest, patched: Patched) -> list[Finding]:
    """Compile and import the patched tree on the host, from a scratch folder that is removed again.

    Args:
        transport: The host.
        manifest: Its snapshot; findings name its release.
        patched: What would be pushed.
    """
    files = [{"path": path, "size": len(data)} for path, data in patched.files.items()]
    payload = b"".join(patched.files.values())
    changes = {c.path: {"base": c.base_sha256, "after": c.sha256} for c in patched.bundle.changes}
    described = [{**file, **changes[str(file["path"])]} for file in files]
    compiled = transport.call("compile", {"files": described}, payload).result
    findings = [*_replaced(compiled, patched, manifest.release), *_compiled(compiled)]
    if any(f.severity == "error" for f in findings):
        return findings
    modules = [module_of(path) for path in patched.files]
    args = {"files": files, "modules": modules, "help": True, "timeout": PROBE_TIMEOUT}
    probed = transport.call("probe", args, payload, timeout=2 * PROBE_TIMEOUT).result
    return [*findings, *_imported(probed, patched, manifest.release), *_helped(probed)]


def _replaced(result: Mapping[str, Any], patched: Patched, release: str) -> list[Finding]:
    """An error when the host has another SGLang than the snapshot: to import ours over that would prove nothing."""
    edited = {c.path for c in patched.bundle.changes if not c.adds}
    unlike = [path for path in result["unlike"] if path in edited]
    if not unlike:
        return []
    message = (
        f"{len(unlike)} of the {len(edited)} files that the overlay changes are not as in the snapshot of SGLang "
        f"{release}; the host has {result['sglang'] or 'an unknown version'} now: take the snapshot again"
    )
    return [Finding("host", "error", unlike[0], None, message)]


def _compiled(result: Mapping[str, Any]) -> list[Finding]:
    python = result["python"]
    errors = [
        Finding("host", "error", e["path"], e.get("line"), f"Python {python}: {e['message']}") for e in result["errors"]
    ]
    return errors or [Finding("host", "info", "", None, f"every patched file compiles with the host's Python {python}")]


def _imported(result: Mapping[str, Any], patched: Patched, release: str) -> list[Finding]:
    base, ours = (result["base"] or {}).get("imports", {}), result["patched"]["imports"]
    if result["patched"]["outside"]:
        message = "the scratch tree was not what Python imported, so nothing is proven about the patched files"
        return [Finding("host", "error", "", None, message)]
    findings = []
    edited = [module_of(c.path) for c in patched.bundle.changes if not c.adds]
    troubles = {_kind(base[name] or "") for name in edited if base.get(name)}
    unproven: list[str] = []
    for path in patched.files:
        error = ours.get(module_of(path))
        if error is None:
            continue
        # A host without torch imports neither tree: that says nothing about our files.
        alike = _kind(error) in troubles and (module_of(path) not in edited or base.get(module_of(path)))
        if alike:
            unproven.append(module_of(path))
        else:
            findings.append(Finding("host", "error", path, None, f"does not import: {error}"))
    if unproven:
        message = (
            f"{len(unproven)} of {len(patched.files)} modules import neither patched nor pristine: {ours[unproven[0]]}"
        )
        findings.append(Finding("host", "warning", "", None, message))
    if not findings:
        message = f"all {len(patched.files)} patched modules import over SGLang {release}"
        findings.append(Finding("host", "info", "", None, message))
    return findings


def _helped(result: Mapping[str, Any]) -> list[Finding]:
    base, ours = (result["base"] or {}).get("help"), result["patched"]["help"]
    if ours is None:
        return []
    if ours["code"] != 0:
        tail = (ours["error"].strip().splitlines() or ["no message"])[-1]
        if base is not None and base["code"] != 0:
            return [
                Finding("host", "warning", "", None, f"launch_server --help fails patched and pristine alike: {tail}")
            ]
        return [Finding("host", "error", "", None, f"launch_server --help fails with the patched files only: {tail}")]
    absent = [flag for flag in FLAGS if flag not in ours["output"]]
    if absent:
        return [Finding("host", "error", "", None, f"launch_server --help does not show {', '.join(absent)}")]
    return [Finding("host", "info", "", None, "launch_server --help shows DDTREE and its flags")]


def _kind(error: str) -> str:
    """`ModuleNotFoundError: No module named 'torch'` of both trees is the same trouble, whatever led to it."""
    return error.strip().splitlines()[-1] if error.strip() else ""
