"""Builds nasfast/_C.so with CMake and Ninja, and records the outcome. The rest of the packaging is in pyproject.toml.

CMakeLists.txt is the only list of sources. Without a C++ compiler the package is installed in pure Python; the
reason is recorded, and `nasfast doctor` shows it. Environment variables: ENVS.md.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# includes the scripts folder, where pip installs cmake and ninja: it is on PATH only in an active environment
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])


def native_mode() -> str:
    """Value of NASFAST_NATIVE. Exits with a message if it is not allowed."""
    mode = os.environ.get("NASFAST_NATIVE", "AUTO")
    if mode not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"NASFAST_NATIVE must be AUTO, ON or OFF, got {mode!r}")
    return mode


def switch(name: str) -> str:
    """Value of a variable that is ON or OFF, and OFF by default. Exits with a message if it is something else."""
    value = os.environ.get(name, "OFF")
    if value not in ("ON", "OFF"):
        raise SystemExit(f"{name} must be ON or OFF, got {value!r}")
    return value


def find_tool(name: str) -> str | None:
    """Path of an executable, or None."""
    return shutil.which(name, path=SEARCH_PATH)


def missing_tools() -> str | None:
    """What the native build lacks and how to get it; None if nothing is missing."""
    # CXX may hold a launcher and options, as in "ccache g++"
    compilers = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    if not any(find_tool(compiler) for compiler in compilers):
        return (
            f"no C++ compiler found (looked for {', '.join(compilers)}): install one "
            "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), then "
            "reinstall"
        )
    for tool in ("cmake", "ninja"):
        if find_tool(tool) is None:
            return f"{tool} not found: pip install {tool}, then reinstall"
    for module in ("torch", *(["pybind11"] if switch("NASFAST_EMULATION") == "ON" else [])):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install {module}, then reinstall with --no-build-isolation"
    return None


def _libraries(package: Path) -> list[Path]:
    """What CMake puts into the package."""
    return [path for name in ("_C", "_emulation") for path in package.glob(f"{name}.*so")]


class CMakeBuild(build_ext):
    """A build_ext that compiles with CMake."""

    def run(self) -> None:
        in_source = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_source else Path(self.build_lib).resolve()) / "nasfast"
        # a checkout keeps its build folder, so that a second installation compiles only what changed
        build = (
            ROOT / "build" / f"native-{sys.implementation.cache_tag}" if in_source else Path(self.build_temp).resolve()
        )
        package.mkdir(parents=True, exist_ok=True)
        for stale in _libraries(package):
            stale.unlink()
        self.written = [package / "_build.json"]

        mode = native_mode()
        reason = "it was installed with NASFAST_NATIVE=OFF: reinstall without it" if mode == "OFF" else missing_tools()
        if mode == "ON" and reason is not None:
            raise SystemExit(f"NASFAST_NATIVE=ON, but the native part cannot be built: {reason}")
        if reason is None:
            self.compile(build, package)
            self.written += _libraries(package)
        else:
            print(f"nasfast: installing without native kernels: {reason}", file=sys.stderr)
        (package / "_build.json").write_text(json.dumps({"native": reason is None, "reason": reason}) + "\n")

    def compile(self, build: Path, package: Path) -> None:
        """Configure, build, and put the extension into the package. A failed build ends the installation."""
        cmake = find_tool("cmake")
        configure = [
            cmake,
            "-G",
            "Ninja",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DNASFAST_CUDA={os.environ.get('NASFAST_CUDA', 'AUTO')}",
            f"-DNASFAST_ISAS={os.environ.get('NASFAST_ISAS', 'NATIVE')}",
            f"-DNASFAST_EMULATION={switch('NASFAST_EMULATION')}",
            f"-DNASFAST_SANITIZE={switch('NASFAST_SANITIZE')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
        ]
        for command in (configure, [cmake, "--build", str(build)]):
            if subprocess.run(command, check=False).returncode != 0:
                raise SystemExit(
                    "nasfast: the native build failed (see the messages above). Repair it, or install without "
                    "native kernels: NASFAST_NATIVE=OFF pip install --no-build-isolation ."
                )

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.written]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPython(bdist_wheel):
    """A wheel for every Python 3, because the library of operators uses none; the emulation, for tests, does."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if switch("NASFAST_EMULATION") == "ON" else ("py3", "none", tag[2])


setup(
    packages=find_packages(include=["nasfast*"]),
    ext_modules=[Extension("nasfast._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPython},
)
