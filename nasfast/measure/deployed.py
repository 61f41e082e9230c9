"""Networks and their parts as they are deployed: PyTorch with folded BatchNorms, `torch.compile`, or onnxruntime."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nasfast.measure.config import LatencyConfig
from nasfast.measure.timing import time_call
from nasfast.ops.modules import ConvBNAct
from nasfast.runtime.onnx import INPUT, open_session, quantise, write_onnx

Timed = Callable[[], dict[str, float]]
"""Runs a network once; the seconds by the key `run`."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def deployed(module: nn.Module, images: Tensor, cfg: LatencyConfig) -> Timed:
    """A function that runs a network without gradients on the settings' device, and times it.

    Before each run the input is written again, because in a network the layer before has just written it.

    Args:
        module: the network or a part of one, on the CPU. It is put into eval mode, and its BatchNorms are folded.
        images: (batch, C, H, W), the input.
        cfg: device, number type, threads and clock.
    """
    module = fold(module.eval())
    if cfg.device == "onnx":
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = Path(folder) / "network.onnx"
            write_onnx(module, images.new_zeros(4, *images.shape[1:]), path)
            return in_onnxruntime(path.read_bytes(), images, cfg)
    device = torch.device(cfg.device)
    dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    network: Callable[[Tensor], Tensor] = module.to(device, dtype).to(memory_format=torch.channels_last)
    if cfg.compiled:
        network = torch.compile(network)
    x = images.to(device, dtype, memory_format=torch.channels_last)

    def run() -> dict[str, float]:
        with torch.inference_mode():
            x.add_(0)
            return {"run": time_call(lambda: network(x), device, clock=CLOCKS[cfg.clock])}

    return run


def fold(module: nn.Module) -> nn.Module:
    """Fold the BatchNorms of a module in eval mode into its convolutions, in place; onnxruntime would do the same."""
    for unit in module.modules():
        if isinstance(unit, ConvBNAct):
            unit.conv = fuse_conv_bn_eval(unit.conv, unit.bn)
            unit.bn = nn.Identity()  # type: ignore[assignment]  # the module is only run from here on
    return module


def second(run: Timed) -> Timed:
    """A function that runs a network twice and gives the time of the second run, for which caches have its data."""

    def timed() -> dict[str, float]:
        run()
        return run()

    return timed


def in_onnxruntime(model: bytes, images: Tensor, cfg: LatencyConfig) -> Timed:
    """As `deployed`, of the content of an ONNX file in fp32."""
    if cfg.dtype == "int8":  # its speed does not depend on the ranges
        model = quantise(model, [images])
    session = open_session(model, provider=cfg.provider, threads=cfg.threads)
    array, clock = images.contiguous().numpy(), CLOCKS[cfg.clock]

    def run() -> dict[str, float]:
        np.add(array, 0, out=array)
        return {"run": time_call(lambda: session.run(None, {INPUT: array}), torch.device("cpu"), clock=clock)}

    return run
