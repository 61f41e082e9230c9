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
import torch
from digits_runs import write_config
from doc_links import ROOT, pages
from tiny import batches, tiny_space, write_folder

from nasfast.cli.commands import parse
from nasfast.cli.main import main
from nasfast.indicators import registry
from nasfast.indicators.scores import Evidence
from nasfast.measure import latency, timing
from nasfast.runtime import imports
from nasfast.search.limits import Limits
from nasfast.settings import RunConfig
from nasfast.spaces import SKIP, format_arch, get_space, parse_arch
from nasfast.supernet import Supernet

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


def lines_of(text: str) -> list[str]:
    """The lines of a block that are commands of nasfast; a command that is continued is one line."""
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if commands(line)]


def reason_against(line: str) -> str:
    """Why a documented command is not run here; "" if it is."""
    return next((reason for part, reason in NOT_RUN.items() if part in line), "")


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
    for name in ("my_blocks", "my_scores"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    (tmp_path / "published").mkdir()  # a folder that two commands read
    for name in ("my_blocks", "my_scores"):
        (tmp_path / f"{name}.py").touch()


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
        space = get_space(cfg.space.name, resolution=cfg.space.resolution, variant=cfg.space.variant)
        limits = Limits(cfg.search.max_macs, cfg.search.max_params, allow_identity=cfg.search.allow_identity)
        limits.check(space)
        assert limits.met_by_all(space) == []


SMALL = """
data: {workers: 0, loader: torchvision, batch_size: 8}
train: {epochs: 1, warmup_epochs: 0}
score: {images: 8, paths: 150}
retrain: {random_architectures: 1, train: {epochs: 1, warmup_epochs: 0, eval_every: 1}}
"""


@pytest.mark.slow
def test_the_commands_of_a_first_search_run(tmp_path, monkeypatch, capfd, blank_figures):
    """In their order and as they are written, with few images and steps: the limits are those of the pages.

    A command that both pages have runs once.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)  # model.onnx takes seconds, and tests/cli writes one
    (tmp_path / "small.yaml").write_text(SMALL)
    for part in ("train", "val"):
        write_folder(tmp_path / "images" / part, {"cat": 8, "dog": 8}, side=32)
    done: list[list[str]] = []
    for page in (ROOT / "docs/tutorial_search.md", README):
        inline = re.findall(r"`(nasfast search --out runs/mine[^`]*)`", page.read_text())
        texts = [text for text in blocks(page, ("",)) if "runs/mine" in text] + inline
        found = [command for text in texts for command in commands(text.replace("\n   ", " "))]
        assert {"run", "export"} <= {command[0] for command in found}
        for command in found:
            left_out = {"--search.latency_table", "--dry_run"} & set(command)  # tests/measure, tests/pipeline
            if command[0] in ("run", "search", "export") and not left_out and command not in done:
                small = ["--config", "small.yaml"] if command[0] == "run" else []
                at = command.index("--out")
                assert main([*command[:at], *small, *command[at:]]) == 0, capfd.readouterr().err
                done.append(command)
    assert "next: nasfast " in capfd.readouterr().out
    assert (tmp_path / "runs/mine/retrain/best/model.pt2").exists()


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """A folder with a run up to its search, `runs/mine`, its like, `runs/other`, and what documented commands read."""
    folder = tmp_path_factory.mktemp("searched")
    config = str(write_config(folder))
    assert main(["supernet", "--out", str(folder / "runs/mine"), "--config", config]) == 0
    for stage in ("score", "search"):
        assert main([stage, "--out", str(folder / "runs/mine")]) == 0
    shutil.copytree(folder / "runs/mine", folder / "runs/other")
    accuracies = {format_arch(arch): sum(arch) / 10 for arch in itertools.product(range(3), repeat=4)}
    for name in ("accuracies.json", "runs/other/accuracies.json"):
        (folder / name).write_text(json.dumps(accuracies))
    for part in ("train", "val"):
        write_folder(folder / "images" / part, {str(i): 4 for i in range(10)}, side=16)
    (folder / "my_blocks.py").touch()
    (folder / "my_scores.py").write_text(own_score())
    shutil.copy(folder / "tiny.yaml", folder / "my_space.yaml")
    return folder


def own_score() -> str:
    """The file `my_scores.py` of docs/ranking.md."""
    (text,) = (text for text in blocks(ROOT / "docs/ranking.md", ("python",)) if "@register" in text)
    return text


def forget_own_score(monkeypatch) -> None:
    """After the test, `margin` of docs/ranking.md is no score; those of nasfast that it imports stay."""
    monkeypatch.setitem(registry.SCORES, "margin", None)
    del registry.SCORES["margin"]


NOT_RUN = {
    "torchrun": "starts several processes, as tests/train does",
    "--workers": "starts several processes, as tests/pipeline does",
    "rank --out runs/mine --train": "trains ten networks in processes, as tests/pipeline does",
    "rank     --out runs/other --train": "trains ten networks in processes, as tests/pipeline does",
    "--search.refine": "reads what the command before it writes",
    "nasfast shrink": "needs published weights, as tests/pipeline has in a file",
    "--seeds": "trains three supernets in processes, as tests/pipeline does",
    "--executor ray": "needs a cluster, as tests/pipeline has",
    "export --out runs/mine --pareto": "a front has many networks",
    "onnx": "takes a minute, as tests/measure does",
    "nasfast moments": "takes minutes, as tests/research does",
    "nasfast nasi": "takes minutes, as tests/research does",
    "nasfast wiring": "takes minutes, as tests/research does",
    "runs/macro": "takes minutes, on CIFAR-10",
    "cifar10/train": "takes minutes, on CIFAR-10",
    "images/train --space": "needs a published table and --score NAME",
    "scores.csv": "needs a published table",
    "--measured": "needs published latencies",
    "pixel3.json": "needs published latencies",
    "--config photos": "test_the_commands_of_a_first_search_run runs it",
}
"""A part of a documented command that is not run here, and why."""

SMALLER = {
    "mobilenet_v2": "tiny.yaml",
    "1000": "10",
    "240": "2",
    "360": "3",
    "3,224,224": "3,16,16",
    "--validate 20": "--validate 2",
    "475M": "60K",
    "330M": "60K",
    "400M": "60K",
    "--search.max_latency_ms 15": "--search.max_latency_ms 1500",
    "--search.max_latency_ms 14": "--search.max_latency_ms 1400",
}
"""Words of documented commands, and what stands for them here."""

RUN = [
    pytest.param(page, text, id=f"{page.name}:{i}")
    for page in pages(ROOT)
    for i, text in enumerate(blocks(page, ("", "bash", "sh")))
    if any(not reason_against(line) for line in lines_of(text))
]


@pytest.fixture
def steady_latencies(monkeypatch):
    """Times of parts and networks to which a fit exists on a busy machine, too: a millisecond for every part."""

    def timed(work, **options):
        timing.measure(work, **options | {"rounds": 1})
        networks = {name: parse_arch(name) for name in work if re.fullmatch(r"[-\d ]+", name)}
        times = dict.fromkeys(work, 1.0)
        times |= {name: 2.0 + sum(choice != SKIP for choice in arch) for name, arch in networks.items()}
        return {name: {"run": dict.fromkeys(("median_ms", "q20_ms", "q80_ms"), ms)} for name, ms in times.items()}

    monkeypatch.setattr(latency, "measure", timed)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), RUN)
def test_the_commands_of_a_block_run(
    page, text, searched, tmp_path, monkeypatch, capfd, blank_figures, steady_latencies
):
    """In their order, as they are written but for sizes, on a run that is there before."""
    monkeypatch.chdir(shutil.copytree(searched, tmp_path / "here"))
    monkeypatch.setattr(imports, "_imported", [])
    forget_own_score(monkeypatch)
    monkeypatch.setitem(sys.modules, "onnx", None)  # model.onnx takes seconds, and tests/cli writes one
    monkeypatch.syspath_prepend(".")
    for line in lines_of(text):
        if reason_against(line):
            continue
        for word, other in SMALLER.items():
            line = re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", other, line)
        (command,) = commands(line)
        run_dir = Path(command[command.index("--out") + 1]) if "--out" in command else Path()
        if not {"--resume", "--dry_run"} & set(command):
            if command[0] in ("run", "supernet"):
                shutil.rmtree(run_dir, ignore_errors=True)
                command[1:1] = ["--config", "settings.yaml"]
            if command[0] == "retrain":  # each of these commands is an alternative
                for made in (*run_dir.glob("retrain*"), *run_dir.glob("checkpoints/retrain*")):
                    shutil.rmtree(made) if made.is_dir() else made.unlink()
        elif command[0] == "retrain":
            assert main([word for word in command if word != "--resume"]) == 0
        if command[0] == "export":
            assert main(["retrain", *command[1:]]) == 0
        assert main(command) == 0, (command, capfd.readouterr().err)


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


def test_the_fine_tuning_of_the_documents_runs():
    page = ROOT / "docs/finetune.md"
    fine_tuning, _ = blocks(page, ("python",))
    names: dict = {}
    exec(compile(fine_tuning, str(page), "exec"), names)
    # statistics stay, and scale and shift have learned
    norms = [module for module in names["model"].modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert all(norm.num_batches_tracked == 0 and not norm.training for norm in norms)
    assert any((norm.weight != 1).any() for norm in norms)


@pytest.mark.slow
def test_the_python_of_deploying_runs(tmp_path, monkeypatch):
    """onnxruntime runs what is quantised, with nearly the same results."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/deploy.md"
    (text,) = blocks(page, ("python",))
    exec(compile(text, str(page), "exec"), names := {})
    images = {"images": names["calibration"][0]}
    plain, small = (
        runtime.InferenceSession(Path(name).read_bytes(), providers=["CPUExecutionProvider"]).run(None, images)[0]
        for name in ("model.onnx", "model.int8.onnx")
    )
    assert plain.shape == small.shape and 0 < abs(plain - small).max() < abs(plain).max()


def test_the_score_of_the_documents_is_what_it_says(monkeypatch):
    """With logits by hand; and what the table says that `evidence` holds is there."""
    forget_own_score(monkeypatch)
    exec(compile(own_score(), "my_scores.py", "exec"), {})
    evidence = Evidence(Supernet(tiny_space(), layer_indicators=True).eval(), batches(2))
    path = evidence.sample(1)[0]
    rows = [row for x, y in evidence.batches for row in zip(evidence.logits(x, path).tolist(), y.tolist(), strict=True)]
    margins = [row[label] - max(v for i, v in enumerate(row) if i != label) for row, label in rows]
    assert registry.SCORES["margin"].function(evidence, path) == pytest.approx(sum(margins) / len(margins), rel=1e-5)
    page = (ROOT / "docs/ranking.md").read_text(encoding="utf-8")
    table = page[page.index("| `evidence.` |") : page.index("`additive=True` is for")]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1] if row else "")]
    assert len(names) >= 9 and all(hasattr(evidence, name) for name in names), names
