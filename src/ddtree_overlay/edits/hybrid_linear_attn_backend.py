# SPDX-License-Identifier: Apache-2.0
"""srt/layers/attention/hybrid_linear_attn_backend.py: which rows of a replayed verify are padding."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class MambaAttnBackendBase:
    def _replay_metadata(self, bs, req_pool_indices, spec_info, seq_lens_cpu):
        num_padding = torch.count_nonzero(seq_lens_cpu == 1)
        # Make sure forward metadata is correctly handled for padding reqs
        req_pool_indices[bs - num_padding :] = 0
        return req_pool_indices
""",
    after="""\
class MambaAttnBackendBase:
    def _replay_metadata(self, bs, req_pool_indices, spec_info, seq_lens_cpu):
        num_padding = torch.count_nonzero(seq_lens_cpu == 1)
        from sglang.srt.speculative.ddtree.topology import padding_rows

        num_padding = padding_rows(num_padding, bs, spec_info)
        # Make sure forward metadata is correctly handled for padding reqs
        req_pool_indices[bs - num_padding :] = 0
        return req_pool_indices
""",
)

HYBRID_LINEAR_ATTN_BACKEND = Edit(
    path="srt/layers/attention/hybrid_linear_attn_backend.py",
    summary="Do not take a request of one token for padding of a CUDA graph; DFLASH is mended with DDTREE.",
    insertions=(
        insert_statements(
            "MambaAttnBackendBase._replay_metadata",
            Before("req_pool_indices[bs - num_padding :] = 0"),
            """\
from sglang.srt.speculative.ddtree.topology import padding_rows

num_padding = padding_rows(num_padding, bs, spec_info)
""",
            reason="Rows of length 1 are counted as padding, so a one-token prompt costs the last request its state.",
        ),
    ),
    examples=(EXAMPLE,),
)
