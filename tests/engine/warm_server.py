# SPDX-License-Identifier: Apache-2.0
"""Import SGLang once and fork a process for every job: warm_server.py SOCKET, with the engine's Python (see `warm.py`).

A job is a line of JSON on a connection, {"words": [script, argument, ...], "environment": {...}, "log": file}. The
answers are the job's process group and its exit status, a line each. Engines that a job starts are forked too: SGLang
itself spawns them, which imports everything again for every process. The server ends with its standard input.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import traceback


#: What the processes of an engine import, and every model that SGLang knows.
MODULES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)


def main(address):
    for name in MODULES:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"{threads} threads run once SGLang is imported: a forked process would lack all but one of them")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
            connection, _ = door.accept()
            if os.fork() == 0:
                door.close()
                answer(connection)
            connection.close()


def answer(connection):
    """Run one job and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rw") as talk:
        job = json.loads(talk.readline())
        pid = os.fork()
        if pid == 0:
            os.setsid()
            run(**job)
        print(pid, file=talk, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=talk, flush=True)
    os._exit(0)


def run(words, environment, log):
    """Become the job: never returns."""
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_args, **_words: None
    sys.argv = words
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
