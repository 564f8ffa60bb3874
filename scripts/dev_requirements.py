# SPDX-License-Identifier: Apache-2.0
"""Print the `dev` dependency group of a pyproject.toml, one requirement a word: older pips know no `--group`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


text = Path(sys.argv[1]).read_text(encoding="utf-8")
group = re.search(r"^dev = \[$(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
if group is None:
    sys.exit(f"{sys.argv[1]} has no dependency group 'dev'")
print(" ".join(re.findall(r'"([^"]+)"', group[1])))
