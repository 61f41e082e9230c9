"""The plan for a machine with a GPU: a dry run of every part, parts that crash or hang, its rows and its summary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_cases.cuda import needs_emulation

from benchmarks import json_lines
from benchmarks.gpu import build, parts, per_launch, plan, proofs, users
from benchmarks.gpu.bench import ENGINE, Bench, NoCudaKernel, Variant, random_paths
from benchmarks.gpu.plan import REPORT, ROWS, Part, run_part
from benchmarks.gpu.report import report
from benchmarks.gpu_step import ROWS as MEASURED
from nasfast.ops import use_backend
from nasfast.spaces import get_space, mean_path

ROOT = Path(plan.__file__).parents[2]
COMMAND = [shutil.which("bash"), str(ROOT / "benchmarks" / "gpu.sh")]

# packages that a machine with a GPU may lack
MISSING = ("jsonargparse", "rich", "matplotlib", "tensorboard", "sklearn", "timm", "onnx", "nvidia.dali")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """An environment without git, and without packages that the plan must not need."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING}))\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NASFAST_", "TRITON_"))}
    for tool in ("dirname", "cc", "gcc", "c++", "g++", "ld", "as"):  # torch.compile has a compiler on a GPU, too
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return {**env, "PYTHON": sys.executable, "PYTHONPATH": str(folder), "PATH": str(folder), "OMP_NUM_THREADS": "1"}


def dry_run(parts: list[str], env: dict[str, str], out: Path) -> dict[str, list[dict]]:
    """The rows of each of these parts on the CPU, all of which ended well."""
    words = [word for part in parts for word in ("--part", part)]
    run = [*COMMAND, "--device", "cpu", "--out", str(out), *words]
    result = subprocess.run(run, env=env, capture_output=True, text=True)
    rows = json_lines.read(out / ROWS)
    problems = [row for row in rows if row["kind"] in ("error", "left_out") or row.get("ok") is False]
    log = (out / plan.LOG).read_text()[-3000:]
    assert result.returncode == 0 and not problems, (problems, result.stderr[-3000:], log)
    assert (out / REPORT).read_text() in result.stdout and "FAILED" not in result.stdout
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    by_part = {part: [row for row in rows if row["part"] == part] for part in parts}
    assert all(rows[-1]["kind"] == "end" for rows in by_part.values())
    return by_part


def column(kind: str, rows: list[dict], key: str = "name") -> list:
    return [row[key] for row in rows if row["kind"] == kind]


@needs_emulation
@pytest.mark.aot
def test_what_users_do_first(bare, tmp_path):
    pytest.importorskip("torchvision")
    names = ["build", "demo", "fuse mobilenet_v2", "adapt mobilenet_v2", "command bf16", "compile resnet50"]
    parts = dry_run(names, bare, tmp_path)
    assert column("built", parts["build"], "compiled") == [False]  # the build that is there serves
    assert column("machine", parts["build"], "packages")[0]["torch"] is not None
    assert column("demo", parts["demo"], "step") == [2, 4]
    assert column("demo", parts["demo"], "precision") == ["fp32"] * 2, "what auto means on a CPU"
    eager_and_graphs = ("fuse mobilenet_v2", "adapt mobilenet_v2")
    for part, kinds in (*((p, users.EAGER_AND_GRAPHS) for p in eager_and_graphs), ("compile resnet50", users.COMPILED)):
        assert column("first_step", parts[part]) == column("step", parts[part]) == list(kinds)
    assert column("first_step", parts["command bf16"]) == column("step", parts["command bf16"])
    assert len(column("step", parts["command bf16"])) == 4
    text = (tmp_path / REPORT).read_text()
    assert "fp32: 2 steps after" in text and "| nasfast fuse graph |" in text
    shown = subprocess.run([*COMMAND, "--report", "--out", str(tmp_path)], env=bare, capture_output=True, text=True)
    assert shown.stdout.strip() == text.strip()


@needs_emulation
@pytest.mark.aot
def test_the_kernels_and_their_peers(bare, tmp_path):
    names = ["engine", "matrices", "launches", "peer compile 32", "parity", "bits", "tests", "ncu", "sanitizer"]
    parts = dry_run([*names, "peer graph 128"], bare, tmp_path)
    assert column("step", parts["engine"]) == ["nasfast engine, no deferral", "nasfast engine"]
    assert column("step", parts["peer compile 32"]) == ["torch compile", "nasfast engine"]
    larger = [f"{name}, batch 128" for name in ("torch eager", "torch graph", "nasfast engine")]
    assert column("step", parts["peer graph 128"]) == larger
    assert set(column("step", parts["peer graph 128"], "batch")) == {4}
    assert column("step", parts["engine"], "batch") == [1, 1]
    for part in ("engine", "peer compile 32", "peer graph 128"):
        losses = column("first_step", parts[part], "loss")
        assert max(losses) < 1.05 * min(losses)
    # which kernels ran, by name
    ran = {row["variant"]: row for row in parts["peer compile 32"] if row["kind"] == "kernels"}
    assert ran["nasfast engine"]["cuda"].keys() >= {"conv_bn_act_chain_gpu_fwd", "conv_bn_act_chain_gpu_bwd"}
    # two chains in both types
    assert sorted(column("parity", parts["parity"], "dtype")) == ["bfloat16"] * 2 + ["float16"] * 2
    assert column("bits", parts["bits"], "what") == ["again", "eager"]
    assert column("bits", parts["bits"], "different") == [0, 0]
    (launches,) = (row for row in parts["launches"] if row["kind"] == "launches")
    assert launches["measured"] == len(column("launch_of_step", parts["launches"])) > 4 and 0 < launches["us"]
    assert column("sanitizer", parts["sanitizer"], "code") == [0] and column("ran", parts["ncu"], "code") == [0]
    cases = {row["case"].split()[0] for row in parts["matrices"] if row["kind"] == "matrices"}
    assert cases == {"orthogonalize", "qr", "geqrf"} and {"cpu", "torch"} <= set(column("matrices", parts["matrices"]))
    assert column("test", parts["tests"], "outcome") == ["passed"] * 2
    text = (tmp_path / REPORT).read_text()
    assert "LOSSES DIFFER" not in text and "4 of 4 chains and types" in text and "- qr batch 512x9x9: " in text


# ---- what would not run our kernels fails


@needs_emulation
def test_a_step_that_no_kernel_serves_stops(tmp_path, monkeypatch):
    """The first plan measured other kernels for an hour, because nothing had built the extension."""
    bench = Bench("engine", tmp_path / ROWS, "cpu", time.monotonic() + 600)
    # the choice that nasfast would make if the extension were not there
    monkeypatch.setattr(Variant, "chosen", lambda self, bench: use_backend("reference"))
    with pytest.raises(NoCudaKernel, match="nasfast engine: no CUDA kernel of a chain ran"):
        parts.bench_variants(bench, (ENGINE,), rounds=1)
    (row,) = json_lines.read(tmp_path / ROWS)
    assert row["kind"] == "kernels" and row["cuda"] == {}
    with pytest.raises(NoCudaKernel):
        proofs.run_bits(bench, ENGINE, random_paths(bench, 1))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"from": "/elsewhere/nasfast/__init__.py"}, "nasfast is imported from /elsewhere"),
        ({"missing": "not built"}, "not built"),
        ({"build": {"cuda_operators": False}}, "has no CUDA operators"),
        ({"device": {"kernels_run": False, "error": "no kernel image"}}, "no kernel image"),
    ],
)
def test_a_build_whose_kernels_would_not_run_is_found(changed, why):
    good = {
        "from": str(ROOT / "nasfast" / "__init__.py"),
        "missing": None,
        "emulation": None,
        "build": {"cuda_operators": True},
        "device": {"kernels_run": True, "error": ""},
    }
    problem = build.problem(good | changed, "cuda")
    assert problem is None if why is None else why in problem
    assert plan.part_environment("cuda")["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize("serves", [True, False])
def test_only_what_does_not_run_here_is_built(serves, tmp_path, monkeypatch):
    """A build takes minutes of the ten, and one that was made elsewhere runs as it is."""
    built = []
    monkeypatch.setattr(build, "_build", lambda: built.append(True))
    monkeypatch.setattr(build, "machine_row", lambda device: {})
    monkeypatch.setattr(build, "inspect_import", lambda device: {"build": {}})
    monkeypatch.setattr(build, "problem", lambda package, device: None if serves or built else "not built")
    build.bench_build(Bench("build", tmp_path / ROWS, "cuda", time.monotonic() + 600))
    rows = {row["kind"]: row for row in json_lines.read(tmp_path / ROWS)}
    assert len(built) == (not serves) == rows["built"]["compiled"]
    assert ("left_out" in rows) == (not serves)


# ---- launches


def test_the_chains_of_a_step_are_those_that_were_measured():
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    space = get_space("mobilenet_v2")
    chains = proofs.distinct_chains(space, mean_path(space), 32)
    measured = {row["chain"] for row in rows if row["kind"] == "launch_of_step"}
    assert len(chains) == len(measured) == 22
    compared = {row["chain"] for row in rows if row["kind"] == "parity"}
    assert compared and compared <= {str(chain) for chain in chains}


def test_our_kernels_are_known_by_the_names_of_a_profiler():
    name = "void nasfast::gpu::run_kernel<nasfast::gpu::DepthwiseForward<nasfast::gpu::Bf16, 3, 1, true> >(...)"
    assert per_launch.parse_family(name) == "DepthwiseForward"
    assert (
        per_launch.parse_family(name.replace("DepthwiseForward", "pointwise::PointwiseForward")) == "PointwiseForward"
    )
    assert per_launch.parse_family("void at::native::vectorized_elementwise_kernel<4, ...>") is None


@needs_emulation
@pytest.mark.aot
def test_two_builds_take_turns_and_one_that_computes_something_else_is_named(tmp_path, capsys):
    """The other one is a copy whose chains have wrong results where autograd calls them; the engine's are as fast."""
    shutil.copytree(ROOT / "nasfast", tmp_path / "nasfast")
    launcher = tmp_path / "nasfast" / "ops" / "chain" / "cuda.py"
    launcher.write_text(launcher.read_text().replace("return y, saved", "return 2 * y, saved"))
    with pytest.raises(SystemExit, match="before: errors are too large in 2 chains.*; after: none"):
        per_launch.main(["--device", "cpu", "--rounds", "3", "--before", str(tmp_path)])
    table = capsys.readouterr().out
    assert "| conv_bn_act_chain_gpu_bwd | 4 |" in table and "| step |  |" in table and "| launch " in table


def test_builds_with_other_launches_are_compared_by_family():
    old, new = ([per_launch.Round([(name, ms) for name in names], 9.0)] for names, ms in (("AAB", 2.0), ("AC", 1.0)))
    assert per_launch.table(old, new)[2:] == [
        "| A | 2 to 1 | 4000.0 | 1000.0 | 0.25 (0.25 to 0.25) |",
        "| B | 1 to 0 | 2000.0 | 0.0 | - |",
        "| C | 0 to 1 | 0.0 | 1000.0 | - |",
        "| step |  | 9000.0 | 9000.0 | 1.00 (1.00 to 1.00) |",
        "",
        "the builds launch other kernels",
    ]


# ---- parts that end badly


def page(out: Path) -> str:
    plan.write_report(out)
    return (out / REPORT).read_text()


def run_code(code: str, out: Path, limit: float = 30.0) -> dict:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_part(Part("engine", 10, 20, ""), [sys.executable, "-c", code], env, out, limit)


def test_a_part_that_crashes_leaves_its_rows_its_last_lines_and_the_next_part(tmp_path):
    row = "{'part': 'engine', 'kind': 'first_step', 'name': 'torch eager', 'first_s': 1.0}"
    code = f"""
import os, pathlib
from benchmarks import json_lines
json_lines.append(pathlib.Path({str(tmp_path / ROWS)!r}), {row})
print("line before the end", flush=True)
os.abort()
"""
    end = run_code(code, tmp_path)
    assert not end["ok"] and end["error"] == "exit code -6" and end["tail"][-1] == "line before the end"
    text = page(tmp_path)
    assert "FAILED: exit code -6" in text and "torch eager" in text and "line before the end" in text
    assert run_code("pass", tmp_path)["ok"]
    # the report has the rows of the last run
    assert "FAILED" not in page(tmp_path)


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path):
    mark = tmp_path / "alive"
    child = f"import pathlib, time\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {child!r}])
print("waits", flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    end = run_code(code, tmp_path, limit=3.0)
    assert time.monotonic() - start < 30
    assert not end["ok"] and end["error"] == "stopped after 3 s" and "waits" in end["tail"]
    mark.unlink()
    time.sleep(0.3)
    assert not mark.exists()


def test_a_row_that_was_cut_short_is_left_out_and_spoils_no_other(tmp_path):
    path = tmp_path / "folder" / ROWS
    assert json_lines.read(path) == []
    json_lines.append(path, {"kind": "start"})
    path.write_text(path.read_text() + '{"kind": "st')
    assert json_lines.read(path) == [{"kind": "start"}]
    json_lines.append(path, {"kind": "end"})
    assert json_lines.read(path) == [{"kind": "start"}, {"kind": "end"}]


def test_a_report_has_ratios_with_intervals_and_other_losses():
    steps = {"torch graph": 4.0, "nasfast engine": 2.0}
    rows = [{"kind": "first_step", "name": name, "first_s": 1.0, "loss": ms} for name, ms in steps.items()]
    rows += [
        {"kind": "step", "name": n, "median_ms": ms, "q20_ms": 0.9 * ms, "q80_ms": 1.1 * ms} for n, ms in steps.items()
    ]
    text = report({"peer graph": [*rows, {"kind": "floor", "ms": 0.5}]})
    assert "peer graph: did not end" in text and "LOSSES DIFFER" in text
    assert "| torch graph | 4.000 (3.600 to 4.400) | 1.0 s | 8.0 | 0.50 (0.41 to 0.61) |" in text
    assert "| nasfast engine | 2.000 (1.800 to 2.200) | 1.0 s | 4.0 |  |" in text
    # what ended before it was timed has its first step
    assert "| torch graph | - | 1.0 s |" in report({"peer graph": rows[:2]})


def test_parts_for_which_there_is_no_time_say_so_and_the_next_one_runs(tmp_path, monkeypatch):
    """A part that hangs is ended at its own limit, and what comes after the plan's end is left out by name."""
    monkeypatch.setattr(plan, "_LEAST", 0.5)
    commands = {"hangs": "import time; time.sleep(600)", "next": "print(1)", "late": "print(2)"}
    monkeypatch.setattr(plan, "part_command", lambda part, *_: [sys.executable, "-c", commands[part.name]])
    monkeypatch.setattr(plan, "part_environment", lambda device: dict(os.environ))
    planned = [Part("hangs", 1, 2, ""), Part("next", 1, 60, "")]
    assert not plan.run_plan(planned, "cuda", tmp_path, 100.0)
    ends = {row["part"]: row for row in json_lines.read(tmp_path / ROWS) if row["kind"] == "end"}
    assert ends["hangs"]["error"] == "stopped after 2 s" and ends["next"]["ok"]
    assert not plan.run_plan([Part("late", 1, 60, "")], "cuda", tmp_path, 0.1)
    ends = {row["part"]: row for row in json_lines.read(tmp_path / ROWS) if row["kind"] == "end"}
    assert ends["late"]["error"] == "no time" and "late: 0.0 s, FAILED: no time" in (tmp_path / REPORT).read_text()
