"""Mutation testing: shows that a change of the tests leaves no more errors unseen than before.

A mutant is the source with one small error, such as `<` in place of `<=`; tests/mutations.py says which. It is killed
if a test fails. tests/mutants.json lists mutants, drawn at random once, with the test that killed each;
those that are `new` were not tested yet:

    python tests/mutants.py draw    # draws new mutants
    python tests/mutants.py test    # tests those that are new or were killed; `test csrc 600` those of a folder, and
                                    # only until so many seconds have passed

A killed mutant meets the test that killed it first, then the tests of its package: those of its file first, those with
marks of slow tests last, until MAX_SECONDS of processor time are over. It is found again by the text of its line in the
same function or class, and "gone" if nothing has that text. All this happens in a copy of the repository,
build/mutants/tree, with the extension of this checkout (`make install-tests`), or, for a mutant of C++, with one that
is compiled without optimizing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import lines_of

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
UNCHANGED = WORK / "unchanged"
LISTED = ROOT / "tests" / "mutants.json"
SOURCES = ("nasfast/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h")
SEED = 0
COUNTS = {True: 150, False: 55}  # Python or not: about as their lines; a few of C++ will not compile

MAX_SECONDS = 20  # of processor time, for a mutant
PATIENCE = 60  # seconds until a test counts as one that never ends
SLOW = ("slow", "interpreter", "kill", "dali")  # marks
LEFT_OUT = "not aot"  # takes minutes to compile

# the tests of the first pattern that a file matches, in tests/; of others, the folder or file of the package's name
TESTS = {
    "csrc/cpu/pool": "ops/test_pool.py ops/test_operators.py",
    "csrc/cpu/(pool_3x3|depthwise_conv2d|squeeze_excite|mixed_bn|bn_act)": "ops/test_operators.py",
    "csrc/cpu/(isa|kernels)": "ops/test_instruction_sets.py measure/test_doctor.py",
    "csrc/cpu/": "ops/test_conv_bn_act*.py ops/test_modules.py ops/test_operators.py",
    "csrc/gpu/": "ops/test_cuda_*.py",
    "csrc/orthogonal/": "ops/test_orthogonalize.py",
    "csrc/": "measure/test_doctor.py ops/test_pool.py ops/test_operators.py",
    "nasfast/ops/triton": "ops/test_triton*.py ops/test_operators.py ops/test_conv*.py",
    "nasfast/extensions": "research/test_extensions.py",
}
LAST = "pipeline"  # runs most of the package
CMAKE = ["-DCMAKE_BUILD_TYPE=Mutants", "-DNASFAST_ISAS=BASELINE", "-DNASFAST_EMULATION=ON", "-DNASFAST_CUDA=OFF"]
LIBRARIES = "_C.so", f"_emulation{sysconfig.get_config_var('EXT_SUFFIX')}"
# what many tests import, imported once for all mutants
PRELOADED = ("torch", "torchvision", "scipy.stats", "scipy.optimize", "matplotlib.pyplot", "hypothesis")


def tests_of(file: str) -> list[str]:
    """Folders and files of the tests of a source, in the order in which they run."""
    patterns = next((tests for pattern, tests in TESTS.items() if re.match(pattern, file)), None)
    chosen = patterns is not None
    if patterns is None:
        package = Path(file).parts[1].removesuffix(".py")
        patterns = f"{package} test_{package}.py {LAST}"
    tests = []
    for name in patterns.split():
        found = sorted((ROOT / "tests").glob(name))
        if chosen and not found:
            raise SystemExit(f"TESTS names {name}, but tests/ has no such file: correct it in {__file__}")
        tests += [str(path.relative_to(ROOT)) for path in found]
    return list(dict.fromkeys(tests))


# ---- mutants


def files() -> list[str]:
    return sorted({str(path.resolve().relative_to(ROOT)) for pattern in SOURCES for path in ROOT.glob(pattern)})


def draw() -> None:
    """Draw lines of all sources, and an error in each."""
    drawn = random.Random(SEED)
    mutants = []
    for python, count in COUNTS.items():
        chosen = [file for file in files() if file.endswith(".py") == python]
        places = [(file, i) for file in chosen for i, line in enumerate(lines_of(ROOT / file)) if line.sites]
        for file, i in drawn.sample(places, count):
            line = lines_of(ROOT / file)[i]
            start, end, text = drawn.choice(line.sites)
            nth = sum(other[:2] == line[:2] for other in lines_of(ROOT / file)[:i])
            mutant = (line.text[:start] + text + line.text[end:]).strip()
            mutants.append({"file": file, "scope": line.scope, "line": line.text.strip(), "nth": nth, "mutant": mutant})
            mutants[-1] |= {"status": "new", "by": None}
    write(mutants)


def write(mutants: list[dict]) -> None:
    LISTED.write_text("[\n" + ",\n".join(json.dumps(mutant, ensure_ascii=False) for mutant in mutants) + "\n]\n")


def find(mutant: dict) -> tuple[str, int] | None:
    """File and line number of a mutant, in another file if its function moved."""
    here = [mutant["file"]] if (ROOT / mutant["file"]).exists() else []
    for file in here + files():
        found = [
            number
            for number, line in enumerate(lines_of(ROOT / file), 1)
            if line.sites and (line.text.strip(), line.scope) == (mutant["line"], mutant["scope"])
        ]
        if found:
            return file, found[min(mutant["nth"], len(found) - 1)]
    return None


# ---- tests of a mutant


def replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    # Python compares seconds and sizes only, and might take the module that was compiled before
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def make_tree() -> None:
    """Bring the copy of the repository up to date."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=-1, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        there, here = TREE / name, ROOT / name
        if here.is_file() and not (there.exists() and there.read_bytes() == here.read_bytes()):
            replace(there, here.read_bytes())
    shutil.copy(ROOT / "nasfast" / "_build.json", TREE / "nasfast")
    UNCHANGED.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        shutil.copy(ROOT / "nasfast" / library, UNCHANGED)
    install(UNCHANGED)


def build() -> bool:
    """Compile what changed in the copy. Returns whether that works."""
    command = ["cmake", "--build", str(WORK / "native")]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@functools.cache
def make_native() -> None:
    """Compile the copy as it is, for mutants of C++."""
    settings = [*CMAKE, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={WORK}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-G", "Ninja", "-S", str(TREE), "-B", str(WORK / "native"), *settings], check=True)
    if not build():
        raise SystemExit("the extension cannot be built: run make install-tests, which shows why")
    for library in LIBRARIES:
        shutil.copy(WORK / library, UNCHANGED)


def install(folder: Path) -> None:
    """Put the libraries of a folder into the copy; a process may have the ones that they replace."""
    for library in LIBRARIES:
        shutil.copy(folder / library, WORK / "next.so")
        os.replace(WORK / "next.so", TREE / "nasfast" / library)


@contextlib.contextmanager
def applied(file: str, number: int, mutant: dict) -> Iterator[bool]:
    """The copy has the mutant's error. Gives whether it compiles."""
    if not file.endswith(".py"):
        make_native()
    before = (TREE / file).read_bytes()
    lines = before.decode().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(mutant["line"], mutant["mutant"])
    replace(TREE / file, "".join(lines).encode())
    compiles = True
    try:
        if not file.endswith(".py"):
            compiles = build()
            install(WORK if compiles else UNCHANGED)
        yield compiles
    finally:
        replace(TREE / file, before)
        install(UNCHANGED)


class Plugin:
    """Sorts tests, writes which one starts, and ends at the first that fails or when time is over."""

    def __init__(self, file: str) -> None:
        self.names = Path(file).with_suffix("").parts[2:]  # of subpackage and file

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        def place(item) -> tuple[bool, bool, int]:
            slow = any(item.get_closest_marker(mark) for mark in SLOW)
            return slow, item.path.parent.name == LAST, -sum(name in item.path.stem for name in self.names)

        items.sort(key=place)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with open(WORK / "log", "a") as file:
            file.write(f"{nodeid}\n")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.pytest_runtest_logstart(report.nodeid)
            os._exit(1)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            os._exit(1)

    def pytest_runtest_logfinish(self) -> None:
        if sum(os.times()[:4]) > MAX_SECONDS:
            os._exit(0)


def run(file: str, *arguments: str) -> str | None:
    """Run the tests of a file in a fork, which has imported PyTorch. Returns the first that fails or does not end."""
    log = WORK / "log"
    log.write_text("")
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.chdir(TREE)
            os.environ["PYTHONPATH"] = sys.path[0] = str(TREE)
            output = os.open(WORK / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os._exit(pytest.main([*arguments, "-q", "-m", LEFT_OUT, "-p", "no:cacheprovider"], plugins=[Plugin(file)]))
        finally:
            os._exit(99)
    # steps, not a clock, because this process may be stopped together with its child
    ended = status = steps = size = 0
    while not ended and steps < PATIENCE * 10:
        time.sleep(0.1)
        ended, status = os.waitpid(child, os.WNOHANG)
        steps, size = (0 if log.stat().st_size > size else steps + 1), log.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return None if ended and status == 0 else (log.read_text().splitlines() or arguments)[-1]


@functools.cache
def sound(test: str) -> bool:
    """Whether a test, or the collection of a file or folder, passes without a mutant."""
    return run(test, test, *([] if "::" in test else ["--collect-only"])) is None


def judge(mutant: dict) -> dict:
    """Status of a mutant, and the test that kills it."""
    place = find(mutant)
    if place is None:
        return {"status": "gone", "by": None}
    unsound: list[str] = []
    while True:
        with applied(*place, mutant) as compiles:
            if not compiles:
                return {"status": "does not compile", "by": None}
            failed = run(place[0], mutant["by"]) if mutant["by"] and mutant["by"] not in unsound else None
            failed = failed or run(place[0], *tests_of(place[0]), *(f"--deselect={test}" for test in unsound))
        if failed is None:
            return {"status": "survived", "by": None}
        if sound(failed):
            return {"status": "killed", "by": failed}
        print(f"fails without a mutant, too: {failed}", flush=True)
        if failed in unsound or "::" not in failed:
            return {"status": "survived", "by": None}
        unsound.append(failed)


def test(folder: str = "", seconds: str = "inf") -> None:
    """Test mutants of a folder. Fails if one that was killed before is no more."""
    end = time.monotonic() + float(seconds)
    for name in PRELOADED:
        importlib.import_module(name)
    make_tree()
    mutants = json.loads(LISTED.read_text())
    lost = []
    for mutant in mutants:
        before = mutant["status"]
        if mutant["file"].startswith(folder) and before in ("new", "killed") and time.monotonic() < end:
            mutant |= judge(mutant)
            print(f"{mutant['status']}: {mutant['file']}: {mutant['mutant']} {mutant['by'] or ''}", flush=True)
            write(mutants)
            if before == "killed" and mutant["status"] == "survived":
                lost.append(mutant)
    for python in COUNTS:
        statuses = collections.Counter(each["status"] for each in mutants if each["file"].endswith(".py") == python)
        print("Python:" if python else "C++:", ", ".join(f"{count} {status}" for status, count in statuses.items()))
    used = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{sum(used) / 60:.1f} minutes of processor time")
    if lost:
        raise SystemExit("\n".join(["killed before, but not now:", *map(json.dumps, lost)]))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}  # before PyTorch is imported
    {"draw": draw, "test": test}[sys.argv[1]](*sys.argv[2:])
