"""What a smaller network keeps of a larger one, as data: it rebuilds the network on a fresh copy of the larger one."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.config import ConfigBase, ConfigError
from nasfast.fusion import unfuse
from nasfast.runtime.files import seal, unseal, write_atomic
from nasfast.shrink.graph import ShrinkError
from nasfast.train.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

RECIPE_FILE, WEIGHTS_FILE = "recipe.json", "model.safetensors"
"""Names in a folder that `save` wrote."""

_FORMAT = "nasfast.shrink_recipe/1"


@dataclass(frozen=True)
class Slice(ConfigBase):
    """What a module keeps: a convolution, a linear layer or a BatchNorm.

    Attributes:
        module: its path.
        rows: outputs, or features of a BatchNorm, that it keeps; None for all.
        columns: input channels that it keeps; None for all.
        groups: groups that are left; None for as many as before.
        bias: whether it gets a bias that it did not have.
    """

    module: str
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    groups: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class Dropped(ConfigBase):
    """A block that is replaced by an identity, or by a ReLU.

    Attributes:
        module: its path.
        relu: whether the ReLU behind its addition stays.
    """

    module: str
    relu: bool = False


@dataclass(frozen=True)
class Recipe(ConfigBase):
    """The structure of a smaller network.

    Attributes:
        arch: the architecture in the space of `find`.
        fingerprint: fingerprint of this space.
        resolution: side of the images in pixels; 0 where they are not square.
        base: digest of the names and shapes of the larger network's state dict.
        slices: the modules that are narrower.
        dropped: the blocks that are gone.
        format: version of the file's format.
    """

    arch: tuple[int, ...]
    fingerprint: str
    resolution: int
    base: str
    slices: tuple[Slice, ...]
    dropped: tuple[Dropped, ...]
    format: str = _FORMAT

    def _check_values(self) -> None:
        if self.format != _FORMAT:
            raise ValueError(f"recipe has format {self.format!r}, this version reads {_FORMAT!r}: cut again")


def shapes_digest(model: nn.Module) -> str:
    """Sixteen hex digits of the names and shapes in a state dict."""
    shapes = [[name, list(tensor.shape)] for name, tensor in model.state_dict().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def rebuild(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A smaller copy of a network; its weights are those that the network had.

    Args:
        model: a network of the class and form that was cut; it is not changed.
        recipe: what the copy keeps.

    Raises:
        ShrinkError: the network has other parameters than the one that was cut.
    """
    if (digest := shapes_digest(model)) != recipe.base:
        raise ShrinkError(
            f"the recipe is for a network whose parameters have the digest {recipe.base}, this one has {digest}: build "
            "the network as it was when it was cut, with as many classes"
        )
    small = copy.deepcopy(model)
    unfuse(small)
    for part in recipe.slices:
        _narrow(small.get_submodule(part.module), part)
    for block in recipe.dropped:
        small.set_submodule(block.module, nn.ReLU() if block.relu else nn.Identity())
    return small


def _narrow(module: nn.Module, part: Slice) -> None:
    any_module: Any = module
    rows = None if part.rows is None else torch.tensor(part.rows)
    columns = None if part.columns is None else torch.tensor(part.columns)
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if tensor.dim() == 0:
            continue
        kept = tensor.detach()
        if rows is not None:
            kept = kept.index_select(0, rows.to(kept.device))
        if columns is not None and name == "weight":
            kept = kept.index_select(1, columns.to(kept.device))
        kept = kept.clone()
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, nn.Parameter(kept, tensor.requires_grad))
        else:
            setattr(module, name, kept)
    if part.bias:
        any_module.bias = nn.Parameter(
            any_module.weight.new_zeros(len(any_module.weight)), any_module.weight.requires_grad
        )
    if isinstance(module, _BatchNorm):
        module.num_features = len(any_module.running_mean)
        return
    groups = part.groups or (module.groups if isinstance(module, nn.Conv2d) else 1)
    outputs, inputs = any_module.weight.shape[0], any_module.weight.shape[1] * groups
    if isinstance(module, nn.Conv2d):
        module.groups, module.out_channels, module.in_channels = groups, outputs, inputs
    else:
        any_module.out_features, any_module.in_features = outputs, inputs


def save(model: nn.Module, recipe: Recipe, folder: str | Path) -> None:
    """Write recipe.json and model.safetensors, from which `load` makes the network again, without pickle.

    Raises:
        CheckpointError, OSError: a file cannot be written.
    """
    folder = Path(folder)
    write_atomic(folder / RECIPE_FILE, (seal(recipe.to_dict()) + "\n").encode())
    tensors: dict[str, Tensor] = dict(model.state_dict())
    save_checkpoint(
        folder / WEIGHTS_FILE, Checkpoint(tensors, {"fingerprint": recipe.fingerprint, "arch": list(recipe.arch)})
    )


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """The network that `save` wrote, on a copy of the larger network, in evaluation mode on the CPU.

    Args:
        model: a network of the class and form that was cut, with any weights; it is not changed.
        folder: the folder with both files.

    Raises:
        FileNotFoundError: a file is missing.
        ShrinkError: the files are damaged, do not belong together, or are for another network.
    """
    folder = Path(folder)
    for file in (RECIPE_FILE, WEIGHTS_FILE):
        if not (folder / file).exists():
            raise FileNotFoundError(f"{folder / file} is missing: a cut network is {RECIPE_FILE} and {WEIGHTS_FILE}")
    try:
        recipe = Recipe.from_dict(unseal((folder / RECIPE_FILE).read_text(encoding="utf-8")))
        saved = load_checkpoint(folder / WEIGHTS_FILE)
        if saved.state != {"fingerprint": recipe.fingerprint, "arch": list(recipe.arch)}:
            raise CheckpointError(f"{WEIGHTS_FILE} belongs to architecture {saved.state}")
        small = rebuild(model, recipe)
        small.load_state_dict(saved.tensors)
    except ShrinkError:
        raise
    except (CheckpointError, ConfigError, ValueError, KeyError, RuntimeError) as error:
        raise ShrinkError(f"{folder} has no network that can be read ({error}): save it again") from error
    return small.cpu().eval()
