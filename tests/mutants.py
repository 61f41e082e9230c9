"""Mutation testing: shows that a change of the tests leaves no more errors unseen than before.

A mutant is the source with one small error, such as `<` in place of `<=`; tests/mutations.py says which. It is killed
if a test fails. tests/mutants.json lists mutants, drawn at random once, with the test that killed each:

    pip install coverage
    python tests/mutants.py cover   # runs the tests: which test runs which line, for how long, coverage of each package
    python tests/mutants.py draw    # draws new mutants
    python tests/mutants.py test    # after a change: tests those that are new or were killed; `test csrc/gpu` a part

A killed mutant meets the test that killed it first. Only if that one is gone or passes are the results of `cover`
needed, which know other tests of the line; the quickest are taken, up to a limit. For C++, CPP_TESTS says which tests.
A mutant is found again by the text of its line in the same function or class, and "gone" if nothing has that text.
All this happens in a copy of the repository, build/mutants/tree, with an extension that is compiled without optimizing.
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

from mutations import lines_of

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
LISTED = ROOT / "tests" / "mutants.json"
PACKAGES = ("nasfast/**/*.py", "kernels/triton/*.py")
SOURCES = (*PACKAGES, "csrc/**/*.cpp", "csrc/**/*.h")
SEED = 0
COUNTS = {True: 150, False: 55}  # Python or not: about as their lines; a few of C++ will not compile

MAX_TESTS = 40
MAX_SECONDS = 30.0  # of all tests of a mutant
MAX_VARIANTS = 2  # of a test function, with different parameters
PATIENCE = 60  # seconds until a test counts as one that never ends

# the tests of the first pattern that a file matches
CPP_TESTS = {
    "csrc/cpu/pool_3x3": "ops/test_pool_3x3",
    "csrc/cpu/pool": "ops/test_pool.py ops/test_bn_act.py",
    "csrc/cpu/depthwise_conv2d": "ops/test_depthwise_conv2d",
    "csrc/cpu/squeeze_excite": "ops/test_squeeze_excite",
    "csrc/cpu/mixed_bn": "ops/test_mixed_bn",
    "csrc/cpu/bn_act": "ops/test_bn_act",
    "csrc/cpu/(isa|kernels)": "ops/test_instruction_sets measure/test_doctor",
    "csrc/cpu/": "ops/test_bn_act ops/test_conv_bn_act ops/test_inverted_residual ops/test_depthwise_conv2d",
    "csrc/gpu/": "ops/test_cuda_",
    "csrc/orthogonal/": "ops/test_orthogonalize",
    "csrc/": "measure/test_doctor ops/test_bn_act ops/test_pool.py",
}
CMAKE = ["-DCMAKE_BUILD_TYPE=Mutants", "-DNASFAST_ISAS=BASELINE", "-DNASFAST_EMULATION=ON", "-DNASFAST_CUDA=OFF"]
LIBRARY = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
# what many tests import, imported once for all mutants
PRELOADED = ("torch", "torchvision", "scipy.stats", "scipy.optimize", "matplotlib.pyplot", "hypothesis")


# ---- which test runs which line. Pytest takes this file as a plugin, so that the data name the tests.


def switch_context(name: str) -> None:
    if measured := sys.modules["coverage"].Coverage.current():
        measured.switch_context(name)


def pytest_runtest_setup(item) -> None:
    # as PYTEST_CURRENT_TEST, which is the context of processes that a test starts
    switch_context(f"{item.nodeid} (setup)")


def pytest_runtest_call(item) -> None:
    switch_context(f"{item.nodeid} (call)")


def pytest_sessionfinish() -> None:
    if measured := sys.modules["coverage"].Coverage.current():
        measured.save()  # a worker of xdist ends without


def cover() -> None:
    """Run the tests under coverage, and print the line coverage of each package."""
    from coverage import Coverage

    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    settings = WORK / "coveragerc"
    settings.write_text(
        f"[run]\nsource =\n    {ROOT}/nasfast\n    {ROOT}/kernels/triton\ndata_file = {WORK}/coverage\n"
        "parallel = true\nconcurrency = thread, multiprocessing\ncontext = ${PYTEST_CURRENT_TEST-}\n"
        "disable_warnings = no-data-collected, module-not-measured, module-not-imported, module-not-python\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "COVERAGE_PROCESS_START": str(settings)}
    options = "-q -p mutants -n 2 --dist loadfile --no-loadscope-reorder --durations=0 --durations-min=0".split()
    options += ["-m", "not aot"]  # these take minutes to compile, and run few lines of the package
    with open(WORK / "durations.txt", "w") as file:
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=env, stdout=file, check=False)
    measured = Coverage(config_file=str(settings))
    measured.combine()
    packages: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for path in sorted(path for pattern in PACKAGES for path in ROOT.glob(pattern)):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        for name in ("/".join(path.relative_to(ROOT).parts[:2]), "total"):
            packages[name][0] += len(statements)
            packages[name][1] += len(missing)
    for name, (statements, missing) in packages.items():
        print(f"{name:24}{statements:8}{100 * (1 - missing / max(statements, 1)):8.1f} %")


class Covering:
    """The tests of a line, by the last run of `cover`."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self.data = CoverageData(basename=str(WORK / "coverage"))
        self.data.read()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        for line in (WORK / "durations.txt").read_text().splitlines():
            if match := re.fullmatch(r"(\d+\.\d+)s (?:setup|call|teardown) +(.*?) *", line):
                self.seconds[match[2]] += float(match[1])

    def tests(self, file: str, number: int) -> list[str]:
        if not file.endswith(".py"):
            names = next(tests for pattern, tests in CPP_TESTS.items() if re.match(pattern, file)).split()
            return self.choose(file, {test for test in self.seconds if test[len("tests/") :].startswith(tuple(names))})
        contexts = self.data.contexts_by_lineno(str(ROOT / file))
        lines = lines_of(ROOT / file)
        line = lines[number - 1]
        wanted = set(line.statement)
        if wanted.isdisjoint(contexts):
            return []
        if line.at_import:  # a default shows where the function runs, a constant anywhere in the module
            inside = (line.scope, line.scope + ".") if line.scope else ("",)
            wanted |= {i for i, other in enumerate(lines, 1) if (other.scope + ".").startswith(inside[-1])}
        found = self.named({context for i in wanted for context in contexts.get(i, ())})
        return self.choose(file, found or self.named({context for names in contexts.values() for context in names}))

    def named(self, contexts: set[str]) -> set[str]:
        """The tests in contexts. What the fixture of a test does may be for all tests of its file."""
        tests, files = set(), set()
        for test, _, phase in (context.rpartition(" ") for context in contexts):
            tests.add(test)
            if phase == "(setup)":
                files.add(test.split("::")[0])
        return {test for test in self.seconds if test in tests or test.split("::")[0] in files}

    def choose(self, file: str, tests: set[str]) -> list[str]:
        """The quickest; of those that take about as long, first those of the file's own tests."""
        own = f"/test_{Path(file).stem}.py"
        variants: dict[str, int] = collections.Counter()
        chosen: list[str] = []
        left = MAX_SECONDS
        for test in sorted(tests, key=lambda test: (self.seconds[test] // 0.5, own not in test, test)):
            variants[test.split("[")[0]] += 1
            if variants[test.split("[")[0]] <= MAX_VARIANTS and (self.seconds[test] <= left or not chosen):
                chosen.append(test)
                left -= self.seconds[test]
        return chosen[:MAX_TESTS]


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
    write(sorted(mutants, key=lambda mutant: mutant["file"]))


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
    """Bring the copy of the repository up to date, and build its extension."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=-1, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        there, here = TREE / name, ROOT / name
        if here.is_file() and not (there.exists() and there.read_bytes() == here.read_bytes()):
            replace(there, here.read_bytes())
    if not (TREE / "nasfast" / "_triton").exists():
        (TREE / "nasfast" / "_triton").symlink_to("../kernels/triton")
    (TREE / "nasfast" / "_build.json").write_text('{"native": true, "reason": null}')
    settings = [*CMAKE, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={WORK}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-G", "Ninja", "-S", str(TREE), "-B", str(WORK / "native"), *settings], check=True)
    if build().returncode:
        raise SystemExit("the extension cannot be built: see above")
    shutil.copy(WORK / LIBRARY, WORK / "unchanged.so")
    install("unchanged.so")


def build(**options) -> subprocess.CompletedProcess:
    return subprocess.run(["cmake", "--build", str(WORK / "native")], check=False, **options)


def install(library: str) -> None:
    shutil.copy(WORK / library, WORK / "next.so")
    os.replace(WORK / "next.so", TREE / "nasfast" / LIBRARY)


@contextlib.contextmanager
def applied(file: str, number: int, mutant: dict) -> Iterator[bool]:
    """The copy has the mutant's error. Gives whether it compiles."""
    before = (TREE / file).read_bytes()
    lines = before.decode().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(mutant["line"], mutant["mutant"])
    replace(TREE / file, "".join(lines).encode())
    compiles = True
    try:
        if not file.endswith(".py"):
            compiles = build(capture_output=True).returncode == 0
            install(LIBRARY if compiles else "unchanged.so")
        yield compiles
    finally:
        replace(TREE / file, before)
        install("unchanged.so")


class Log:
    """A plugin of pytest that writes which test starts, and which file cannot be imported."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with open(WORK / "log", "a") as file:
            file.write(f"{nodeid}\n")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.pytest_runtest_logstart(report.nodeid)


def run(*arguments: str) -> str | None:
    """Run tests in a fork, which has imported PyTorch. Returns the first that fails or does not end."""
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
            pytest = importlib.import_module("pytest")
            os._exit(pytest.main([*arguments, "-x", "-q", "-p", "no:cacheprovider"], plugins=[Log()]))
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
    """Whether a test, or a file's collection, passes without a mutant."""
    return run(test, *([] if "::" in test else ["--collect-only"])) is None


def judge(mutant: dict, covering: Covering | None) -> dict:
    """Status of a mutant, and the test that kills it."""
    place = find(mutant)
    if place is None:
        return {"status": "gone", "by": None}
    others = covering.tests(*place) if covering else []
    groups = [[mutant["by"]] if mutant["by"] else [], others]
    unsound: set[str] = set()
    while True:
        groups = [[test for test in group if test not in unsound] for group in groups]
        with applied(*place, mutant) as compiles:
            if not compiles:
                return {"status": "does not compile", "by": None}
            failed = next((failed for group in groups if group and (failed := run(*group))), None)
        if failed is None:
            status = "new" if covering is None else "survived" if others else "not covered"
            return {"status": status, "by": None}
        if sound(failed):
            return {"status": "killed", "by": failed}
        print(f"fails without a mutant, too: {failed}", flush=True)
        unsound.add(failed)


def test(folder: str = "") -> None:
    """Test mutants of a folder. Fails if one that was killed before is no more."""
    for name in PRELOADED:
        importlib.import_module(name)
    make_tree()
    mutants = json.loads(LISTED.read_text())
    covering = Covering() if (WORK / "coverage").exists() else None
    lost = []
    for mutant in mutants:
        if mutant["file"].startswith(folder) and mutant["status"] in ("new", "killed"):
            before = mutant["status"]
            mutant |= judge(mutant, covering)
            print(f"{mutant['status']}: {mutant['file']}: {mutant['mutant']} {mutant['by'] or ''}", flush=True)
            write(mutants)
            if before == "killed" and mutant["status"] in ("new", "survived", "not covered"):
                lost.append(mutant)
    for python in COUNTS:
        statuses = collections.Counter(each["status"] for each in mutants if each["file"].endswith(".py") == python)
        print("Python:" if python else "C++:", ", ".join(f"{count} {status}" for status, count in statuses.items()))
    used = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{sum(used) / 60:.1f} minutes of processor time")
    if lost:
        advice = "" if covering else "\nrun `cover`, then `test` again with other tests"
        raise SystemExit("\n".join(["killed before, but not now:", *map(json.dumps, lost)]) + advice)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    {"cover": cover, "draw": draw, "test": test}[sys.argv[1]](*sys.argv[2:])
