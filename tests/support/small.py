# SPDX-License-Identifier: Apache-2.0
"""A tiny SGLang that the edits of its files fit, those of 0.5.11, and a tiny overlay: for tests that run in no time."""

from __future__ import annotations

import ast
from dataclasses import replace

from ddtree_overlay.manifest import FileEntry, Manifest, sha256
from ddtree_overlay.releases import RELEASES, Release
from ddtree_overlay.verify.mentions import MODULE, Place, mentions_in
from ddtree_overlay.verify.mirrors import digest_of
from ddtree_overlay.verify.tables import Site


_FILES = {
    "srt/speculative/spec_info.py": """\
from enum import Enum, auto


class SpeculativeAlgorithm(Enum):
    DFLASH = auto()
    NONE = auto()

    def is_dflash(self) -> bool:
        return self == SpeculativeAlgorithm.DFLASH

    def create_worker(self, server_args):
        enable_overlap = not server_args.disable_overlap_schedule

        if self.is_dflash():
            from sglang.srt.speculative.dflash_worker import DFlashWorker

            return DFlashWorker
""",
    "srt/server_args.py": """\
from dataclasses import dataclass
from typing import Optional


@dataclass
class ServerArgs:
    model_path: str
    attention_backend: Optional[str] = None
    speculative_algorithm: Optional[str] = None
    speculative_num_draft_tokens: Optional[int] = None
    speculative_dflash_block_size: Optional[int] = None
    speculative_dflash_draft_window_size: Optional[int] = None

    def __post_init__(self):
        'Complete the arguments.'

        self._handle_speculative_decoding()

    def _handle_attention_backend_compatibility(self):
        self.attention_backend = self.attention_backend or "fa3"

    def _handle_speculative_decoding(self):
        if self.speculative_algorithm == "DFLASH":
            self.speculative_num_draft_tokens = 16

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-algorithm", choices=["DFLASH"])
        parser.add_argument("--speculative-dflash-block-size", type=int)
        parser.add_argument("--other")


def get_global_server_args():
    return None
""",
    "srt/speculative/dflash_worker.py": """\
from sglang.srt.utils import wrap


class DFlashWorker:
    def __init__(self, server_args, gpu_id, *, nccl_port=None):
        self.server_args = server_args

    def _prepare_for_speculative_decoding(self, batch, draft_input):
        draft_hidden = draft_input.hidden
        block_ids = draft_input.block_ids
        lm_head = wrap(batch)
        draft_next = self._greedy_sample_from_vocab_parallel_head(
            hidden_states=draft_hidden, lm_head=lm_head
        ).view(1, 2)
        return draft_next, block_ids

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states, lm_head):
        return hidden_states
""",
    "srt/speculative/dflash_info.py": """\
from dataclasses import dataclass

import torch


@dataclass
class DFlashVerifyInput:
    draft_token_num: int
    num_tokens_per_batch: int = -1
""",
    "srt/layers/attention/triton_backend.py": """\
import torch


class TritonAttnBackend:
    def __init__(self, model_runner):
        self.skip_prefill = False
        self.num_draft_tokens = model_runner.server_args.speculative_num_draft_tokens

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.logits = torch.zeros(max_num_tokens)
        if not self.skip_prefill:
            self.cuda_graph_custom_mask = torch.zeros(max_num_tokens)
""",
    "srt/layers/attention/hybrid_linear_attn_backend.py": """\
import torch


class MambaAttnBackendBase:
    def _replay_metadata(self, bs, req_pool_indices, spec_info, seq_lens_cpu):
        num_padding = torch.count_nonzero(seq_lens_cpu == 1)
        req_pool_indices[bs - num_padding :] = 0
        return req_pool_indices
""",
    "srt/layers/attention/flashinfer_backend.py": """\
class FlashInferAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        self.indices = kv_indices_buf or [0] * max_num_tokens
""",
    "srt/layers/attention/flashattention_backend.py": """\
class FlashAttentionBackend:
    def __init__(self, model_runner):
        self.topk = model_runner.server_args.speculative_eagle_topk or 0

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.tables = [0] * max_bs
""",
    "srt/speculative/dflash_utils.py": """\
def resolve_dflash_verify_mask_policy(attn_backend):
    backend_name = type(attn_backend).__name__
    return backend_name, backend_name != "FlashInferAttnBackend"
""",
    "srt/model_executor/model_runner_kv_cache_mixin.py": """\
class ModelRunnerKVCacheMixin:
    def __init__(self, server_args, config):
        self.server_args = server_args
        self.config = config

    def handle_max_mamba_cache(self, total_rest_memory):
        config = self.config
        server_args = self.server_args
        assert config is not None
        return total_rest_memory - server_args.mamba

    def _init_pools(self):
        extra_max_context_len = 4
        if self.server_args.speculative_num_draft_tokens is not None:
            extra_max_context_len += self.server_args.speculative_num_draft_tokens
        return extra_max_context_len
""",
    "srt/managers/schedule_batch.py": """\
def get_global_server_args():
    return None


class ScheduleBatch:
    def __init__(self, reqs, spec_algorithm):
        self.reqs = reqs
        self.spec_algorithm = spec_algorithm

    def new_tokens_required_next_decode(self, requests):
        server_args = get_global_server_args()
        spec_tokens = server_args.speculative_num_draft_tokens
        return spec_tokens * len(requests)

    def prepare_for_extend(self):
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)
""",
    "srt/managers/tokenizer_manager.py": """\
class TokenizerManager:
    def __init__(self, server_args):
        self.server_args = server_args

    def _calculate_spec_decoding_metrics(self, meta_info, recv_obj, i):
        meta_info["spec_verify_ct"] = recv_obj.spec_verify_ct[i]

    def _validate_one_request(self, obj, input_ids):
        self.longest = len(input_ids)
""",
    "srt/model_executor/model_runner.py": """\
class ModelRunner:
    def __init__(self, server_args, is_draft_worker, dtype):
        self.server_args = server_args
        self.is_draft_worker = is_draft_worker
        self.dtype = dtype

    def forward_extend(self, forward_batch):
        kwargs = {}
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
        return kwargs

    def _dummy_run(self, buffers):
        def get_spec_info():
            return None

        spec_info = get_spec_info()
        return spec_info
""",
    "srt/models/dflash.py": """\
class DFlashAttention:
    def __init__(self, config):
        rope_theta = float(getattr(config, "rope_theta", 1000000))
        rope_scaling = getattr(config, "rope_scaling", None)
        self.rope = rope_theta, rope_scaling
""",
    "srt/utils/__init__.py": """\
from sglang.srt.utils.common import *
from sglang.srt.utils.common import wrap as wrapped
""",
    "srt/utils/common.py": "def wrap(model, depth=0, *, strict=False):\n    return model\n",
}

RELEASE: Release = replace(
    RELEASES[0], sites="none", edits=tuple(edit for edit in RELEASES[0].edits if edit.path in _FILES)
)

_OVERLAY = {
    "srt/speculative/ddtree/__init__.py": "",
    "srt/speculative/ddtree/args.py": """\
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def choose_attention_backend(server_args: ServerArgs) -> None:
    server_args.attention_backend = "triton"


def enter_dflash_handling(server_args: ServerArgs) -> None:
    server_args.speculative_algorithm = "DFLASH"


def finish_dflash_handling(server_args: ServerArgs) -> None:
    server_args._handle_attention_backend_compatibility()
    server_args.speculative_algorithm = "DDTREE"


def report_overlay(server_args: ServerArgs) -> None:
    from sglang.srt.speculative.ddtree.overlay_id import OVERLAY_ID

    server_args.speculative_ddtree_overlay_id = OVERLAY_ID


def extra_draft_columns(server_args: ServerArgs) -> int:
    return server_args.speculative_dflash_block_size


def request_meta_info(server_args: ServerArgs) -> dict[str, int]:
    return {"budget": server_args.speculative_ddtree_budget}
""",
    "srt/speculative/ddtree/flags.py": """\
def add_ddtree_cli_args(parser):
    from sglang.srt.server_args import ServerArgs

    parser.add_argument("--speculative-ddtree-budget", default=ServerArgs.speculative_ddtree_budget)
""",
    "srt/speculative/ddtree/gates.py": """\
def prepare_graph_buffers(backend, max_bs, max_num_tokens, kv_indices):
    return kv_indices


def is_ddtree_on():
    return True


def grow_graph_mask(backend, max_num_tokens):
    return backend.cuda_graph_custom_mask


def prepare_flashinfer_buffers(backend, max_bs, max_num_tokens, kv_indices):
    return kv_indices


def check_flash_attention_buffers(backend, max_bs, max_num_tokens):
    return None


def check_recurrent_memory(state_bytes, free_gib):
    return None
""",
    "srt/speculative/ddtree/choosing.py": """\
def check_wish(server_args, obj):
    return None
""",
    "srt/speculative/ddtree/earlier_output.py": """\
def count_earlier_output(penalizers, reqs):
    return None
""",
    "srt/speculative/ddtree/topology.py": """\
def padding_rows(counted, rows, spec_info):
    return counted
""",
    "srt/speculative/ddtree/draft_model.py": """\
def draft_rope(config, theta, scaling):
    return theta, scaling
""",
    "srt/speculative/ddtree/worker.py": """\
from sglang.srt.speculative.dflash_worker import DFlashWorker
from sglang.srt.utils import wrap, wrapped


class DDTreeWorker(DFlashWorker):
    def __init__(self, server_args, gpu_id, nccl_port):
        super().__init__(server_args, gpu_id, nccl_port=nccl_port)
        self.model = wrap(server_args, 1, strict=True)
        self.other = wrapped(server_args)

    def _prepare_tree_verify(self, batch, *, draft_hidden, block_ids, lm_head):
        self._greedy_sample_from_vocab_parallel_head(hidden_states=draft_hidden, lm_head=lm_head)


def create_ddtree_worker(enable_overlap):
    return DDTreeWorker
""",
}


def base() -> dict[str, bytes]:
    """The edited files and what they import, by package-relative path."""
    return {path: text.encode() for path, text in _FILES.items()}


def overlay() -> dict[str, bytes]:
    """The new modules."""
    return {path: text.encode() for path, text in _OVERLAY.items()}


def manifest(files: dict[str, bytes]) -> Manifest:
    """The manifest of a snapshot that holds `files`."""
    entries = tuple(FileEntry(path, sha256(data), len(data)) for path, data in sorted(files.items()))
    mentions = tuple(path for path, data in sorted(files.items()) if mentions_in(path, data))
    return Manifest("small", "/small", "wheel", {"sglang": RELEASE.version, "python": None}, entries, mentions)


def mirrors(files: dict[str, bytes]) -> dict[Place, str]:
    """Every function of `files`, as read."""
    places = [
        Place(path, scope)
        for path, data in files.items()
        for node in ast.parse(data).body
        for scope in (
            [f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)]
            if isinstance(node, ast.ClassDef)
            else [getattr(node, "name", "")]
        )
    ]
    digests = {place: digest_of(files[place.path], place.scope) for place in places}
    return {place: digest for place, digest in digests.items() if digest is not None}


def sites() -> tuple[Site, ...]:
    """A table that classifies every mention of `base()`."""
    found = {place: m for path, data in base().items() for place, m in mentions_in(path, data).items()}
    edited = {(edit.path, insertion.scope) for edit in RELEASE.edits for insertion in edit.insertions}
    return tuple(
        Site(p.path, p.scope or MODULE, "edited" if (p.path, p.scope) in edited else "same", "Test.", m.counts)
        for p, m in found.items()
    )
