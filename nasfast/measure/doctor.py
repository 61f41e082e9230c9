"""`nasfast doctor`: versions, the machine, the native build, and which backend each operator uses and why."""

import importlib.metadata
import platform

import torch

from nasfast.ops import _native, backends
from nasfast.ops.precision import default_precision

_PACKAGES = (
    "nasfast",
    "torch",
    "torchvision",
    "triton",
    "nvidia-dali-cuda130",
    "timm",
    "onnx",
    "onnxruntime",
    "numpy",
    "scipy",
)


def environment() -> dict[str, list[str]]:
    """Lines of text by title: versions, CPU, GPU, native build and dispatch table.

    A run saves them as environment.json. A wrong environment variable gives a line with the error and does not raise.
    """
    return {
        "versions": _versions(),
        "cpu": _cpu(),
        "gpu": _gpu(),
        "native build": _build(),
        "operators": _operators(),
    }


def doctor() -> str:
    """`environment` as text for a terminal or a bug report."""
    lines = []
    for title, section in environment().items():
        lines += [title, *(f"  {line}" for line in section), ""]
    return "\n".join(lines)


def _versions() -> list[str]:
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} not installed")
    return lines


def _cpu() -> list[str]:
    lines = [f"{torch.get_num_threads()} threads, torch uses {torch.backends.cpu.get_cpu_capability()}"]
    if _native.extension is not None:
        try:
            lines.append(
                f"nasfast uses {_native.extension.isa()} (usable here: {', '.join(_native.extension.usable_isas())})"
            )
        except RuntimeError as error:
            lines.append(str(error))
    return lines


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        # without a driver CUDA says that the driver's version is insufficient, which misleads people
        return ["torch sees no GPU", "compiled CUDA kernels do not run here: no GPU or no driver"]
    lines = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")
        if _native.extension is None:
            continue
        info = _native.extension.cuda_device_info(index)
        if info.kernels_run:
            how = "" if info.ptx_version == info.binary_version else ", which the driver compiles at their first call"
            lines.append(f"compiled CUDA kernels run here (image sm_{info.binary_version}{how})")
        else:
            lines.append(f"compiled CUDA kernels do not run here: {info.error or 'no GPU'}")
    return lines


def _build() -> list[str]:
    if _native.extension is None:
        return [str(_native.why_missing())]
    info = _native.extension.build_info()
    cuda = f"CUDA {info.cuda_version} for {info.cuda_archs}" if info.cuda_version else "no CUDA"
    return [
        f"{info.compiler} {info.flags}",
        f"compiled with torch {info.torch_version}, runs with torch {info.torch_target} and later",
        f"instruction sets {', '.join(info.isas)}",
        cuda,
    ]


def _operators() -> list[str]:
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    lines = []
    for device in devices:
        try:
            # what `precision: auto` runs, and not what another setting could run
            precision, reason = default_precision(device)
            rows = backends.explain(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        except ValueError as error:
            return [str(error)]
        lines.append(f"precision auto on {device}: {precision} ({reason})")
        for op in dict.fromkeys(row.op for row in rows):
            chosen = [row.backend for row in rows if row.op == op and row.chosen]
            lines.append(f"{op} on {device}: {chosen[0] if chosen else 'none, the named backend cannot serve'}")
            for row in rows:
                if row.op == op and row.serves and row.available:
                    lines.append(f"  {row.backend} serves only {row.serves}")
                if row.op == op and not row.chosen:
                    lines.append(f"  not {row.backend}: {row.reason or 'another backend comes first'}")
    return lines
