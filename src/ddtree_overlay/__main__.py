# SPDX-License-Identifier: Apache-2.0
"""`python -m ddtree_overlay`."""

from ddtree_overlay.cli import main


if __name__ == "__main__":
    main()
