"""What is refused, before it trains and without harm to what is there: a row for each command and sentence."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from tiny import tiny_space, write_folder

import nasfast
import nasfast.train.loop as loop
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.pipeline import evidence
from nasfast.pipeline.children import child_settings, child_task
from nasfast.pipeline.evidence import retrain_loaders
from nasfast.pipeline.inputs import read_layers
from nasfast.pipeline.run import Run, load_settings
from nasfast.pipeline.searching import search
from nasfast.runtime.distributed import World
from nasfast.runtime.lock import RunDirectoryError
from nasfast.settings import RunConfig, TaskSettings

PATHS = "--method spos --search.population 4 --search.crossovers 1 --search.mutations 1"
RUNS = ("run", "supernet", "run --dry_run", "run --seeds 2", "run --seeds 2 --dry_run")
NO_SPACE = "space.yaml is missing: run `nasfast supernet"

BEGINNING = [
    *((f"{command} {flags}", message) for command, (flags, message) in itertools.product(RUNS, [
        ("--search.max_macs 1000", "cannot be met: the architectures of space 'tiny' at 16 x 16 pixels have"),
        ("--search.tables [absent.json]", "cannot read the table absent.json"),
        ("--score.table absent.json", "cannot read the table absent.json"),
    ])),
    ("run --dry_run --data.source folder --data.train images --data.val images", "data.train and data.val are both"),
    ("run --search.refine few.json", "has 9 architectures, at least 10 are needed"),
    (f"run {PATHS} --search.refine many.json", "refines a table, and 'recalibrated_accuracy' scores whole paths"),
    ("run --seeds 0", "--seeds must be at least 2"),
    (f"run --seeds 3 {PATHS}", "score.distill=true"),
    ("run --seeds 3 --retrain.init inherit", "retrain.init=orthogonal"),
    ("run --seeds 3 --retrain.seeds 2", "got retrain.seeds=2: set it to 1"),
    ("run --seeds 3 --search.refine few.json", "nasfast search --out out/seed-0 --search.refine few.json"),
    *((command, NO_SPACE) for command in ("score", "search", "retrain", "retrain --workers 2")),
    ("search --num_classes 3", "--num_classes is for a search without a run"),
    ("search --score isometry --max_macs 9", "cannot be met: the architectures of space 'tiny' at 16 x 16 pixels have"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    def began(*_, **__):
        raise AssertionError("something began")

    monkeypatch.setattr(loop, "update", began)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with files that flags name."""
    archs = list(itertools.product(range(3), repeat=4))
    for name, count in (("few", 9), ("many", 81)):
        accuracies = {"".join(map(str, a)): 50.0 + 3 * a[0] - a[3] / 2 for a in archs[:count]}
        (tmp_path / f"{name}.json").write_text(json.dumps(accuracies))
    tiny_space(num_classes=10, activation="relu").save(tmp_path / "other.yaml")
    write_folder(tmp_path / "images", {"a": 10, "b": 10})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "message"), BEGINNING, ids=[command for command, _ in BEGINNING])
def test_what_cannot_begin_makes_neither_a_loader_nor_a_directory(here, config, monkeypatch, capsys, command, message):
    monkeypatch.setattr(evidence, "make_loaders", lambda *_, **__: pytest.fail("a loader was made"))
    name, *flags = command.split()
    assert main([name, "--out", "out", "--config", str(config), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run --dry_run", "run it without torchrun"),
        ("run --max_hours 1", "torchrun would start its ranks again"),
        ("run --workers 2", "there are 2 ranks, which would each start all"),
        ("run --seeds 2", "there are 2 ranks, which would each start all"),
        ("retrain --workers 2", "there are 2 ranks, which would each start all"),
    ],
)
def test_what_several_ranks_cannot_do(here, config, monkeypatch, capsys, command, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    name, *flags = command.split()
    assert main([name, "--out", "out", "--config", str(config), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()


def test_python_cannot_start_tasks_in_several_ranks_either(tmp_path):
    cfg = RunConfig(out=str(tmp_path), device="cpu")
    for rank in range(2):
        with pytest.raises(ConfigError, match="there are 2 ranks, which would each start all"):
            nasfast.run(cfg, tasks=TaskSettings(), world=World(rank=rank, size=2, leads=rank == 0))
    assert not list(tmp_path.glob("*.*"))


FINISHED = [
    ("score --method bnnas", "method was 'dinas', now 'bnnas'"),
    ("search --seed 9", "seed was 0, now 9"),
    ("retrain --train.epochs 77", "train.epochs was 2, now 77"),
    *(
        (f"{command} --search.max_macs 1000", "the architectures of space 'tiny' at 16 x 16 pixels have")
        for command in ("score", "search")
    ),
    ("retrain --search.max_macs 1000", "--max_macs is a limit of the search, and `nasfast retrain` trains what that"),
    # --resume would be refused too, so the error does not stop at it
    (
        "run --config {config} --train.lr 0.3",
        "has a supernet run already: choose another --out, or add --resume, which takes.* train.lr was 0.1, now 0.3",
    ),
    ("run --config {config}", "has a supernet run already: add --resume, or choose another --out"),
    ("run --resume --train.lr 0.3", "train.lr was 0.1, now 0.3"),
    ("supernet --resume --data.augment none", "data.augment was 'auto', now 'none'"),
    ("supernet --resume --space.name other.yaml", "activation was 'relu6', now 'relu'"),
    ("run --seeds 2 --config {config}", "has a run without --seeds"),
    ("run --seeds 2 --config {config} --resume", "has a run without --seeds"),
    ("search --search.refine few.json", "has 9 architectures, at least 10 are needed"),
    ("search --search.refine none.json", "cannot read"),
    ("search --score.distill false --search.method exact", "set search.method='evolution', or score.distill=true"),
    ("search --score gamma", "has the score 'path_loss', the settings say 'gamma': run `nasfast score"),
    ("search --num_classes 4", "--num_classes is for a search without a run"),
    ("retrain --arch 121", "must have 4 values"),
    ("retrain --arch 1211 --pareto", "give one of them"),
    ("export --arch 1211 --pareto", "give one of them"),
]


@pytest.fixture(scope="module")
def finished(run_dir, tmp_path_factory):
    """A copy of the finished run, which no test here may change; and its files."""
    out = shutil.copytree(run_dir, tmp_path_factory.mktemp("finished") / "run")
    return out, {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}


def is_unchanged(out, files) -> bool:
    return files == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "message"), FINISHED, ids=[command for command, _ in FINISHED])
def test_a_finished_run_stays_as_it_is(here, finished, config, capsys, command, message):
    status = 2 if "give one of them" in message else 1
    assert main([*command.format(config=config).split(), "--out", str(finished[0])]) == status
    assert re.search(message, capsys.readouterr().err)
    assert is_unchanged(*finished)


@pytest.mark.parametrize(
    "command", ["supernet", "retrain", "export", "run", "run --dry_run", "run --seeds 2", "run --seeds 2 --dry_run"]
)
def test_a_directory_in_use_is_refused_and_left_alone(finished, capsys, command):
    out, files = finished
    images = [] if command in ("retrain", "export") else ["--data.source", "digits"]  # what is looked at first
    with open(out / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would: a lock is the open file's
        assert main([*command.split(), "--out", str(out), *images]) == 1
        with pytest.raises(RunDirectoryError, match="is in use by"), Run.open(load_settings(str(out))):
            pass
    (out / ".lock").unlink()
    assert f"run directory {out} is in use by another process" in capsys.readouterr().err
    assert is_unchanged(out, files)


@pytest.mark.parametrize(
    ("command", "missing", "message"),
    [
        ("score", "space.yaml", NO_SPACE),
        ("score", "checkpoints", "no supernet checkpoint in {out}: run `nasfast supernet --out {out}` first"),
        ("search", "indicators.json", "indicators.json is missing: run `nasfast score"),
        ("retrain", "archs.json", "archs.json is missing: run `nasfast search"),
    ],
)
def test_a_missing_file_names_the_stage_that_writes_it(finished, capsys, command, missing, message):
    out, files = finished
    os.rename(out / missing, out.parent / missing)
    try:
        assert main([command, "--out", str(out)]) == 1
    finally:
        os.rename(out.parent / missing, out / missing)
    assert message.format(out=out) in capsys.readouterr().err
    assert is_unchanged(out, files)


def test_images_of_other_classes_cannot_retrain(here, out):
    cfg = load_settings(str(out))
    cfg = cfg.replace(data=cfg.data.replace(source="folder", train="images"))
    with pytest.raises(ConfigError, match="the images have 2 classes, .*space.yaml has 10"):
        retrain_loaders(cfg, read_layers(out))


def test_a_stage_writes_only_while_its_run_is_open(out):
    looked = Run.look(load_settings(str(out)))
    with Run.open(looked.cfg) as run:
        search(run)
    for closed in (looked, run):
        with pytest.raises(RuntimeError, match="open the run, `with Run.open"):
            search(closed)


def test_a_run_is_a_value(out):
    run = Run.look(load_settings(str(out)))
    with pytest.raises(FrozenInstanceError):
        run.cfg = run.cfg.replace(seed=1)


def test_a_child_has_a_seed_of_its_own_and_the_images_of_the_run(out):
    cfg = load_settings(str(out))
    for in_run, folder in ((False, "seed-1"), (True, cfg.out)):
        task = child_task(cfg, "seed-1", "module:function", seed=1, in_run=in_run)
        child = child_settings(Path("seed-1"), task.arguments["config"], task.machine)
        assert (child.out, child.seed, child.search.seed, child.data.split_seed) == (folder, 1, 1, cfg.seed)
