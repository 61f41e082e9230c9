import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import nasfast
from nasfast.ops import _native

LEVELS = ["baseline", "avx2", "avx512", "avx512bf16", "amx"]
ROOT = Path(__file__).parent.parent


def build(folder, **environment):
    """Run setup.py's build step into folder; returns the finished process and the folder of the package."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NASFAST_") and k not in ("CXX", "CUDACXX")}
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    return result, folder / "lib" / "nasfast"


def record(package):
    return json.loads((package / "_build.json").read_text())


def test_the_version_of_the_package_is_that_of_the_source():
    command = [sys.executable, "setup.py", "-q", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == nasfast.__version__
    assert (ROOT / "nasfast" / "py.typed").exists()


def test_the_package_is_built_with_its_recipes(tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        tmp_path,
        "build_py",
        "--build-lib",
        tmp_path,
    ]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    recipes = {path.name for path in (ROOT / "nasfast" / "recipes").glob("*.yaml")}
    assert "demo.yaml" in recipes
    assert {path.name for path in (tmp_path / "nasfast" / "recipes").iterdir()} == recipes


def test_the_source_distribution_has_all_that_is_built(tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path / 'dist')!r})"
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "*.so", "results"))
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    wanted = {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"}
    for folder in ("csrc", "kernels", "nasfast"):
        suffixes = ("*.py", "*.pyi", "*.cpp", "*.h", "*.cu", "*.yaml", "*.json", "py.typed")
        wanted |= {str(path.relative_to(ROOT)) for suffix in suffixes for path in (ROOT / folder).rglob(suffix)}
    assert wanted - names - {"nasfast/_build.json"} == set()
    assert not any(name.startswith("tests/") for name in names)


def has_compiler():
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def test_without_a_compiler_it_installs_and_says_why(tmp_path):
    result, package = build(tmp_path, PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert list(package.iterdir()) == [package / "_build.json"]
    assert not record(package)["native"]
    assert "no C++ compiler found" in record(package)["reason"] and "apt install" in record(package)["reason"]
    assert record(package)["reason"] in result.stderr


def test_native_on_without_a_compiler_fails(tmp_path):
    result, _ = build(tmp_path, PATH=str(tmp_path), NASFAST_NATIVE="ON")
    assert result.returncode != 0
    assert "NASFAST_NATIVE=ON, but the native part cannot be built: no C++ compiler" in result.stderr


def test_native_off_is_recorded(tmp_path):
    result, package = build(tmp_path, NASFAST_NATIVE="OFF")
    assert result.returncode == 0, result.stderr
    assert "NASFAST_NATIVE=OFF" in record(package)["reason"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NASFAST_NATIVE", "AUTO, ON or OFF"),
        ("NASFAST_CUDA", "AUTO, ON or OFF"),
        ("NASFAST_EMULATION", "ON or OFF"),
        ("NASFAST_SANITIZE", "ON or OFF"),
        ("NASFAST_ISAS", "NATIVE, ALL or BASELINE"),
    ],
)
def test_wrong_switch_values_are_named(tmp_path, name, values):
    if name != "NASFAST_NATIVE" and not has_compiler():
        pytest.skip("no C++ compiler, so the build is not reached")
    result, _ = build(tmp_path, **{name: "MAYBE"})
    assert result.returncode != 0
    assert f"{name} must be {values}, got" in result.stderr


def test_a_broken_compiler_fails_loudly(tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    result, package = build(tmp_path, CXX=str(broken))
    assert result.returncode != 0
    assert "the native build failed" in result.stderr and "NASFAST_NATIVE=OFF" in result.stderr
    assert not (package / "_build.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_native_is_the_best_level_of_this_machine_and_the_baseline(tmp_path):
    """CMake and the library find the same level."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, "-DNASFAST_CUDA=OFF", "-DNASFAST_ISAS=NATIVE"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, check=True)
    commands = {
        entry["file"]: entry["command"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    chosen = [level for level in LEVELS if f"NASFAST_HAS_{level.upper()}" in commands[str(ROOT / "csrc/cpu/isa.cpp")]]
    if _native.extension is None or _native.extension.build_info().isas != LEVELS:
        pytest.skip("the installed extension does not have every level")
    assert chosen == sorted({"baseline", _native.extension.usable_isas()[-1]}, key=LEVELS.index)
