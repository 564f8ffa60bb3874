# SPDX-License-Identifier: Apache-2.0
"""Serve as `python -m sglang.launch_server` does: serve.py PID-FILE FLAG..., a job of `warm_server.py`."""

import os
import sys
from pathlib import Path


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    file = Path(sys.argv[1])
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    run_server(prepare_server_args(sys.argv[2:]))
