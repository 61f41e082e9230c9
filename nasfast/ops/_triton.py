"""Whether Triton can run in this process, or why not, without importing it."""

import importlib.util
import os
import shutil

import torch


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on CPU tensors, which is very slow: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_missing() -> str | None:
    """Why the Triton backend cannot run in this process; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton (Linux, x86-64 or aarch64)"
    if interpreted():
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is usable (TRITON_INTERPRET=1 runs the kernels on the CPU, very slowly, for tests)"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        return "Triton compiles with gcc or clang: put one on PATH, or its path in CC"
    return None
