"""Whole runs on the digits through the command line: files, resuming, stages alone, the baselines."""

from __future__ import annotations

import fcntl
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from scipy.stats import kendalltau
from tiny import batches, tiny_space

import nasfast.train.loop as loop
from nasfast import pipeline
from nasfast.cli.main import main
from nasfast.config import ConfigError, dump_yaml, load_yaml
from nasfast.indicators import bn_gamma
from nasfast.indicators.scores import score_paths, score_table
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import RunConfig
from nasfast.report.evidence import compare
from nasfast.retrain import retrain
from nasfast.runtime.lock import RunDirectoryError
from nasfast.search import InfeasibleConstraintError, Limits, equal_cost_peers, load_candidates
from nasfast.spaces import SKIP, Arch, FairSampler, SearchSpace, load_arch
from nasfast.supernet import Supernet
from nasfast.train import CheckpointError, TrainConfig, train_supernet
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.log import read_metrics

LIMIT = 70_000  # below the dearest architecture, where those in reach have others of equal cost
SETTINGS = {
    "data": {"source": "digits", "batch_size": 128, "workers": 0},
    "train": {"epochs": 2, "lr": 0.1, "log_every": 5, "checkpoint_every": 4},
    "search": {"max_macs": LIMIT, "top_k": 3},
    "retrain": {"top_k": 1, "random_architectures": 1, "train": {"epochs": 1, "log_every": 5, "checkpoint_every": 4}},
    "threads": 1,
}


def write_config(folder: Path, **changes) -> Path:
    """A config file with a tiny space of its own beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_space(num_classes=10).save(folder / "tiny.yaml")
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "space": {"name": str(folder / "tiny.yaml")}, **changes}))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, config) -> Path:
    """A finished run; tests must not change it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["run", "--out", str(out), "--config", str(config)]) == 0
    return out


def contents(run_dir: Path) -> dict[str, object]:
    """Everything a repeated run must reproduce."""
    names = ["space.yaml", "indicators.json", "archs.json"]
    names += [f"retrain/{n}/{f}" for n in ("best", "random") for f in ("model.safetensors", "arch.json", "space.yaml")]
    result = {name: (run_dir / name).read_bytes() for name in names}
    result |= {str(p.name): p.read_bytes() for p in (run_dir / "checkpoints").iterdir()}
    result["metrics"] = [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(run_dir)]
    return result


def test_every_file_of_a_run(run_dir):
    names = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    expected = {
        "config.yaml",
        "space.yaml",
        "environment.json",
        "metrics.jsonl",
        "indicators.json",
        "archs.json",
        "report.html",
    }
    expected |= {
        f"retrain/{name}/{file}"
        for name in ("best", "random")
        for file in ("model.safetensors", "arch.json", "space.yaml", "result.json")
    }
    expected |= {f"checkpoints/supernet-{s:08d}.safetensors" for s in (16, 20)}
    space = SearchSpace.load(run_dir / "space.yaml")
    for name in ("best", "random"):
        arch = "_".join(map(str, load_arch(run_dir / "retrain" / name / "arch.json", space)))
        expected |= {f"checkpoints/retrain-{name}-{arch}-{s}.safetensors" for s in ("00000008", "00000011", "best")}
    boards = {n for n in names if n.startswith("tensorboard/")}
    figures = {n for n in names if n.startswith("report/")}
    assert names - boards - figures == expected
    assert {str(Path(n).parent) for n in boards} == {
        f"tensorboard/{s}" for s in ("supernet", "retrain/best", "retrain/random")
    }


def test_the_results_belong_together(run_dir):
    space = SearchSpace.load(run_dir / "space.yaml")
    assert space == tiny_space(num_classes=10)
    table = IndicatorTable.load(run_dir / "indicators.json")
    assert (table.space, table.meta["method"]) == (space, "dinas")
    assert all(v != 1.0 for row in table.block for v in row.values())
    found = load_candidates(run_dir / "archs.json", space)
    assert found.max_macs == LIMIT
    assert len(found.candidates) == 3
    for candidate in found.candidates:
        assert candidate.optimal
        assert candidate.macs == space.cost(candidate.arch).macs <= LIMIT
        assert candidate.score == pytest.approx(table.score(candidate.arch))
    assert len(found.pareto) > 1
    best = load_arch(run_dir / "retrain/best/arch.json", space)
    assert best == found.candidates[0].arch
    random = load_arch(run_dir / "retrain/random/arch.json", space)
    assert random != best
    result = json.loads((run_dir / "retrain/best/result.json").read_text())
    assert result["macs"] == found.candidates[0].macs
    assert 0.1 <= result["top1"] <= result["top5"] <= 1


@pytest.mark.slow
def test_the_saved_config_is_complete_and_repeats_the_run(run_dir, config, tmp_path):
    saved = RunConfig.load(run_dir / "config.yaml")
    assert saved.resolved() == saved
    assert (saved.supernet.init, saved.score.name) == ("aligned", "path_loss")
    assert (saved.train.epochs, saved.retrain.train.epochs, saved.data.batch_size) == (2, 1, 128)
    assert main(["run", "--config", str(run_dir / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(run_dir)


def test_the_report_shows_the_run(run_dir):
    page = (run_dir / "report.html").read_text()
    best = load_candidates(run_dir / "archs.json").candidates[0]
    assert "<img" in page
    assert " ".join(map(str, best.arch)) in page
    assert "top-1" in page


def interrupt(monkeypatch, at: int) -> None:
    """Ctrl-C in the middle of step `at`, counted over all stages."""
    step, count = loop._step, 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "_step", counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", [3, 15, 31, 40], ids=["before a checkpoint", "supernet", "retrain best", "retrain random"]
)
def test_an_interrupted_run_resumes_to_the_same_files(run_dir, config, tmp_path, monkeypatch, capsys, at):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupt(patched, at)
        assert main(["run", "--out", str(out), "--config", str(config)]) == 130
    assert "interrupted; the last checkpoint is kept, --resume continues" in capsys.readouterr().err
    assert not (out / "report.html").exists()
    # the settings come from the run directory
    assert main(["run", "--out", str(out), "--resume"]) == 0
    assert contents(out) == contents(run_dir)
    assert (out / "report.html").exists()


def test_a_finished_run_resumes_to_nothing(run_dir, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    interrupt(monkeypatch, 1)
    assert main(["run", "--out", str(out), "--resume"]) == 0
    assert contents(out) == contents(run_dir)


@pytest.mark.slow
def test_stages_alone_give_what_the_run_gives(run_dir, config, tmp_path):
    out = tmp_path / "stages"
    assert main(["supernet", "--out", str(out), "--config", str(config)]) == 0
    assert not (out / "indicators.json").exists()
    for stage in ("score", "search", "retrain"):
        assert main([stage, "--out", str(out)]) == 0
    assert contents(out) == contents(run_dir)
    assert main(["report", "--out", str(out)]) == 0
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("score", "space.yaml is missing: run `nasfast supernet"),
        ("search", "space.yaml is missing: run `nasfast supernet"),
        ("retrain", "space.yaml is missing: run `nasfast supernet"),
    ],
)
def test_a_stage_without_the_one_before(tmp_path, capsys, config, stage, message):
    assert main([stage, "--out", str(tmp_path / "empty"), "--config", str(config)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("stage", "missing", "message"),
    [("search", "indicators.json", "run `nasfast score"), ("retrain", "archs.json", "run `nasfast search")],
)
def test_a_missing_file_names_the_stage_that_writes_it(run_dir, tmp_path, capsys, stage, missing, message):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    (out / missing).unlink()
    assert main([stage, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert missing in error


def test_later_stages_need_neither_the_space_file_nor_the_old_settings(run_dir, tmp_path):
    """The user's YAML space may be gone, and a search may be repeated with other limits."""
    out = tmp_path / "moved"
    shutil.copytree(run_dir, out)
    saved = yaml.safe_load((out / "config.yaml").read_text())
    saved["space"]["name"] = str(tmp_path / "gone.yaml")
    (out / "config.yaml").write_text(yaml.safe_dump(saved))
    assert main(["score", "--out", str(out)]) == 0
    assert main(["search", "--out", str(out), "--search.max_macs", "190000", "--search.top_k", "1"]) == 0
    found = load_candidates(out / "archs.json")
    assert (found.max_macs, len(found.candidates)) == (190_000, 1)
    shutil.rmtree(out / "checkpoints")
    assert main(["retrain", "--out", str(out), "--retrain.random_architectures", "0"]) == 0


def test_what_the_terminal_says_claims_no_more_than_the_interval_allows(run_dir, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    assert main(["search", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("proven: no other within the limits has a higher score") == 1
    assert shown.count("proven: only those above have a higher score") == 2
    assert "The proof is about the score only. How well the score ranks trained accuracies was not measured" in shown
    assert main(["retrain", "--out", str(out), "--resume"]) == 0
    forms = [json.loads((out / "retrain" / n / "result.json").read_text()) for n in ("best", "random")]
    expected = compare(forms[0], forms[1:])
    assert expected.images == forms[0]["images"] > 100
    assert expected.gain == pytest.approx(100 * (forms[0]["top1"] - forms[1]["top1"]))
    assert expected.sentence.replace("it is", "the best is", 1) in capsys.readouterr().out


def test_random_architectures_differ_and_cost_the_same(run_dir, caplog):
    space = SearchSpace.load(run_dir / "space.yaml")
    best = load_candidates(run_dir / "archs.json", space).candidates[0].arch
    target = space.cost(best).macs
    every = set(itertools.product(range(3), repeat=4)) - {best}
    near = {a for a in every if abs(space.cost(a).macs - target) <= 0.01 * target}

    def draw(count: int) -> list[Arch]:
        return equal_cost_peers(space, random.Random(0), best, count, limits=Limits(), allow_identity=False)

    peers = draw(3)
    assert len(set(peers)) == len(peers) == min(3, len(near)) and set(peers) <= near
    assert set(draw(len(near) + 5)) == near
    assert f"only {len(near)} of {len(near) + 5} different random architectures" in caplog.text
    assert draw(0) == []


@pytest.mark.slow
def test_an_identity_in_the_answer_can_be_retrained(run_dir, tmp_path):
    """Under a limit that only skipping meets."""
    out = tmp_path / "skip"
    shutil.copytree(run_dir, out)
    space = SearchSpace.load(out / "space.yaml")
    least = min(space.cost((a, SKIP, b, SKIP)).macs for a in range(3) for b in range(3))
    assert main(["search", "--out", str(out), "--search.allow_identity", "true", "--search.max_macs", str(least)]) == 0
    shutil.rmtree(out / "checkpoints")
    assert (
        main(["retrain", "--out", str(out), "--retrain.random_architectures", "0", "--search.allow_identity", "true"])
        == 0
    )
    assert load_arch(out / "retrain/best/arch.json", space)[1::2] == (SKIP, SKIP)


@pytest.mark.slow
def test_inherited_retraining(run_dir, tmp_path):
    out = tmp_path / "inherit"
    shutil.copytree(run_dir, out)
    for path in (out / "checkpoints").glob("retrain*"):
        path.unlink()
    flags = ["--retrain.init", "inherit", "--retrain.random_architectures", "0", "--retrain.top_k", "2"]
    assert main(["retrain", "--out", str(out), *flags]) == 0
    assert (out / "retrain/best-2/result.json").exists()
    assert (out / "retrain/best/model.safetensors").read_bytes() != (
        run_dir / "retrain/best/model.safetensors"
    ).read_bytes()


# refusals before training


def run_fails(out: Path, config: Path, *flags: str, monkeypatch) -> None:
    """The command must fail before the first step of training."""

    def trained(*_, **__):
        raise AssertionError("training began")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_step", trained)
        existed = out.exists()
        assert main(["run", "--out", str(out), "--config", str(config), *flags]) == 1
        assert out.exists() == existed


def test_an_unreachable_limit_is_refused_before_training(config, tmp_path, monkeypatch, capsys):
    space = tiny_space(num_classes=10)
    least = sum(min(c.macs for c in row.values()) for row in space.cost_table) + space.fixed_cost.macs
    run_fails(tmp_path / "run", config, "--search.max_macs", "1000", monkeypatch=monkeypatch)
    assert f"the smallest architecture of space 'tiny' has {least:,} MACs" in capsys.readouterr().err
    with pytest.raises(InfeasibleConstraintError):
        pipeline.supernet(
            RunConfig.load(config).replace(out=str(tmp_path), search=RunConfig().search.replace(max_params=10))
        )


def test_exact_search_over_accuracies_is_refused_before_training(config, tmp_path, monkeypatch, capsys):
    run_fails(tmp_path / "run", config, "--method", "spos", "--search.method", "exact", monkeypatch=monkeypatch)
    assert (
        "search.method='exact' needs additive scores, and 'recalibrated_accuracy' scores whole paths: set"
        in capsys.readouterr().err
    )


def test_an_existing_run_is_not_overwritten(run_dir, config, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    run_fails(out, config, monkeypatch=monkeypatch)
    assert "has a supernet run already: add --resume, or choose another --out" in capsys.readouterr().err
    assert contents(out) == contents(run_dir)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seed", "1"], "seed was 0, now 1"),
        (["--train.lr", "0.3"], "train.lr was 0.1, now 0.3"),
        (["--method", "bnnas"], "method was 'dinas', now 'bnnas'"),
        (["--data.augment", "none"], "data.augment was 'auto', now 'none'"),
        (["--supernet.trainable", "all"], "supernet.trainable was 'bn', now 'all'"),
    ],
)
def test_other_settings_are_refused_on_resume_and_leave_the_run_alone(
    run_dir, tmp_path, monkeypatch, capsys, flags, named
):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    before = (out / "config.yaml").read_bytes()
    run_fails(out, run_dir / "config.yaml", "--resume", "--out", str(out), *flags, monkeypatch=monkeypatch)
    assert named in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["supernet", "--out", str(out), "--resume"]) == 0


def test_another_space_is_refused_on_resume_and_leaves_the_run_alone(run_dir, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    before = (out / "space.yaml").read_bytes()
    tiny_space(num_classes=10, activation="relu").save(tmp_path / "other.yaml")
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), space=cfg.space.replace(name=str(tmp_path / "other.yaml")))
    with pytest.raises(CheckpointError, match="activation was 'relu6', now 'relu'"):
        pipeline.supernet(cfg, resume=True)
    assert (out / "space.yaml").read_bytes() == before


def test_settings_of_later_stages_may_change_on_resume(run_dir, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    assert main(["supernet", "--out", str(out), "--resume", "--search.top_k", "2", "--data.workers", "1"]) == 0
    assert RunConfig.load(out / "config.yaml").search.top_k == 2


def test_images_of_other_classes_cannot_retrain(run_dir, tmp_path):
    from tiny import write_folder

    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    folder = write_folder(tmp_path / "images", {"a": 10, "b": 10})
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), data=cfg.data.replace(source="folder", train=str(folder)))
    cfg.save(out / "config.yaml")
    with pytest.raises(ConfigError, match="the images have 2 classes, .*space.yaml has 10"):
        pipeline.retrain_best(cfg)


STAGES = ("supernet", "score", "search", "retrain", "export", "run")


@pytest.mark.parametrize("stage", STAGES)
def test_a_directory_in_use_is_refused_and_left_alone(run_dir, tmp_path, capsys, stage):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    with open(out / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would: a lock is the open file's
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
        assert main([stage, "--out", str(out)]) == 1
        assert "is in use by another process" in capsys.readouterr().err
        assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
        assert main(["report", "--out", str(out)]) == 0  # a reader


def test_stages_called_from_python_take_the_lock_too(run_dir, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    cfg = RunConfig.load(out / "config.yaml").replace(out=str(out))
    with open(out / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for call in (
            lambda: pipeline.score(cfg=cfg),
            lambda: pipeline.run(cfg, resume=True),
            lambda: train_stage(out),
            lambda: retrain(tiny_space(), (0, 0, 0, 0), batches(2), batches(1), run_dir=out),
        ):
            with pytest.raises(RunDirectoryError, match="in use"):
                call()
    assert pipeline.score(cfg=cfg) is not None
    assert not (out / ".lock").exists()


def train_stage(out: Path) -> None:
    space = tiny_space()
    cfg = TrainConfig(epochs=1, lr=0.1)
    train_supernet(Supernet(space), batches(2), FairSampler(space), cfg, run_dir=out / "sub" / "..", resume=True)


# scores


def test_the_default_score_is_distilled_from_held_out_images_beside_structure(run_dir):
    table = IndicatorTable.load(run_dir / "indicators.json")
    assert (table.rule, table.meta["score"], table.meta["structure"], table.meta["step"]) == (
        "sum",
        "path_loss",
        1.0,
        20,
    )
    assert 0 < table.meta["r2"] <= 1
    cfg = RunConfig.load(run_dir / "config.yaml")
    evidence, _ = pipeline.evidence_of(cfg.replace(out=str(run_dir)))
    train, held = evidence.loaders
    assert len(train.source) + len(held.source) == 1442  # the digits of the training part
    assert sum(len(y) for _, y in evidence.batches) == len(held.source)
    # batches mix the classes, as those of training did
    assert all(len(y.unique()) > 5 for _, y in evidence.batches)
    again = score_table("path_loss", evidence, structure=1.0)
    assert [again.score(a) for a in evidence.sample(5)] == [table.score(a) for a in evidence.sample(5)]


def test_another_score_of_the_same_supernet(run_dir, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    assert main(["score", "--out", str(out), "--score.name", "gamma", "--score.structure", "0"]) == 0
    net, _ = pipeline.load_supernet(RunConfig.load(out / "config.yaml").replace(out=str(out)))
    table = IndicatorTable.load(out / "indicators.json")
    assert table.scores == bn_gamma.score(net).scores
    before = (out / "config.yaml").read_bytes()
    assert main(["search", "--out", str(out), "--score.name", "fisher"]) == 1
    assert "has the score 'gamma', the settings say 'fisher': run `nasfast score" in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["search", "--out", str(out)]) == 0
    assert load_candidates(out / "archs.json").candidates[0].score == pytest.approx(
        table.score(load_candidates(out / "archs.json").candidates[0].arch)
    )
    # without training: of the weights that the supernet began with
    assert main(["score", "--out", str(out), "--score.name", "beta_gradient", "--score.images", "64"]) == 0
    assert IndicatorTable.load(out / "indicators.json").meta["score"] == "beta_gradient"


def test_a_score_can_be_ranked_path_by_path(run_dir, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    archs = list(itertools.product(range(3), repeat=4))
    table = tmp_path / "accuracies.json"
    table.write_text(json.dumps({"".join(map(str, a)): 50 + sum(a) + a[0] / 10 for a in archs}))
    ranked = ["rank", "--out", str(out), "--table", str(table), "--resamples", "10"]
    assert main([*ranked, "--score", "path_accuracy", "--sample", "12"]) == 0
    assert "12 architectures" in capsys.readouterr().out
    report = json.loads((out / "rank-path_accuracy.json").read_text())
    cfg = RunConfig.load(out / "config.yaml")
    evidence, _ = pipeline.evidence_of(cfg.replace(out=str(out), score=cfg.score.replace(name="path_accuracy")))
    chosen = random.Random(0).sample(archs, 12)
    scores = score_paths("path_accuracy", evidence, chosen)
    tau = kendalltau([scores[a] for a in chosen], [50 + sum(a) + a[0] / 10 for a in chosen]).statistic
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert not (out / "rank.json").exists()
    assert main([*ranked, "--score", "ablation"]) == 1
    assert "tiny has no score 'ablation'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*ranked, "--sample", "12"])


@pytest.mark.slow
def test_a_score_of_paths_can_be_searched_without_a_table(run_dir, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    (out / "indicators.json").unlink()
    flags = ["--score.distill", "false", *(f"--search.{key}={value}" for key, value in EVOLUTION.items())]
    assert main(["score", "--out", str(out), *flags]) == 0
    assert not (out / "indicators.json").exists()
    assert main(["search", "--out", str(out), *flags]) == 0
    (best, *_) = load_candidates(out / "archs.json").candidates
    evidence, checkpoint = pipeline.evidence_of(RunConfig.load(out / "config.yaml").replace(out=str(out)))
    assert best.score == score_paths("path_loss", evidence, [best.arch])[best.arch]
    header = json.loads((out / "history.jsonl").read_text().splitlines()[0])
    assert header["scorer"] == f"path_loss of {checkpoint.digest}, 1000 images"
    assert main(["search", "--out", str(out), "--search.method", "exact"]) == 1
    assert (
        "'path_loss' scores whole paths: set search.method='evolution', or score.distill=true"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--method", "dinas_paper", "--score.name", "path_loss"],
            "needs images that the supernet is not trained on: set supernet.hold_out=true",
        ),
        (["--score.name", "ablation"], "tiny has no score 'ablation': layers 0, 2 change shape"),
    ],
)
def test_a_score_that_cannot_be_had_is_refused_before_training(config, tmp_path, monkeypatch, capsys, flags, message):
    run_fails(tmp_path / "run", config, *flags, monkeypatch=monkeypatch)
    assert message in capsys.readouterr().err


def test_unknown_scores_are_named(config, tmp_path, capsys):
    assert main(["run", "--out", str(tmp_path), "--config", str(config), "--score.name", "path_los"]) == 1
    assert "did you mean 'path_loss'" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_of_the_old_dinas_go_on_under_its_present_name(tmp_path, capsys):
    settings = write_config(tmp_path / "config", method="dinas_paper")
    out = tmp_path / "run"
    assert main(["supernet", "--out", str(out), "--config", str(settings)]) == 0
    assert RunConfig.load(out / "config.yaml").supernet.trainable == "indicators"
    form = load_yaml(out / "config.yaml")
    # as the version before wrote it
    del form["score"], form["supernet"]["hold_out"], form["supernet"]["alignment"]
    old = dump_yaml({**form, "method": "dinas"})
    (out / "config.yaml").write_text(old)
    for command in (["supernet", "--resume"], ["score"], ["run", "--resume"]):
        assert main([*command, "--out", str(out)]) == 1
        assert "put `method: dinas_paper` there" in capsys.readouterr().err
        assert (out / "config.yaml").read_text() == old
    (out / "config.yaml").write_text(old.replace("method: dinas\n", "method: dinas_paper\n"))
    for command in (["supernet", "--resume"], ["score"], ["search"]):
        assert main([*command, "--out", str(out)]) == 0
    table = IndicatorTable.load(out / "indicators.json")
    assert (table.rule, table.meta["score"], table.meta["method"]) == ("product", "gamma", "dinas_paper")


# baselines


EVOLUTION = {
    "method": "evolution",
    "population": 4,
    "generations": 2,
    "parents": 2,
    "crossovers": 1,
    "mutations": 1,
    "max_macs": LIMIT,
    "top_k": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spos", "fairnas"])
def test_methods_that_score_by_accuracy(tmp_path, method, capsys):
    settings = write_config(
        tmp_path / "config",
        method=method,
        recalibration_batches=2,
        search=EVOLUTION,
        train={"epochs": 1, "log_every": 5},
        retrain={"random_architectures": 0, "train": {"epochs": 1}},
    )
    out = tmp_path / "run"
    assert main(["run", "--out", str(out), "--config", str(settings)]) == 0
    assert not (out / "indicators.json").exists()
    space = SearchSpace.load(out / "space.yaml")
    found = load_candidates(out / "archs.json", space).candidates
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    header, evaluated = history[0], history[1:]
    (*_, newest) = sorted((out / "checkpoints").glob("supernet-*"))
    assert load_checkpoint(newest).digest in header["scorer"]
    assert len(evaluated) == 8
    assert found[0].score == max(e["score"] for e in evaluated)
    assert all(c.macs <= LIMIT and not c.optimal and 0 <= c.score <= 1 for c in found)
    assert (out / "retrain/best/result.json").exists()
    # searching again takes every score from the history
    before = (out / "history.jsonl").read_bytes()
    assert main(["search", "--out", str(out)]) == 0
    assert (out / "history.jsonl").read_bytes() == before
    # the accuracies were of images that are not judged later
    _, held = pipeline._loaders(RunConfig.load(out / "config.yaml"), space, hold_out=True)
    counts = [e["score"] * held.num_images for e in evaluated]
    assert counts == pytest.approx([round(c) for c in counts], abs=1e-6)


def test_evolution_over_a_table_has_a_history_too(run_dir, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    flags = [f"--search.{key}={value}" for key, value in EVOLUTION.items()]
    assert main(["search", "--out", str(out), *flags]) == 0
    exact, found = load_candidates(run_dir / "archs.json").candidates, load_candidates(out / "archs.json").candidates
    assert found[0].score <= exact[0].score + 1e-12
    assert (out / "history.jsonl").exists()


@pytest.mark.slow
def test_bnnas_runs_without_layer_indicators(tmp_path):
    settings = write_config(
        tmp_path / "config",
        method="bnnas",
        train={"epochs": 1},
        retrain={"random_architectures": 0, "train": {"epochs": 1}},
    )
    out = tmp_path / "run"
    assert main(["run", "--out", str(out), "--config", str(settings)]) == 0
    table = IndicatorTable.load(out / "indicators.json")
    assert table.layer == (None,) * 4
    assert RunConfig.load(out / "config.yaml").supernet.sampler == "uniform"


def test_the_device_must_exist():
    assert RunConfig().torch_device == "cpu"
    with pytest.raises(ConfigError, match="device='cuda', but torch sees no GPU: use --device cpu"):
        _ = RunConfig(device="cuda").torch_device


@pytest.mark.parametrize(
    ("stage", "flags", "message"),
    [
        ("score", ["--method", "bnnas"], "method was 'dinas', now 'bnnas'"),
        ("search", ["--seed", "9"], "seed was 0, now 9"),
        ("retrain", ["--train.epochs", "77"], "train.epochs was 2, now 77"),
    ],
)
def test_a_later_stage_cannot_change_what_the_supernet_was_trained_with(
    run_dir, tmp_path, capsys, stage, flags, message
):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    before = (out / "config.yaml").read_bytes()
    assert main([stage, "--out", str(out), *flags]) == 1
    assert message in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_new_search_can_be_retrained_and_the_earlier_network_is_kept(run_dir, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    space = SearchSpace.load(out / "space.yaml")
    earlier, weights = (
        load_arch(out / "retrain/best/arch.json", space),
        (out / "retrain/best/model.safetensors").read_bytes(),
    )
    smaller = space.cost(earlier).macs - 1
    assert main(["search", "--out", str(out), "--search.max_macs", str(smaller)]) == 0
    assert RunConfig.load(out / "config.yaml").search.max_macs == smaller
    assert main(["retrain", "--out", str(out), "--retrain.random_architectures", "0"]) == 0
    best = load_candidates(out / "archs.json", space).candidates[0].arch
    assert load_arch(out / "retrain/best/arch.json", space) == best != earlier
    (kept,) = (out / "retrain-superseded").iterdir()
    assert (kept / "model.safetensors").read_bytes() == weights


def test_a_retraining_resumes_only_with_its_own_start(run_dir, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    assert main(["retrain", "--out", str(out), "--resume", "--retrain.init", "he"]) == 1
    assert "init was 'orthogonal', now 'he'" in capsys.readouterr().err


def test_a_supernet_that_is_not_trained_to_its_end_is_named(run_dir, tmp_path, caplog):
    out = tmp_path / "run"
    shutil.copytree(run_dir, out)
    (out / "checkpoints/supernet-00000020.safetensors").unlink()
    table = pipeline.score(RunConfig.load(out / "config.yaml").replace(out=str(out)))
    assert "step 16 of 20" in caplog.text
    assert table.meta["step"] == 16


@pytest.mark.slow
def test_a_supernet_at_chance_is_named(tmp_path, config, caplog):
    flags = ["--train.epochs", "1", "--train.lr", "1e-6", "--train.checkpoint_every", "0"]
    assert main(["supernet", "--out", str(tmp_path / "run"), "--config", str(config), *flags]) == 0
    assert "at chance" in caplog.text


@pytest.mark.parametrize("stage", [pipeline.score, pipeline.search, pipeline.evidence_of])
def test_stages_without_training_use_the_threads_of_the_config(run_dir, tmp_path, stage):
    """The score is `gamma`, which reads no images; the search is exact."""
    out, before = tmp_path / "run", torch.get_num_threads()
    shutil.copytree(run_dir, out)
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), threads=before + 1, score=cfg.score.replace(name="gamma"))
    pipeline.score(cfg.replace(threads=before))
    try:
        stage(cfg)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("field", "value"), [("threads", -3), ("seed", -1), ("recalibration_batches", 0), ("device", "banana")]
)
def test_settings_of_the_run_are_checked(field, value):
    with pytest.raises(ConfigError, match=field):
        RunConfig.from_dict({field: value})
