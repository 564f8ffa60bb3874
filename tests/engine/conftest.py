# SPDX-License-Identifier: Apache-2.0
"""Every job that the modules of this run need, in one queue: a module's `queue` says which."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Queue, Sites


#: A test waits for its job behind others', on a machine that does other things too; each job has a limit of its own.
WAIT = 7200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests that wait for a queue, or start engines beside it, the time that it takes."""
    for item in items:
        if "sites" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(WAIT))


def need_engine() -> None:
    """Skip, or fail in CI, where there is no environment that runs engines."""
    if harness.ENGINE_PYTHON.exists() and harness.SECOND_PYTHON.exists():
        return
    message = "the engine environment is missing; next: scripts/engine_env (make test builds it)"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """The patched releases."""
    need_engine()
    return Sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="session")
def site(sites: Sites) -> Path:
    """The release of the whole matrix."""
    return sites[harness.RELEASE]


@pytest.fixture(scope="session")
def queued(
    request: pytest.FixtureRequest, sites: Sites, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engines]]:
    """The jobs of every module of this run that has some, by the module's name."""
    queue, found = Queue(), {}
    items = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    for module in dict.fromkeys(item.getparent(pytest.Module).obj for item in items):
        if hasattr(module, "queue"):
            # What is not among the parameters of any test of this run is left alone.
            own = [item.callspec.params for item in items if item.module is module and hasattr(item, "callspec")]
            wanted = frozenset(value for params in own for value in params.values() if isinstance(value, str))
            name = module.__name__.rpartition(".")[2]
            found[module.__name__] = Engines(tmp_path_factory.mktemp(name), queue, wanted)
            module.queue(found[module.__name__], sites)
    queue.begin()
    yield found
    queue.close()


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, queued: dict[str, Engines]) -> Engines:
    """The module's jobs."""
    return queued[request.module.__name__]
