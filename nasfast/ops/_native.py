"""Load the compiled extension, or keep the reason why it is missing.

Importing `nasfast._C` registers the schemas and CPU kernels of `torch.ops.nasfast`.
"""

import json
from pathlib import Path

import torch  # noqa: F401  # its libraries must be loaded before the extension that uses them

_BUILD_RECORD = Path(__file__).parent.parent / "_build.json"

try:
    from nasfast import _C as extension
except ImportError as error:
    extension = None  # type: ignore[assignment]  # a module that may be missing has no other notation
    _import_error = str(error)


def build_record() -> dict | None:
    """What setup.py wrote about the last build, or None in a checkout that was never installed."""
    return json.loads(_BUILD_RECORD.read_text(encoding="utf-8")) if _BUILD_RECORD.exists() else None


def why_missing() -> str | None:
    """Why `nasfast._C` is not loaded and what to do about it; None when it is loaded."""
    if extension is not None:
        return None
    record = build_record()
    if record is None:
        return f"not built ({_import_error}): run pip install --no-build-isolation -e ."
    if not record["native"]:
        return f"not built: {record['reason']}"
    return f"built, but could not be loaded ({_import_error}): reinstall with pip install --no-build-isolation -e ."


def why_no_emulation() -> str | None:
    """Why the CUDA kernels of chains cannot be emulated on the CPU; None when they can."""
    if extension is not None and not hasattr(extension, "set_emulation"):
        return "built without the emulation of CUDA: run NASFAST_EMULATION=ON pip install --no-build-isolation -e ."
    return why_missing()


def set_early_launches(on: bool) -> bool:
    """Whether CUDA kernels of chains may start early from now on; returns whether they could."""
    return hasattr(extension, "set_early_launches") and extension.set_early_launches(on)


def empty_cache() -> None:
    """Give the memory that the CPU operators keep for their next tensors back to the system.

    The operators use the memory of their freed tensors again, so a process keeps as much as was ever in use at once.
    """
    if extension is not None:
        extension.empty_cache()
