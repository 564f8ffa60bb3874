# SPDX-License-Identifier: Apache-2.0
"""Reaching a host: one protocol, spoken over a local subprocess or over SSH."""
