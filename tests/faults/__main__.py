"""Injects faults into real runs of the command line, and compares what comes out with runs in peace.

    python -m tests.faults [--seed 0] [--scale 1.0] [--kinds KIND ...] [--jobs 2] [--work DIR] [--out FILE]

Every case copies the files of the stages before it, disturbs one stage at a random moment, looks whether anything that
was saved is lost, does what a user would do (run it again, with --resume where it trains), and compares every file with
those of the run in peace. `--scale 0.1` injects a tenth of the faults. A small and a read-only file system are mounts,
which need privileges; without them only limits of file sizes and permissions are used, and the table says so. Disturbed
runs are processes of their own, but for a third of those that are killed: these, and what follows a fault, are forks of
a process that has torch imported, which saves its seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import positive, write_json

from .processes import ForkServer, RealRun, Run
from .runs import RECIPES, Reference, contents, damaged_files, make_inputs, newest_checkpoints, older_checkpoints

_START_SECONDS = 5.0
"""Of importing torch and what belongs to it."""


class NotInjectedError(Exception):
    """The run ended before the fault, or the fault did not reach it: another try."""


class ExpectationError(Exception):
    """The run did something else than it should have after the fault."""


class Case:
    """One fault in one run directory.

    Args:
        suite: has the runs in peace.
        recipe, stage: what is disturbed.
        seed: of the moment and everything else random.
        server: starts forks.
        attempt: how many faults came too late before this; it comes earlier.
        forked: whether every run is a fork that has no environment of its own.

    Attributes:
        folder: all files of the case.
        out: the run directory; `renamed` gives another.
        injected: how many faults were.
        lost: what was saved before a fault and is not there after it.
        unequal: files that differ from those in peace.
    """

    def __init__(
        self, suite: Suite, recipe: str, stage: str, seed: str, server: ForkServer, *, attempt: int, forked: bool
    ) -> None:
        self.suite, self.stage, self.rng = suite, stage, random.Random(f"{seed} {attempt}")
        self.reference = suite.reference(recipe, stage, server)
        self._server, self.forked = server, forked
        self._runs: list[Run] = []
        self._share = 0.6**attempt
        self.folder = Path(tempfile.mkdtemp(prefix="case-", dir=suite.work))
        self.out = self.folder / "run"
        self.injected, self.lost, self.unequal = 0, [], []

    def prepare(self, after: str | None = None) -> None:
        """Put the files of the stages before into the run directory, or of those up to `after`."""
        source = self.reference.before(self.stage) if after is None else self.reference.after(after)
        if source is not None:
            shutil.copytree(source, self.out, dirs_exist_ok=True)

    def start(
        self,
        stage: str | None = None,
        *,
        resume: bool = False,
        forked: bool = False,
        alone: bool = False,
        settings: bool = True,
        environment: dict[str, str | None] | None = None,
    ) -> Run:
        """Start a stage, this case's if none is named, as a process of its own (always if `alone`) or as a fork."""
        argv = self.reference.argv(
            stage or self.stage, self.out, caches=self.folder / "cache", resume=resume, settings=settings
        )
        log = self.folder / f"{len(self._runs)}.log"
        fork = environment is None and not alone and (self.forked or forked)
        self._runs.append(self._server.start(argv, log) if fork else RealRun(argv, log, environment))
        return self._runs[-1]

    def end(self) -> None:
        """Kill what still runs."""
        for run in self._runs:
            run.send(signal.SIGKILL)
            run.wait()

    def complete(self, stage: str | None = None, **how: object) -> str:
        """Run a stage to its end, in a fork if nothing else is said; returns its output."""
        run = self.start(stage, **{"resume": True, "forked": True, **how})
        if run.wait() != 0:
            raise ExpectationError(f"{stage or self.stage} after the fault: exit status {run.code}: {_tail(run)}")
        return run.output()

    def refused(self, run: Run, *words: str) -> None:
        """The run must fail with a message of one line that has these words."""
        if run.wait() == 0:
            raise NotInjectedError
        output = run.output()
        message = output.strip().splitlines()[-1] if output.strip() else ""
        missing = [word for word in words if word not in message]
        if run.code != 1 or "Traceback" in output or not message.startswith("nasfast ") or missing:
            raise ExpectationError(f"exit status {run.code}, expected a message with {missing}: {_tail(run)}")

    def random_share_of_written(self) -> int:
        """Bytes: a random part of the largest file that the stage makes in peace."""
        after, before = self.reference.after(self.stage), self.reference.before(self.stage)
        known = {} if before is None else _snapshot(before)
        made = (p for p in after.rglob("*") if p.is_file() and str(p.relative_to(after)) not in known)
        return int(self.rng.uniform(0, 0.9) * max(p.stat().st_size for p in made))

    def strike(self, run: Run, *, early: bool = False) -> None:
        """Wait for a random moment of the run's work, or `early` for one before it.

        Raises:
            NotInjectedError: the run has ended, or is about to.
        """
        # a stage's work is done under its lock; a report has none
        mark = self.out / ("report" if self.stage == "report" else ".lock")
        delay = self.rng.uniform(0, _START_SECONDS)
        if not early:
            run.wait_until(mark.exists)
            delay = self.rng.uniform(0, self._share * self.reference.seconds[self.stage])
        time.sleep(delay)
        if run.poll() is not None or not (early or mark.exists()):
            raise NotInjectedError

    def kill(self, run: Run, number: int = signal.SIGKILL) -> None:
        """End the run by a signal, and note what is lost by it."""
        before = _Saved(self.out)
        run.send(number)
        run.wait()
        if run.code not in (0, -number, 128 + number):
            raise ExpectationError(f"exit status {run.code} before the fault: {_tail(run)}")
        self.injected += 1
        self.lost += before.missing(self.out)

    def compare(self, stage: str | None = None, *, without: tuple[str, ...] = (), last: bool = False) -> None:
        """Note what differs from the run in peace after a stage.

        Args:
            without: names of files that may differ.
            last: of the numbered checkpoints, only the newest need be the same.
        """
        folders = (self.out, self.reference.after(stage or self.stage))
        ours, theirs = map(contents, folders)
        older = [name for folder in folders for name in older_checkpoints(folder)] if last else []
        names = sorted((ours.keys() | theirs.keys()) - {*without, *older})
        self.unequal += [name for name in names if ours.get(name) != theirs.get(name)]


def _tail(run: Run) -> str:
    return run.output()[-1500:]


class _Saved:
    """What a run directory holds at a moment."""

    def __init__(self, folder: Path) -> None:
        self._files = _names(folder)
        self._steps = newest_checkpoints(folder, read=False)
        self._history = _whole_lines(folder / "history.jsonl")

    def missing(self, folder: Path) -> list[str]:
        """What is not there any more, or cannot be read; of checkpoints, if there is no newer one."""
        lost = [f"{name} is gone" for name in self._files - _names(folder)]
        now = newest_checkpoints(folder, read=True)
        lost += [f"checkpoint {step} of {stage}" for stage, step in self._steps.items() if step > now.get(stage, -1)]
        if self._history != _whole_lines(folder / "history.jsonl")[: len(self._history)]:
            lost.append("lines of history.jsonl")
        return lost + damaged_files(folder)


def _names(folder: Path) -> set[str]:
    """Files that stay once they are there: neither checkpoints, nor those that are being written, nor the lock."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name for name in found if not name.startswith("checkpoints/") and not name.endswith((".tmp", ".lock"))}


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


# the faults; each disturbs the run of its case and then does what brings it to its end


def killed(case: Case) -> None:
    """SIGKILL at a random moment, sometimes before the work has begun."""
    case.prepare()
    run = case.start()
    case.strike(run, early=not case.forked and case.rng.random() < 0.2)
    case.kill(run)
    case.complete()
    case.compare()


def killed_often(case: Case) -> None:
    """A whole run, killed and resumed until it is done."""
    for attempt in range(12):
        run = case.start(resume=attempt > 0, forked=attempt > 1)
        try:
            case.strike(run)
        except NotInjectedError:
            break
        case.kill(run)
    if not case.injected:
        raise NotInjectedError
    case.complete()
    case.compare()


def terminated(case: Case) -> None:
    """SIGTERM, as preemptible machines send it before they end."""
    case.prepare()
    run = case.start()
    case.strike(run)
    case.kill(run, signal.SIGTERM)
    if run.code == 0 or (run.code == -signal.SIGTERM and not (case.out / ".lock").exists()):
        raise NotInjectedError  # it was just about to end
    if run.code != 128 + signal.SIGTERM or "Traceback" in run.output():
        raise ExpectationError(f"exit status {run.code} after SIGTERM: {_tail(run)}")
    case.complete()
    case.compare(last=True)  # it has saved one of its own, in the place of an older one


def disk_full(case: Case) -> None:
    """At a random moment another program takes all but a random rest of the file system."""
    with _mounted(case.out, 1 << 26):
        case.prepare()
        saved = _Saved(case.out)
        run = case.start()
        case.strike(run)
        filler = case.out / "filler"
        with contextlib.suppress(OSError):  # the run has taken some more meanwhile
            filler.write_bytes(bytes(max(0, shutil.disk_usage(case.out).free - case.random_share_of_written())))
        case.refused(run, f"nasfast {case.stage}: ", "pace")  # "space" or "Space"
        case.injected += 1
        filler.unlink()
        case.lost += saved.missing(case.out)
        case.complete()
        case.compare()


def no_room(case: Case) -> None:
    """A file system that has too little room from the beginning, which must show before there is any training."""
    before = case.reference.before(case.stage)
    used = 0 if before is None else _disk_bytes(before)
    with _mounted(case.out, used + 65536 + case.random_share_of_written()) as remount:
        case.prepare()
        saved, lines = _Saved(case.out), len(_whole_lines(case.out / "metrics.jsonl"))
        case.refused(case.start(), f"nasfast {case.stage}: ", "pace")
        case.injected += 1
        case.lost += saved.missing(case.out)
        if len(_whole_lines(case.out / "metrics.jsonl")) != lines:
            raise ExpectationError("it trained before it noticed")
        remount("size=64m")
        case.complete()
        case.compare()


def file_size_limit(case: Case) -> None:
    """From a random moment on no file may grow beyond a random size, as with a quota."""
    case.prepare()
    saved = _Saved(case.out)
    run = case.start()
    case.strike(run)
    limit = case.random_share_of_written()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    case.refused(run, f"nasfast {case.stage}: ", "pace")
    case.injected += 1
    case.lost += saved.missing(case.out)
    case.complete()
    case.compare()


def worker_killed(case: Case) -> None:
    """SIGKILL for a process that decodes images, as the kernel does when memory runs out."""
    case.prepare()
    run = case.start()
    run.wait_until(lambda: bool(run.children()))
    case.strike(run)
    workers = run.children()
    if not workers:
        raise NotInjectedError
    with contextlib.suppress(ProcessLookupError):
        os.kill(case.rng.choice(workers), signal.SIGKILL)
    case.injected += 1
    if run.wait() != 0:
        case.complete()
    case.compare()


def checkpoint_damaged(case: Case) -> None:
    """The newest checkpoint of a killed run is not what was written."""
    case.prepare()
    run = case.start()
    if not run.wait_until(lambda: len(list((case.out / "checkpoints").glob(f"{case.stage}*-0*"))) > 1) or run.poll():
        raise NotInjectedError
    case.strike(run)
    case.kill(run)
    newest = sorted((case.out / "checkpoints").glob(f"{case.stage}*-0*"))[-1]
    _damage(newest, case.rng)
    output = case.complete(forked=False)
    if newest.name not in output:
        raise ExpectationError(f"nothing was said of {newest.name}: {output[-500:]}")
    case.compare()


def cache_damaged(case: Case) -> None:
    """A file of the image cache of a killed run is not what was written, or gone."""
    run = case.start()
    run.wait_until(lambda: bool(newest_checkpoints(case.out, read=False)))
    case.strike(run)
    case.kill(run)
    parts = sorted((case.folder / "cache").rglob("*.part"))
    if not parts:
        raise NotInjectedError
    part = case.rng.choice(parts)
    if case.rng.random() < 0.2:
        part.unlink()
    else:
        _damage(part, case.rng)
    case.complete(forked=False)
    case.compare()


@dataclass(frozen=True)
class _Damage:
    """What follows when a file of a finished stage is damaged.

    Attributes:
        after: the stage whose files are there.
        notices: the stage that must refuse the file; None if it is to go on.
        words: of its message.
        repairs: stages that put it right.
    """

    after: str
    notices: str | None
    words: tuple[str, ...]
    repairs: tuple[str, ...]


_DAMAGES = {
    "config.yaml": _Damage("supernet", "supernet", ("config.yaml",), ("supernet",)),
    "space.yaml": _Damage("supernet", "score", ("space.yaml", "nasfast supernet --resume"), ("supernet", "score")),
    "indicators.json": _Damage("score", "search", ("indicators.json", "run `nasfast score"), ("score", "search")),
    "archs.json": _Damage("search", "retrain", ("archs.json", "run `nasfast search"), ("search", "retrain")),
    "history.jsonl": _Damage("search", None, (), ("search",)),
    "retrain/best/result.json": _Damage("retrain", None, (), ("retrain",)),
    "retrain/best/model.safetensors": _Damage("report", "export", ("nasfast retrain --resume",), ("retrain", "export")),
}


def result_damaged(case: Case, name: str) -> None:
    """A file that a stage left is not what was written: the next stage says which one writes it again, or goes on."""
    damage = _DAMAGES[name]
    case.prepare(damage.after)
    path = case.out / name
    if name.endswith(".yaml"):  # they are there to be edited: only what is missing shows
        path.write_bytes(path.read_bytes()[: case.rng.randrange(path.stat().st_size)])
    elif name == "history.jsonl":
        _damage_line(path, case.rng)
    else:
        _damage(path, case.rng)
    case.injected += 1
    if damage.notices:
        case.refused(case.start(damage.notices, resume=True, settings=False), *damage.words)
    if name == "config.yaml":
        path.unlink()  # as the message says
    for stage in damage.repairs:
        case.complete(stage)
    case.compare(damage.repairs[-1], without=("history.jsonl",))


def clock_jumps(case: Case) -> None:
    """The clock shows another time of the last and next months whenever it is asked, in both parts of a killed run."""
    (case.folder / "clock").mkdir()
    (case.folder / "clock" / "sitecustomize.py").write_text(
        "import random, time\n"
        "real, draw = time.time, random.Random(0)\n"
        "time.time = lambda: real() + draw.uniform(-5e6, 5e6)\n"
        "time.time_ns = lambda: int(1e9 * time.time())\n"
    )
    environment = {"PYTHONPATH": os.fspath(case.folder / "clock")}
    case.prepare()
    run = case.start(environment=environment)
    case.strike(run)
    case.kill(run)
    case.complete(environment=None if case.forked else environment)
    case.compare()


def locale_changes(case: Case) -> None:
    """Killed under one locale and resumed under another, with names of files that are not ASCII."""
    case.out = case.folder / "läuft 走"
    first = case.rng.choice([locale for locale in case.suite.locales if "UTF-8" not in locale["LC_ALL"]])
    second = case.rng.choice([locale for locale in case.suite.locales if locale is not first])
    case.prepare()
    run = case.start(environment=first)
    with contextlib.suppress(NotInjectedError):
        case.strike(run)
    case.kill(run)
    case.complete(environment=None if case.forked else second)
    case.compare()


def read_only(case: Case) -> None:
    """A run directory that cannot be written, by a mount or by permissions."""
    if case.suite.mounts:
        with _mounted(case.out, 1 << 28) as remount:
            case.prepare()
            remount("ro")
            _refused_unchanged(case, "cannot write to run directory", "Nothing was changed")
            remount("rw")
            case.complete()
            case.compare()
        return
    case.prepare()
    case.out.mkdir(exist_ok=True)
    case.out.chmod(0o555)
    try:
        _refused_unchanged(case, "cannot write to run directory", "Nothing was changed")
    finally:
        case.out.chmod(0o755)
    case.complete()
    case.compare()


def second_run(case: Case) -> None:
    """Another run in the directory of a run, which is stopped meanwhile, so that it changes nothing itself."""
    case.prepare()
    first = case.start()
    first.wait_until((case.out / ".lock").exists)
    case.strike(first)
    first.stop()
    try:
        _refused_unchanged(case, "is in use by", f"process {first.pid}", "Nothing was changed", resume=True, alone=True)
    finally:
        first.send(signal.SIGCONT)
    if first.wait() != 0:
        raise ExpectationError(f"the first run: exit status {first.code}: {_tail(first)}")
    case.compare()


def _refused_unchanged(case: Case, *words: str, **how: bool) -> None:
    """A run of the case's stage must be refused and leave every byte as it is."""
    before = _snapshot(case.out)
    run = case.start(**how)
    case.refused(run, *words)
    case.injected += 1
    case.lost += sorted(name for name, state in before.items() if _snapshot(case.out).get(name) != state)


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


def _disk_bytes(folder: Path) -> int:
    """What the files of a folder take, in pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def _damage(path: Path, rng: random.Random) -> None:
    """Change a file in place, as a failing disk does."""
    data = bytearray(path.read_bytes())
    place, length = rng.randrange(len(data)), rng.randrange(1, 1 + max(1, len(data) // 4))
    kind = rng.choice(["bit", "cut", "empty", "zeros", "noise"])
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "empty":
        data.clear()
    else:
        fill = bytes(length) if kind == "zeros" else rng.randbytes(length)
        if data[place : place + length] == fill[: len(data) - place]:
            fill = b"\xff" * length
        data[place : place + length] = fill[: len(data) - place]
    path.write_bytes(data)


def _damage_line(path: Path, rng: random.Random) -> None:
    """Damage one line that is neither the first nor the last."""
    lines = path.read_bytes().split(b"\n")
    number = rng.randrange(1, len(lines) - 2)
    line = bytearray(lines[number])
    line[rng.randrange(len(line))] ^= 2
    lines[number] = bytes(line)
    path.write_bytes(b"\n".join(lines))


@contextlib.contextmanager
def _mounted(folder: Path, size: int) -> Iterator[Callable[[str], None]]:
    """A file system of its own at `folder`; yields what changes its options."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(folder))
    try:
        yield lambda options: _mount("-o", f"remount,{options}", os.fspath(folder))
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount file systems."""
    try:
        with _mounted(folder / "mount", 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


_KEEP_LOCALE: dict[str, str | None] = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": None, "LANGUAGE": None}


def usable_locales(folder: Path) -> list[dict[str, str | None]]:
    """Environments of the C locale, of UTF-8, and of German in Latin-1 with its decimal comma where it can be made."""
    found = [{**_KEEP_LOCALE, "LC_ALL": "C"}, {**_KEEP_LOCALE, "LC_ALL": "C.UTF-8"}]
    name = "de_DE.ISO-8859-1"
    (folder / "locales").mkdir()
    with contextlib.suppress(OSError):
        command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", os.fspath(folder / "locales" / name)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            found.append({**_KEEP_LOCALE, "LC_ALL": name, "LOCPATH": os.fspath(folder / "locales")})
    return found


@dataclass(frozen=True)
class Plan:
    """Cases of one kind.

    Attributes:
        fault: row of the table.
        recipe, stage: what is disturbed.
        times: how many.
        inject: the fault.
    """

    fault: str
    recipe: str
    stage: str
    times: int
    inject: Callable[[Case], None]


def _damage_plan(name: str, recipe: str = "exact") -> Plan:
    return Plan(
        f"damaged {Path(name).name}", recipe, _DAMAGES[name].repairs[-1], 2, lambda case: result_damaged(case, name)
    )


PLANS = [
    Plan("SIGKILL", "exact", "supernet", 12, killed),
    Plan("SIGKILL", "exact", "score", 3, killed),
    Plan("SIGKILL", "exact", "search", 3, killed),
    Plan("SIGKILL", "table", "search", 4, killed),
    Plan("SIGKILL", "accuracy", "search", 8, killed),
    Plan("SIGKILL", "exact", "retrain", 12, killed),
    Plan("SIGKILL", "exact", "report", 3, killed),
    Plan("SIGKILL", "exact", "export", 4, killed),
    Plan("SIGKILL, building a cache", "cache", "supernet", 5, killed),
    Plan("SIGKILL, unreadable images", "bad images", "supernet", 3, killed),
    Plan("SIGKILL, unreadable images", "bad images", "retrain", 2, killed),
    Plan("SIGKILL again and again", "exact", "run", 2, killed_often),
    Plan("SIGTERM", "exact", "supernet", 5, terminated),
    Plan("SIGTERM", "exact", "retrain", 4, terminated),
    Plan("SIGTERM", "accuracy", "search", 2, terminated),
    Plan("disk full (tmpfs)", "exact", "supernet", 3, disk_full),
    Plan("disk full (tmpfs)", "exact", "retrain", 3, disk_full),
    Plan("disk full (tmpfs)", "exact", "export", 1, disk_full),
    Plan("disk full (tmpfs)", "accuracy", "search", 1, disk_full),
    Plan("too small a disk (tmpfs)", "exact", "supernet", 1, no_room),
    Plan("too small a disk (tmpfs)", "exact", "retrain", 1, no_room),
    Plan("file size limit (RLIMIT_FSIZE)", "exact", "supernet", 2, file_size_limit),
    Plan("file size limit (RLIMIT_FSIZE)", "exact", "retrain", 2, file_size_limit),
    Plan("file size limit (RLIMIT_FSIZE)", "accuracy", "search", 1, file_size_limit),
    Plan("loader worker killed", "workers", "supernet", 4, worker_killed),
    Plan("newest checkpoint damaged", "exact", "supernet", 4, checkpoint_damaged),
    Plan("newest checkpoint damaged", "exact", "retrain", 3, checkpoint_damaged),
    Plan("cache damaged", "cache", "supernet", 4, cache_damaged),
    *[_damage_plan(name) for name in _DAMAGES if name != "history.jsonl"],
    _damage_plan("history.jsonl", "accuracy"),
    Plan("clock jumps", "exact", "supernet", 2, clock_jumps),
    Plan("clock jumps", "exact", "retrain", 1, clock_jumps),
    *[Plan("locale changes, odd names", "names", stage, 1, locale_changes) for stage in RECIPES["names"].stages],
    Plan("read-only run directory", "exact", "supernet", 1, read_only),
    Plan("read-only run directory", "exact", "retrain", 1, read_only),
    Plan("second run in the directory", "exact", "supernet", 2, second_run),
    Plan("second run in the directory", "exact", "retrain", 1, second_run),
    Plan("second run in the directory", "accuracy", "search", 1, second_run),
]


@dataclass
class Outcome:
    """Of one case; `problem` is an expectation that was not met."""

    fault: str
    recipe: str
    stage: str
    seed: str
    injected: int = 0
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def equal(self) -> bool:
        return not (self.unequal or self.problem)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.unequal, *filter(None, [self.problem])]


class Suite:
    """The runs in peace, made when first asked for, and the cases that are compared with them.

    Args:
        work: an empty folder.

    Attributes:
        mounts: whether file systems can be mounted.
        locales: environments of several locales.
    """

    _TRIES = 6

    def __init__(self, work: Path) -> None:
        self.work = work
        self.mounts, self.locales = can_mount(work), usable_locales(work)
        make_inputs(work)
        self._references: dict[str, Reference] = {}

    def reference(self, recipe: str, stage: str, server: ForkServer) -> Reference:
        """The run in peace, made up to a stage."""
        if recipe not in self._references:
            base = RECIPES[recipe].base
            self._references[recipe] = Reference(
                recipe, self.work, None if base is None else self.reference(base, RECIPES[base].stages[0], server)
            )
        self._references[recipe].make(stage, server.start)
        return self._references[recipe]

    def can(self, plan: Plan) -> bool:
        """Whether the fault can be injected here."""
        if plan.inject is read_only:  # root may write whatever the permissions say
            return self.mounts or os.geteuid() != 0
        return self.mounts or plan.inject not in (disk_full, no_room)

    def run(self, plan: Plan, seed: str, server: ForkServer, *, forked: bool) -> Outcome:
        """Carry out one case; a fault that came too late is tried again."""
        for attempt in range(self._TRIES):
            outcome = Outcome(plan.fault, plan.recipe, plan.stage, seed)
            case = Case(self, plan.recipe, plan.stage, seed, server, attempt=attempt, forked=forked)
            late = False
            try:
                plan.inject(case)
            except NotInjectedError:
                late = True
            except Exception as error:  # noqa: BLE001  (of the suite as well: the others are to go on)
                known = isinstance(error, (ExpectationError, TimeoutError))
                outcome.problem = str(error) if known else traceback.format_exc()
            finally:
                case.end()
            outcome.injected, outcome.lost, outcome.unequal = case.injected, case.lost, case.unequal
            if late or not outcome.problems:
                shutil.rmtree(case.folder)
            if not late:
                return outcome
        outcome = Outcome(plan.fault, plan.recipe, plan.stage, seed)
        outcome.problem = f"the fault came too late {self._TRIES} times"
        return outcome


def run_all(
    suite: Suite, plans: list[tuple[Plan, str]], *, jobs: int, tell: Callable[[Outcome, int], None]
) -> list[Outcome]:
    """All cases, several at a time; `tell` is called after each with their number so far."""
    servers: queue.Queue[ForkServer] = queue.Queue()
    for number in range(jobs):
        servers.put(ForkServer(suite.work / f"server {number}.log"))
    done: list[Outcome] = []

    def carry_out(place: int) -> None:
        plan, seed = plans[place]
        server = servers.get()
        try:
            done.append(suite.run(plan, seed, server, forked=plan.inject is killed and place % 3 == 0))
        finally:
            servers.put(server)
        tell(done[-1], len(done))

    try:
        server = servers.get()
        for recipe, stage in dict.fromkeys((plan.recipe, plan.stage) for plan, _ in plans):
            suite.reference(recipe, stage, server)
        servers.put(server)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(carry_out, range(len(plans))))
    finally:
        while not servers.empty():
            servers.get().close()
    return done


def rows_of(outcomes: list[Outcome]) -> list[dict]:
    """The table: fault, stage, times injected, what was lost, how many final results are equal."""
    rows: dict[tuple[str, str], dict] = {}
    for outcome in outcomes:
        stage = f"{outcome.stage}, {outcome.recipe}" if outcome.recipe != "exact" else outcome.stage
        row = rows.setdefault(
            (outcome.fault, stage),
            {"fault": outcome.fault, "stage": stage, "injected": 0, "lost": 0, "cases": 0, "equal": 0, "problems": []},
        )
        row["injected"] += outcome.injected
        row["lost"] += len(outcome.lost)
        row["cases"] += 1
        row["equal"] += outcome.equal
        row["problems"] += [f"{outcome.seed}: {text}" for text in outcome.problems]
    order = list(dict.fromkeys(plan.fault for plan in PLANS))
    return sorted(rows.values(), key=lambda row: order.index(row["fault"]))


def table(rows: list[dict]) -> str:
    """The rows as text, and their sum."""
    total = {key: sum(row[key] for row in rows) for key in ("injected", "lost", "cases", "equal")}
    lines = [f"{'fault':32} {'stage':22} {'injected':>8} {'lost':>5} {'final result equal':>19}"]
    for row in [*rows, {"fault": "all", "stage": "", **total}]:
        equal = f"{row['equal']} of {row['cases']}"
        lines.append(f"{row['fault']:32} {row['stage']:22} {row['injected']:>8} {row['lost']:>5} {equal:>19}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many faults; at least one of each kind")
    parser.add_argument("--kinds", nargs="+", help="only rows of the table that begin with one of these")
    parser.add_argument("--jobs", type=positive, default=2, help="cases at a time")
    parser.add_argument("--work", type=Path, help="keep all files in this new folder; default: a temporary one")
    parser.add_argument("--out", type=Path, help="also write the table and all cases as JSON")
    args = parser.parse_args()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.work:
            args.work.mkdir(parents=True)
        suite = Suite(args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nasfast-faults-"))))
        plans = [
            (plan, f"{args.seed} {plan.fault} {plan.recipe} {plan.stage} {number}")
            for plan in PLANS
            if suite.can(plan) and (not args.kinds or plan.fault.startswith(tuple(args.kinds)))
            for number in range(max(1, round(args.scale * plan.times)))
        ]
        print(f"{len(plans)} cases; mounts: {'yes' if suite.mounts else 'no'}; locales: {len(suite.locales)}")
        random.Random(args.seed).shuffle(plans)

        def tell(outcome: Outcome, count: int) -> None:
            state = (
                "equal" if outcome.equal and not outcome.lost else f"{outcome.lost} {outcome.unequal} {outcome.problem}"
            )
            print(f"{count}/{len(plans)}  {outcome.fault}  {outcome.stage}: {state}", file=sys.stderr, flush=True)

        rows = rows_of(run_all(suite, plans, jobs=args.jobs, tell=tell))
    print(table(rows))
    for row in rows:
        for problem in row["problems"]:
            print(f"\n{row['fault']}, {row['stage']}: {problem}")
    print(f"\n{time.monotonic() - started:.0f} s")
    if args.out:
        write_json(args.out, rows)
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
