"""`--import`: a user's own block kinds on the command line and in worker processes."""

from __future__ import annotations

import sys

import pytest
from tiny import tiny_space

import nasfast.runtime.imports as imports
from nasfast.cli.main import main
from nasfast.pipeline.children import Task, TaskRunner
from nasfast.runtime.imports import import_modules, imported
from nasfast.settings import TaskSettings
from nasfast.spaces import Block, SearchSpace, blocks
from nasfast.supernet import blocks as modules
from nasfast.train.checkpoint import load_checkpoint

KIND = """
import nasfast

@nasfast.spaces.block_cost("pointwise")
def cost(block, in_channels, out_channels, stride, size):
    weights = in_channels * out_channels
    return nasfast.spaces.Cost(macs=weights * (-(-size // stride)) ** 2, params=weights + 2 * out_channels)

@nasfast.supernet.block_builder("pointwise")
def build(block, layer, units):
    return units.conv_bn_act(layer.in_channels, layer.out_channels, 1, stride=layer.stride)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What a test imports and registers is forgotten after it."""
    monkeypatch.setattr(imports, "_imported", [])
    monkeypatch.setattr(blocks, "_BLOCK_COSTS", dict(blocks._BLOCK_COSTS))
    monkeypatch.setattr(modules, "_BLOCK_BUILDERS", dict(modules._BLOCK_BUILDERS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.fixture
def own_space(tmp_path):
    """The path of a space with a kind that nasfast does not have."""
    form = tiny_space(num_classes=10).to_yaml()
    assert form.count("kind: mbconv") == 6
    path = tmp_path / "space.yaml"
    path.write_text(form.replace("kind: mbconv", "kind: pointwise", 1))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("flag", [["--import", "own_blocks"], ["--import=own_blocks.py"]], ids=["module", "file"])
def test_a_supernet_with_a_block_kind_of_the_users_own_trains(tmp_path, monkeypatch, capsys, own_space, flag):
    (tmp_path / "own_blocks.py").write_text(KIND)
    monkeypatch.chdir(tmp_path)
    argv = ["--out", "run", "--space.name", "space.yaml", "--supernet.init", "orthogonal", "--data.source", "digits"]
    argv += ["--data.workers", "1", "--train.epochs", "1", "--threads", "1"]
    assert main(["supernet", *argv]) == 1
    error = capsys.readouterr().err
    assert "unknown block kind 'pointwise'" in error
    assert "--import FILE" in error
    assert main(["supernet", *flag, *argv]) == 0
    space = SearchSpace.load("run/space.yaml")
    assert Block("pointwise", 3, 2) in space.layers[0].choices
    (newest,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    assert any(name.startswith("model.layers.0.candidates.0.") for name in load_checkpoint(newest).tensors)


@pytest.mark.slow
def test_worker_processes_import_it_too(tmp_path, monkeypatch):
    """The function of the task is in a file that a new process does not find by itself."""
    file = tmp_path / "hidden" / "own_work.py"
    file.parent.mkdir()
    file.write_text("def answer(folder, *, value):\n    return 2 * value\n")
    monkeypatch.chdir(file.parent)
    import_modules(["own_work.py"])
    monkeypatch.chdir(tmp_path)
    task = Task("double", "own_work:answer", {"value": 21})
    with TaskRunner(tmp_path / "tasks", TaskSettings(workers=1, attempts=1)) as runner:
        (result,) = runner.run([task])
    assert (result.status, result.result) == ("done", 42), result.error


def test_each_is_imported_once(tmp_path, monkeypatch):
    (tmp_path / "own_count.py").write_text("import sys\nsys.own_count = getattr(sys, 'own_count', 0) + 1\n")
    monkeypatch.chdir(tmp_path)
    import_modules(["own_count.py", "own_count.py"])
    import_modules([str(tmp_path / "own_count.py")])
    assert sys.own_count == 1
    assert imported() == (str(tmp_path / "own_count.py"),)
    del sys.own_count


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("own_missing.py", None, "own_missing.py: ImportError: there is no such file"),
        ("own_nowhere", None, "--import own_nowhere: ModuleNotFoundError: No module named 'own_nowhere'"),
        ("own_broken.py", "1 / 0", "own_broken.py: ZeroDivisionError: division by zero"),
        ("json.py", "", "a module 'json' is imported already: give the file another name"),
        ("own_twice.py", KIND.replace('"pointwise"', '"mbconv"'), "block kind 'mbconv' already has a cost"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys, name, source, message):
    if source is not None:
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--import", name]) == 1
    assert message in capsys.readouterr().err
    assert imported() == ()
    assert name.removesuffix(".py") == "json" or name.removesuffix(".py") not in sys.modules
