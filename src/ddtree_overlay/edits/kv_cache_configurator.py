# SPDX-License-Identifier: Apache-2.0
"""srt/mem_cache/kv_cache_configurator.py: where the second worker's releases size their pools."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.kv_cache_mixin import RECURRENT_MEMORY


EXAMPLE = Example(
    before="""\
class KVCacheConfigurator:
    def _handle_max_mamba_cache(self, total_rest_memory):
        config = self.mambaish_config
        assert config is not None

        all_mamba_layers = config.mamba2_cache_params.layers
        return total_rest_memory
""",
    after="""\
class KVCacheConfigurator:
    def _handle_max_mamba_cache(self, total_rest_memory):
        config = self.mambaish_config
        assert config is not None
        from sglang.srt.speculative.ddtree.gates import check_recurrent_memory

        check_recurrent_memory(config.mamba2_cache_params.mamba_cache_per_req, total_rest_memory)

        all_mamba_layers = config.mamba2_cache_params.layers
        return total_rest_memory
""",
)

KV_CACHE_CONFIGURATOR = Edit(
    path="srt/mem_cache/kv_cache_configurator.py",
    summary="Check that the recurrent states of all nodes fit.",
    insertions=(
        RECURRENT_MEMORY.moved(After("assert config is not None"), scope="KVCacheConfigurator._handle_max_mamba_cache"),
    ),
    examples=(EXAMPLE,),
)
