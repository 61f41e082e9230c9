"""How many seeds the disk has room for, against the sizes of real checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import batches

from nasfast.cli.main import main
from nasfast.retrain import retrain
from nasfast.search import InfeasibleConstraintError
from nasfast.settings import RunConfig
from nasfast.spaces import digits_mini
from nasfast.stability import room, run, work
from nasfast.train import CheckpointError
from nasfast.train.supernet import make_supernet, train_supernet

SPACE = digits_mini()
FLAGS = ["--data.source", "digits", "--data.workers", "0", "--space.name", "digits_mini"]


def config(out, **changes) -> RunConfig:
    form = {"out": str(out), "space": {"name": "digits_mini"}, "data": {"source": "digits", "workers": 0}}
    return RunConfig.from_dict({**form, "device": "cpu", **changes}).resolved()


def test_how_weights_begin_changes_no_bytes(tmp_path):
    supernet = {"alignment": 0.5, "linear_share": 0.9, "shift": 0.5, "branch_scale": 0.3}
    drawn = room.bytes_of(config(tmp_path, supernet=supernet), SPACE, 2, 1)
    assert drawn == room.bytes_of(config(tmp_path), SPACE, 2, 1)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_bytes_are_those_of_checkpoints(tmp_path, ema):
    cfg = config(tmp_path, retrain={"ema": ema, "random_architectures": 3, "train": {"epochs": 1}})
    images = batches(1, resolution=SPACE.resolution, num_classes=10)
    images = [(x[:, : SPACE.in_channels].contiguous(), y) for x, y in images]
    net, sampler = make_supernet(SPACE, cfg.method, cfg.supernet)
    supernet = train_supernet(net, images, sampler, cfg.train.replace(epochs=1), run_dir=tmp_path).stat().st_size
    arch = tuple(max(row, key=lambda choice: row[choice].params) for row in SPACE.cost_table)
    retrain(SPACE, arch, images, images, cfg.retrain, run_dir=tmp_path)
    (file, *_) = tmp_path.glob("checkpoints/retrain-best-*")
    network = file.stat().st_size
    each, once = room.bytes_of(cfg, SPACE, 2, 1)
    # two checkpoints of the supernet; of each network two and the best one
    assert each == pytest.approx(2 * supernet + 2 * 3 * network, rel=0.05)
    # and what one worker writes before it deletes an older one; supernets and networks are not written together
    assert once == pytest.approx(max(supernet, network) + 3 * 3 * network, rel=0.05)
    # with workers for all, those of two supernets, or of seven networks
    assert room.bytes_of(cfg, SPACE, 2, 9)[1] == pytest.approx(max(2 * supernet, 7 * network) + 9 * network, rel=0.05)


def test_more_seeds_than_room_are_refused_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    cfg = config(tmp_path / "run")
    monkeypatch.setattr(run, "seeds_at_a_time", lambda cfg, seeds: 2)
    each, once = room.bytes_of(cfg, SPACE, 4, 2)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(free=once + 3.5 * each))
    assert main(["run", "--out", str(cfg.run_dir), *FLAGS, "--seeds", "4"]) == 1
    said = capsys.readouterr().err
    assert "which is enough for 3 seeds: free some space, lower --seeds" in said and "Nothing was trained" in said
    assert main(["run", "--out", str(cfg.run_dir), *FLAGS, "--seeds", "4", "--workers", "2", "--dry_run"]) == 1
    assert capsys.readouterr().err == said, "as the run would be"
    assert not cfg.run_dir.exists()
    cfg.run_dir.mkdir()
    room.check_room(cfg, 3, 2)
    # what earlier calls have written needs no room again
    (cfg.run_dir / "seed-0/checkpoints").mkdir(parents=True)
    with open(cfg.run_dir / "seed-0/checkpoints/supernet-00000010.safetensors", "wb") as file:
        file.truncate(int(0.6 * each))
    room.check_room(cfg, 4, 2)
    with pytest.raises(CheckpointError, match="which is enough for"):  # more are written at a time
        room.check_room(cfg, 4, 9)


def test_a_billion_seeds_are_refused_at_once(tmp_path, monkeypatch, capsys):
    made = []

    def counted(cfg, number, make=work.seed_task):
        made.append(number)
        assert len(made) <= 1000, "a task for every seed"
        return make(cfg, number)

    for module in (run, work):
        monkeypatch.setattr(module, "seed_task", counted)
    assert main(["run", "--out", str(tmp_path / "run"), *FLAGS, "--seeds", "1_000_000_000"]) == 1
    assert "the checkpoints of 1000000000 seeds need" in capsys.readouterr().err
    assert made


def test_limits_are_checked_before_a_cluster_gets_tasks(tmp_path, caplog):
    with pytest.raises(InfeasibleConstraintError, match="max_macs=1,000 cannot be met"):
        run._check_limits(config(tmp_path, search={"max_macs": 1000}))
    elsewhere = {"source": "folder", "train": str(tmp_path / "far"), "val": str(tmp_path / "away"), "workers": 0}
    run._check_limits(config(tmp_path, data=elsewhere, search={"max_macs": 1000}))
    assert "this machine does not see the images" in caplog.text
