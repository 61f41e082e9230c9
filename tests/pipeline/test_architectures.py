"""Retraining and exporting architectures by name, by their values, and from the Pareto fronts."""

from __future__ import annotations

import json
import logging
import shutil
import sys

import pytest
from in_process import run_tasks_here
from tiny import tiny_space

import nasfast.train.loop as loop
from nasfast.cli.main import main
from nasfast.pipeline import children, exporting
from nasfast.pipeline import networks as stage
from nasfast.retrain import ImageInfo, load_model, save_model
from nasfast.search import Candidate, Limits, ParetoPoint, save_candidates
from nasfast.spaces import SKIP, CostTable
from nasfast.supernet import build

SPACE = tiny_space(num_classes=10)
BEST, SECOND, CHEAP, FAST, FREE = (1, 2, 1, 1), (2, 2, 1, 1), (0, 0, 0, 0), (0, 1, 0, 2), (2, SKIP, 0, 1)
FLAGS = ["--data.source", "digits", "--data.workers", "0", "--threads", "1", "--retrain.train.epochs", "1"]


def candidate(kind, arch):
    cost = SPACE.cost(arch)
    return kind(arch, 1.0, cost.macs, cost.params, values=(1.0,))


@pytest.fixture
def searched(tmp_path):
    """What a search leaves for the commands behind it: two candidates, a front against MACs and one against a table."""
    SPACE.save(tmp_path / "space.yaml")
    table = CostTable("latency", "ms", tuple(tuple((c, 0.25) for c in range(3)) for _ in range(4)))
    save_candidates(
        tmp_path / "archs.json",
        SPACE,
        [candidate(Candidate, BEST), candidate(Candidate, SECOND)],
        limits=Limits(tables=((table, None),)),
        pareto=[candidate(ParetoPoint, CHEAP), candidate(ParetoPoint, BEST)],
        table_fronts=[[candidate(ParetoPoint, FAST), candidate(ParetoPoint, BEST)]],
    )
    return tmp_path


class Calls(dict):
    """Architectures by name, and in `seeds` the seed and the loaders of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = {}


@pytest.fixture
def trained(monkeypatch):
    """The stage replaced by one that saves an untrained network and notes its name; the larger the seed, the worse."""
    calls = Calls()

    def retrain(space, arch, train, val, *_, run_dir, name, seed, **__):
        calls[name] = arch
        calls.seeds[name] = (seed, train, val)
        save_model(build(space, arch), run_dir / "retrain" / name / "model.safetensors")
        cost = space.cost(arch)
        right = f"{0xFFFF << seed & 0xFFFF:04x}"
        top1 = (16 - seed) / 16
        result = stage.RetrainResult(arch, cost.macs, cost.params, top1, 1.0, 1.0, 1, 1.0, images=16, correct=right)
        (run_dir / "retrain" / name / "result.json").write_text(json.dumps(result.to_dict()))
        return result

    monkeypatch.setattr(stage, "retrain", retrain)
    return calls


def test_architectures_are_named_after_their_values(searched, trained, capsys):
    """Every form that is printed is understood, and the search need not have run."""
    (searched / "archs.json").unlink()
    argv = ["retrain", "--out", str(searched), *FLAGS, "--arch", "[2 -1 0 1]", "--arch", "0,0,0,0", "--arch", "1211"]
    assert main([*argv, "--verbose"]) == 0
    assert trained == {"arch-2_-1_0_1": FREE, "arch-0_0_0_0": CHEAP, "arch-1_2_1_1": BEST}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["network", "top-1", "MACs", "params", "architecture"]
    assert lines[1].startswith("arch-2_-1_0_1  100.00%  ") and lines[1].endswith("  2 -1 0 1")
    assert len(lines) == 5 and lines[4].startswith("written: "), "without random networks nothing is compared"
    assert load_model(searched / "retrain/arch-2_-1_0_1").arch == FREE


def test_the_points_of_all_fronts_are_retrained_once(searched, trained):
    assert main(["retrain", "--out", str(searched), *FLAGS, "--pareto"]) == 0
    assert list(trained.values()) == [CHEAP, BEST, FAST]


def test_several_seeds_are_compared_with_random_architectures(searched, trained, capsys):
    flags = ["--retrain.seeds", "3", "--retrain.random_architectures", "2", "--seed", "1"]
    assert main(["retrain", "--out", str(searched), *FLAGS, *flags]) == 0
    assert list(trained) == ["best", "best-seed-2", "best-seed-3", "random"], "random architectures are trained once"
    assert {trained[name] for name in list(trained)[:3]} == {BEST}
    assert [trained.seeds[name][0] for name in trained] == [1, 2, 3, 1]
    orders = [next(trained.seeds[name][1].epoch(0))[1].tolist() for name in list(trained)[:3]]
    assert orders[0] != orders[1] != orders[2] != orders[0], "each seed has an order of images of its own"
    assert len({id(trained.seeds[name][1]) for name in trained}) == 3
    out = capsys.readouterr().out
    assert "best, 3 seeds  87.50% (81.25 to 93.75)  " in out
    # the random one has the seed of the run: 15 of 16 are right
    assert "random         93.75%  " in out
    assert "-6.2 points over one random network of equal cost (95 % interval " in out
    assert "best: top-1 " in out and "next: nasfast retrain --out " in out
    assert len(out.splitlines()) == 8, "seeds share a line"


def test_a_search_without_fronts_says_so(searched, trained, capsys):
    save_candidates(searched / "archs.json", SPACE, [candidate(Candidate, BEST).replace(values=())])
    assert main(["retrain", "--out", str(searched), *FLAGS, "--pareto"]) == 1
    assert "archs.json has no Pareto front, because the score scores whole paths" in capsys.readouterr().err
    assert trained == {}


# --- export


def export(run_dir, *flags) -> int:
    return main(["export", "--out", str(run_dir), "--onnx", "false", *flags])


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


IMAGES = ImageInfo(tuple("abcdefghij"), 16, 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def save(run_dir, images=IMAGES, **networks):
    for name, arch in networks.items():
        network = build(SPACE, arch)
        network.images = images
        save_model(network, run_dir / "retrain" / name.replace("_", "-") / "model.safetensors")


@pytest.fixture
def no_programs(monkeypatch):
    """No time for torch.export, where the network and the warnings matter."""

    def write(network, path):
        path.write_bytes(b"program")
        return 0.0

    monkeypatch.setattr(exporting, "export_program", write)


def test_a_network_is_exported_by_its_architecture(searched, no_programs, capsys, caplog):
    save(searched, random=FAST, best=BEST, best_2=SECOND, arch_x=BEST)
    assert export(searched, "--arch", "[1 2 1 1]") == 0
    assert capsys.readouterr().out.splitlines()[0] == str(searched / "retrain/best/model.safetensors")
    assert export(searched, "--arch", "0 1 0 2") == 0
    assert capsys.readouterr().out.splitlines()[0] == str(searched / "retrain/random/model.safetensors")
    assert not warnings(caplog)
    assert export(searched, "--arch", "0 0 0 1") == 1
    error = capsys.readouterr().err
    assert f'run `nasfast retrain --out {searched} --arch "0 0 0 1"`' in error
    assert "Retrained: best [1 2 1 1], best-2 [2 2 1 1], random [0 1 0 2]" in error


def test_all_points_of_the_fronts_are_exported(searched, no_programs, capsys, caplog):
    assert export(searched, "--pareto") == 1
    assert "no network of any of the 3 points of the Pareto fronts was retrained" in capsys.readouterr().err
    save(searched, best=BEST, **{"arch-0_0_0_0".replace("-", "_"): CHEAP})
    assert export(searched, "--pareto") == 0
    files = capsys.readouterr().out.splitlines()
    assert [file.split("/")[-2] for file in files] == ["arch-0-0-0-0"] * 4 + ["best"] * 4
    assert f"1 of 3 points were not retrained: `nasfast retrain --out {searched} --pareto`" in caplog.text
    save(searched, random=FAST)
    caplog.clear()
    assert export(searched, "--pareto") == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    assert not warnings(caplog)


def test_a_network_that_the_last_search_did_not_find_is_told(searched, no_programs, caplog):
    save(searched, best=SECOND, best_2=SECOND, best_3=FREE, arch_y=FREE, arch_z=CHEAP, random=FREE)
    said = {}
    for name in ("best", "best-2", "best-3", "arch-y", "arch-z", "random"):
        caplog.clear()
        assert export(searched, "--name", name) == 0
        said[name] = warnings(caplog)
    other = ": this network is 2 -1 0 1, which is neither a result nor on a Pareto front of the last search"
    assert said == {
        "best": ["best: this network is 2 2 1 1, and a later search found 1 2 1 1: `nasfast retrain` trains that one"],
        "best-2": [],
        "best-3": ["best-3" + other],
        "arch-y": ["arch-y" + other],
        "arch-z": [],
        "random": [],
    }


def test_a_network_of_unknown_classes_is_exported_with_a_warning(searched, caplog):
    save(searched, images=None, best=BEST)
    assert export(searched) == 0
    assert "best: its classes, and how an image becomes its input, are not known" in caplog.text


def test_without_onnxruntime_the_other_files_are_exported(searched, capsys, caplog, monkeypatch):
    save(searched, best=BEST)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", "--out", str(searched)]) == 0
    assert "model.pt2" in capsys.readouterr().out
    assert "model.onnx is left out: ONNX export needs onnxruntime: pip install 'nasfast[onnx]'" in caplog.text
    assert main(["export", "--out", str(searched), "--onnx", "true"]) == 1
    said = capsys.readouterr().err
    assert "pip install 'nasfast[onnx]', or export without model.onnx (--onnx false)" in said


def files(run_dir):
    """What a repeated retraining must reproduce."""
    found = {}
    for path in run_dir.rglob("*"):
        if path.name in ("model.safetensors", "config.json") or path.parent.name == "checkpoints":
            found[str(path.relative_to(run_dir))] = path.read_bytes()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = sorted(str({**line, "images_per_s": 0}) for line in lines)
    for path in run_dir.glob("retrain/*/result.json"):
        found[path.parent.name] = {**json.loads(path.read_text()), "seconds": 0}
    return found


@pytest.mark.slow
def test_networks_that_are_retrained_apart_have_the_same_bytes(searched, tmp_path_factory, monkeypatch, capsys):
    many, once = (tmp_path_factory.mktemp(name) for name in ("many", "once"))
    for folder in (many, once):
        shutil.copytree(searched, folder, dirs_exist_ok=True)
    flags = [*FLAGS, "--retrain.random_architectures", "0", "--retrain.seeds", "2"]
    flags += ["--retrain.train.checkpoint_every", "3", "--retrain.train.keep_checkpoints", "9"]
    assert main(["retrain", "--out", str(searched), *flags]) == 0
    said, expected = capsys.readouterr().out, files(searched)

    # while this process holds the lock of the run directory, one in another, which takes seconds to start, and one here
    in_another = children.TaskRunner._in_process
    run_tasks_here(monkeypatch)
    here = children.TaskRunner._in_process
    ways = iter([in_another, here])
    monkeypatch.setattr(children.TaskRunner, "_in_process", lambda *task: next(ways)(*task))
    assert main(["retrain", "--out", str(many), *flags, "--workers", "2"]) == 0
    monkeypatch.setattr(children.TaskRunner, "_in_process", here)
    assert capsys.readouterr().out.replace(str(many), str(searched)) == said
    assert files(many) == expected
    assert not (many / "retrain-tasks").exists()

    # what is there is refused, and continued as in one process
    assert main(["retrain", "--out", str(many), *flags, "--workers", "2"]) == 1
    assert "holds checkpoints of 'retrain/best': continue them (--resume" in capsys.readouterr().err
    assert files(many) == expected
    # --resume would refuse other settings too
    assert main(["retrain", "--out", str(many), *flags, "--retrain.ema", "0.9", "--workers", "2"]) == 1
    said = capsys.readouterr().err
    assert "'retrain/best' with other settings (ema was None, now 0.9): delete them" in said
    assert files(many) == expected

    # the first two attempts of a network end in the middle
    steps, original = [], loop.update

    def step(*args, **kwargs):
        steps.append(0)
        if len(steps) in (4, 9):
            raise RuntimeError("killed")
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "update", step)
    assert main(["retrain", "--out", str(once), *flags, "--workers", "1"]) == 0
    assert files(once) == expected
    assert main(["retrain", "--out", str(once), *flags, "--workers", "1", "--resume"]) == 0
    assert files(once) == expected


def test_a_network_that_fails_is_named_with_its_log_and_the_next_start_goes_on(searched, trained, monkeypatch, capsys):
    run_tasks_here(monkeypatch)
    fails, save = {"best"}, stage.retrain

    def retrain(*arguments, name, **keywords):
        if name in fails:
            raise ValueError("no images")
        return save(*arguments, name=name, **keywords)

    monkeypatch.setattr(stage, "retrain", retrain)
    flags = [*FLAGS, "--retrain.random_architectures", "0", "--retrain.top_k", "2", "--attempts", "1"]
    assert main(["retrain", "--out", str(searched), *flags]) == 1
    said = capsys.readouterr().err
    assert "1 of 2 networks are not retrained; the same command with --resume continues" in said
    assert "ValueError: no images (log: " in said
    (log,) = searched.glob("retrain-tasks/best/task.log")
    assert "Traceback" in log.read_text()
    assert list(trained) == ["best-2"]

    # what was finished may be gone meanwhile, so a task's own record of it does not count
    shutil.rmtree(searched / "retrain/best-2")
    fails.clear()
    assert main(["retrain", "--out", str(searched), *flags, "--resume"]) == 0
    assert {name: load_model(searched / "retrain" / name).arch for name in trained} == {"best": BEST, "best-2": SECOND}
    assert not (searched / "retrain-tasks").exists()


def test_a_network_of_another_space_is_not_exported(searched, capsys):
    """An architecture of the run's space may have the values of one of a space that was there before."""
    other = tiny_space(num_classes=7)
    save_model(build(other, FREE), searched / "retrain" / "best" / "model.safetensors")
    assert export(searched, "--arch", "2 -1 0 1") == 1
    assert "no network of this architecture was retrained" in capsys.readouterr().err
