"""What README and docs/ tell a user to type: flags of commands and names of Python exist, and README's Python runs."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from digits_runs import write_config
from doc_links import ROOT, pages
from tiny import write_folder

from nasfast.cli.flags import parse
from nasfast.cli.main import main
from nasfast.runtime import imports
from nasfast.search.limits import check_range
from nasfast.settings import RunConfig
from nasfast.spaces import format_arch, get_space

README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, languages: tuple[str, ...]) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(text: str) -> list[list[str]]:
    """The arguments of every `nasfast COMMAND` in a block, without comments and the dots that stand for more flags."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        begin = re.match(r"(?:torchrun .* -m )?nasfast (?=\w+( |$))", line)
        if begin:
            found.append([word for word in shlex.split(line[begin.end() :], comments=True) if word != "..."])
    return found


DOCUMENTED = [
    pytest.param(command, id=f"{page.name}: {' '.join(command)[:60]}")
    for page in pages(ROOT)
    for text in blocks(page, ("", "bash", "sh"))
    for command in commands(text)
]


@pytest.fixture
def reader(tmp_path, monkeypatch) -> None:
    """A folder with what documented commands read."""
    monkeypatch.chdir(tmp_path)
    # what the command imports is forgotten after the test
    monkeypatch.setattr(imports, "_imported", [])
    monkeypatch.setitem(sys.modules, "my_blocks", None)
    del sys.modules["my_blocks"]
    (tmp_path / "published").mkdir()  # a folder that two commands read
    (tmp_path / "my_blocks.py").touch()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("command", DOCUMENTED)
def test_the_flags_of_a_documented_command_exist(command):
    try:
        parse(command)
    except SystemExit as ended:
        # --print_config ends the command; a wrong flag gives 2
        assert ended.code == 0


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("command", [p for p in DOCUMENTED if p.values[0][0] in ("run", "supernet", "search")])
def test_a_documented_limit_chooses_something(command):
    """Some architectures of the space meet it, and others do not."""
    given = parse([word for word in command if word != "--print_config"])[1]
    cfg = RunConfig.from_dict({name: given[name] for name in ("space", "search") if name in given})
    # a search in the directory of a run has its space
    if not cfg.space.name.endswith(".yaml") and (command[0] != "search" or "space" in given):
        check_range(cfg.search, get_space(cfg.space.name, resolution=cfg.space.resolution, variant=cfg.space.variant))


SMALL = """
data: {workers: 0, loader: torchvision, batch_size: 8}
train: {epochs: 1, warmup_epochs: 0}
score: {images: 8}
retrain: {random_architectures: 1, train: {epochs: 1, warmup_epochs: 0, eval_every: 1}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, ROOT / "docs/tutorial_search.md"], ids=lambda page: page.name)
def test_the_commands_of_a_first_search_run(page, tmp_path, monkeypatch, capfd):
    """In their order and as they are written, with few images and steps: the limits are those of the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    for part in ("train", "val"):
        write_folder(tmp_path / "images" / part, {"cat": 8, "dog": 8}, side=32)
    inline = re.findall(r"`(nasfast search --out runs/mine[^`]*)`", page.read_text())
    texts = [text for text in blocks(page, ("",)) if "runs/mine" in text] + inline
    done = []
    for command in [command for text in texts for command in commands(text.replace("\n   ", " "))]:
        if command[0] not in ("run", "search", "export") or "--search.latency_table" in command:
            continue
        small = ["--config", "small.yaml"] if command[0] == "run" else []
        at = command.index("--out")
        assert main([*command[:at], *small, *command[at:]]) == 0, capfd.readouterr().err
        done.append(command[0])
    assert {"run", "export"} <= set(done) and "next: nasfast " in capfd.readouterr().out
    assert (tmp_path / "runs/mine/retrain/best/model.pt2").exists()


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """A folder with a run, `runs/mine`, up to its search, and accuracies of its space."""
    folder = tmp_path_factory.mktemp("searched")
    config = str(write_config(folder))
    assert main(["supernet", "--out", str(folder / "runs/mine"), "--config", config]) == 0
    for stage in ("score", "search"):
        assert main([stage, "--out", str(folder / "runs/mine")]) == 0
    accuracies = {format_arch(arch): sum(arch) / 10 for arch in itertools.product(range(3), repeat=4)}
    (folder / "accuracies.json").write_text(json.dumps(accuracies))
    return folder


FEWER = {"240": "2", "360": "3"}
"""Epochs in place of documented ones."""


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), [("retrain.md", "retrain"), ("ranking_zero_cost.md", "rank")])
def test_the_commands_about_a_searched_run_run(page, name, searched, tmp_path, monkeypatch, capfd):
    """Each on the run as it was, but for those that resume; tests/tasks runs tasks in processes and on a cluster."""
    done = 0
    for command in [command for text in blocks(ROOT / "docs" / page, ("",)) for command in commands(text)]:
        if command[0] != name or "runs/mine" not in command or {"--workers", "--executor"} & set(command):
            continue
        done += 1
        if "--resume" not in command:
            monkeypatch.chdir(shutil.copytree(searched, tmp_path / str(done)))
        assert main([FEWER.get(word, word) for word in command]) == 0, (command, capfd.readouterr().err)
    assert done >= 2


def test_commands_are_found_and_wrong_flags_are_refused():
    text = (
        "nasfast run --out a \\\n  --seed 1 ...  # words\ntorchrun --x -m nasfast supernet\nnasfast supernet: stopped\n"
    )
    assert commands(text) == [["run", "--out", "a", "--seed", "1"], ["supernet"]]
    assert len(DOCUMENTED) > 30
    with pytest.raises(SystemExit):
        parse(["run", "--no_such_flag", "1"])


PYTHON = [
    pytest.param(text, id=f"{page.name}:{i}")
    for page in pages(ROOT)
    for i, text in enumerate(blocks(page, ("python",)))
]


def missing_names(tree: ast.AST) -> list[str]:
    """The names of nasfast that a program uses and that do not exist."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nasfast":
            module = importlib.import_module(str(node.module))
            found += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("nasfast."):
            owner, *rest = ast.unparse(node).split(".")
            value = importlib.import_module(owner)
            for name in rest:
                if not hasattr(value, name):
                    found.append(ast.unparse(node))
                    break
                value = getattr(value, name)
    return found


@pytest.mark.parametrize("text", PYTHON)
def test_documented_python_names_exist(text):
    assert missing_names(ast.parse(text)) == []


def test_missing_names_are_found():
    text = "import nasfast\nfrom nasfast.spaces import no_space\nnasfast.no_function(1)\nnasfast.fuse(m)"
    assert missing_names(ast.parse(text)) == ["nasfast.spaces.no_space", "nasfast.no_function"]


def test_the_python_of_readme_runs(capsys):
    (text,) = blocks(README, ("python",))
    exec(compile(text, str(README), "exec"), {})
    assert "52 of 52 convolutions" in capsys.readouterr().out
