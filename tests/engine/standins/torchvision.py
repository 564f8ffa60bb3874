# SPDX-License-Identifier: Apache-2.0
"""`torchvision` in name only: a text model's imports ask for it and use nothing of it."""

import importlib.machinery
import sys
import types


class _Names(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class InterpolationMode:
    """The members that transformers reads at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


for _name in (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
):
    _module = _Names(_name)
    _module.__path__ = []
    _module.__version__ = "0.0.0"
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None, is_package=True)
    _module.InterpolationMode = InterpolationMode
    sys.modules[_name] = _module
    if "." in _name:
        _parent, _leaf = _name.rsplit(".", 1)
        setattr(sys.modules[_parent], _leaf, _module)
