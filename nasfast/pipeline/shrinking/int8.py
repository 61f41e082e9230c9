"""A network in 8-bit integers: onnxruntime's static quantisation, with ranges from training images."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nasfast.pipeline.shrinking.images import Answers, answers
from nasfast.pipeline.shrinking.material import Material
from nasfast.runtime.files import temporary_beside
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session, require_onnx

INT8_FILE = "model-int8.onnx"

_CALIBRATION = 200
"""Training images from which ranges of activations are taken."""


def write_int8(work: Material, size: int, source: Path, path: Path) -> None:
    """Write the network of an ONNX file in 8-bit integers.

    Args:
        work: the material.
        size: side of the network's images.
        source: the ONNX file.
        path: the file to write.

    Raises:
        RuntimeError: onnxruntime cannot quantise it, or there is no ONNX file.
    """
    require_onnx()
    if not source.exists():
        raise RuntimeError(f"{source.name} is missing, from which it is made")
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    shown, _ = work.images.read(work.images.train, size, _CALIBRATION)
    batches = iter(work.images.prepared(shown).split(16))

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            return None if batch is None else {INPUT: batch.contiguous().numpy()}

    unchecked = temporary_beside(path)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared))
            quantization.quantize_static(
                str(prepared),
                str(unchecked),
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
        os.replace(unchecked, path)
    except Exception as error:  # onnxruntime raises errors of its own
        raise RuntimeError(f"onnxruntime cannot quantise it ({type(error).__name__}: {error})") from error
    finally:
        unchecked.unlink(missing_ok=True)


def int8_answers(work: Material, size: int, path: Path) -> Answers:
    """The answers of such a file to the validation images."""
    session = open_session(path.read_bytes(), threads=torch.get_num_threads())

    def network(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: x.contiguous().numpy()})[0])

    return answers(network, work.images, work.val(size))
