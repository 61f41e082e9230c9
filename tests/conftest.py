"""Fixtures of the whole suite: fixed seeds, the device, the mark `gpu`, and uninitialised memory that shows."""

import gc
import logging
import os
import sys
from pathlib import Path

import pytest

# before PyTorch loads libgomp: processes of pytest share the cores, where a thread that spins takes the core of the one
# that it waits for, and operators of a microsecond take milliseconds
os.environ.setdefault("GOMP_SPINCOUNT", "100")
# until the tests are collected: imports leave little garbage, for which the collector would look at all objects
gc.disable()

import torch  # noqa: E402

# so that tests can import `benchmarks`; at the end, because an installed nasfast comes before the one in this folder
sys.path.append(str(Path(__file__).parents[1]))

# before the kernels are imported: without a GPU they run under Triton's interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# before oneDNN runs: on AVX2 its weight gradient of a strided 1x1 convolution of fewer than 8 channels, which these
# tests have, writes beyond its memory (https://github.com/uxlfoundation/oneDNN/issues/6035)
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX")
# before cuBLAS is initialised, which otherwise refuses every matrix product under deterministic algorithms
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import forked  # noqa: E402
from devices import DEVICE, no_gpu  # noqa: E402

from nasfast.ops import _native, _triton  # noqa: E402
from nasfast.runtime.once import forget_logged  # noqa: E402

INTERPRETED = _triton.interpreted()
# marks of tests that take long, longest first
LONG = ("aot", "kill", "slow", "dali")


def pytest_configure(config):
    """The process of xdist that only hands out tests collects none, and so never reaches `pytest_collection_finish`."""
    if config.getoption("numprocesses", None):  # None in the processes that run the tests
        gc.enable()


def pytest_collection_modifyitems(items):
    """Give the mark `gpu` to every test that uses the fixture `device` or `gpu`, and put the longest files first.

    Several processes then end at about the same time, because each takes the next file as soon as it has none.
    """
    if _triton.interpreted() != INTERPRETED:
        raise pytest.UsageError("a module that a test imports sets TRITON_INTERPRET: it must only as a program")
    for item in items:
        if {"device", "gpu"} & set(item.fixturenames):
            item.add_marker(pytest.mark.gpu)
    places: dict[Path, int] = {}
    for item in items:
        place = min([LONG.index(mark.name) for mark in item.iter_markers() if mark.name in LONG], default=len(LONG))
        places[item.path] = min(place, places.get(item.path, place))
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session):
    """Before any test runs, fork the process that starts ranks and stages that are killed.

    The collector of garbage does not look at what was imported, nearly a million objects: half a second each time.
    """
    gc.freeze()
    gc.enable()
    if any(item.get_closest_marker("kill") for item in session.items):
        forked.start_server()


def pytest_unconfigure():
    """Libraries say at the end what was not collected."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test without the mark finds no GPU, nor do its fixtures of any scope."""
    if not torch.cuda.is_available() or item.get_closest_marker("gpu"):
        return (yield)
    with no_gpu():
        return (yield)


@pytest.fixture(scope="session")
def device():
    """`cuda` where there is a GPU that the Triton kernels run on, else `cpu`."""
    return DEVICE


@pytest.fixture(scope="session")
def gpu():
    """The GPU, for tests that need one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """No test sees what tests before it changed: what a process logs once, and the level that commands log at."""
    forget_logged()
    logging.getLogger("nasfast").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def fixed_seed_and_threads():
    """Commands set the number of threads of their process: the next test has again what there was before."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory():
    """Fill every uninitialised tensor with NaN, those allocated in C++ included, so that unwritten elements show.

    The operators' results come from a pool of their own, which fills them itself.
    """
    pool = _native.extension
    if pool is not None:
        pool.poison_pool(True)
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
    if pool is not None:
        pool.poison_pool(False)


@pytest.fixture(autouse=True)
def poison(request):
    """Every test of the operators and of `fuse` runs with uninitialised memory full of NaN."""
    if request.path.parent.name in ("ops", "fusion"):
        request.getfixturevalue("poisoned_memory")


@pytest.fixture
def small_forests(monkeypatch):
    """Forests of few trees, for tests of what is done with their predictions."""
    monkeypatch.setattr("nasfast.indicators.learned._TREES", 20)


@pytest.fixture
def blank_figures(monkeypatch):
    """Figures of reports have few points and are not drawn, which takes most of the time of a report."""
    monkeypatch.setattr("nasfast.report.html._CLOUD", 3)
    blank = '<svg xmlns="http://www.w3.org/2000/svg"/>'
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(blank))


@pytest.fixture(scope="module")
def one_thread():
    """A module's tests run on one thread: equal bytes are promised for equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def native():
    """The compiled extension; skipped with the loader's reason where it was not built."""
    if _native.extension is None:
        pytest.skip(_native.why_missing())
    return _native.extension


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    """Each backend that serves CPU tensors; skipped with the loader's reason where it was not built."""
    if request.param == "cpu" and _native.extension is None:
        pytest.skip(_native.why_missing())
    return request.param
