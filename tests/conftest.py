"""Fixtures of all lanes: nothing may be left behind by a test, and one converted sample model is shared."""

import asyncio
import gc
import inspect
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import tools
from tests.support.guards import leaks
from tests.support.guards.lanes import LANES, Starts, lane_of
from tests.support.kernels.triton.interpreter import interpreter as interpreter

# How long an example takes says how crowded the machine is: no test fails for that.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Before anything imports torch: tests share few cores, with each other and with the worker processes they start.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell that runs this in the background ignores Ctrl-C, and all processes below it would: some are tested for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# torch looks up the names of a store's peers. A question that the resolver loses costs so many seconds, and not five.
os.environ["RES_OPTIONS"] = "timeout:1"
# Nothing is fetched: not by a test, and not by a library on its behalf.
os.environ["HF_HUB_OFFLINE"] = "1"

STARTS = Starts()
"""Processes and servers that this process starts while tests run."""
MODEL_CACHE = Path(__file__).parents[1] / ".cache" / "models"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tools", action="store_true", help="fail where a tool is missing that tests would skip for"
    )
    parser.addoption("--lane", choices=LANES, help="run only the test files of this lane (docs/testing.md)")
    parser.addoption(
        "--order-seed", type=int, help="seed of the order of the files that start Ray (default: drawn from the time)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-tools") and (missing := tools.missing()):
        raise pytest.UsageError(f"these tests need {', '.join(missing)}")
    if config.option.order_seed is None:
        config.option.order_seed = int(time.time())  # here, so that processes of one run agree


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files that start Ray, behind all others: what they share must be whole after each of them."""
    files = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("cluster")))
    random.Random(config.option.order_seed).shuffle(files)
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: places.get(item.path, -1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and exempt what they are made of: it took a twentieth of a run."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say how to get this order again."""
    shuffled = any(item.get_closest_marker("cluster") for item in items)
    return [f"files on Ray in the order of --order-seed {config.option.order_seed}"] if shuffled else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    lane, is_test = config.getoption("--lane"), collection_path.match("test_*.py")
    return True if lane and is_test and lane_of(collection_path) != lane else None


def pytest_sessionstart(session: pytest.Session) -> None:
    STARTS.watch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    STARTS.take()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the lane `unit` that has started a process or a server. Nightly tests build kernels."""
    yield
    started = STARTS.take()
    if started and lane_of(item.path) == "unit" and item.get_closest_marker("nightly") is None:
        pytest.fail(
            f"a unit test started {started[0]}: give its file `pytestmark = pytest.mark.integration`", pytrace=False
        )


@pytest.fixture
def prepared() -> None:
    """A folder overrides this to start what outlives a test, so that it does not count as left behind."""


@pytest.fixture(autouse=True)
def no_leaks(prepared: None) -> Iterator[None]:
    """Fails a test that leaves non-daemon threads or child processes behind."""
    threads, processes = leaks.live_threads(), leaks.child_processes()
    yield
    left = leaks.threads_left(threads) + leaks.processes_left(processes)
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def no_leaked_tasks(no_leaks: None, request: pytest.FixtureRequest) -> None:
    """Fails an async test that leaves tasks on its loop; checked before the loop is closed, threads after."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_leaked_tasks_check")


@pytest.fixture
async def _leaked_tasks_check() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = await leaks.tasks_left(before)
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The sample model's folder, converted once into the project's own cache. All weights are in bf16, so that
    transformers can read them."""
    from baton.modeling.checkpoints.catalog import resolve_model
    from baton.text.gguf_tokenizer import write_tokenizer

    return resolve_model(
        "smollm2-135m",
        cache=MODEL_CACHE,
        progress=lambda done, total: None,
        finish=write_tokenizer,
        dequantised=True,
    )


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the sample model's first layers: for tests of what is around a model, which start many workers."""
    from tests.support.models.first_layers import write_first_layers

    folder = tmp_path_factory.mktemp("models") / "short-smollm2"
    yield write_first_layers(smollm2, folder)
    shutil.rmtree(folder)
