# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: steps of trees against SGLang's real pools, allocators and radix cache.

Nothing is decoded. The KV of a token is a digest of the whole text up to it, so what must lie at a position is known,
and a slot that was moved wrongly, given away or shared holds something else.
"""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ddtree.commit import committed_rows
from sglang.srt.speculative.ddtree.draft_slots import draft_slots
from sglang.srt.speculative.ddtree.finishing import finish_if_due
from sglang.srt.speculative.ddtree.tree import build_tree
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput
from tests.overlay.publishing import publish


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance


SLOTS, LAYERS, HEADS, DIM, VOCABULARY = 1024, 2, 2, 8, 13
STOP = 12


def text_of(req: Req) -> list[int]:
    """Prompt and answer."""
    return [*req.origin_input_ids, *req.output_ids]


def row(text: list[int], salt: int, dtype: torch.dtype) -> torch.Tensor:
    """The KV of the last token of a text in one buffer, [HEADS, DIM], as the pool stores it."""
    noise = np.random.default_rng(zlib.crc32(repr((text, salt)).encode())).integers(0, 128, HEADS * DIM, np.uint8)
    return torch.from_numpy(noise).to(dtype).view(HEADS, DIM)


class Engine:
    """A scheduler's worth of bookkeeping around `DDTreeVerifyInput`: requests come, step, and leave."""

    def __init__(
        self, page_size: int, dtype: torch.dtype, budget: int, seed: int, slots: int = SLOTS, *, early: bool = True
    ) -> None:
        self.early = early
        self.drafted: list[list[int]] = []
        self.dice, self.budget, self.page_size = random.Random(seed), budget, page_size
        self.generator = torch.Generator().manual_seed(seed)
        arguments = {"page_size": page_size, "attention_backend": "triton", "strip_thinking_cache": False}
        arguments["speculative_algorithm"] = "DDTREE"
        publish(SimpleNamespace(**arguments))
        shape = {"head_num": HEADS, "head_dim": DIM, "layer_num": LAYERS, "device": "cpu"}
        options = {"enable_memory_saver": False, "enable_kv_cache_copy": False}
        self.pool, self.draft_pool = (MHATokenToKVPool(slots, page_size, dtype, **shape, **options) for _ in range(2))
        allocator = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paging = {} if page_size == 1 else {"page_size": page_size}
        self.allocator = allocator(slots, **paging, dtype=dtype, device="cpu", kvcache=self.pool, need_sort=False)
        self.rows = ReqToTokenPool(8, 512, "cpu", enable_memory_saver=False)
        parameters = CacheInitParams(False, self.rows, self.allocator, page_size)
        self.cache = RadixCache(parameters)
        self.running: list[Req] = []
        self.started = 0

    def start(self, prompt: list[int], max_new_tokens: int, stop: int = STOP) -> Req:
        """Prefill a request, with what the radix cache holds of it, and insert it there as the scheduler does."""
        self.started += 1
        sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=[stop], ignore_eos=False)
        sampling.normalize(None)
        req = Req(str(self.started), "", prompt, sampling, eos_token_ids=set(), vocab_size=VOCABULARY)
        if not isinstance(req.output_ids, list):  # newer releases keep arrays
            req.origin_input_ids = type(req.output_ids)(req.output_ids.typecode, prompt)
        self.prefill(req)
        self.running.append(req)
        finish_if_due(req)
        if req.finished():
            self.leave(req, keep=True)
        return req

    def prefill(self, req: Req) -> None:
        req.init_next_round_input(self.cache)
        self.cache.inc_lock_ref(req.last_node)
        req.cache_protected_len = len(req.prefix_indices)
        text = text_of(req)
        hit, length = len(req.prefix_indices), len(text)
        req.fill_len = length  # what the scheduler sets in releases without `fill_ids`
        self.rows.alloc([req])
        if self.page_size == 1:
            slots = alloc_token_slots(self.cache, length - hit)
        else:
            before, after = torch.tensor([hit]), torch.tensor([length])
            last = req.prefix_indices[-1:] if hit else torch.tensor([-1])
            slots = alloc_paged_token_slots_extend(self.cache, before, before, after, after, last, length - hit)
        self.rows.write((req.req_pool_idx, slice(0, hit)), req.prefix_indices.to(torch.int32))
        self.rows.write((req.req_pool_idx, slice(hit, length)), slots.to(torch.int32))
        for at, slot in zip(range(hit, length), slots.tolist(), strict=True):
            for pool in (self.pool, self.draft_pool):
                self.write(pool, slot, text[: at + 1])
        req.kv_committed_len = req.kv_allocated_len = length
        self.cache.cache_unfinished_req(req)
        req.output_ids.append(self.dice.randrange(VOCABULARY - 1))  # prefill's own token; its KV is not computed

    def write(self, pool: MHATokenToKVPool, slot: int, text: list[int]) -> None:
        for salt, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
            buffer[slot] = row(text, salt, buffer.dtype)

    def step(self) -> None:
        """One verify step of all running requests; finished ones leave."""
        assert self.running
        lengths = torch.tensor([req.kv_committed_len for req in self.running])
        batch: Any = SimpleNamespace(
            reqs=self.running,
            seq_lens=lengths.clone(),
            seq_lens_cpu=lengths.clone(),
            seq_lens_sum=int(lengths.sum()),
            req_pool_indices=torch.tensor([req.req_pool_idx for req in self.running]),
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            forward_mode=ForwardMode.DECODE,
            sampling_info=None,
            model_config=SimpleNamespace(think_end_id=None),
            device="cpu",
            batch_size=lambda: len(self.running),
        )
        shape = (len(self.running), 5, 3)
        tokens = torch.rand((*shape[:2], VOCABULARY), generator=self.generator).argsort(dim=-1)[..., :3]
        scores = torch.rand(shape, generator=self.generator).log().sort(dim=-1, descending=True).values
        roots = torch.tensor([req.output_ids[-1] for req in self.running])
        tree = build_tree(roots, scores, tokens, self.budget)
        targets = SimpleNamespace(choose=lambda logits, *_: logits)
        before: list[list[list[int]]] = []  # what the host knew when it did what it has to do anyway
        known = [text_of(req) for req in self.running]
        verify = DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=(lengths.unsqueeze(1) + tree.depths).reshape(-1),
            draft_token_num=self.budget + 1,
            tree=tree,
            targets=targets,
            block_size=6,
            pool=self.pool if self.page_size > 1 else None,
            on_accepted=self.write_drafts if self.early else None,
            meanwhile=lambda: before.append([text_of(req) for req in self.running]),
        )
        verify.prepare_for_verify(batch, self.page_size, build_custom_mask=False)
        hidden, self.drafted = [], self.texts(tree)
        texts = self.drafted
        for at, (slot, text) in enumerate(zip(batch.out_cache_loc.tolist(), texts, strict=True)):
            self.write(self.pool, slot, text)
            hidden.append(at if self.early else zlib.crc32(repr(text).encode()))
        wishes = self.wishes(tree)
        # The chooser is a stand-in: the "logits" are the target's tokens.
        output = SimpleNamespace(next_token_logits=wishes, hidden_states=torch.tensor(hidden, dtype=torch.int64))
        _, commit_lens, features, _ = verify.verify(batch=batch, logits_output=output, page_size=self.page_size)
        assert before == [known] != [[text_of(req) for req in self.running]]
        if self.early:
            assert not features.numel()
        else:
            self.append_drafts(commit_lens.tolist(), features.tolist())
        assert verify.last_nodes is not None  # whose recurrent state is kept: the last committed token's
        for at, (req, node) in enumerate(zip(self.running, verify.last_nodes.tolist(), strict=True)):
            assert texts[at * (self.budget + 1) + node] == text_of(req)[: req.kv_committed_len]
        for req in [req for req in self.running if req.finished()]:
            assert not set(req.output_ids[:-1]) & req.sampling_params.stop_token_ids
            assert len(req.output_ids) <= req.sampling_params.max_new_tokens
            self.leave(req, keep=True)

    def texts(self, tree: Any) -> list[list[int]]:
        """The whole text up to each node, request by request."""
        texts = []
        for at, req in enumerate(self.running):
            before = text_of(req)[: req.kv_committed_len]
            own: list[list[int]] = []
            for token, parent in zip(tree.tokens[at].tolist(), tree.parents[at].tolist(), strict=True):
                own.append([*(own[parent] if parent >= 0 else before), token])
            texts += own
        return texts

    def wishes(self, tree: Any) -> torch.Tensor:
        """What the target wants after each node: mostly one of the node's children, wherever it lies."""
        wishes = torch.randint(0, VOCABULARY, tree.tokens.shape, generator=self.generator)
        for at, parents in enumerate(tree.parents.tolist()):
            for node, parent in enumerate(parents):
                if parent >= 0 and self.dice.random() < 0.6:
                    wishes[at, parent] = tree.tokens[at, node]
        return wishes

    def append_drafts(self, counts: list[int], features: list[int]) -> None:
        """What DFLASH does next: the committed tokens' hidden states become the drafter's KV, through the row."""
        features = list(reversed(features))
        for req, count in zip(self.running, counts, strict=True):
            text = text_of(req)
            for at in range(req.kv_committed_len - count, req.kv_committed_len):
                assert features.pop() == zlib.crc32(repr(text[: at + 1]).encode())
                self.write(self.draft_pool, int(self.rows.req_to_token[req.req_pool_idx, at]), text[: at + 1])
        assert not features

    def write_drafts(self, batch: Any, acceptance: Acceptance, hidden: torch.Tensor) -> None:
        """What the worker launches as soon as the path is known: the accepted tokens' drafter KV, stop or no stop."""
        slots = draft_slots(batch.out_cache_loc.view(len(self.running), -1), acceptance, moved=self.page_size > 1)
        rows = committed_rows(hidden.unsqueeze(1), acceptance).flatten()
        for slot, node in zip(slots.tolist(), rows.tolist(), strict=True):
            self.write(self.draft_pool, slot, self.drafted[node])

    def leave(self, req: Req, keep: bool) -> None:
        """Finish (`keep` for the radix cache), or retract and abort."""
        release_kv_cache(req, self.cache, is_insert=keep)
        self.running.remove(req)

    def check(self) -> None:
        """Every committed position of every request holds the KV of its text, in both pools."""
        for req in self.running:
            text = text_of(req)
            slots = self.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist()
            assert len(set(slots)) == len(slots)
            assert len(text) == req.kv_committed_len + 1
            for at, slot in enumerate(slots):
                assert slot % self.page_size == at % self.page_size
                for pool in (self.pool, self.draft_pool):
                    for salt, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
                        assert torch.equal(buffer[slot], row(text[: at + 1], salt, buffer.dtype)), (req.rid, at)


def serve(engine: Engine, requests: int) -> None:
    """Random traffic: shared prefixes, stops inside paths, retractions, aborts."""
    dice = engine.dice
    prompts: list[list[int]] = []
    while engine.started < requests or engine.running:
        while len(engine.running) < 5 and engine.started < requests:
            base = dice.choice(prompts)[: dice.randrange(1, 60)] if prompts and dice.random() < 0.6 else []
            prompt = base + [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 40))]
            engine.start(prompt, max_new_tokens=dice.randrange(1, 30))
            prompts.append(prompt)
        if engine.running:
            engine.step()
        if dice.random() < 0.1 and engine.running:
            engine.leave(dice.choice(engine.running), keep=dice.random() < 0.5)
        prompts += [text_of(req) for req in engine.running[:1]]
        if dice.random() < 0.2:
            engine.check()
