"""The network of a discovered cell retrains and leaves files like any other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch
from tiny import batches

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.pipeline.architectures import choose_architectures
from nasfast.pipeline.networks import retrain_best
from nasfast.pipeline.run import Run
from nasfast.research.cells.network import CellStandalone
from nasfast.research.cells.space import CellSpace, darts_space, minimal_cell, nas_bench_201_space
from nasfast.retrain import (
    RetrainConfig,
    load_model,
    retrain,
    timm_plugin,  # noqa: F401  registers the model
)
from nasfast.retrain.export import read_form
from nasfast.settings import RunConfig
from nasfast.spaces import arch_to_json
from nasfast.train import TrainConfig, evaluate

SPACE = CellSpace("tiny cells", minimal_cell(), cells=2, channels=6, num_classes=4, resolution=16)
ARCH = (4, 1, 2, 0, 5)
ONE_EPOCH = RetrainConfig(train=TrainConfig(epochs=1, lr=0.05))


@pytest.fixture(scope="module")
def retrained_cells(tmp_path_factory) -> SimpleNamespace:
    run_dir, val = tmp_path_factory.mktemp("cells"), batches(2, seed=1)
    cfg = RetrainConfig(train=TrainConfig(epochs=4, lr=0.1))
    result = retrain(SPACE, ARCH, batches(8), val, cfg, run_dir=run_dir)
    return SimpleNamespace(run_dir=run_dir, folder=run_dir / "retrain" / "best", result=result, val=val)


def test_it_learns_and_reports_what_it_measured(retrained_cells):
    result, network = retrained_cells.result, load_model(retrained_cells.folder)
    assert isinstance(network, CellStandalone)
    assert (network.space, network.arch, network.training) == (SPACE, ARCH, False)
    assert result.top1 > 0.7
    assert result.top1 == evaluate(network, retrained_cells.val).top1
    cost = SPACE.cost(ARCH)
    assert (result.macs, result.params) == (cost.macs, cost.params)
    assert sum(p.numel() for p in network.parameters()) == cost.params
    assert read_form(retrained_cells.folder / "config.json")[:2] == (SPACE, ARCH)


def test_an_architecture_that_is_none_on_every_edge_retrains(tmp_path):
    """Two levels of DARTS end with this cell. Only the classifier is left, and its input is constant."""
    result = retrain(SPACE, (0,) * 5, batches(2), batches(2), ONE_EPOCH, run_dir=tmp_path)
    assert result.loss == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-5)


def test_a_cell_serves_networks_of_other_sizes():
    """DARTS searches in 8 cells of 16 channels, and trains 20 of 36."""
    searched = darts_space()
    arch = tuple(i % 8 for i in range(28))
    final = searched.replace(cells=20, channels=36, reductions=(6, 13))
    assert final.describe(arch) == searched.describe(arch)
    with torch.device("meta"):
        network = CellStandalone(final, arch)
    assert sum(p.numel() for p in network.parameters()) == final.cost(arch).params
    assert (network.classifier.in_features, len(network.cells)) == (4 * 36 * 4, 20)


def test_cells_inherit_no_weights(tmp_path):
    with pytest.raises(ValueError, match="networks of cells begin with fresh weights"):
        retrain(SPACE, ARCH, batches(1), batches(1), RetrainConfig(init="inherit"), run_dir=tmp_path)


def test_timm_builds_it(retrained_cells):
    name = f"local-dir:{retrained_cells.folder}"
    model = timm.create_model(name, pretrained=True).eval()
    x = retrained_cells.val[0][0]
    with torch.no_grad():
        assert torch.equal(model(x), load_model(retrained_cells.folder)(x))
        features = model.forward_features(x)
    assert features.shape == (8, SPACE.features, 16, 16)
    assert model.num_features == SPACE.features == 12
    assert model.get_classifier().bias is None
    with pytest.raises(ValueError, match="features_only: a cell gives several maps"):
        timm.create_model(name, features_only=True)
    other = timm.create_model(name, num_classes=7)
    assert other(x).shape == (8, 7)
    assert not torch.equal(other.stem[0].weight, model.stem[0].weight)


# --- from a run directory


SEARCHED = CellSpace(
    "digits cells", minimal_cell(), cells=2, channels=4, reductions=(1,), stem_multiplier=1, resolution=15
)
# a node that nothing enters, and then a reduction
FOUND = {"darts": (0, 0, 4, 3, 6) + (4, 1, 0, 2, 5), "argmax": (0, 1, 0, 1, 0) * 2}


@pytest.fixture
def searched(tmp_path):
    """What a search of cells leaves for the commands behind it."""
    SEARCHED.save(tmp_path / "space.yaml")
    for name, arch in FOUND.items():
        (tmp_path / f"arch_{name}.json").write_text(arch_to_json(arch, SEARCHED))
    return tmp_path


FLAGS = ["--data.source", "digits", "--data.workers", "0", "--threads", "1", "--retrain.train.epochs", "1"]


@pytest.mark.slow
def test_the_commands_retrain_and_export_it(searched, capsys):
    import onnxruntime

    assert main(["retrain", "--out", str(searched), *FLAGS, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert " ".join(map(str, FOUND["darts"])) in out
    assert sorted(p.name for p in (searched / "retrain").iterdir()) == ["argmax", "darts"]
    found = {name: load_model(searched / "retrain" / name) for name in FOUND}
    assert {network.space.name for network in found.values()} == {"digits cells"}
    assert {name: network.arch for name, network in found.items()} == FOUND
    weights = (searched / "retrain/darts/model.safetensors").read_bytes()
    assert main(["retrain", "--out", str(searched), "--resume"]) == 0, "the settings are in config.yaml"
    assert (searched / "retrain/darts/model.safetensors").read_bytes() == weights
    assert main(["export", "--out", str(searched), "--name", "darts"]) == 0
    assert str(searched / "retrain/darts/config.json") in capsys.readouterr().out
    # another number of images
    session = onnxruntime.InferenceSession(
        str(searched / "retrain/darts/model.onnx"), providers=["CPUExecutionProvider"]
    )
    x = torch.randn(5, 3, 15, 15)
    (got,) = session.run(["logits"], {"images": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), found["darts"](x), rtol=1e-4, atol=1e-4)


def test_an_architecture_may_be_named_by_its_operations(tmp_path):
    nas_bench_201_space().save(tmp_path / "space.yaml")
    run = Run.look(RunConfig(out=str(tmp_path), device="cpu"))
    text = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|avg_pool_3x3~0|nor_conv_1x1~1|none~2|"
    space, found = choose_architectures(run.cfg, [text])
    ((name, arch),) = found.items()
    assert space.format(arch) == "conv_3x3 none skip_connect avg_pool_3x3 conv_1x1 none"
    assert name == "arch-" + "_".join(map(str, arch))
    with pytest.raises(ConfigError, match="a search of cells computes no Pareto front"):
        choose_architectures(run.cfg, pareto=True)


def test_what_is_missing_in_the_directory_is_named(searched):
    def open_and_retrain(cfg):
        with Run.open(cfg) as run:
            retrain_best(run)

    cfg = RunConfig(out=str(searched), device="cpu")
    for path in searched.glob("arch_*.json"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="no arch_NAME.json in .*: a search of cells writes them at its end"):
        open_and_retrain(cfg)
    (searched / "space.yaml").write_text((searched / "space.yaml").read_text().replace("sep_conv_3x3", "sep_conv", 1))
    with pytest.raises(ValueError, match="space.yaml: cell.edges.*unknown operation 'sep_conv'"):
        open_and_retrain(cfg)
