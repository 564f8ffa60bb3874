# SPDX-License-Identifier: Apache-2.0
"""The agent: what runs on the host, under the interpreter that serves SGLang.

Nothing is installed there. Each call sends the source of these modules over stdin to `PYTHON -c …`; `loader` keeps them
in memory as a package and hands the request to `agent.serve`. A dict of modules was chosen over one big file so that
each part stays readable and testable, and over a zip file so that nothing has to be written to disk first.

Rules for every module here: standard library only, syntax of Python 3.9, relative imports only (on the host the package
is called `ddtree_agent`), and no import of `ddtree_overlay`.

    loader        the second stage of the bootstrap: reads the modules and the request
    agent         the operations by name, the reply frame, the heartbeat
    common        refusals, digests, paths that cannot leave the package
    locate        which SGLang the interpreter imports, and how it is installed
    installed     whether that is one release, and all of it
    reading       snapshot, file contents
    facts         versions, interpreter, disk, container
    kernels       which CUDA runtime the installed kernels link to
    processes     servers that are running
    ages          which code a running server has, by the history
    preflight     reasons why a write would fail, found before anything is written
    durable       names and bytes that survive a power cut
    lock          the lock of the host and its holder
    store         the state folder: journal, history, deployments
    pruning       which deployments lose their backups
    damage        state that is not as it was written, and the deployment that is in place all the same
    swap          one file replaced or removed, the right way
    transaction   many files replaced or removed, all or none
    undo          the way back from the middle of one
    standing      how the live deployment stands, after an upgrade underneath as well
    planning      what a push or rollback has to do, decided from digests alone
    grounds       the view of the host that a plan is made from, and the check that it still holds
    pushing       push
    stages        files of a push that waits for other hosts
    staging       what a push to several hosts does before any of them is changed
    rolling       rollback
    states        pending, good and bad; the trial that is running; confirm
    trials        restart, prove, and go back when that fails
    proving       whether the server runs what is on the disk
    restarting    the restart command or unit
    asking        what the server says of itself, over HTTP
    telling       lines that the operator sees while an operation runs
    reporting     status, history
    remarks       what whoever pushes should hear; not sent to a host
    options       the command line of apply.py; not sent either
    standalone    the agent without SSH: what apply.py of an export runs; not sent either
    probe         compile and import under the host's Python
"""
