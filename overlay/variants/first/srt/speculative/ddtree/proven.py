# SPDX-License-Identifier: Apache-2.0
"""What was seen to agree with plain decoding, by the worker's generation."""

from __future__ import annotations


#: Backends whose TARGET_VERIFY honours an ancestor mask, as shown by the overlay's own tests. The first is the default.
TREE_ATTENTION_BACKENDS = ("triton", "flashinfer", "fa3")

#: Whether a whole engine with recurrent layers was seen to agree with plain decoding on a GPU.
RECURRENT_LAYERS_RAN = True
