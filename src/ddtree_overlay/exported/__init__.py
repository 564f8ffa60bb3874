# SPDX-License-Identifier: Apache-2.0
"""Files that `export` writes as they are: `apply.py` and the Dockerfile."""
