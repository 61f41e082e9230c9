"""What a run refuses, before it trains and without harm to what is there."""

from __future__ import annotations

import fcntl

import pytest
from digits_runs import contents, run_fails
from tiny import tiny_space

from nasfast import pipeline
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.pipeline import inputs
from nasfast.runtime.distributed import World
from nasfast.settings import RunConfig, TaskSettings
from nasfast.train import CheckpointError


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--search.max_macs", "1000"], "no architecture of space 'tiny' at 16 x 16 pixels meets it"),
        (["--search.tables", "[absent.json]"], "cannot read the table absent.json"),
        (["--score.table", "absent.json"], "cannot read the table absent.json"),
    ],
)
@pytest.mark.parametrize("command", ["run", "supernet", "run --dry_run", "run --seeds 2", "run --seeds 2 --dry_run"])
def test_what_the_search_would_refuse_is_refused_before_there_are_loaders(
    config, tmp_path, monkeypatch, capsys, command, flags, reason
):
    def made(*_, **__):
        raise AssertionError("a loader was made")

    monkeypatch.setattr(inputs, "make_loaders", made)
    name, *more = command.split()
    assert main([name, "--out", str(tmp_path / "run"), "--config", str(config), *more, *flags]) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["score", "search", "retrain", "retrain --workers 2"])
def test_later_stages_refuse_limits_before_they_change_a_file(out, capsys, command):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    name, *more = command.split()
    assert main([name, "--out", str(out), "--search.max_macs", "1000", *more]) == 1
    assert "the smallest architecture of space 'tiny' has" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("stage", [pipeline.run, pipeline.retrain_best])
def test_tasks_in_several_ranks_are_refused(stage, tmp_path):
    """Each rank would start all of them."""
    cfg = RunConfig(out=str(tmp_path), device="cpu")
    for rank in range(2):
        with pytest.raises(ConfigError, match="there are 2 ranks, which would each start all"):
            stage(cfg, tasks=TaskSettings(), world=World(rank=rank, size=2, leads=rank == 0))
    assert not list(tmp_path.glob("*.*"))


def test_an_existing_run_of_other_settings_is_named_with_them(out, run_dir, config, monkeypatch, capsys):
    """--resume would be refused too, so the error does not stop at it."""
    run_fails(out, config, "--train.lr", "0.3", monkeypatch=monkeypatch)
    said = capsys.readouterr().err
    assert "has a supernet run already: choose another --out, or add --resume, which takes the settings of" in said
    assert "train.lr was 0.1, now 0.3" in said
    assert contents(out) == contents(run_dir)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train.lr", "0.3"], "train.lr was 0.1, now 0.3"),
        (["--data.augment", "none"], "data.augment was 'auto', now 'none'"),
    ],
)
def test_other_settings_are_refused_on_resume_and_leave_the_run_alone(out, run_dir, monkeypatch, capsys, flags, named):
    before = (out / "config.yaml").read_bytes()
    run_fails(out, run_dir / "config.yaml", "--resume", "--out", str(out), *flags, monkeypatch=monkeypatch)
    assert named in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["supernet", "--out", str(out), "--resume"]) == 0


def test_another_space_is_refused_on_resume_and_leaves_the_run_alone(out, tmp_path):
    before = (out / "space.yaml").read_bytes()
    tiny_space(num_classes=10, activation="relu").save(tmp_path / "other.yaml")
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), space=cfg.space.replace(name=str(tmp_path / "other.yaml")))
    with pytest.raises(CheckpointError, match="activation was 'relu6', now 'relu'"):
        pipeline.supernet(cfg, resume=True)
    assert (out / "space.yaml").read_bytes() == before


def test_settings_of_later_stages_may_change_on_resume(out):
    assert main(["supernet", "--out", str(out), "--resume", "--search.top_k", "2", "--data.workers", "1"]) == 0
    assert RunConfig.load(out / "config.yaml").search.top_k == 2


def test_images_of_other_classes_cannot_retrain(out, tmp_path):
    from tiny import write_folder

    folder = write_folder(tmp_path / "images", {"a": 10, "b": 10})
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), data=cfg.data.replace(source="folder", train=str(folder)))
    cfg.save(out / "config.yaml")
    with pytest.raises(ConfigError, match="the images have 2 classes, .*space.yaml has 10"):
        pipeline.retrain_best(cfg)


@pytest.mark.slow
def test_a_directory_in_use_is_refused_and_left_alone(out, capsys):
    with open(out / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would: a lock is the open file's
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
        for stage in ("supernet", "retrain", "export", "run"):
            images = ["--data.source", "digits"] if stage in ("supernet", "run") else []  # what is looked at first
            assert main([stage, "--out", str(out), *images]) == 1
            assert "is in use by another process" in capsys.readouterr().err
        assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
        assert main(["report", "--out", str(out)]) == 0  # a reader
