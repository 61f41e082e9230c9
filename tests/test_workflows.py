"""The GitHub workflows and hooks: valid, with pinned actions, without secrets, calling targets that exist."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_workflows_for_lint_tests_wheel_and_docs():
    assert {workflow.stem for workflow in WORKFLOWS} == {"lint", "test", "wheel", "docs"}


def _steps(workflow: Path) -> list[dict]:
    """The steps of all jobs of a workflow, in order, with each value of a job's matrix."""
    text, steps = workflow.read_text(), []
    for name, job in yaml.safe_load(text)["jobs"].items():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            chosen = text
            for key, value in zip(matrix, values, strict=True):
                chosen = chosen.replace(f"${{{{ matrix.{key} }}}}", value)
            steps += yaml.safe_load(chosen)["jobs"][name]["steps"]
    return steps


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_a_workflow_runs_what_exists(workflow):
    text = workflow.read_text()
    settings = yaml.safe_load(text)
    assert "secrets" not in text and settings["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in settings["jobs"].values())
    for step in _steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), "an action has its major version"
            for path in (step.get("with") or {}).get("cache-dependency-path", "").split():
                assert (ROOT / path).exists()
            continue
        program, argument = step["run"].split()
        assert (program == "make" and argument in TARGETS) or (program == "python" and (ROOT / argument).exists())


def test_the_workflows_run_the_checks_all_tests_the_oldest_versions_and_the_wheel():
    commands = {step["run"] for workflow in WORKFLOWS for step in _steps(workflow) if "run" in step}
    assert commands >= {"make check", "make test", "make test-oldest-fast", "make wheel", "make wheel-cuda"}


def test_wheels_with_and_without_cuda_kernels_are_uploaded_under_different_names():
    steps = _steps(ROOT / ".github" / "workflows" / "wheel.yml")
    uploads = [step["with"] for step in steps if "upload-artifact" in step.get("uses", "")]
    names = [upload["name"] for upload in uploads]
    assert len(set(names)) == len(names) == 6 and {"wheel-3.12", "wheel-cuda-3.12"} <= set(names)
    assert {upload["path"] for upload in uploads} == {"build/wheel/nasfast-*", "build/wheel-cuda/nasfast-*"}
    planned = {
        target: subprocess.run(
            ["make", "-n", target, f"VENV={ROOT / '.venv'}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for target in ("wheel", "wheel-cuda")
    }
    assert "NASFAST_CUDA=OFF" in planned["wheel"] and "--build-number" not in planned["wheel"]
    assert "NASFAST_CUDA=ON" in planned["wheel-cuda"] and "--build-number=1cuda" in planned["wheel-cuda"]


def test_a_wheel_is_built_for_every_python_of_the_tested_versions():
    """pyproject.toml names Python 3.10 too, for which torch and numpy of constraints.txt have no release."""
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "wheel.yml").read_text())["jobs"].values()
    assert ["3.10", *job["strategy"]["matrix"]["python"]] == pythons
    (setup,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["python-version"] == "${{ matrix.python }}"


def test_hooks_use_the_installed_tools():
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in settings["repos"]] == ["local"]
    hooks = settings["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "mypy", "clang-format"}
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in hooks)
    clang_format = hooks[-1]
    assert re.search(clang_format["files"], "csrc/cpu/gemm.h") and not re.search(clang_format["files"], "nasfast/ops.h")
