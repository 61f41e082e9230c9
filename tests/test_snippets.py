"""What README and docs/ tell a user to type: flags of commands and names of Python exist, and README's Python runs."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from doc_links import ROOT, pages

from nasfast.cli.flags import parse
from nasfast.runtime import imports

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


@pytest.mark.parametrize("command", DOCUMENTED)
def test_the_flags_of_a_documented_command_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what the command imports is forgotten after the test
    monkeypatch.setattr(imports, "_imported", [])
    monkeypatch.setitem(sys.modules, "my_blocks", None)
    del sys.modules["my_blocks"]
    (tmp_path / "published").mkdir()  # a folder that two commands read
    (tmp_path / "my_blocks.py").touch()
    try:
        parse(command)
    except SystemExit as ended:
        # --print_config ends the command; a wrong flag gives 2
        assert ended.code == 0


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
