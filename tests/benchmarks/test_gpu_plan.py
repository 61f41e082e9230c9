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

from benchmarks.gpu import plan
from benchmarks.gpu.plan import PARTS, ROWS, SUMMARY, Part, read_rows, run_part, summarise_file

ROOT = Path(plan.__file__).parents[2]
COMMAND = [shutil.which("bash"), str(ROOT / "benchmarks" / "gpu.sh")]
pytest.importorskip("triton")

# packages that a machine with a GPU may lack
MISSING = ("nasfast._C", "jsonargparse", "rich", "matplotlib", "tensorboard", "sklearn", "timm", "onnx", "nvidia.dali")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """An environment without git, the extension, and packages that the plan must not need."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING}))\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NASFAST_", "TRITON_"))}
    (folder / "dirname").symlink_to(shutil.which("dirname"))
    return {**env, "PYTHON": sys.executable, "PYTHONPATH": str(folder), "PATH": str(folder), "OMP_NUM_THREADS": "1"}


def dry_run(name: str, env: dict[str, str], out: Path) -> list[dict]:
    """The rows of one part on the CPU, which ended well."""
    command = [*COMMAND, "--device", "cpu", "--part", name, "--out", str(out)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = read_rows(out / ROWS)
    problems = [row for row in rows if row["kind"] in ("error", "left_out")]
    assert rows[-1]["kind"] == "end" and rows[-1]["ok"] and not problems, (problems, rows[-1])
    assert (out / SUMMARY).read_text() in result.stdout
    assert {row["part"] for row in rows} == {name}
    return rows


def of(kind: str, rows: list[dict], key: str = "name") -> list:
    return [row[key] for row in rows if row["kind"] == kind]


@pytest.mark.aot
def test_machine(bare, tmp_path):
    rows = dry_run("machine", bare, tmp_path)
    assert of("machine", rows, "packages")[0]["rich"] is not None  # installed, though it cannot be imported
    assert len(of("ceiling", rows, "what")) == 3
    assert of("launch", rows) == ["torch", "triton"] and all(us > 0 for us in of("launch", rows, "host_us"))


@pytest.mark.aot
def test_step(bare, tmp_path):
    rows = dry_run("step", bare, tmp_path)
    names = ["torch eager", "torch graph", "nasfast eager", "nasfast engine"]
    assert of("step", rows) == [*names[:2], *names, "torch graph, indicators"] == of("variant", rows)
    losses = of("variant", rows, "loss")
    assert max(losses) < 1.05 * min(losses)
    (compiled,) = (row for row in rows if row["kind"] == "compiled")
    assert compiled["layers"] == compiled["of"] == 4 and compiled["failed"] == 0
    (floor,) = of("floor", rows, "times")
    assert floor.keys() == set(names)
    text = (tmp_path / SUMMARY).read_text()
    assert "nasfast engine: " in text and "x floor" in text and "LOSSES DIFFER" not in text


@pytest.mark.aot
def test_kernels(bare, tmp_path):
    rows = [row for row in dry_run("kernels", bare, tmp_path) if row["kind"] == "kernel"]
    eager = [row for row in rows if row["variant"] == "nasfast eager"]
    assert {"pointwise_forward_kernel", "depthwise_forward_kernel"} <= {row["kernel"] for row in eager}
    assert all(row["us"] >= row["max_us"] >= row["min_us"] > 0 and row["grid"] for row in eager)
    # two depthwise convolutions of other widths are other rows
    widths = {row["arguments"]["C"] for row in eager if row["kernel"] == "depthwise_forward_kernel"}
    assert len(widths) == 2
    # the engine launches what the eager step does
    launches = [
        {
            name: sum(row["launches"] for row in rows if (row["variant"], row["kernel"]) == (variant, name))
            for name in ("pointwise_forward_kernel", "depthwise_backward_kernel")
        }
        for variant in ("nasfast eager", "nasfast engine")
    ]
    assert launches[0] == launches[1] and all(launches[0].values())


@pytest.mark.aot
def test_tests(bare, tmp_path):
    rows = dry_run("tests", bare, tmp_path)
    assert of("test", rows, "outcome") == ["passed", "passed"]
    assert "2 passed" in (tmp_path / SUMMARY).read_text()


@pytest.mark.aot
def test_paths(bare, tmp_path):
    rows = dry_run("paths", bare, tmp_path)
    assert of("paths", rows) == ["torch eager", "nasfast eager", "nasfast engine"]
    assert all(rate > 0 for rate in of("paths", rows, "images_per_s"))


@pytest.mark.aot
def test_native(bare, tmp_path):
    rows = dry_run("native", bare, tmp_path)
    assert of("ran", rows, "what") == ["build", "tests", "times"] and of("ran", rows, "code") == [0, 0, 0]
    assert of("orthogonalize", rows) == ["nasfast", "qr grouped"]
    assert set(of("test", rows, "outcome")) == {"skipped"} and "needs a GPU" in (tmp_path / SUMMARY).read_text()
    # the new build was used, and not the checkout
    assert "NASFAST_NATIVE=OFF" in of("doctor", rows, "native build")[0][0]


@pytest.mark.aot
def test_compile(bare, tmp_path):
    rows = dry_run("compile", bare, tmp_path)
    assert of("step", rows) == ["torch compile", "nasfast engine", "torch compile graph", "nasfast engine"]


def test_the_plan_takes_ten_minutes_and_lists_itself():
    listed = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, check=True)
    for part in PARTS:
        assert f"{part.name:8} {part.seconds:4} s  {part.text}" in listed.stdout
    assert sum(part.seconds for part in PARTS) + plan._GRACE * len(PARTS) <= 610
    assert sum(part.seconds for part in PARTS) <= 600


@pytest.mark.parametrize(("memory", "wanted"), [("143771\n", 16), ("10240\n", 5), ("1000", 1), ("[N/A]", 4), (None, 4)])
def test_the_memory_of_a_gpu_limits_its_processes(memory, wanted, tmp_path, monkeypatch):
    if memory is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n/bin/echo '{memory}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert plan.processes() == wanted


# ---- parts that end badly


def run_code(code: str, out: Path, limit: float = 30.0) -> dict:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_part(Part("step", 10, ""), [sys.executable, "-c", code], env, out, limit)


def test_a_part_that_crashes_leaves_its_rows_its_last_lines_and_the_next_part(tmp_path):
    row = "{'part': 'step', 'kind': 'step', 'name': 'torch eager', 'median_ms': 2.0, 'q20_ms': 1.0, 'q80_ms': 3.0}"
    code = f"""
import os, pathlib
from benchmarks.gpu import plan
plan.append(pathlib.Path({str(tmp_path / ROWS)!r}), {row})
print("line before the end", flush=True)
os.abort()
"""
    end = run_code(code, tmp_path)
    assert not end["ok"] and end["error"] == "exit code -6" and end["tail"][-1] == "line before the end"
    text = summarise_file(tmp_path / ROWS)
    assert "FAILED: exit code -6" in text and "torch eager" in text and "| line before the end" in text
    assert run_code("pass", tmp_path)["ok"]
    # the summary has the rows of the last run
    assert "FAILED" not in summarise_file(tmp_path / ROWS)


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


def test_a_row_that_was_cut_short_is_left_out(tmp_path):
    (tmp_path / ROWS).write_text(json.dumps({"kind": "start"}) + '\n{"kind": "st')
    assert read_rows(tmp_path / ROWS) == [{"kind": "start"}]


def test_a_summary_names_the_best_peer_and_other_losses():
    steps = {"torch eager": 8.0, "torch graph": 4.0, "nasfast engine": 2.0, "nasfast engine, indicators": 1.0}
    rows = [{"kind": "variant", "name": name, "first_s": 1.0, "loss": ms} for name, ms in steps.items()]
    rows += [{"kind": "step", "name": n, "median_ms": ms, "q20_ms": ms, "q80_ms": ms} for n, ms in steps.items()]
    text = plan.summarise({"step": [*rows, {"kind": "floor", "ms": 0.5}]})
    assert "step: did not end" in text
    assert "  nasfast engine: 0.50 of torch graph" in text and "nasfast engine, indicators: " not in text
    assert "4.0 x floor" in text and "LOSSES DIFFER" in text


# ---- the rows of tests


TESTS = """
import pytest, torch

def test_a():
    pass

def test_loses_the_context(monkeypatch):
    torch.cuda.is_initialized = lambda: True
    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.synchronize = synchronize

def test_c():
    assert 1 == 2

def test_d():
    pytest.skip("a reason")
"""


@pytest.mark.slow
def test_a_lost_context_costs_one_test(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "-p",
        "benchmarks.gpu.rows",
        "--rows",
        "rows",
        "--part",
        "tests",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=env, capture_output=True)
    rows = {row["test"].partition("::")[2]: row for row in read_rows(tmp_path / "rows") if row["outcome"] != "passed"}
    assert rows.keys() == {"test_loses_the_context", "test_c", "test_d"}
    assert "crashed while running" in rows["test_loses_the_context"]["error"]
    assert rows["test_c"]["error"] == "assert 1 == 2" and rows["test_d"]["reason"] == "a reason"
