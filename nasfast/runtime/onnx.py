"""ONNX files and onnxruntime, both from the extra `onnx`."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.config import ConfigError

if TYPE_CHECKING:
    import onnxruntime

INPUT, OUTPUT = "images", "logits"
"""Names of the input and the output of a written network."""

# the package that has an execution provider, by the provider's name without `ExecutionProvider`
_PACKAGES = {
    "CUDA": "onnxruntime-gpu",
    "Tensorrt": "onnxruntime-gpu",
    "OpenVINO": "onnxruntime-openvino",
    "Dml": "onnxruntime-directml",
}


def require_onnx() -> None:
    """Raise RuntimeError, which says what to install, unless the extra `onnx` is there."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RuntimeError(f"ONNX export needs {error.name}: pip install 'nasfast[onnx]'") from error


def check_provider(provider: str) -> None:
    """Refuse an execution provider that the installed onnxruntime has not; the text says what to install."""
    require_onnx()
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    if provider not in providers:
        package = _PACKAGES.get(provider.removesuffix("ExecutionProvider"))
        remedy = f"pip install {package} in place of onnxruntime" if package else "choose one of these"
        raise ConfigError(f"onnxruntime has no provider {provider!r}, but {', '.join(providers)}: {remedy}")


def write_onnx(network: nn.Module, images: Tensor | Sequence[Tensor], path: Path) -> None:
    """Write a network, in eval mode on the CPU, with a free batch size.

    Args:
        network: takes images and gives logits. One that takes several tensors as `*images` gives as many; their names
            have numbers, as `images0`, and each has a batch size of its own.
        images: (N, C, H, W), N > 1, an example of its input, or one of each.
        path: the .onnx file.
    """
    require_onnx()
    several = not isinstance(images, Tensor)
    ends = [str(i) for i in range(len(images))] if several else [""]
    sizes = tuple({0: torch.export.Dim(f"batch{end}")} for end in ends)
    torch.onnx.export(
        network,
        tuple(images) if several else (images,),
        str(path),
        input_names=[INPUT + end for end in ends],
        output_names=[OUTPUT + end for end in ends],
        dynamic_shapes=(sizes,) if several else sizes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def quantise(model: bytes, batches: Iterable[Tensor]) -> bytes:
    """The content of a file in 8-bit integers: onnxruntime's static quantisation, of weights by channel.

    Args:
        model: the content of an ONNX file whose input is `INPUT`.
        batches: (N, C, H, W) each, from which the ranges of activations are taken.

    Raises:
        RuntimeError: onnxruntime cannot quantise it, or cannot read what it made.
    """
    require_onnx()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    remaining = iter(batches)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(remaining, None)
            return None if batch is None else {INPUT: batch.contiguous().numpy()}

    with tempfile.TemporaryDirectory() as folder:
        given, prepared, quantised = (Path(folder) / f"{name}.onnx" for name in ("given", "prepared", "quantised"))
        given.write_bytes(model)
        try:
            quant_pre_process(str(given), str(prepared))
            quantization.quantize_static(
                str(prepared),
                str(quantised),
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
            content = quantised.read_bytes()
            open_session(content)
            return content
        except Exception as error:  # onnxruntime raises errors of its own
            raise RuntimeError(f"onnxruntime cannot quantise it ({type(error).__name__}: {error})") from error


def open_session(
    model: bytes, *, provider: str = "CPUExecutionProvider", threads: int = 0
) -> onnxruntime.InferenceSession:
    """The network of a file's content, ready to run; `threads` is the number of CPU threads, 0 for one per core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # idle threads would spin for a while after each run, and slow the networks that are timed next
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # content and no name, because onnxruntime takes every file name to be UTF-8
    return onnxruntime.InferenceSession(model, options, providers=[provider])
