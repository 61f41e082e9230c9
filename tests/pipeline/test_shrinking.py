"""`nasfast shrink`: the whole command on a network of random weights, what a stopped one goes on from, refusals."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_process import run_tasks_here
from tiny import write_folder
from torch.utils._python_dispatch import TorchDispatchMode

import nasfast
from nasfast import shrink
from nasfast.cli.main import main
from nasfast.pipeline.shrinking import exporting, rivals, stages, timing
from nasfast.pipeline.shrinking.files import (
    load_network,
    read_measured,
    read_tensors,
    save_measured,
    save_network,
    save_tensors,
)
from nasfast.pipeline.shrinking.images import Images, Lesson, lesson_epochs, made_ahead, spread
from nasfast.pipeline.shrinking.latency import network_graph
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.models import Renormalised, fit_classifier, load_pretrained
from nasfast.pipeline.shrinking.norms import by_norms
from nasfast.pipeline.shrinking.rivals import peer_network
from nasfast.pipeline.shrinking.run import Bound, ShrinkConfig, ShrinkRun, choose_sizes
from nasfast.pipeline.shrinking.stages import full_network
from nasfast.pipeline.shrinking.timing import pixel_share
from nasfast.report.findings import compare_runs
from nasfast.report.shrinking import ShrinkFiles, _comparison, headline, verdicts
from nasfast.retrain import save_model
from nasfast.runtime.files import CheckpointError
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session
from nasfast.search import InfeasibleConstraintError, Limits
from nasfast.settings import DataConfig, ImageInfo
from nasfast.spaces import read_cost_table

MODEL = """
import shrinkable
def net(): return shrinkable.small().float()
def plain(): return __import__("torch").nn.Sequential(__import__("torch").nn.Conv2d(3, 4, 3))
def unnormed():
    from torch import nn
    block = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*block, nn.Linear(8, 2))
def failing(): raise LookupError("no such weights")
"""
FLAGS = (
    "--resolution 16 --sizes [16] --epochs 2 --teacher_epochs 1 --measure_images 32 --score_images 8 --held_out 8 "
    "--top_k 2 --rounds 2 --threads 1 --latency_device cpu --export false"
).split()


@pytest.fixture(autouse=True)
def quick(monkeypatch, one_thread, blank_figures):
    """TorchDynamo captures nothing, which takes seconds for each network."""
    monkeypatch.setattr(shrink, "adapt", functools.partial(shrink.adapt, fused=False))


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shrink")
    (folder / "shrinking_model.py").write_text(MODEL)
    for name, count in (("train", 30), ("val", 10), ("few", 5)):
        write_folder(folder / name, {"a": count, "b": count}, side=16)
    return folder


def command(here: Path, out: str, *flags: str) -> list[str]:
    model = f"{here / 'shrinking_model.py'}:net"
    data = ["--data.train", str(here / "train"), "--data.val", str(here / "val"), "--data.batch_size", "16"]
    return ["shrink", "--model", model, *data, "--out", str(here / out), *FLAGS, *flags]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that a repeated run must reproduce; times differ."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix in (".json", ".safetensors")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.name not in ("times.json", "export.json")}


@pytest.fixture(scope="module")
def whole(here, request) -> Path:
    """A finished run; tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrink, "adapt", functools.partial(shrink.adapt, fused=False))
        blank = '<svg xmlns="http://www.w3.org/2000/svg"/>'
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(blank))
        assert main(command(here, "whole", "--max_macs", "60%")) == 0
    return here / "whole"


@pytest.mark.slow
def test_a_run_writes_networks_within_the_limit_and_a_page_that_compares_them(whole):
    search = json.loads((whole / "search.json").read_text())
    limit = search["about"]["limits"]["max_macs"]
    assert limit == 0.6 * search["full"]["macs"]
    assert all(network["macs"] <= limit for network in search["networks"])
    page = (whole / "report.html").read_text()
    result = json.loads((whole / "networks/small/result.json").read_text())
    for kind in (result["kind"], "uniform widths by L1 norms", "random allocation 1"):
        assert kind in page
    assert "cannot be read" not in page


@pytest.mark.slow
def test_saved_networks_have_the_accuracy_of_their_results(here, whole):
    work = Material(ShrinkRun.look(whole))
    shown, labels = work.val(16)
    for name in ("full", "small", "l1"):
        result = json.loads((whole / f"networks/{name}/result.json").read_text())
        net = load_network(whole / "networks" / name, work.form)
        with torch.no_grad():
            right = net(work.images.prepared(shown)).argmax(1) == labels
        assert right.float().mean().item() == pytest.approx(result["top1"])
        if name != "full":
            assert sum(p.numel() for p in net.parameters()) == result["params"]


@pytest.mark.kill
@pytest.mark.parametrize("moment", [1, 4, 8, 13, 19])
def test_a_stopped_run_ends_with_the_same_bytes(here, whole, monkeypatch, moment):
    """The run is stopped right before a file gets its name, as a kill would leave it."""
    out, replace, count = f"stopped-{moment}", os.replace, 0

    class Killed(BaseException):
        pass

    def killing(*args):
        nonlocal count
        count += 1
        if count == moment:
            raise Killed
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killing)
        with pytest.raises(Killed):
            main(command(here, out, "--max_macs", "60%"))
    assert main(command(here, out, "--max_macs", "60%", "--resume")) == 0
    assert contents(here / out) == contents(whole)


@pytest.mark.slow
def test_all_weights_train_beside_the_affine_network_where_they_are_asked_for(here, whole, monkeypatch, capsys):
    """The run goes on from a finished one; a stopped training of all weights begins again."""
    import shutil

    shutil.copytree(whole, here / "all")
    flags = ["--max_macs", "60%", "--resume", "--finetune", "all", "--finetune_epochs", "2", "--finetune_lr", "0.001"]
    flags += ["--export", "true", "--int8", "false"]
    with monkeypatch.context() as patch:
        patch.setattr(stages, "save_network", lambda *_: pytest.fail("stopped here"))
        with pytest.raises(pytest.fail.Exception, match="stopped here"):
            main(command(here, "all", *flags))
    monkeypatch.setattr(exporting, "write_program", lambda *_: None)
    monkeypatch.setattr(exporting, "write_checked_onnx", lambda *_: None)
    assert main(command(here, "all", *flags)) == 0
    out = here / "all"
    for name in ("full", "small", "l1"):
        path = f"networks/{name}/result.json"
        assert (out / path).read_bytes() == (whole / path).read_bytes()
    small, finetuned = (json.loads((out / f"networks/{n}/result.json").read_text()) for n in ("small", "finetuned"))
    assert finetuned["before"] == small["top1"] and finetuned["macs"] == small["macs"]
    assert finetuned["losses"][-1] < finetuned["losses"][0] < small["losses"][0]  # on other views, and the same
    nets = [
        load_network(out / path, Material(ShrinkRun.look(out)).form) for path in ("networks/small", "export/finetuned")
    ]
    first, second = (dict(net.named_parameters()) for net in nets)
    assert first.keys() == second.keys() and not any(torch.equal(first[name], second[name]) for name in first)
    times = json.loads((out / "times.json").read_text())["networks"]
    assert times["small"] == times["finetuned"]
    text = "With all weights trained for 2 epochs more it has"
    assert text in (out / "report.html").read_text() and text in capsys.readouterr().out
    assert "finetuned/model.safetensors" in (out / "report.html").read_text()


@pytest.mark.slow
def test_seeds_are_whole_runs_with_one_page_of_means(here, whole, monkeypatch, capsys):
    run_tasks_here(monkeypatch)
    flags = ["--max_macs", "60%", "--seeds", "2"]
    assert main(command(here, "seeds", *flags)) == 0
    out = here / "seeds"
    # the first seed is what a run without --seeds makes of it, but for the name of its file of settings
    assert (out / "seed-0/networks/small/model.safetensors").read_bytes() == (
        whole / "networks/small/model.safetensors"
    ).read_bytes()
    small, results = (
        [json.loads((out / f"seed-{i}/networks/{name}/result.json").read_text()) for i in range(2)]
        for name in ("small", "full")
    )
    assert small[0]["losses"] != small[1]["losses"]
    said = capsys.readouterr().out
    top1 = [100 * result["top1"] for result in results]
    spread = f"{np.mean(top1):.2f} ± {np.std(top1, ddof=1):.2f}"
    assert spread in said and "means of 2 of 2 seeds with standard deviations" in said
    page = (out / "report.html").read_text()
    assert spread in page and "uniform widths by L1 norms" in page and "cannot be read" not in page
    # the page is written again from the files, and a run of one seed does not replace it
    (out / "report.html").unlink()
    assert main(["report", "--out", str(out)]) == 0
    assert (out / "report.html").read_text() == page
    assert main(command(here, "seeds", "--max_macs", "60%", "--resume")) == 1
    assert "has a run of --seeds: add --seeds N" in capsys.readouterr().err
    # it goes on with the files of the stages, and says what failed
    (out / "seed-1/networks/small/model.safetensors").unlink()
    monkeypatch.setattr(stages, "save_network", lambda *_: exec("raise OSError('no room')"))
    assert main(command(here, "seeds", *flags, "--resume", "--attempts", "1")) == 0
    said = capsys.readouterr().out
    assert "means of 1 of 2 seeds" in said and "seed-1 failed in every attempt: OSError: no room" in said


@pytest.mark.slow
def test_another_limit_resumes_from_what_was_measured(here, whole, monkeypatch):
    import shutil

    shutil.copytree(whole, here / "again")
    monkeypatch.setattr(shrink, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert main(command(here, "again", "--max_params", "70%", "--resume", "--comparison", "false")) == 0
    about = json.loads((here / "again" / "search.json").read_text())["about"]
    assert list(about["limits"]) == ["max_params"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "says"), [("fp32", "a run with --latency_dtype int8"), ("int8", "and the result ")])
def test_a_limit_in_milliseconds_is_that_of_a_measured_table_and_exported_files_compute_the_result(here, dtype, says):
    # less may count as too little: the table of a network of a tenth of a millisecond can be too slow by a half
    flags = ("--max_latency_ms", "95%", "--latency_device", "onnx", "--latency_dtype", dtype, "--export", "true")
    assert main(command(here, f"timed-{dtype}", *flags)) == 0
    out = here / f"timed-{dtype}"
    table = json.loads((out / "size-16" / "latency.json").read_text())
    assert (table["device"], table["dtype"]) == ("onnx", dtype) and table["validation"]["networks"]
    times = json.loads((out / "times.json").read_text())["networks"]
    assert {"full", "small", "random-1", "int8"} <= set(times)
    assert b"QuantizeLinear" in (out / "networks" / "int8" / "model-int8.onnx").read_bytes()
    page = (out / "report.html").read_text()
    assert says in page and ("a run with --latency_dtype int8" in page) == (dtype == "fp32")
    record = {row["file"]: row for row in json.loads((out / "export" / "export.json").read_text())["files"]}
    assert {"model.onnx", "model.pt2", "model-int8.onnx", "model.safetensors", "recipe.json"} <= set(record)
    assert all(row["ms"] > 0 for name, row in record.items() if name.endswith((".onnx", ".pt2")))
    work = Material(ShrinkRun.look(out))
    images = work.images.prepared(work.val(16)[0])
    small = load_network(out / "networks" / "small", work.form)
    with torch.no_grad():
        expected = small(images)
        program = torch.export.load(out / "export" / "model.pt2").module()(images)
    data = (out / "export" / "model.onnx").read_bytes()
    (got,) = open_session(data, threads=1).run([OUTPUT], {INPUT: images.contiguous().numpy()})
    for logits in (program, torch.from_numpy(got)):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_latencies_of_a_run_are_a_table_of_its_space(here, capsys):
    with ShrinkRun.open(ShrinkConfig.from_dict(settings(here, "shaped"))) as run:
        run.begin_writing()
    flags = "--device onnx --threads 1 --clock cpu --rounds 2 --calibrate 4 --validate 2".split()
    assert main(["latency", "--shrunk", str(run.dir), "--out", str(here / "table.json"), *flags]) == 0
    space = Material(run).searched(16).space
    table = read_cost_table(here / "table.json", space)
    assert table.cost(tuple(len(c.branches) - 1 for c in space.choices)) > table.cost((0,) * len(space))
    assert "whole networks" in capsys.readouterr().out


def settings(here: Path, out: str) -> dict[str, object]:
    data = {"train": str(here / "train"), "val": str(here / "val")}
    model = f"{here / 'shrinking_model.py'}:net"
    return {"model": model, "out": str(here / out), "data": data, "resolution": 16, "max_macs": "50%"}


REFUSALS = [
    ("--max_macs 0.01%", "give another module, or inputs of another size: --sizes has the sides"),
    ("--max_macs 0.01% --dry_run", "cannot be met"),
    ("--max_macs 50 --max_params 0.5", "has a sign: max_macs 50%, max_params 50%"),
    ("--max_macs 50% --model {model}:unnormed", "has 0 BatchNorms with statistics"),
    ("--max_macs 50% --latency_device cuda", "torch sees no GPU"),
    ("--max_macs 50% --latency_dtype int8", "latency_dtype int8 is onnxruntime's: give latency_device onnx, got cpu"),
    ("--max_macs 100%", "is not below the 764,912 of the full network, so nothing would be cut"),
    ("--max_macs 50% --sizes [16,32]", "sizes has 32 pixels, and images have 16"),
    ("--max_macs 50% --model {model}:failing", "failing failed (LookupError: no such weights)"),
    ("--max_macs 50% --model torchvision:resnet81", "did you mean 'resnet18'?"),
    ("--max_macs 50% --peer torchvision:mobilnet_v2", "did you mean 'mobilenet_v2'?"),
    ("--max_macs 120%", "max_macs must be a positive number or a percentage of at most 100%"),
    ("--data.val absent --max_macs 50%", "absent does not exist"),
    ("", "no limit is set"),
    ("--max_macs 50% --model torchvision", "names no network"),
    ("--max_macs 50% --model {here}", "the networks of a run are in RUN/retrain/NAME"),
    ("--max_macs 50% --model torchvision:resnet19 --weights absent.pth", "absent.pth is no file"),
    ("--max_macs 50% --model {model}:absent", "has no function 'absent'"),
    ("--max_macs 50% --model {model}:plain", "has no nn.Linear as its classifier"),
    ("--max_macs 50% --data.train {few}", "10 training images of 2 classes are too few"),
    ("--max_macs 50% --weights {model}", "cannot be read"),
    ("--max_macs 50% --workers 2", "are for the tasks of --seeds N"),
    ("--max_macs 50% --seeds 0", "--seeds must be at least 2, to compare them, got 0"),
    ("--max_macs 0.01% --seeds 2", "cannot be met"),
    ("--max_macs 50% --finetune_lr 0", "finetune_lr must be positive, got 0"),
    ("--max_macs 50% --measure_images 1", "set measure_images to "),
]


@pytest.mark.parametrize(("flags", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals(here, capsys, flags, message):
    flags = flags.format(model=here / "shrinking_model.py", few=here / "few", here=here)
    assert main(command(here, "refused", *flags.split())) == 1
    text = capsys.readouterr().err
    assert message in text
    assert not (here / "refused").exists()


def test_torchrun_is_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command(here, "refused", "--max_macs", "50%")) == 1
    assert "works in one process: run it without torchrun" in capsys.readouterr().err


def test_a_missing_runtime_is_named_before_anything_trains(here, capsys, monkeypatch):
    def missing():
        raise RuntimeError("it needs onnx")

    monkeypatch.setattr("nasfast.pipeline.shrinking.material.require_onnx", missing)
    assert main(command(here, "refused", "--max_macs", "50%", "--latency_device", "onnx")) == 1
    assert "it needs onnx, or time PyTorch by --latency_device cpu" in capsys.readouterr().err
    assert not (here / "refused").exists()


def test_damaged_files_take_no_images_from_those_that_compare_networks(here, tmp_path):
    import shutil

    shutil.copytree(here / "train", tmp_path / "train")
    for path in sorted((tmp_path / "train" / "a").iterdir())[:9]:
        path.write_bytes(b"damaged")
    values = settings(here, "damaged") | {"held_out": 8}
    values["data"] |= {"train": str(tmp_path / "train"), "max_bad_files": 9}
    work = Material(ShrinkRun(ShrinkConfig.from_dict(values)))
    first, second = work.sample(16)
    assert (len(first), len(second)) == (43, 8)


def test_a_directory_with_a_run_is_kept(here, capsys):
    out = here / "kept"
    with ShrinkRun.open(ShrinkConfig(out=str(out), max_macs="50%")) as run:
        run.begin_writing()
    assert main(command(here, "kept", "--max_macs", "50%")) == 1
    assert "has a run already: add --resume" in capsys.readouterr().err
    assert main(command(here, "kept", "--max_macs", "50%", "--resume")) == 1
    assert "has other settings" in capsys.readouterr().err


def test_dry_run_says_what_is_searched_and_writes_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr("nasfast.pipeline.estimate._BUSY", 0.0)
    assert main(command(here, "planned", "--max_macs", "50%", "--dry_run")) == 0
    text = capsys.readouterr().out
    assert "may be dropped" in text and "measure at 16 px" in text and "GiB" in text
    assert "The machine was busy" in text and "train all weights" not in text
    assert main(command(here, "planned", "--max_macs", "50%", "--dry_run", "--finetune", "all")) == 0
    assert "train all weights of the result" in capsys.readouterr().out
    assert main(command(here, "planned", "--max_macs", "50%", "--dry_run", "--seeds", "3")) == 0
    text = capsys.readouterr().out
    assert text.split("seeds (whole runs)")[1].split()[0] == "3" and "1 at a time" in text
    assert not (here / "planned").exists()


def test_bounds():
    assert Bound.read("max_macs", "50%").absolute(300) == 150
    assert Bound.read("max_macs", "60M").absolute(1) == 60e6
    for bad in ("0%", "101%", "-3", "many", "nan"):
        with pytest.raises(ValueError, match="max_macs must be"):
            Bound.read("max_macs", bad)


def test_the_first_size_leaves_most_of_the_cut_to_widths_and_the_last_nothing():
    for share in (0.1, 0.25, 0.5):
        first, *_, last = sizes = choose_sizes(224, share)
        alone = 224 * share**0.5  # with this side, the full network would meet the limit
        assert alone + 16 < first < 224 and abs(last - alone) <= 8
        assert sizes == tuple(range(first, last - 1, -16))


def test_a_side_that_is_a_multiple_of_a_large_stride_is_raised():
    assert choose_sizes(160, 0.3) == (128, 112, 96, 80) and choose_sizes(160, 0.3, stride=32) == (136, 112, 104, 80)
    assert choose_sizes(160, 0.1, stride=32)[0] == 112 and choose_sizes(160, 0.95, stride=32) == (160,)
    assert choose_sizes(64, 0.2, stride=4) == choose_sizes(64, 0.2) == (48, 32)
    assert choose_sizes(16, 0.01) == (16,)


def test_a_smaller_side_is_searched_where_no_network_meets_the_limits_at_the_first(monkeypatch):
    tried = []

    def limits_of(size):
        def check(_):
            tried.append(size)
            if size > 48:
                raise InfeasibleConstraintError("too large")

        return SimpleNamespace(check=check)

    monkeypatch.setattr(stages, "_sizes_by_limits", lambda *_: (64, 48, 32))
    cfg = SimpleNamespace(sizes=(), bounds={})
    work = SimpleNamespace(
        cfg=cfg, resolution=64, check_samples=lambda _: None, searched=lambda size: SimpleNamespace(space=size)
    )
    assert stages.sizes_of(work, {}, {}, limits_of, float) == (48,) and tried == [64, 48]
    cfg.sizes = (64, 48, 32)
    assert stages.sizes_of(work, {}, {}, limits_of, float) == (48, 32)


def test_measured_survives_its_files(tmp_path):
    import shrinkable

    found = shrink.find(shrinkable.small().float(), shrinkable.images(1).float(), multiple=4, widths=4)
    measured = shrink.measure(found, shrinkable.images(24).float(), score_images=8)
    save_measured(tmp_path, measured, {"a": 1})
    again = read_measured(tmp_path, found, {"a": 1})
    assert again is not None and read_measured(tmp_path, found, {"a": 2}) is None
    assert again.table.scores == measured.table.scores
    arch = tuple(0 for _ in found.places)
    first, second = (shrink.cut(m, arch).state_dict() for m in (measured, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_uniform_widths_have_equal_shares_and_use_the_limit():
    import shrinkable

    found = shrink.find(shrinkable.small().float(), shrinkable.images(1).float(), multiple=4, widths=4)
    limit = 0.7 * found.macs
    arch = shrink.uniform_widths(found, Limits(max_macs=limit))
    assert arch is not None and found.space.cost(arch).macs <= limit
    shares = [
        k / w[-1]
        for p, v in zip(found.places, arch, strict=True)
        for k, w in zip(p.candidates[v] or (), p.widths, strict=True)
    ]
    assert len(shares) == sum(len(p.widths) for p in found.places)  # nothing is dropped
    assert max(shares) - min(shares) <= 0.5 + 1e-9
    assert shrink.uniform_widths(found, Limits(max_macs=1)) is None


def test_graphs_that_are_timed_are_those_of_cut_networks():
    import shrinkable

    found = shrink.find(shrinkable.small().float(), shrinkable.images(1).float(), multiple=4, widths=4)
    rng = random.Random(0)
    archs = [found.full, (0,) * len(found.places)]
    archs += [tuple(rng.randrange(len(p.candidates)) for p in found.places) for _ in range(4)]
    for arch in archs:
        graph, cut = network_graph(found, arch), shrink.cut(by_norms(found), arch)
        shapes = [sorted(tuple(t.shape) for t in (*m.parameters(), *m.buffers()) if t.dim() > 1) for m in (graph, cut)]
        assert shapes[0] == shapes[1]  # so that what is dropped is not timed
    images = shrinkable.images(2).float()
    torch.testing.assert_close(network_graph(found, found.full)(images), found.model(images), rtol=1e-4, atol=1e-4)


def test_graphs_of_networks_that_share_a_weight_are_timed():
    import shrinkable

    net = shrinkable.small().float()
    net.second_basic.first[0].weight = net.basic.first[0].weight
    found = shrink.find(net, shrinkable.images(1).float(), multiple=4, widths=4)
    images = shrinkable.images(2).float()
    torch.testing.assert_close(network_graph(found, found.full)(images), net(images), rtol=1e-4, atol=1e-4)


def test_norms_keep_the_largest_filters_and_their_weights():
    import shrinkable

    model = shrinkable.small().float()
    found = shrink.find(model, shrinkable.images(1).float(), multiple=4, widths=4)
    measured = by_norms(found)
    place = next(p for p in found.places if p.name == "basic")
    row = measured.solutions[found.places.index(place)][0]
    kept = row[place.widths[0][0]].kept
    norms = model.basic.first[0].weight.abs().sum((1, 2, 3)).detach().numpy()
    assert set(kept.tolist()) == set(np.argsort(-norms)[: len(kept)].tolist())
    small = shrink.cut(measured, tuple(0 if p is place else len(p.candidates) - 1 for p in found.places))
    if not isinstance(small.basic, torch.nn.ReLU):
        torch.testing.assert_close(small.basic.second[0].weight, model.basic.second[0].weight[:, kept])


def test_a_new_classifier_separates_classes_that_features_separate():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 7))
    labels = torch.arange(3).repeat(40)
    images = torch.randn(120, 3, 2, 2) + 3 * torch.nn.functional.one_hot(labels, 12).view(120, 3, 2, 2)
    fit_classifier(net, lambda: zip(images.split(16), labels.split(16), strict=True), 3)
    assert net[1].out_features == 3
    fresh = torch.randn(120, 3, 2, 2) + 3 * torch.nn.functional.one_hot(labels, 12).view(120, 3, 2, 2)
    assert (net(fresh).argmax(1) == labels).float().mean() > 0.9


def test_a_lesson_gives_each_batch_the_targets_of_its_views(here):
    data = DataConfig(train=str(here / "train"), val=str(here / "val"), batch_size=16, workers=0, loader="torchvision")
    images = Images.open(ShrinkConfig(), data, 3)
    lesson = Lesson(images, images.read(images.train, 16), batch=16, epochs=2)
    targets = lesson.taught_by(lambda x: (x.mean((2, 3)), x[:, :, 0, 0]))
    lesson.begin(targets)
    views = []
    for _ in range(3):
        for x, _ in lesson:
            torch.testing.assert_close(lesson.teacher(x), x.mean((2, 3)))
            views.append(x)
    for x, _ in lesson.begin(targets, kept=torch.tensor([2, 0])):
        torch.testing.assert_close(lesson.teacher(x), (x.mean((2, 3)), x[:, [2, 0], 0, 0]))
    per_epoch = len(lesson)
    assert not torch.equal(views[0], views[per_epoch])
    assert torch.equal(views[0], views[2 * per_epoch])  # the epochs come again
    assert [lesson_epochs(epochs) for epochs in (1, 2, 3, 4)] == [1, 1, 2, 2]
    step = 1.01 * float(images.normaliser[0].max())  # of a byte
    for large, (small, _) in zip(views, lesson.begin(targets, size=12), strict=False):
        expected = torch.nn.functional.interpolate(large, size=(12, 12), mode="bilinear", antialias=True)
        torch.testing.assert_close(small, expected, rtol=0, atol=step)


def test_views_are_mirrored_and_moved_and_what_comes_in_is_reflected(here):
    data = DataConfig(train=str(here / "train"), val=str(here / "val"), batch_size=16, workers=0, loader="torchvision")
    images = Images.open(ShrinkConfig(), data, 3)
    shown, labels = images.read(images.train, 16)
    expected = {}
    for source in (shown, shown.flip(3)):
        padded = torch.nn.functional.pad(source.float(), (1, 1, 1, 1), mode="reflect").byte()
        for place in np.ndindex(3, 3):
            window = images.prepared(padded[:, :, place[0] : place[0] + 16, place[1] : place[1] + 16])
            expected |= {x.contiguous().numpy().tobytes(): (i, source is shown, place) for i, x in enumerate(window)}
    seen = [
        expected[x.contiguous().numpy().tobytes()]
        for batch, _ in Lesson(images, (shown, labels), batch=16, epochs=1).begin()
        for x in batch
    ]
    assert sorted(i for i, *_ in seen) == list(range(len(labels)))
    assert {kept for _, kept, _ in seen} == {True, False} and len({place for *_, place in seen}) > 4


def test_the_next_batch_is_made_meanwhile_and_an_error_of_it_is_raised():
    threads, second = [], threading.Event()
    torch.set_num_threads(2)  # the fixture of this module restores it

    def batches():
        for number in range(3):
            torch.ones(1 << 20).sum()  # in parallel
            threads.append((threading.get_ident(), torch.get_num_threads()))
            if number == 1:
                second.set()
            yield number
        raise OSError("a file is damaged")

    ahead = made_ahead(batches())
    assert next(ahead) == 0
    assert second.wait(60), "it is made without being asked for"
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="damaged"):
        next(ahead)
    (one,) = set(threads)
    assert one[0] != threading.get_ident() and one[1] == 1 and torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert next(made_ahead(iter([threading.get_ident()]))) == threading.get_ident()


def test_held_out_images_teach_only_where_nothing_is_compared_on_them_any_more(here, monkeypatch):
    work, lessons = Material(ShrinkRun(ShrinkConfig.from_dict(settings(here, "held")))), []
    monkeypatch.setattr(shrink, "adapt", lambda model, data, **_: lessons.append(list(data)))
    shown, labels = work.train
    # each image is marked in its first pixel; views move and mirror it
    marked = torch.arange(len(labels)).to(torch.uint8)[:, None, None, None].expand_as(shown).contiguous()
    work.train = marked, labels
    monkeypatch.setattr(type(work.images), "prepared", lambda _, views: views.float())
    held = range(work.held_out.start, work.held_out.stop)
    assert len(held) == work.samples[1] > 0
    assert torch.equal(work.reference.argmax(1), labels[work.held_out])
    for all_images in (False, True):
        work.teach(torch.nn.Identity(), 1, by_labels=True, all_images=all_images)
    first, second = (sorted(int(x[0, 0, 0]) for views, _ in lesson for x in views) for lesson in lessons)
    assert first == [i for i in range(len(labels)) if i not in held]
    assert second == list(range(len(labels)))


def test_each_network_has_the_lesson_from_its_first_epoch(here, monkeypatch):
    """However many epochs those before it had, so that a run that goes on has the same."""
    work, seen = Material(ShrinkRun(ShrinkConfig.from_dict(settings(here, "taught")))), []
    monkeypatch.setattr(shrink, "adapt", lambda model, data, epochs, **_: [list(data) for _ in range(epochs)])
    for epochs in (2, 1, 3):
        seen.append(work.teach(torch.nn.Identity(), epochs, by_labels=True)[0][0][0])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_a_new_classifier_is_fitted_without_a_copy_of_all_images_and_without_held_out_ones():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.uint8 and not out._is_view():
                self.size = max(self.size, len(out))
            return out

    work = Material(SimpleNamespace(cfg=ShrinkConfig()))
    work.train = torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1).expand(-1, 3, 2, 2), torch.arange(200)
    work.held_out, work.images = slice(70, 80), SimpleNamespace(prepared=lambda shown: shown)
    with Largest() as largest:
        batches = list(work.batches())
    assert torch.cat([y for _, y in batches]).tolist() == [*range(70), *range(80, 200)]
    assert all(torch.equal(x[:, 0, 0, 0], y) for x, y in batches)
    assert largest.size == 64


def test_the_full_network_is_the_teacher_and_the_peer_has_the_adaptation_of_the_result(here, monkeypatch):
    taught = []
    monkeypatch.setattr(
        Material, "teach", lambda self, model, epochs, by_labels=False, **_: taught.append((epochs, by_labels))
    )
    values = settings(here, "equal") | {"peer": f"{here / 'shrinking_model.py'}:net", "teacher_epochs": 5}
    with ShrinkRun.open(ShrinkConfig.from_dict(values)) as run:
        work = Material(run)
        full_network(work)
        peer_network(work)
    assert taught == [(5, True), (5, True), (4, False)]


@pytest.mark.parametrize("changed", ["images", "weights"])
def test_other_images_or_weights_are_refused_where_a_run_goes_on(here, tmp_path, changed):
    import shutil

    shutil.copytree(here / "train", tmp_path / "train")
    values = settings(here, str(tmp_path / "run"))
    values["data"]["train"] = str(tmp_path / "train")
    cfg = ShrinkConfig.from_dict(values)
    about = Material(ShrinkRun(cfg)).about
    save_tensors(tmp_path / "tensors", {}, about)
    assert read_tensors(tmp_path / "tensors", about) == {}
    work = Material(ShrinkRun(cfg))
    if changed == "images":
        next((tmp_path / "train" / "a").iterdir()).unlink()
    else:
        next(work.pretrained.model.parameters()).data.mul_(2)
    with pytest.raises(CheckpointError, match=f"the {changed} are others than when"):
        read_tensors(tmp_path / "tensors", work.about)


def test_a_stop_between_weights_and_result_leaves_no_result_of_other_weights(here, monkeypatch):
    monkeypatch.setattr(Material, "teach", lambda self, *_, **__: [])
    with ShrinkRun.open(ShrinkConfig.from_dict(settings(here, "between"))) as run:
        work = Material(run)
        folder = full_network(work) and run.network("full")
        monkeypatch.setattr(stages, "save_network", lambda *_: pytest.fail("stopped here"))
        assert full_network(work)["top1"] >= 0  # it is kept
        monkeypatch.setattr(stages, "load_network", lambda *_: (_ for _ in ()).throw(ValueError))
        with pytest.raises(pytest.fail.Exception, match="stopped here"):
            full_network(work)
    assert not (folder / "result.json").exists()


def test_files_of_another_network_do_not_stay_beside_those_of_the_result(here, monkeypatch):
    def refuse(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(exporting, "write_program", refuse)
    monkeypatch.setattr(exporting, "write_checked_onnx", refuse)
    small = {"kind": "", "size": 16, "macs": 1, "params": 1, "about": {}}
    with ShrinkRun.open(ShrinkConfig.from_dict(settings(here, "stale") | {"int8": False})) as run:
        work = Material(run)
        save_network(run.network("small"), work.form, None, {})
        for file in ("recipe.json", "export/model-int8.onnx"):
            path = run.dir / file if "/" in file else run.network("small") / file
            path.parent.mkdir(exist_ok=True)
            path.write_text("old")
        monkeypatch.setattr(exporting, "load_network", lambda *_: work.form)
        files = exporting.export(work, "small", {**small, "top1": 0.5}, "")
    assert {path.name for path in files} == {"README.md", "model.safetensors", "recipe.json"}
    card = (run.dir / "export" / "README.md").read_text()
    assert "recipe.json" in card and "model.onnx" not in card and "model.pt2" not in card
    assert not (run.dir / "export" / "model-int8.onnx").exists()


def test_the_full_network_in_8_bits_is_kept_made_again_where_damaged_and_may_be_left_out(here, monkeypatch, caplog):
    monkeypatch.setattr(Material, "teach", lambda self, *_, **__: [])
    with ShrinkRun.open(ShrinkConfig.from_dict(settings(here, "eight"))) as run:
        work, folder = Material(run), run.network("int8")
        made = rivals.int8_network(work)
        assert made is not None and made["images"] == len(work.images.val)
        with monkeypatch.context() as patch:
            patch.setattr(rivals, "write_int8", lambda *_: pytest.fail("it is there"))
            assert rivals.int8_network(work) == made
        (folder / "model-int8.onnx").write_bytes(b"damaged")
        assert rivals.int8_network(work)["top1"] == made["top1"]
        (folder / "model-int8.onnx").unlink()

        def refuse(*_):
            raise RuntimeError("not today")

        monkeypatch.setattr(rivals, "write_int8", refuse)
        assert rivals.int8_network(work) is None and not (folder / "result.json").exists()
    assert "the full network in 8 bits is left out: not today" in caplog.text


def test_uniform_widths_are_compared_at_the_side_of_the_result_and_at_their_best(monkeypatch):
    monkeypatch.setattr(rivals, "int8_network", lambda *_: None)
    taught = []
    monkeypatch.setattr(rivals, "equal_side", lambda *_: None)
    monkeypatch.setattr(rivals, "random_archs", lambda *_: [])
    kinds = set()
    monkeypatch.setattr(
        rivals, "cut_network", lambda work, name, kind, size, arch, _: taught.append((name, size)) or kinds.add(kind)
    )
    work = SimpleNamespace(
        searched=lambda size: SimpleNamespace(full=(size,)), measured=lambda size: None, cfg=ShrinkConfig()
    )

    def compared(*networks: tuple[int, int]) -> list[tuple[str, int]]:
        """By sizes and rounds, best first."""
        taught.clear()
        records = [{"size": s, "arch": [8 + r], "round": r, "divergence": i} for i, (s, r) in enumerate(networks)]
        rivals.rivals(work, {"networks": records}, {})
        return list(taught)

    # those of 8 pixels have all widths
    others = (8, 0), (16, 0), (32, 0)
    assert compared((32, 1), *others) == [("uniform", 32), ("uniform-16", 16), ("l1", 32)]
    assert len(kinds) == 3  # each has a name of its own in sentences
    assert compared((16, 1), *others) == [("uniform", 16), ("l1", 16)]
    assert compared((16, 0), (32, 0)) == [("l1", 16)]
    assert compared((64, 1), (8, 0)) == []


def test_the_full_network_is_timed_alone_and_smaller_sides_beside_it(tmp_path, monkeypatch):
    def measured(runs: dict[str, float], rounds: int) -> dict[str, dict]:
        timed.append((set(runs), rounds))
        return {name: {"run": {"median_ms": ms}} for name, ms in runs.items()}

    timed: list[tuple[set[str], int]] = []
    work = SimpleNamespace(
        run=SimpleNamespace(dir=tmp_path, begin_writing=lambda: None),
        cfg=ShrinkConfig(),
        resolution=64,
        searched=lambda side: SimpleNamespace(full=side / 8),
    )
    monkeypatch.setattr(timing, "deployed_network", lambda _, found, arch: arch)
    monkeypatch.setattr(timing, "measure", measured)
    assert timing.full_latency(work, 32) == 4.0
    assert [names for names, _ in timed] == [{"full"}, {"full", "small"}]
    assert timing.full_latency(work, 64) == 8.0 and timing.full_latency(work, 32) == 4.0
    assert len(timed) == 2  # the files have them


def test_the_best_networks_of_several_sizes_are_compared_after_adaptation(monkeypatch):
    losses, taught = {16: 0.3, 24: 0.1}, []
    work = SimpleNamespace(
        measured=lambda size: size,
        cfg=ShrinkConfig(),
        kept_features=lambda _: None,
        teach=lambda _, epochs, **options: taught.append((options["size"], epochs)),
        held_out_loss=lambda model, images: losses[images],
    )
    monkeypatch.setattr(shrink, "cut", lambda *_: torch.nn.Identity())
    monkeypatch.setattr(shrink, "make_recipe", lambda *_: None)
    networks = [{"size": size, "arch": [i], "divergence": i} for i, size in enumerate((16, 16, 24, 24, 32))]
    networks[-1]["divergence"] = math.inf  # which cannot be adapted
    held = {size: size for size in (16, 24, 32)}
    first, second, *rest = stages.adapted_first(work, [dict(network) for network in networks], held)
    assert first == {**networks[2], "adapted": 0.1} and second == {**networks[0], "adapted": 0.3}
    assert rest == [networks[1], *networks[3:]] and sorted(taught) == [(16, 4), (24, 4)]
    assert stages.adapted_first(work, networks[:2], held) == networks[:2]


def test_rivals_meet_a_limit_in_milliseconds_as_measured(tmp_path, monkeypatch):
    """Networks take 1.2 times what the table says, and the search has seen a factor of 1.1."""
    import shrinkable

    found = shrink.find(shrinkable.small().float(), shrinkable.images(1).float(), multiple=4, widths=4)
    rows = found.space.option_costs()
    entries = [
        {"layer": layer, "choice": value, "value": cost.macs / 1e4}
        for layer, row in enumerate(rows)
        for value, cost in row.items()
    ]
    path = tmp_path / "size-16" / "latency.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"quantity": "latency", "unit": "ms", "entries": entries}))
    table = read_cost_table(path, found.space)
    run = SimpleNamespace(dir=tmp_path)
    work = SimpleNamespace(run=run, cfg=ShrinkConfig(random_networks=3), searched=lambda _: found)
    monkeypatch.setattr(stages, "measure_latency", lambda *_: None)
    monkeypatch.setattr(rivals, "network_timer", lambda _: lambda _, arch: 1.2 * table.cost(arch))
    limits = {"max_latency_ms": 0.6 * table.cost(found.full)}
    networks = [{"size": 16, "arch": list(found.full)}]
    record = {"about": {"sizes": [16]}, "networks": networks, "latency_factors": {"16": 1.1}}
    archs = rivals.random_archs(work, record, limits)
    archs.append(rivals.within_limits(work, record, 16, limits, functools.partial(shrink.uniform_widths, found)))
    assert len(set(archs)) == 4
    for arch in archs:
        assert 0.9 * limits["max_latency_ms"] < 1.2 * table.cost(arch) <= limits["max_latency_ms"]
    monkeypatch.setattr(rivals, "network_timer", lambda _: pytest.fail("timed again"))
    assert rivals.random_archs(work, record, limits) == archs[:3]  # the file has them


def test_a_lower_resolution_is_no_rival_where_parameters_are_limited(tmp_path):
    work = SimpleNamespace(
        resolution=64,
        run=SimpleNamespace(dir=tmp_path),
        searched=lambda _: SimpleNamespace(params=10, macs=100),
    )
    record = {"about": {"sizes": [64]}, "networks": [{"macs": 25}]}
    assert rivals.equal_side(work, record, {"max_macs": 25}) == 32
    assert rivals.equal_side(work, record, {"max_params": 5}) is None


@pytest.mark.parametrize("limits", [{"max_macs": 25}, {"max_latency_ms": 3.0}])
def test_a_network_of_one_side_has_no_rival_of_a_lower_resolution(tmp_path, monkeypatch, limits):
    def searched(side: int) -> SimpleNamespace:
        if side != 64:
            raise shrink.ShrinkError("it runs at 64 pixels alone")
        return SimpleNamespace(params=10, macs=100)

    monkeypatch.setattr(rivals, "full_latency", lambda work, side: float(work.searched(side).params))
    work = SimpleNamespace(resolution=64, run=SimpleNamespace(dir=tmp_path), searched=searched)
    record = {"about": {"sizes": [64]}, "networks": [{"macs": 25}]}
    assert rivals.equal_side(work, record, limits) is None


def test_a_lower_resolution_meets_a_limit_in_milliseconds_as_measured(tmp_path, monkeypatch):
    """A line through times says 80 pixels, and the network takes longer than that line there."""
    times = {128: 5.0, 104: 3.6, 88: 2.8}
    work = SimpleNamespace(
        resolution=128,
        run=SimpleNamespace(dir=tmp_path),
        searched=lambda side: SimpleNamespace(params=10, full=side),
    )
    monkeypatch.setattr(rivals, "full_latency", lambda _, side: times[side])
    measured = {120: 4.6, 112: 4.1, 104: 3.7, 96: 3.2, 88: 2.9, 80: 2.6, 72: 2.2, 64: 1.9}
    monkeypatch.setattr(rivals, "network_timer", lambda _: lambda found, arch: measured[arch])
    record = {"about": {"sizes": [96]}}
    assert rivals.equal_side(work, record, {"max_latency_ms": 2.5}) == 72
    measured.clear()  # the file has it
    assert rivals.equal_side(work, record, {"max_latency_ms": 2.5}) == 72
    measured.update({side: 9.0 for side in range(8, 136, 8)})
    assert rivals.equal_side(work, {"about": {"sizes": [96], "other": 1}}, {"max_latency_ms": 2.5}) is None


def test_sides_for_a_limit_in_milliseconds_are_by_the_part_that_depends_on_pixels():
    """A half of the time is fixed: a limit of .75 leaves half of the pixels, and one of .4 hardly any."""

    def milliseconds(side: int) -> float:
        return 2 + 2 * (side / 224) ** 2

    assert pixel_share(milliseconds, 224, 3.0) == pytest.approx(0.5)
    assert pixel_share(lambda side: 4.0 if side == 224 else 5.0, 224, 3.0) == 0.75
    assert pixel_share(milliseconds, 8, 1.0) == 1.0 * 1.0 / milliseconds(8)
    costs = {"max_latency_ms": 4.0}
    found = SimpleNamespace(space=SimpleNamespace(resolution=224), stride=32)
    by_half = stages._sizes_by_limits(found, {"max_macs": 1.0}, {"max_macs": 0.5}, milliseconds)
    assert stages._sizes_by_limits(found, costs, {"max_latency_ms": 3.0}, milliseconds) == by_half
    assert stages._sizes_by_limits(found, costs, {"max_latency_ms": 1.6}, milliseconds)[0] < by_half[0]


def test_a_result_of_uniform_widths_is_called_so(monkeypatch):
    made = []
    monkeypatch.setattr(stages, "cut_network", lambda work, name, kind, *_: made.append(kind))
    work = SimpleNamespace(searched=lambda size: SimpleNamespace(full=(size,)))
    for size, number in ((16, 0), (8, 0), (16, 1)):
        stages.small_network(work, {"size": size, "arch": [8], "round": number})
    assert made == [stages.UNIFORM, stages.PROGRAM, stages.PROGRAM]


def test_verdicts_the_headline_and_the_comparison(tmp_path):
    def network(kind, macs, params, right):
        return {"kind": kind, "macs": macs, "params": params, "correct": right * 24, "images": 96, "top1": 0.5}

    networks = {
        "full": network("full network", 90, 90, "f"),
        "small": network("exact program", 50, 40, "f"),
        "peer": network("peer", 50, 90, "f"),
        "uniform": network("uniform", 50, 40, "f"),
        "random-1": network("random", 50, 40, "f"),
        "l1": network("l1", 50, 40, "0"),
    }
    files = ShrinkFiles(tmp_path)
    files.networks, files.times = networks, {}
    files.search = {"about": {"limits": {"max_params": 40}}, "cardinality": 9.0, "networks": [{}, {}]}
    # the peer has more parameters than the limit
    first, second, third = verdicts(files)
    assert first.startswith("uniform is no worse") and first.endswith("which is simpler (networks/uniform).")
    assert second.startswith("random is no worse") and second.endswith("gains nothing here (networks/random-1).")
    assert third == "96 images tell the result and the full network apart only from about 2 points on."
    assert "at 0.0 points less (95 % interval -2.0 to 2.0, 96 images)" in headline(files.search, files)
    for record in networks.values():
        record |= {"size": 16, "before": 0.4, "before_images": 20}
    networks["full"]["before"] = None  # it is only evaluated
    networks["l1"]["top1"] = 0.2
    page = html.unescape(_comparison(files))
    assert page.count("Below the picture: l1 (20.00 %).") == 2  # its caption, also for those who cannot see it
    assert "peer learns from the teacher's logits, and not from its features" in page
    assert "Every 'before' is on 20 images." in page and page.count(">-</td>") == 1
    networks["small"]["kind"] = stages.UNIFORM
    assert verdicts(files)[0].endswith("no network of the exact program was better.")
    files.search["networks"][0]["adapted"] = 0.1
    assert verdicts(files)[0].endswith("no network of the exact program was better after adaptation.")


def test_weights_of_a_network_for_other_classes_make_it_one_for_these(here, tmp_path):
    import shrinkable

    torch.save(shrinkable.small(classes=2).state_dict(), tmp_path / "two.pth")
    model = load_pretrained(f"{here / 'shrinking_model.py'}:net", str(tmp_path / "two.pth")).model
    assert shrink.last_linear(model)[1].out_features == 2
    torch.testing.assert_close(model(torch.ones(1, 3, 16, 16)), shrinkable.small(2).float()(torch.ones(1, 3, 16, 16)))


def test_weights_with_and_without_counts_of_batches_are_those_of_the_network(here, tmp_path):
    import shrinkable

    network = shrinkable.small(seed=1).float()
    network.stem[1].num_batches_tracked.fill_(7)
    whole = network.state_dict()
    state = {name: value for name, value in whole.items() if "num_batches_tracked" not in name}
    assert len(state) < len(whole)
    x = torch.ones(1, 3, 16, 16)
    for names, tensors in ((whole, whole.values()), (state, state.values()), (range(len(state)), state.values())):
        torch.save(dict(zip(map(str, names), tensors, strict=True)), tmp_path / "weights.pth")
        model = load_pretrained(f"{here / 'shrinking_model.py'}:net", str(tmp_path / "weights.pth")).model
        torch.testing.assert_close(model(x), network(x))
        assert int(model.stem[1].num_batches_tracked) == (7 if len(tensors) == len(whole) else 0)


@pytest.mark.parametrize(("most", "places"), [(10, range(7)), (4, range(0, 7, 2)), (3, range(0, 7, 3)), (1, [0])])
def test_some_images_are_spread_over_all(most, places):
    shown = torch.arange(7).view(7, 1, 1, 1), torch.arange(7)
    x, y = spread(shown, most)
    assert y.tolist() == x.flatten().tolist() == list(places)


def test_a_network_that_nasfast_trained_is_given_by_its_folder(tmp_path):
    grey = dataclasses.replace(nasfast.spaces.get_space("digits_mini"), in_channels=1)
    network = nasfast.build(grey, [0] * 6).eval()
    network.images = ImageInfo(tuple("0123456789"), short_side=20, resolution=18, mean=(0.2,), std=(0.3,))
    save_model(network, tmp_path / "model.safetensors")
    given = load_pretrained(str(tmp_path), None)
    assert (given.channels, given.resolution) == (1, 18)
    data = given.data(DataConfig())
    assert (data.mean, data.std) == ((0.2,) * 3, (0.3,) * 3)
    x = torch.randn(2, 1, 18, 18)
    assert torch.equal(given.model(x), network(x))
    network.images = None
    save_model(network, tmp_path / "model.safetensors")
    assert load_pretrained(str(tmp_path), None).data(DataConfig()) == DataConfig()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_peer_gets_images_with_its_own_normalisation(channels):
    given, wanted = DataConfig(mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 0.4)), DataConfig(mean=(0.5,) * 3, std=(0.5,) * 3)
    pixels = torch.randint(0, 256, (2, channels, 4, 4), dtype=torch.uint8)
    x, want = (Images(None, None, data, channels, 0).prepared(pixels) for data in (given, wanted))
    torch.testing.assert_close(Renormalised(torch.nn.Identity(), given, wanted, channels)(x), want)


def test_narrow_graphs_of_layers_with_their_width_as_a_number_run():
    import shrinkable

    found = shrink.find(shrinkable.excited(), torch.randn(1, 3, 8, 8))
    for arch in ((0,), found.full):
        assert network_graph(found, arch)(torch.randn(2, 3, 8, 8)).shape == (2, 4)


def test_the_difference_of_two_networks_is_paired():
    right = "f" * 50
    comparison = compare_runs([{"correct": right, "images": 200}], [{"correct": right, "images": 200}])
    assert comparison.gain == 0
    assert comparison.high == -comparison.low == pytest.approx(100 * 1.96 / 202, rel=1e-3)
