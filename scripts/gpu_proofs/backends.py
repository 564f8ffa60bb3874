# SPDX-License-Identifier: Apache-2.0
"""The part of `gpu_prove` that shows which attention backends verify a tree.

What a backend needs lies in the site: FlashAttention 3 the library `sgl_kernel/flash_ops*.so`; FlashInfer a compiler
(nvcc) and `ninja`, from PATH or from the site's own `bin`. A backend without it is reported as not run.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from gpu_proofs.calls import texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm
from gpu_proofs.judging import judge
from gpu_proofs.parts import plain_engine
from gpu_proofs.watching import report_hiding, report_replays


#: Verify with the decode backend, and draft with a third one.
MIXED = {
    "prefill_attention_backend": "flashinfer",
    "decode_attention_backend": "fa3",
    "speculative_attention_mode": "decode",
}

#: A budget beyond the block of the pair, so that a chain leaves nodes over.
PADDED = 24


def part_backends(part: Part) -> None:
    """Per backend: greedy output, hidden nodes, replays; pages of 1 and 16; all engines beside each other."""
    # FlashInfer's ragged prefill is another kernel to compile, and has nothing to do with a tree.
    os.environ["SGLANG_FLASHINFER_USE_PAGED"] = "1"
    os.environ["PATH"] = f"{part.options.site / 'bin'}:{os.environ['PATH']}"
    calls, started = texts(part.options), {}
    for name in part.options.backends.split(","):
        missing = [text for backend in used(name)[0] if (text := what_is_missing(part, backend))]
        if missing:
            part.check(f"{name}: nodes see their ancestors and nobody else", None, missing[0])
            continue
        started[name] = start(part, name, calls)
    for name, (plain, arms) in started.items():
        judge(part, plain, arms, f", {name}")
        for arm_name, arm in arms.items():
            if "watched" in arm_name:
                report_hiding(part, arm_name, arm)
                if not part.options.cpu:
                    report_replays(part, arm, f"{arm_name}: ", f", {name}")


def start(part: Part, name: str, calls: list[dict[str, Any]]) -> tuple[Arm, dict[str, Arm]]:
    """The engines of one name: plain decoding, DFLASH, trees as they are served, and watched trees."""
    backends, stored = used(name)
    plain = plain_engine(part, calls, f"plain-{name}", attention_backend=backends[-1], **stored)
    backend = MIXED if name == "mixed" else {"attention_backend": name.partition("+")[0]} | stored
    tree = part.drafting("DDTREE") | backend
    arms = {f"DFLASH {name}": part.engine(f"dflash-{name}", calls, **part.drafting("DFLASH"), **backend)}
    arms[f"DDTREE {name}"] = part.engine(f"ddtree-{name}", calls, **tree)
    if name == "mixed":
        drafted = {"speculative_draft_attention_backend": "triton"}
        arms["DDTREE mixed watched"] = part.engine("watched-mixed", calls, watched=True, **tree, **drafted)
        return plain, arms
    for page in (16,) if stored else (1, 16):
        paged = {} if page == 1 else {"page_size": page}
        arm_name = f"DDTREE {name} watched, pages of {page}"
        arms[arm_name] = part.engine(f"watched-{name}-{page}", calls, watched=True, **tree, **paged)
    if not stored:
        # A chain in a budget that it cannot fill: every tree ends in padding nodes.
        chain = part.drafting("DDTREE", PADDED) | {"speculative_ddtree_topk_cap": 1} | backend
        arms[f"DDTREE {name} watched, padding"] = part.engine(f"padded-{name}", calls, watched=True, **chain)
    return plain, arms


def used(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The backends of a name of --backends, the one that decodes last, and how their KV is stored: `fa3+fp8_e4m3`."""
    backend, _, kind = name.partition("+")
    return ("flashinfer", "fa3") if name == "mixed" else (backend,), {"kv_cache_dtype": kind} if kind else {}


def what_is_missing(part: Part, backend: str) -> str | None:
    """What this machine lacks for a backend."""
    site = part.options.site
    if part.options.cpu and backend != "triton":
        return "a CPU runs triton only"
    if backend == "fa3" and not [*site.glob("sgl_kernel/flash_ops*.so"), *site.glob("sgl_kernel/*/flash_ops*.so")]:
        return f"{site}/sgl_kernel/flash_ops*.so is missing: pip install sglang-kernel brings it"
    if backend == "flashinfer" and not shutil.which("ninja"):
        return "ninja is missing, with which FlashInfer compiles its kernels: pip install ninja"
    return None
