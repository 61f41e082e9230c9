"""One injected fault: the run that it disturbs, what the run has saved, and the comparison with an undisturbed run."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .processes import ForkServer, RealRun, Run
from .runs import contents, damaged_files, newest_checkpoints, older_checkpoints

if TYPE_CHECKING:
    from .suite import Suite

_START_SECONDS = 5.0
"""How long a process imports torch and the package before its work begins."""


class NotInjectedError(Exception):
    """The run ended before the fault, or the fault did not reach it. The suite tries again."""


class ExpectationError(Exception):
    """The run did not behave after the fault as it should."""


class Case:
    """One fault in one run directory.

    Args:
        suite: has the undisturbed runs.
        recipe, stage: the run and its stage that the fault disturbs.
        seed: decides the moment of the fault and all other random choices.
        server: starts forks.
        attempt: how many earlier tries came too late; the more there were, the earlier this one strikes.
        forked: start every run as a fork, which cannot have its own environment.

    Attributes:
        folder: holds all files of the case.
        out: the run directory.
        injected: how many faults reached the run.
        lost: what was saved before a fault and is missing after it.
        unequal: files that differ from those of the undisturbed run.
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
        """Copy the files of the earlier stages, or of all stages up to `after`, into the run directory."""
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
        """Start a stage as a process or, if `forked` or the case asks for it, as a fork.

        Args:
            stage: the case's stage by default.
            resume, settings: whether the command line has --resume and the file of settings.
            alone: never start a fork.
            environment: changes to the environment; a run with changes is never a fork.
        """
        argv = self.reference.argv(
            stage or self.stage, self.out, caches=self.folder / "cache", resume=resume, settings=settings
        )
        log = self.folder / f"{len(self._runs)}.log"
        fork = environment is None and not alone and (self.forked or forked)
        self._runs.append(self._server.start(argv, log) if fork else RealRun(argv, log, environment))
        return self._runs[-1]

    def end(self) -> None:
        """Kill the runs that have not ended."""
        for run in self._runs:
            run.send(signal.SIGKILL)
            run.wait()

    def complete(self, stage: str | None = None, **how: object) -> str:
        """Run a stage to its end, by default in a fork and with --resume; returns its output.

        Raises:
            ExpectationError: the run failed.
        """
        run = self.start(stage, **{"resume": True, "forked": True, **how})
        if run.wait() != 0:
            raise ExpectationError(f"{stage or self.stage} after the fault: exit status {run.code}: {tail(run)}")
        return run.output()

    def refused(self, run: Run, *words: str) -> None:
        """Check that the run fails with one line of error message, which contains these words.

        Raises:
            NotInjectedError: the run succeeded.
            ExpectationError: it failed in another way.
        """
        if run.wait() == 0:
            raise NotInjectedError
        output = run.output()
        message = output.strip().splitlines()[-1] if output.strip() else ""
        missing = [word for word in words if word not in message]
        if run.code != 1 or "Traceback" in output or not message.startswith("nasfast ") or missing:
            raise ExpectationError(f"exit status {run.code}, expected a message with {missing}: {tail(run)}")

    def random_share_of_written(self) -> int:
        """A size in bytes: a random part of the largest file that the undisturbed stage writes."""
        after, before = self.reference.after(self.stage), self.reference.before(self.stage)
        known = {} if before is None else snapshot(before)
        made = (p for p in after.rglob("*") if p.is_file() and str(p.relative_to(after)) not in known)
        return int(self.rng.uniform(0, 0.9) * max(p.stat().st_size for p in made))

    def strike(self, run: Run, *, early: bool = False) -> None:
        """Wait until a random moment while the run works, or, if `early`, before its work begins.

        Raises:
            NotInjectedError: the run has ended, or is about to.
        """
        # a stage holds its lock while it works; the report takes no lock
        mark = self.out / ("report" if self.stage == "report" else ".lock")
        delay = self.rng.uniform(0, _START_SECONDS)
        if not early:
            run.wait_until(mark.exists)
            delay = self.rng.uniform(0, self._share * self.reference.seconds[self.stage])
        time.sleep(delay)
        if run.poll() is not None or not (early or mark.exists()):
            raise NotInjectedError

    def kill(self, run: Run, number: int = signal.SIGKILL) -> None:
        """End the run by a signal, and note what it lost.

        Raises:
            ExpectationError: the run had failed before the signal.
        """
        before = Saved(self.out)
        run.send(number)
        run.wait()
        if run.code not in (0, -number, 128 + number):
            raise ExpectationError(f"exit status {run.code} before the fault: {tail(run)}")
        self.injected += 1
        self.lost += before.missing(self.out)

    def compare(self, stage: str | None = None, *, without: tuple[str, ...] = (), last: bool = False) -> None:
        """Note which files differ from those of the undisturbed run after a stage.

        Args:
            stage: the case's stage by default.
            without: names of files that may differ.
            last: compare only the newest of the numbered checkpoints.
        """
        folders = (self.out, self.reference.after(stage or self.stage))
        ours, theirs = map(contents, folders)
        older = [name for folder in folders for name in older_checkpoints(folder)] if last else []
        names = sorted((ours.keys() | theirs.keys()) - {*without, *older})
        self.unequal += [name for name in names if ours.get(name) != theirs.get(name)]


def tail(run: Run) -> str:
    """The end of what a run printed."""
    return run.output()[-1500:]


class Saved:
    """What a run directory holds when this object is made."""

    def __init__(self, folder: Path) -> None:
        self._files = _names(folder)
        self._steps = newest_checkpoints(folder, read=False)
        self._history = whole_lines(folder / "history.jsonl")

    def missing(self, folder: Path) -> list[str]:
        """Name what is gone or unreadable by now. A checkpoint may go if there is a newer one."""
        lost = [f"{name} is gone" for name in self._files - _names(folder)]
        now = newest_checkpoints(folder, read=True)
        lost += [f"checkpoint {step} of {stage}" for stage, step in self._steps.items() if step > now.get(stage, -1)]
        if self._history != whole_lines(folder / "history.jsonl")[: len(self._history)]:
            lost.append("lines of history.jsonl")
        return lost + damaged_files(folder)


def _names(folder: Path) -> set[str]:
    """Names of the files that a run keeps once it has written them: no checkpoints, temporary files or locks."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith("checkpoints/") and not name.endswith((".tmp", ".lock"))}


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without one that was cut off; none if there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of the last change (ns) of every file, by name."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }
