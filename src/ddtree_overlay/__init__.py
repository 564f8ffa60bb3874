# SPDX-License-Identifier: Apache-2.0
"""Adds DDTree tree speculative decoding to an installed SGLang, and takes it away again."""

__version__ = "0.1.0"
