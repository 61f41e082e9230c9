"""The ranks of a run: starting them, exchanges between them, whole commands, and torchrun with a killed worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import digits_runs
import pytest
import ranks
import torch
import torch.distributed as dist
import yaml
from forked import run_program
from tiny import tiny_space

import nasfast.runtime.distributed as distributed
from nasfast.cli.main import main
from nasfast.runtime.distributed import SINGLE, RankError, World, start
from nasfast.train.log import read_metrics

SETTINGS = {
    **digits_runs.SETTINGS,
    "search": {"max_macs": 70_000},
    "retrain": {**digits_runs.SETTINGS["retrain"], "init": "inherit", "top_k": 2},
    "method": "dinas_paper",  # whose steps are counted here
}
NETWORKS = ("best", "best-2", "random")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, dict[str, list[int]], str]:
    """A folder with a run of one process in `single` and the cases of ranks, how they ended, and what they showed.

    "score", "networks" and "batch" continue from the files of the single process.
    """
    out = tmp_path_factory.mktemp("distributed")
    tiny_space(num_classes=10).save(out / "tiny.yaml")
    settings = {**SETTINGS, "space": {"name": str(out / "tiny.yaml")}}
    (out / "settings.yaml").write_text(yaml.safe_dump(settings))
    common = ["--out", str(out / "single"), "--config", str(out / "settings.yaml")]
    for command in ("supernet", "score", "search"):
        assert main([command, *common]) == 0
    for case in ("score", "networks", "batch"):
        shutil.copytree(out / "single", out / case)
    assert main(["retrain", *common]) == 0
    said = run_program(ranks, out, "talk", "gone", *ranks.COMMANDS, "torchrun")
    return out, ranks.codes(said), said


@pytest.mark.kill
def test_every_exchange(done):
    out, codes, _ = done
    assert codes["talk"] == [0, 0, 0]
    said = {path.read_text() for path in (out / "talk").glob("*.txt")}
    assert said == {f"{[7.5] * 3} {[float(i) for i in range(12)]} [] {[b'abc', b'']} {[b'', b'x', b'xx']}"}


@pytest.mark.kill
def test_a_rank_that_is_gone_is_noticed(done):
    out, codes, _ = done
    assert codes["gone"] == [3, 7]
    assert "RankError: another process of this run has ended" in (out / "gone" / "error 0").read_text()


# starting


@pytest.fixture
def launched(monkeypatch):
    """The environment of rank 1 of 2 on one machine; nothing is started."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: pytest.fail("it was started"))
    return monkeypatch


def test_a_single_process_needs_no_launcher():
    with start("cpu") as world:
        assert world == SINGLE == World(rank=0, size=1, leads=True, attempt=0) and world.store is None
        assert not torch.distributed.is_initialized()
    tensor = torch.ones(2)
    world.all_reduce(tensor)
    world.broadcast([tensor])
    assert tensor.tolist() == [1, 1]
    assert world.all_gather(b"x") == [world.broadcast_bytes(b"x")] == [b"x"]


@pytest.mark.parametrize(
    ("device", "absent", "message"),
    [
        ("cuda", None, "2 processes but 1 GPUs on this machine: start torchrun --nproc-per-node 1"),
        ("cuda:0", None, "device='cuda:0' names one GPU for every process: use --device cuda"),
        ("cuda", "LOCAL_RANK", "LOCAL_RANK is not set, so this process has no GPU: start it with torchrun"),
    ],
)
def test_ranks_without_a_gpu_each_are_refused(launched, device, absent, message):
    launched.setattr(torch.cuda, "device_count", lambda: 1)
    if absent:
        launched.delenv(absent)
    with pytest.raises(RankError, match=message), start(device):
        pass


def test_another_kind_of_device_than_rank_0(launched):
    store = dist.HashStore()
    dist.PrefixStore("nasfast 0 2", store).set("device", "cuda")
    launched.setattr(distributed.dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    with pytest.raises(RankError, match="rank 1 would compute on cpu, rank 0 on cuda: use --device cpu, or give"):
        with start("cpu"):
            pass


@pytest.mark.parametrize(
    ("text", "gone"), [("Connection closed by peer", True), ("Broken pipe", True), ("CUDA out of memory", False)]
)
def test_only_a_connection_that_ended_is_a_rank_that_is_gone(monkeypatch, text, gone):
    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(distributed.dist, "all_reduce", fail)
    with pytest.raises(RuntimeError, match=text) as error:
        World(size=2).all_reduce(torch.ones(1))
    assert isinstance(error.value, RankError) == gone


def test_only_what_the_job_has_begun_is_resumed(tmp_path):
    """What was in the directory before the job is not its own, however often torchrun starts it again."""
    store = dist.HashStore()
    first, second, third = (World(attempt=n, store=store) for n in range(3))
    assert not second.has_begun(tmp_path)
    first.note_begun(tmp_path / "a")
    second.note_begun(tmp_path / "b")
    assert [world.has_begun(tmp_path / "a") for world in (first, second, third)] == [False, True, True]
    assert [world.has_begun(tmp_path / "b") for world in (first, second, third)] == [False, False, True]


# commands


def metrics(run_dir: Path) -> list[dict]:
    """Sorted, because ranks write side by side."""
    lines = [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(run_dir)]
    return sorted(lines, key=lambda m: (m["stage"], m["step"], "eval_top1" in m))


@pytest.mark.kill
def test_networks_side_by_side_are_those_of_a_single_process(done):
    out, codes, shown = done
    assert codes["networks"] == [0, 0]
    for name in NETWORKS:
        for file in ("model.safetensors", "config.json"):
            path = Path("retrain") / name / file
            assert (out / "networks" / path).read_bytes() == (out / "single" / path).read_bytes(), path
        results = [json.loads((out / d / "retrain" / name / "result.json").read_text()) for d in ("networks", "single")]
        for result in results:
            del result["seconds"]
            result.pop("digest", None)
        assert results[0] == results[1]
    assert metrics(out / "networks") == metrics(out / "single")
    one, other = ({p.name: p.read_bytes() for p in (out / d / "checkpoints").iterdir()} for d in ("networks", "single"))
    assert one == other


@pytest.mark.kill
def test_networks_trained_together(done):
    """BatchNorm sees half of each batch, so the numbers are near those of one process and not the same."""
    out, codes, _ = done
    assert codes["batch"] == [0, 0]
    assert [m["step"] for m in metrics(out / "batch")] == [m["step"] for m in metrics(out / "single")]
    lines = [[m for m in metrics(out / d) if m["stage"] == "retrain/best" and "loss" in m] for d in ("batch", "single")]
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.1)
    assert lines[0] != lines[1]
    assert {p.parent.name for p in (out / "batch" / "retrain").glob("*/model.safetensors")} == set(NETWORKS)


@pytest.mark.kill
def test_only_rank_0_shows_what_it_does(done):
    """Every line of progress and of results once, though two processes did the work."""
    _, _, shown = done
    stages = [line.split()[0] for line in shown.splitlines() if line.startswith(("supernet ", "retrain "))]
    # a supernet without torchrun and one with it; the networks are retrained in each of two ways
    assert stages == ["supernet", "retrain", "retrain", "supernet"]
    assert shown.count("checkpoint: ") == 2


@pytest.mark.kill
def test_a_command_of_one_process_is_done_by_one(done):
    _, codes, shown = done
    assert codes["score"] == [0, 0]
    assert shown.count("score/indicators.json") == 1


@pytest.mark.kill
def test_sigterm_ends_a_command_with_143_and_one_line(done):
    out, codes, shown = done
    assert codes["terminated"] == [143]
    saved = out / "terminated" / "checkpoints" / "supernet-00000006.safetensors"
    assert (
        f"\nnasfast supernet: stopped by SIGTERM; supernet: step 6 of 22 is saved in {saved}; the same command with "
        in shown
    )
    assert saved.exists()
    assert not list((out / "terminated").glob(".*"))


@pytest.mark.kill
def test_an_error_of_every_rank(done):
    out, codes, shown = done
    assert codes["refused"] == [1, 1]
    assert "batch_size must be at least 2" in shown
    assert not (out / "refused" / "checkpoints").exists()


# torchrun


@pytest.mark.kill
def test_torchrun_starts_a_killed_worker_again_and_nothing_is_lost(done):
    """Rank 1 dies in step 7 of 22, behind the checkpoint of step 4; no flag is given for that."""
    out, codes, _ = done
    assert codes["unbroken"] == [0, 0]
    assert (out / "rank 1 was killed").exists()
    folders = [out / name / "checkpoints" for name in ("torchrun", "unbroken")]
    resumed, unbroken = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert resumed == unbroken
    assert metrics(out / "torchrun") == metrics(out / "unbroken")
