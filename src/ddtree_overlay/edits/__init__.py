# SPDX-License-Identifier: Apache-2.0
"""What the overlay inserts into upstream files: one module a file, every edit declared as data (see `base`)."""
