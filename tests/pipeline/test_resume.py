"""What `--resume` repeats: nothing that is complete and still valid, not even the paths of a score that was killed."""

from __future__ import annotations

import json
import logging

import pytest
from digits_runs import contents

from nasfast.cli.main import main
from nasfast.indicators.evidence import Evidence
from nasfast.indicators.table import TABLE_FILE
from nasfast.pipeline import stages
from nasfast.pipeline.path_scores import _FILE as PATHS_FILE


@pytest.fixture
def paths(monkeypatch) -> list:
    """The paths whose score is computed, in order."""
    computed, outcome = [], Evidence.outcome

    def count(self, path):
        if path not in self._outcomes:
            computed.append(path)
        return outcome(self, path)

    monkeypatch.setattr(Evidence, "outcome", count)
    return computed


def resume(out, *flags: str) -> None:
    assert main(["run", "--out", str(out), "--resume", *flags]) == 0


def test_a_finished_run_says_so_at_once(out, capsys, caplog, monkeypatch, paths):
    caplog.set_level(logging.INFO, "nasfast")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(stages, "supernet", lambda *_, **__: pytest.fail("a stage began"))
    resume(out)
    assert f"{out} has ended, and its files are as it left them: nothing is left to do" in caplog.messages
    shown = capsys.readouterr().out
    assert f"report: {out / 'report.html'}" in shown and "best" in shown
    assert not paths
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def test_a_file_that_is_missing_is_made_again_from_what_is_there(out, run_dir, paths):
    for name in (TABLE_FILE, "archs.json", "report.html"):
        (out / name).unlink()
    resume(out)
    assert not paths, "the scores of paths are kept"
    assert contents(out) == contents(run_dir)


def test_a_killed_score_continues(out, run_dir, paths, caplog):
    caplog.set_level(logging.INFO, "nasfast")
    (out / TABLE_FILE).unlink()
    lines = (out / PATHS_FILE).read_bytes().splitlines(keepends=True)
    done = 20
    (out / PATHS_FILE).write_bytes(b"".join(lines[: done + 1]) + lines[done + 1][:30])
    assert main(["score", "--out", str(out)]) == 0
    assert len(paths) == len(lines) - 1 - done
    assert (out / TABLE_FILE).read_bytes() == (run_dir / TABLE_FILE).read_bytes()
    assert (out / PATHS_FILE).read_bytes() == b"".join(lines)
    assert f"{out / PATHS_FILE}: {done} paths are scored already, and kept" in caplog.messages


@pytest.mark.parametrize(
    ("flags", "again"),
    [
        (("--search.top_k", "2"), False),
        (("--score.structure", "2"), False),
        (("--data.workers", "1"), False),
        (("--score.images", "100"), True),
        (("--score", "path_accuracy"), True),
    ],
    ids=str,
)
def test_scores_are_kept_while_nothing_changes_that_they_depend_on(out, paths, flags, again):
    resume(out, *flags, "--retrain.random_architectures", "0")
    assert bool(paths) == again


def test_scores_of_other_weights_are_not_kept(out, paths):
    """The newest checkpoint is gone, so that the supernet is trained again from the one before."""
    (out / "checkpoints/supernet-00000020.safetensors").unlink()
    assert main(["score", "--out", str(out)]) == 0
    assert len(paths) > 10


def test_a_score_that_is_asked_for_again_is_computed_again(out, paths):
    assert main(["score", "--out", str(out)]) == 0
    assert paths


def test_a_score_whose_code_changes_is_computed_again(out, paths, monkeypatch):
    text = (out / PATHS_FILE).read_text().splitlines()[0]
    monkeypatch.setattr("nasfast.pipeline.path_scores._code", lambda module: f"{module}, edited")
    (out / TABLE_FILE).unlink()
    resume(out)
    assert paths
    assert json.loads((out / PATHS_FILE).read_text().splitlines()[0])["scorer"] != json.loads(text)["scorer"]
