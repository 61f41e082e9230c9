"""`nasfast run --seeds` from images to its page: each seed is a plain run, and what stops or fails is reported."""

from __future__ import annotations

import pytest
from digits_runs import SETTINGS, write_config
from in_process import run_tasks_here

from nasfast.cli.main import main
from nasfast.pipeline import children
from nasfast.runtime.files import unseal

pytestmark = pytest.mark.slow


@pytest.fixture
def here(monkeypatch):
    run_tasks_here(monkeypatch)


@pytest.fixture
def config(tmp_path):
    train = {**SETTINGS["train"], "epochs": 1}
    return str(write_config(tmp_path / "config", train=train, score={"paths": 30, "images": 64}))


def contents(folder):
    names = ("task.json", "model.safetensors", "indicators.json", "archs.json", "stability.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.name in names}


def test_seeds_are_plain_runs_and_a_stopped_run_continues(tmp_path, config, here, capfd):
    out, stopped = tmp_path / "out", tmp_path / "stopped"
    flags = ["--config", config, "--seeds", "2"]
    assert main(["run", "--out", str(out), *flags]) == 0
    said = capfd.readouterr().out
    assert "table between seeds" not in said and "tau between seeds is" in said
    assert "Retrained with 2 seeds, the answer is" in said and f"report: {out / 'report.html'}" in said

    # the second seed is what the stages by themselves make of its seed
    plain = ["--out", str(tmp_path / "plain"), "--seed", "1", "--config", config]
    for stage in ("supernet", "score", "search"):
        assert main([stage, *plain]) == 0
    for name in ("indicators.json", "archs.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (out / "seed-1" / name).read_bytes()
    assert (out / "seed-0/indicators.json").read_bytes() != (out / "seed-1/indicators.json").read_bytes()

    form = unseal((out / "stability.json").read_text())
    answer = form["agreement"]["top"][0]["arch"]
    trained = [n for n in form["networks"] if n["role"] == "answer"]
    assert [n["seed"] for n in trained] == [0, 1] and all(n["arch"] == answer for n in trained)
    assert trained[0]["result"]["correct"] != trained[1]["result"]["correct"]
    assert form["missing"] == {}

    # the report is written again from the files, and nothing is trained twice
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert main(["report", "--out", str(out)]) == 0
    assert (out / "report.html").read_text() == before
    assert main(["run", "--out", str(out), *flags]) == 1
    assert "has a run already: add --resume" in capfd.readouterr().err
    assert main(["run", "--out", str(out), "--config", config, "--resume"]) == 1
    assert "has a run of --seeds: add --seeds N" in capfd.readouterr().err
    assert (out / "report.html").read_text() == before

    # 0.2 s end in the middle of the first supernet
    assert main(["run", "--out", str(stopped), *flags, "--max_hours", str(0.2 / 3600)]) == 0
    assert "The time limit came first: 2 tasks are missing (seed-0, seed-1)" in capfd.readouterr().out
    assert "0 of 2 seeds are scored" in (stopped / "report.html").read_text()
    assert main(["run", "--out", str(stopped), *flags, "--resume"]) == 0
    assert contents(stopped) == contents(out)


def test_a_failing_seed_is_reported_and_the_rest_goes_on(tmp_path, config, here, capfd, caplog):
    out = tmp_path / "out"
    # the folder of one seed cannot be made
    out.mkdir()
    (out / "seed-1").write_text("in the way")
    flags = ["--config", config, "--seeds", "3", "--attempts", "2", "--retrain.random_architectures", "0"]
    assert main(["run", "--out", str(out), *flags]) == 0
    said = capfd.readouterr()
    assert "seed-1 failed in every attempt: no answer from its worker (FileExistsError" in said.out
    assert "task seed-1 failed: its log is" in caplog.text
    form = unseal((out / "stability.json").read_text())
    assert (form["scored"], form["agreement"]["seeds"]) == (["seed-0", "seed-2"], 2)
    assert "failed no answer" in (out / "report.html").read_text()


def test_a_dry_run_writes_nothing(tmp_path, config, capfd, monkeypatch):
    monkeypatch.setattr(children, "cores", lambda: 3)
    monkeypatch.setattr(children, "free_memory", lambda: 5 << 30)
    assert main(["run", "--out", str(tmp_path / "out"), "--config", config, "--seeds", "3", "--dry_run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("seeds (supernet, score, search)") and lines[2].startswith("networks (retraining)")
    assert lines[1].split("search)")[1].split()[:2] == ["3", "1"]
    assert lines[2].split("(retraining)")[1].split()[0] == "7", "three of the answer and of the baseline, one random"
    assert "GiB" in lines[1] and "Nothing was trained" in lines[3]
    assert lines[3].startswith("2 at a time"), "as in the run, where a task counts as 2 GiB"
    assert not (tmp_path / "out").exists()
