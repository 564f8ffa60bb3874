# SPDX-License-Identifier: Apache-2.0
"""What the objects are whose attributes our code reads: by the name that every module of the overlay gives them.

The overlay says `Any` of most of SGLang's objects, but one name means one thing in it. A new name that stands for such
an object belongs in here, so that `verify` sees when a release renames what is read of it.
"""

from __future__ import annotations

from collections.abc import Mapping


_NAMESPACES = (
    "device",
    "disagg",
    "exec_",
    "lora",
    "memory",
    "mm",
    "model",
    "observability",
    "parallel",
    "schedule",
    "serving",
    "spec",
)
#: The arguments' class, and the namespaces that newer releases assemble it from.
_ARGUMENTS = (
    "srt/server_args.py ServerArgs",
    *(f"srt/arg_groups/fields/{name}.py *" for name in _NAMESPACES),
)
#: What is published of the arguments; until 0.5.19 every field is one of `ServerArgs`.
_PUBLISHED = (
    "srt/runtime_context.py _ConfigBag",
    "srt/runtime_context.py RuntimeContext",
    "srt/server_args.py ServerArgs",
)
_TARGET = "srt/managers/tp_worker.py TpModelWorker"

#: Classes by the name that annotations give them -> where they are, `PATH CLASS`, or `PATH *` for every class of a
#: module. What one of them has, the object may have; a release has those of its time.
CLASSES: Mapping[str, tuple[str, ...]] = {
    # The arguments.
    "ServerArgs": _ARGUMENTS,
    "ResolvingConfig": _ARGUMENTS,
    "published spec": (*_PUBLISHED, "srt/arg_groups/fields/spec.py *"),
    "published schedule": (*_PUBLISHED, "srt/arg_groups/fields/schedule.py *"),
    "ParallelContext": (
        "srt/runtime_context.py ParallelContext",
        "srt/runtime_context.py SpawnRanks",
        "srt/server_args.py ServerArgs",
        "srt/arg_groups/fields/parallel.py *",
    ),
    # Workers and what they run. A DFLASH worker passes on what it lacks to the target's.
    "DFlashWorker": ("srt/speculative/dflash_worker.py DFlashWorker", _TARGET),
    "DFlashWorkerV2": ("srt/speculative/dflash_worker_v2.py DFlashWorkerV2", _TARGET),
    "DDTreeWorker": ("srt/speculative/ddtree/worker.py DDTreeWorker", _TARGET),
    "TpModelWorker": (_TARGET,),
    "ModelRunner": ("srt/model_executor/model_runner.py ModelRunner",),
    "DecodeCudaGraphRunner": (
        "srt/model_executor/cuda_graph_runner.py CudaGraphRunner",
        "srt/model_executor/runner/decode_cuda_graph_runner.py DecodeCudaGraphRunner",
    ),
    "CUDA graphs": (
        "srt/model_executor/runner_backend/full_cuda_graph_backend.py FullCudaGraphBackend",
        "srt/model_executor/runner_backend/breakable_cuda_graph_backend.py BreakableCudaGraphBackend",
    ),
    "AttentionBackend": (
        "srt/layers/attention/triton_backend.py TritonAttnBackend",
        "srt/layers/attention/flashinfer_backend.py FlashInferAttnBackend",
        "srt/layers/attention/flashattention_backend.py FlashAttentionBackend",
        "srt/layers/attention/hybrid_linear_attn_backend.py HybridLinearAttnBackend",
    ),
    "VerifyMask": ("srt/layers/attention/verify_mask.py VerifyMask",),
    "ModelConfig": ("srt/configs/model_config.py ModelConfig",),
    "Sampler": ("srt/layers/sampler.py Sampler",),
    "ParallelLMHead": ("srt/layers/vocab_parallel_embedding.py ParallelLMHead",),
    "VocabParallelEmbeddingShardIndices": (
        "srt/layers/vocab_parallel_embedding.py VocabParallelEmbeddingShardIndices",
    ),
    "DFlashDraftModel": ("srt/models/dflash.py DFlashDraftModel",),
    "GroupCoordinator": ("srt/distributed/parallel_state.py GroupCoordinator",),
    # Pools.
    "ReqToTokenPool": ("srt/mem_cache/memory_pool.py ReqToTokenPool",),
    "MHATokenToKVPool": (
        "srt/mem_cache/memory_pool.py MHATokenToKVPool",
        "srt/mem_cache/memory_pool.py HybridLinearKVPool",
    ),
    "BaseTokenToKVPoolAllocator": (
        "srt/mem_cache/allocator.py BaseTokenToKVPoolAllocator",
        "srt/mem_cache/allocator/base.py BaseTokenToKVPoolAllocator",
    ),
    "KVIndexTranslator": ("srt/mem_cache/kv_index_translator.py KVIndexTranslator",),
    # Batches and requests.
    "Scheduler": ("srt/managers/scheduler.py Scheduler",),
    "ScheduleBatch": ("srt/managers/schedule_batch.py ScheduleBatch",),
    "ModelWorkerBatch": ("srt/managers/schedule_batch.py ModelWorkerBatch",),
    "ForwardBatch": ("srt/model_executor/forward_batch_info.py ForwardBatch",),
    "ForwardMode": ("srt/model_executor/forward_batch_info.py ForwardMode",),
    "Req": ("srt/managers/schedule_batch.py Req",),
    "SamplingParams": ("srt/sampling/sampling_params.py SamplingParams",),
    "SamplingBatchInfo": ("srt/sampling/sampling_batch_info.py SamplingBatchInfo",),
    "BatchedPenalizerOrchestrator": ("srt/sampling/penaltylib/orchestrator.py BatchedPenalizerOrchestrator",),
    "SpeculativeAlgorithm": ("srt/speculative/spec_info.py SpeculativeAlgorithm",),
    "DFlashDraftInput": (
        "srt/speculative/dflash_info.py DFlashDraftInput",
        "srt/speculative/dflash_info_v2.py DFlashDraftInputV2",
    ),
    "DFlashVerifyInput": ("srt/speculative/ddtree/verify_input.py DDTreeVerifyInput",),
    "GenerationBatchResult": ("srt/managers/utils.py GenerationBatchResult",),
    "LogitsProcessorOutput": ("srt/layers/logits_processor.py LogitsProcessorOutput",),
}

#: Name of a parameter, a local variable, an attribute, or, with `()`, of a function that returns one -> class.
RECEIVERS: Mapping[str, str] = {
    "server_args": "ServerArgs",
    "arguments": "ServerArgs",
    "reading()": "ServerArgs",
    "get_server_args()": "ServerArgs",
    "get_global_server_args()": "ServerArgs",
    "spec()": "published spec",
    "get_spec()": "published spec",
    "schedule()": "published schedule",
    "get_schedule()": "published schedule",
    "worker": "DDTreeWorker",
    "target_worker": "TpModelWorker",
    "model_runner": "ModelRunner",
    "target": "ModelRunner",
    "draft_runner": "ModelRunner",
    "draft_model_runner": "ModelRunner",
    "runner": "DecodeCudaGraphRunner",
    "runner.backend": "CUDA graphs",
    "attn_backend": "AttentionBackend",
    "backend": "AttentionBackend",
    "verify_mask": "VerifyMask",
    "model_config": "ModelConfig",
    "model_config()": "ModelConfig",
    "sampler": "Sampler",
    "lm_head": "ParallelLMHead",
    "shard": "VocabParallelEmbeddingShardIndices",
    "draft_model": "DFlashDraftModel",
    "group": "GroupCoordinator",
    "get_tp_group()": "GroupCoordinator",
    "req_to_token_pool": "ReqToTokenPool",
    "token_to_kv_pool": "MHATokenToKVPool",
    "pool": "MHATokenToKVPool",
    "token_to_kv_pool_allocator": "BaseTokenToKVPoolAllocator",
    "kv_index_translator": "KVIndexTranslator",
    "scheduler": "Scheduler",
    "batch": "ScheduleBatch",
    "model_worker_batch": "ModelWorkerBatch",
    "forward_batch": "ForwardBatch",
    "forward_mode": "ForwardMode",
    "req": "Req",
    "request": "Req",
    "params": "SamplingParams",
    "sampling_params": "SamplingParams",
    "sampling_info": "SamplingBatchInfo",
    "penalizer_orchestrator": "BatchedPenalizerOrchestrator",
    "spec_algorithm": "SpeculativeAlgorithm",
    "draft_input": "DFlashDraftInput",
    "spec_info": "DFlashVerifyInput",
    "verify_input": "DFlashVerifyInput",
    "forward_batch_generation()": "GenerationBatchResult",
    "plain_forward()": "GenerationBatchResult",
    "logits_output": "LogitsProcessorOutput",
}

#: Function -> class of which it sets the attributes that it is given by name.
KEYWORDS: Mapping[str, str] = {
    "settle": "ServerArgs",
    "override": "published spec",
}

#: Where bases of these classes are, as far as nothing else wants their modules.
_BASES = (
    "srt/dllm/mixin/req.py",
    "srt/layers/attention/base_attn_backend.py",
    "srt/managers/scheduler_pp_mixin.py",
    "srt/managers/scheduler_profiler_mixin.py",
    "srt/managers/scheduler_update_weights_mixin.py",
    "srt/mem_cache/memory_pool.py",
    "srt/model_executor/forward_batch_deepseek_mha_mixin.py",
    "srt/model_executor/model_runner_kv_cache_mixin.py",
    "srt/model_executor/runner/base_cuda_graph_runner.py",
    "srt/model_executor/runner/base_runner.py",
    "srt/model_executor/runner_backend/base_cuda_graph_backend.py",
    "srt/model_executor/runner_backend/cuda_graph_dedup_mixin.py",
    "srt/multiplex/multiplexing_mixin.py",
    "srt/speculative/base_spec_worker.py",
)

#: What the sites' tables hold digests of (`verify.mirrors`), as far as nothing else wants these modules.
_READ = ("kernels/ops/attention/extend_attention.py", "srt/layers/attention/triton_ops/extend_attention.py")


def paths() -> frozenset[str]:
    """The modules that a snapshot needs for these classes, and those that are only compared with what was read."""
    return frozenset((*_BASES, *_READ)) | {place.partition(" ")[0] for places in CLASSES.values() for place in places}
