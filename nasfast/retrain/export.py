"""A retrained network as files: model.safetensors, arch.json and space.yaml, and ONNX."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from nasfast.config import nearest
from nasfast.runtime.files import temporary_beside, write_atomic
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session, require_onnx, write_onnx
from nasfast.settings import SPACE_FILE, ImageInfo
from nasfast.spaces import arch_to_json, format_arch, load_arch, read_space
from nasfast.supernet import ArchNetwork, standalone_network
from nasfast.train.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

MODEL_FILE, ARCH_FILE = "model.safetensors", "arch.json"

_ONNX_TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit; fp32 sums of some 60 layers differ by their order."""


def save_model(network: ArchNetwork, path: str | Path) -> None:
    """Write the weights to `path`, and arch.json and space.yaml beside it; `load_model` needs all three.

    arch.json also has the costs, and `network.images`: the classes, and how an image becomes the input. The metadata of
    the safetensors file has the latter too.

    Raises:
        OSError, CheckpointError: a file cannot be written.
    """
    path = Path(path)
    space = network.space
    write_atomic(path.parent / SPACE_FILE, space.to_yaml().encode())
    form = {**json.loads(arch_to_json(network.arch, space)), **_description(network)}
    write_atomic(path.parent / ARCH_FILE, (json.dumps(form, indent=1) + "\n").encode())
    save_checkpoint(path, Checkpoint(network.state_dict(), {**_state(network), "images": _images(network)}))


def _state(network: ArchNetwork) -> dict[str, Any]:
    """What the weights belong to; the file has it beside them, under the same digest."""
    return {
        "activation": network.activation,
        "arch": format_arch(network.arch),
        "fingerprint": network.space.fingerprint,
    }


def _images(network: ArchNetwork) -> dict[str, Any] | None:
    return network.images.to_dict() if network.images else None


def _description(network: ArchNetwork) -> dict[str, Any]:
    """What a user of the network needs to know of it, as JSON."""
    cost = network.space.cost(network.arch)
    return {"macs": cost.macs, "params": cost.params, "images": _images(network)}


def model_folder(folder: Path, name: str) -> Path:
    """The folder of one of the networks in `folder`.

    Raises:
        FileNotFoundError: there is no network of this name; the text has the names that exist.
    """
    if not (folder / name).is_dir():
        names = [file.parent.name for file in folder.glob(f"*/{MODEL_FILE}")]
        there = nearest(name, names) if names else "`nasfast retrain` makes networks"
        raise FileNotFoundError(f"{folder} has no network {name!r}; {there}")
    return folder / name


def load_model(path: str | Path) -> ArchNetwork:
    """The network that `save_model` wrote, in eval mode on the CPU, with its `images`.

    Raises:
        TypeError: path is no path.
        FileNotFoundError: the weights, arch.json or space.yaml are missing.
        ValueError: the files do not belong together or are damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_model: path must be a folder that `save_model` wrote, got {type(path).__name__}")
    path = Path(path)
    if path.is_dir():
        path = path / MODEL_FILE
    for file in (path, path.parent / ARCH_FILE, path.parent / SPACE_FILE):
        if not file.exists():
            raise FileNotFoundError(
                f"{file} is missing: an exported model is {MODEL_FILE}, {ARCH_FILE} and {SPACE_FILE} in one folder"
            )
    space = read_space(path.parent / SPACE_FILE)
    arch = load_arch(path.parent / ARCH_FILE, space)
    try:
        saved = load_checkpoint(path)
        network = standalone_network(space, arch, activation=saved.state["activation"])
        images = saved.state.pop("images")
        if saved.state != _state(network):
            raise CheckpointError(f"they belong to {saved.state}")
        network.load_state_dict(saved.tensors)
        network.images = ImageInfo.from_dict(images) if images else None
    except (RuntimeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not have the weights of {path.parent / ARCH_FILE}: {error}; "
            "`nasfast retrain --resume` writes them again"
        ) from error
    return network.eval()


def export_onnx(network: ArchNetwork, path: str | Path) -> float:
    """Write ONNX with a free batch size, after comparing onnxruntime with PyTorch.

    An older file is replaced only if the new one passes the comparison.

    Args:
        network: the network; it is put into eval mode.
        path: the .onnx file. Its input is `images` (N, in_channels, resolution, resolution) fp32, its output `logits`.
            Its metadata has, as JSON: `space`, `arch`, `macs`, `params`, and `images` (`ImageInfo`).

    Returns:
        Largest absolute difference of logits over 4 random images, divided by the largest absolute logit.

    Raises:
        RuntimeError: the extra `onnx` is not installed, or onnxruntime and PyTorch disagree.
    """
    require_onnx()
    path, space = Path(path), network.space
    network = network.eval().cpu()
    images = torch.randn(
        4, space.in_channels, space.resolution, space.resolution, generator=torch.Generator().manual_seed(0)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        expected = network(images)
    unchecked = temporary_beside(path)
    try:
        write_onnx(network, images, unchecked)
        (got,) = open_session(unchecked).run([OUTPUT], {INPUT: images.numpy()})
        difference = ((torch.from_numpy(got) - expected).abs().max() / expected.abs().max()).item()
        if not difference <= _ONNX_TOLERANCE:
            raise RuntimeError(
                f"{path} is not written: onnxruntime differs from PyTorch by {difference:.2g} of the largest logit, "
                f"expected at most {_ONNX_TOLERANCE:g}; export again with another version of onnxruntime or torch"
            )
        _describe(unchecked, network)
        os.replace(unchecked, path)
    finally:
        unchecked.unlink(missing_ok=True)
    return difference


def _describe(path: Path, network: ArchNetwork) -> None:
    """Put what a user needs to know of the network into the metadata of an ONNX file."""
    import onnx

    model = onnx.load_model_from_string(path.read_bytes())
    form = {"space": network.space.name, "arch": list(network.arch), **_description(network)}
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in form.items()})
    path.write_bytes(model.SerializeToString())
