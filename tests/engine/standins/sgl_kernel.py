# SPDX-License-Identifier: Apache-2.0
"""Just enough of `sgl_kernel` to import SGLang and decode on a CPU.

Three CPU operations that SGLang's memory pools call are written here with plain tensor indexing. Every other name
exists, so that imports succeed, and raises when it is called. `sgl_kernel.scalar_type` is absent on purpose: SGLang
then uses its own.
"""

import ctypes
import importlib.machinery
import sys
import types


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy the rows `src_loc` of every buffer to `tgt_loc`, as if all were read before any is written."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        saved = {source: ctypes.string_at(address + source * stride, stride) for source in sources}
        for source, target in zip(sources, targets):
            ctypes.memmove(address + target * stride, saved[source], stride)


def _spans(req_pool_indices, start, end):
    """(row, first column, end column, offset into the flat locations) of every request."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        yield row, first, last, offset
        offset += last - first


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, width):
    """Write each request's share of `out_cache_loc` into its row of `req_to_token`."""
    for row, first, last, offset in _spans(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, width):
    """Read each request's span of `req_to_token` into its share of `out_cache_loc`."""
    for row, first, last, offset in _spans(req_pool_indices, start, end):
        out_cache_loc[offset : offset + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)


class _Names(types.ModuleType):
    """A module in which every name is an operation that needs a GPU."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def needs_gpu(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name} needs a GPU; this is the CPU stand-in of the tests")

        return needs_gpu


_SUBMODULES = (
    "elementwise flash_attn gemm grammar kvcacheio load_utils mamba memory moe quantization sampling spatial "
    "speculative test_utils top_k utils"
).split()

for _name in ("sgl_kernel", *(f"sgl_kernel.{sub}" for sub in _SUBMODULES)):
    _module = _Names(_name)
    _module.__file__ = __file__
    _module.__path__ = []
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None, is_package=True)
    for _op in (copy_all_layer_kv_cache_cpu, assign_req_to_token_pool_cpu, assign_extend_cache_locs_cpu):
        setattr(_module, _op.__name__, _op)
    sys.modules[_name] = _module
