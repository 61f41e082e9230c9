"""A retrained network as files that need no nasfast: weights, config.json, and torch.export's and ONNX's programs."""

from __future__ import annotations

import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from nasfast.config import nearest
from nasfast.runtime.files import temporary_beside, write_atomic
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session, require_onnx, write_onnx
from nasfast.settings import ImageInfo
from nasfast.spaces import Arch, ArchSpace, format_arch, space_kind
from nasfast.supernet import ArchNetwork, standalone_network
from nasfast.train.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

MODEL_FILE, FORM_FILE, PROGRAM_FILE, ONNX_FILE = "model.safetensors", "config.json", "model.pt2", "model.onnx"
"""Names that Hugging Face and timm, torch.export and onnxruntime expect."""

_TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit; fp32 sums of some 60 layers differ by their order."""

# timm's own defaults, for a network of which it is not known how images become its input
_CROP_SHARE, _MEAN, _STD = 0.875, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def save_model(network: ArchNetwork, path: str | Path) -> None:
    """Write the weights to `path`, and config.json beside it; `load_model` and timm need both.

    The metadata of the safetensors file has the architecture and `network.images`, too.

    Raises:
        OSError, CheckpointError: a file cannot be written.
    """
    path = Path(path)
    write_atomic(path.parent / FORM_FILE, (json.dumps(network_form(network), indent=1) + "\n").encode())
    save_checkpoint(path, Checkpoint(network.state_dict(), {**_state(network), "images": _images(network)}))


def network_form(network: ArchNetwork) -> dict[str, Any]:
    """What config.json has, in the form of timm on Hugging Face: from `model_args` the network can be built."""
    space, images = network.space, network.images
    names = {} if images is None else {"label_names": list(images.classes)}
    return {
        "architecture": "nasfast",
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        **names,
        "model_args": {
            "space": space.to_dict(),
            "arch": list(network.arch),
            "activation": network.activation,
        },
        "pretrained_cfg": {
            "input_size": [space.in_channels, space.resolution, space.resolution],
            "num_classes": network.num_classes,
            "crop_pct": _CROP_SHARE if images is None else images.resolution / images.short_side,
            "interpolation": "bilinear",
            "mean": list(_MEAN if images is None else images.mean),
            "std": list(_STD if images is None else images.std),
            "classifier": "classifier",
        },
    }


def read_form(path: Path) -> tuple[ArchSpace, Arch, str]:
    """The space, the architecture and the activation in a config.json; ValueError if it has none."""
    try:
        args = json.loads(path.read_text(encoding="utf-8"))["model_args"]
        space = space_kind(args["space"]).from_dict(args["space"])
        return space, space.check(args["arch"]), str(args["activation"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not that of a network of nasfast: {error}") from error


def _state(network: ArchNetwork) -> dict[str, Any]:
    """What the weights belong to; the file has it beside them, under the same digest."""
    return {
        "activation": network.activation,
        "arch": format_arch(network.arch),
        "fingerprint": network.space.fingerprint,
    }


def _images(network: ArchNetwork) -> dict[str, Any] | None:
    return network.images.to_dict() if network.images else None


def model_folder(folder: Path, name: str) -> Path:
    """The folder of one of the networks in `folder`; FileNotFoundError with the names that exist."""
    if not (folder / name).is_dir():
        names = [file.parent.name for file in folder.glob(f"*/{MODEL_FILE}")]
        advice = nearest(name, names) if names else "`nasfast retrain` makes networks"
        raise FileNotFoundError(f"{folder} has no network {name!r}; {advice}")
    return folder / name


def load_model(path: str | Path) -> ArchNetwork:
    """The network that `save_model` wrote, in eval mode on the CPU, with its `images`.

    Raises:
        TypeError: path is no path.
        FileNotFoundError: the weights or config.json are missing.
        ValueError: the files do not belong together or are damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_model: path must be a folder that `save_model` wrote, got {type(path).__name__}")
    path = Path(path)
    if path.is_dir():
        path = path / MODEL_FILE
    form = path.parent / FORM_FILE
    for file in (path, form):
        if not file.exists():
            raise FileNotFoundError(
                f"{file} is missing: an exported model is {MODEL_FILE} and {FORM_FILE} in one folder"
            )
    space, arch, activation = read_form(form)
    try:
        saved = load_checkpoint(path)
        network = standalone_network(space, arch, activation=activation)
        images = saved.state.pop("images")
        if saved.state != _state(network):
            raise CheckpointError(f"they belong to {saved.state}")
        network.load_state_dict(saved.tensors)
        network.images = ImageInfo.from_dict(images) if images else None
    except (RuntimeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not have the weights of {form}: {error}; `nasfast retrain --resume` writes them again"
        ) from error
    return network.eval()


def export_program(network: ArchNetwork, path: str | Path) -> float:
    """Write the program of torch.export with a free batch size, after comparing it with the network.

    `torch.export.load(path).module()` takes images (N, in_channels, resolution, resolution) fp32 and gives logits
    (N, num_classes) where there is no nasfast.

    Args:
        network: the network; it is put into eval mode on the CPU.
        path: the .pt2 file; an older one is replaced only if the new one passes the comparison.

    Returns:
        Largest absolute difference of logits over 4 random images, divided by the largest absolute logit.

    Raises:
        RuntimeError: the network has operators other than PyTorch's, or the program computes something else.
    """
    return write_program(network, _random_images(network), path)


def write_program(network: nn.Module, images: Tensor, path: str | Path) -> float:
    """As `export_program`, of any network; `images` (N, C, H, W), N > 1, are those that the program is compared on."""
    path = Path(path)
    network = network.eval().cpu()
    with torch.no_grad():
        expected = network(images)
        program = torch.export.export(network, (images,), dynamic_shapes=({0: Dim("batch")},))
    called = {str(node.target): getattr(node.target, "namespace", "aten") for node in program.graph.nodes}
    if foreign := [name for name, namespace in called.items() if namespace != "aten"]:
        raise RuntimeError(
            f"{path} is not written: without nasfast it could not call {', '.join(foreign)}; build the block of "
            "PyTorch's operators, or export ONNX alone"
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine, which the file would have
    file = io.BytesIO()
    with warnings.catch_warnings():
        # PyTorch 2.15 warns of weights that are not on the CPU, where these are
        warnings.filterwarnings("ignore", message="No complete tensor found", category=UserWarning)
        torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        difference = _difference(torch.export.load(file).module()(images), expected)
    _check_difference(difference, path, "the exported program", "torch")
    write_atomic(path, file.getvalue())
    return difference


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
    cost = network.space.cost(network.arch)
    about = {"space": network.space.name, "arch": list(network.arch), "macs": cost.macs, "params": cost.params}
    return write_checked_onnx(network, _random_images(network), path, {**about, "images": _images(network)})


def write_checked_onnx(network: nn.Module, images: Tensor, path: str | Path, about: dict[str, Any]) -> float:
    """As `export_onnx`, of any network.

    Args:
        network: the network; it is put into eval mode.
        images: (N, C, H, W), N > 1, on which onnxruntime and PyTorch are compared.
        path: the .onnx file.
        about: metadata, whose values are written as JSON.
    """
    require_onnx()
    path = Path(path)
    network = network.eval().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        expected = network(images)
    unchecked = temporary_beside(path)
    try:
        write_onnx(network, images, unchecked)
        (got,) = open_session(unchecked.read_bytes()).run([OUTPUT], {INPUT: images.numpy()})
        difference = _difference(torch.from_numpy(got), expected)
        _check_difference(difference, path, "onnxruntime", "onnxruntime or torch")
        _describe(unchecked, about)
        os.replace(unchecked, path)
    finally:
        unchecked.unlink(missing_ok=True)
    return difference


def _random_images(network: ArchNetwork) -> Tensor:
    """Four random images, the same at each call."""
    space, generator = network.space, torch.Generator().manual_seed(0)
    return torch.randn(4, space.in_channels, space.resolution, space.resolution, generator=generator)


def _difference(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def _check_difference(difference: float, path: Path, what: str, package: str) -> None:
    """Refuse a file that computes something else than the network."""
    if not difference <= _TOLERANCE:
        raise RuntimeError(
            f"{path} is not written: {what} differs from PyTorch by {difference:.2g} of the largest logit, "
            f"expected at most {_TOLERANCE:g}; export again with another version of {package}"
        )


def _describe(path: Path, about: dict[str, Any]) -> None:
    """Put what a user needs to know of the network into the metadata of an ONNX file."""
    import onnx

    model = onnx.load_model_from_string(path.read_bytes())
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in about.items()})
    path.write_bytes(model.SerializeToString())
