"""Load the compiled library, or keep the reason why it is missing.

`nasfast/_C.so` registers the schemas and kernels of `torch.ops.nasfast`. It uses torch's stable ABI and nothing of
Python, so one build serves every Python and every torch from the one that `build_info` names.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parent.parent
_BUILD_RECORD = _PACKAGE / "_build.json"


class BuildInfo(NamedTuple):
    """What was compiled.

    Attributes:
        compiler, flags: the C++ compiler and its options.
        torch_version, torch_target: the torch compiled against, and the oldest one served.
        cuda_version, cuda_archs: of nvcc, and the architectures with code, separated by spaces; empty without CUDA.
        cuda_operators: whether the CUDA kernels have their operators, for which torch must have been one with CUDA.
        isas: instruction sets of the CPU kernels, ascending.
    """

    compiler: str
    flags: str
    torch_version: str
    torch_target: str
    cuda_version: str
    cuda_archs: str
    cuda_operators: bool
    isas: list[str]


class CudaDeviceInfo(NamedTuple):
    """Whether the compiled kernels run on a GPU; kernels/cuda/device_info.h explains each field."""

    kernels_run: bool
    binary_version: int
    ptx_version: int
    old_driver: bool
    error: str


class Extension:
    """The loaded library: what it is, and how it runs here.

    Args:
        path: its file.

    Raises:
        OSError: there is no such file, or it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))
        self.path = path
        self._ops = torch.ops.nasfast

    def build_info(self) -> BuildInfo:
        compiler, flags, torch_version, torch_target, cuda_version, cuda_archs = self._ops.build_info()
        operators, isas = self._ops.has_cuda_operators(), self._ops.compiled_isas()
        return BuildInfo(compiler, flags, torch_version, torch_target, cuda_version, cuda_archs, operators, isas)

    def isa(self) -> str:
        """The instruction set that the CPU kernels use: the best usable one, or NASFAST_ISA.

        Raises:
            RuntimeError: NASFAST_ISA names none that is usable here.
        """
        return self._ops.isa()

    def usable_isas(self) -> list[str]:
        """The compiled instruction sets that this processor runs, ascending."""
        return self._ops.usable_isas()

    def cuda_device_info(self, device: int = 0) -> CudaDeviceInfo:
        """Whether the compiled kernels run on this GPU; needs no GPU and no driver."""
        return CudaDeviceInfo(*self._ops.cuda_device_info(device))

    def empty_cache(self) -> None:
        """Return the pages of the CPU operators' free memory to the system."""
        self._ops.empty_cache()

    def poison_pool(self, on: bool) -> None:
        """Fill the memory of new tensors with NaN, for tests."""
        self._ops.poison_pool(on)

    def pool_bytes(self) -> tuple[int, int]:
        """Bytes of the CPU operators' memory in use, and the extent of what was ever used since `empty_cache`."""
        return self._ops.pool_bytes()


extension: Extension | None
try:
    extension = Extension(_PACKAGE / "_C.so")
except OSError as error:
    extension = None
    _load_error = str(error)


def build_record() -> dict | None:
    """What setup.py wrote about the last build, or None in a checkout that was never installed."""
    return json.loads(_BUILD_RECORD.read_text(encoding="utf-8")) if _BUILD_RECORD.exists() else None


def why_missing() -> str | None:
    """Why the library is not loaded and what to do about it; None when it is loaded."""
    if extension is not None:
        return None
    record = build_record()
    if record is None:
        return "not built: run pip install --no-build-isolation -e ."
    if not record["native"]:
        return f"not built: {record['reason']}"
    return f"built, but could not be loaded ({_load_error}): reinstall with pip install --no-build-isolation -e ."


def why_no_emulation() -> str | None:
    """Why the CUDA kernels of chains cannot be emulated on the CPU; None when they can."""
    if extension is None:
        return why_missing()
    try:
        import nasfast._emulation  # noqa: F401  # registers their operators for CPU tensors
    except ModuleNotFoundError:
        return "built without the emulation of CUDA: run NASFAST_EMULATION=ON pip install --no-build-isolation -e ."
    except ImportError as error:
        return f"built with an emulation of CUDA that cannot be loaded ({error}): build it again"
    return None


def check_isa() -> None:
    """Raise what `Extension.isa` raises, if the library is loaded."""
    if extension is not None:
        extension.isa()


def empty_cache() -> None:
    """Give the memory that the CPU operators keep for their next tensors back to the system.

    The operators use the memory of their freed tensors again, so a process keeps as much as was ever in use at once.
    """
    if extension is not None:
        extension.empty_cache()
