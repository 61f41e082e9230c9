"""The faults. Each function disturbs the run of its case, then completes the run as a user would, and compares."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from dataclasses import dataclass

from .case import Case, ExpectationError, NotInjectedError, Saved, snapshot, tail, whole_lines
from .runs import newest_checkpoints
from .surroundings import damage, damage_line, disk_bytes, mounted


def killed(case: Case) -> None:
    """Send SIGKILL at a random moment, sometimes before the work has begun."""
    case.prepare()
    run = case.start()
    case.strike(run, early=not case.forked and case.rng.random() < 0.2)
    case.kill(run)
    case.complete()
    case.compare()


def killed_often(case: Case) -> None:
    """Kill and resume a whole run until it is done."""
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
    """Send SIGTERM, as preemptible machines do before they stop."""
    case.prepare()
    run = case.start()
    case.strike(run)
    case.kill(run, signal.SIGTERM)
    if run.code == 0 or (run.code == -signal.SIGTERM and not (case.out / ".lock").exists()):
        raise NotInjectedError  # the run was about to end
    if run.code != 128 + signal.SIGTERM or "Traceback" in run.output():
        raise ExpectationError(f"exit status {run.code} after SIGTERM: {tail(run)}")
    case.complete()
    case.compare(last=True)  # the run saved a checkpoint when it was terminated, and removed an older one for it


def disk_full(case: Case) -> None:
    """Fill the file system at a random moment, except for a rest of random size."""
    with mounted(case.out, 1 << 26):
        case.prepare()
        saved = Saved(case.out)
        run = case.start()
        case.strike(run)
        filler = case.out / "filler"
        with contextlib.suppress(OSError):  # the run may have taken more space in between
            filler.write_bytes(bytes(max(0, shutil.disk_usage(case.out).free - case.random_share_of_written())))
        case.refused(run, f"nasfast {case.stage}: ", "pace")  # "space" or "Space"
        case.injected += 1
        filler.unlink()
        case.lost += saved.missing(case.out)
        case.complete()
        case.compare()


def no_room(case: Case) -> None:
    """Start on a file system that is too small. The run must notice before it trains."""
    before = case.reference.before(case.stage)
    used = 0 if before is None else disk_bytes(before)
    with mounted(case.out, used + 65536 + case.random_share_of_written()) as remount:
        case.prepare()
        saved, lines = Saved(case.out), len(whole_lines(case.out / "metrics.jsonl"))
        case.refused(case.start(), f"nasfast {case.stage}: ", "pace")
        case.injected += 1
        case.lost += saved.missing(case.out)
        if len(whole_lines(case.out / "metrics.jsonl")) != lines:
            raise ExpectationError("the run trained before it noticed the small file system")
        remount("size=64m")
        case.complete()
        case.compare()


def file_size_limit(case: Case) -> None:
    """Limit the size of files, as a quota does, from a random moment on."""
    case.prepare()
    saved = Saved(case.out)
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
    """Send SIGKILL to a process that decodes images, as the kernel does when memory runs out."""
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
    """Damage the newest checkpoint of a killed run."""
    case.prepare()
    run = case.start()
    if not run.wait_until(lambda: len(list((case.out / "checkpoints").glob(f"{case.stage}*-0*"))) > 1) or run.poll():
        raise NotInjectedError
    case.strike(run)
    case.kill(run)
    newest = sorted((case.out / "checkpoints").glob(f"{case.stage}*-0*"))[-1]
    damage(newest, case.rng)
    output = case.complete(forked=False)
    if newest.name not in output:
        raise ExpectationError(f"no message named {newest.name}: {output[-500:]}")
    case.compare()


def cache_damaged(case: Case) -> None:
    """Damage or remove a file in the image cache of a killed run."""
    run = case.start()
    run.wait_until(lambda: bool(newest_checkpoints(case.out, read=False)))
    case.strike(run)
    case.kill(run)
    parts = sorted((case.folder / "cache").rglob("*.npy"))
    if not parts:
        raise NotInjectedError
    part = case.rng.choice(parts)
    if case.rng.random() < 0.2:
        part.unlink()
    else:
        damage(part, case.rng)
    case.complete(forked=False)
    case.compare()


@dataclass(frozen=True)
class Damage:
    """What must follow when a file of a finished stage is damaged.

    Attributes:
        after: the last stage that is done.
        notices: the stage that must refuse the file; None if the next stage must go on.
        words: what the message of refusal must contain.
        repairs: stages that write the file again and continue.
    """

    after: str
    notices: str | None
    words: tuple[str, ...]
    repairs: tuple[str, ...]


DAMAGES = {
    "config.yaml": Damage("supernet", "supernet", ("config.yaml",), ("supernet",)),
    "space.yaml": Damage("supernet", "score", ("space.yaml", "nasfast supernet --resume"), ("supernet", "score")),
    "indicators.json": Damage("score", "search", ("indicators.json", "run `nasfast score"), ("score", "search")),
    "archs.json": Damage("search", "retrain", ("archs.json", "run `nasfast search"), ("search", "retrain")),
    "history.jsonl": Damage("search", None, (), ("search",)),
    "retrain/best/result.json": Damage("retrain", None, (), ("retrain",)),
    "retrain/best/model.safetensors": Damage("report", "export", ("nasfast retrain --resume",), ("retrain", "export")),
}


def result_damaged(case: Case, name: str) -> None:
    """Damage a file of a finished stage. The next stage must name the command that writes it again, or go on."""
    expected = DAMAGES[name]
    case.prepare(expected.after)
    path = case.out / name
    if name.endswith(".yaml"):  # users edit these files, so only a truncated one is noticed
        path.write_bytes(path.read_bytes()[: case.rng.randrange(path.stat().st_size)])
    elif name == "history.jsonl":
        damage_line(path, case.rng)
    else:
        damage(path, case.rng)
    case.injected += 1
    if expected.notices:
        case.refused(case.start(expected.notices, resume=True, settings=False), *expected.words)
    if name == "config.yaml":
        path.unlink()  # the message asks for this
    for stage in expected.repairs:
        case.complete(stage)
    case.compare(expected.repairs[-1], without=("history.jsonl",))


def clock_jumps(case: Case) -> None:
    """Kill and resume a run whose clock is wrong by a new random amount, up to 58 days, at every call."""
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
    """Kill a run under one locale and resume it under another; file names are not ASCII."""
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
    """Make the run directory read-only, by a mount or by permissions."""
    if case.suite.mounts:
        with mounted(case.out, 1 << 28) as remount:
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
    """Start a second run in the directory of a run, which is stopped during that time and so changes nothing."""
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
        raise ExpectationError(f"the first run ended with exit status {first.code}: {tail(first)}")
    case.compare()


def _refused_unchanged(case: Case, *words: str, **how: bool) -> None:
    """Check that a run of the case's stage is refused and leaves every byte unchanged."""
    before = snapshot(case.out)
    run = case.start(**how)
    case.refused(run, *words)
    case.injected += 1
    case.lost += sorted(name for name, state in before.items() if snapshot(case.out).get(name) != state)
