"""A network in 8-bit integers: onnxruntime's static quantisation, with ranges from training images."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nasfast.pipeline.shrinking.images import Answers, answers
from nasfast.pipeline.shrinking.material import Material
from nasfast.runtime.files import write_atomic
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session, quantise

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
    if not source.exists():
        raise RuntimeError(f"{source.name} is missing, from which it is made")
    shown, _ = work.images.read(work.images.train, size, _CALIBRATION)
    write_atomic(path, quantise(source.read_bytes(), work.images.prepared(shown).split(16)))


def int8_answers(work: Material, size: int, path: Path) -> Answers:
    """The answers of such a file to the validation images."""
    session = open_session(path.read_bytes(), threads=torch.get_num_threads())

    def network(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: x.contiguous().numpy()})[0])

    return answers(network, work.images, work.val(size))
