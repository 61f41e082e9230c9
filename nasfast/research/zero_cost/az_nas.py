"""The three scores of AZ-NAS that look at blocks: expressivity, progressivity and trainability.

Lee and Ham, AZ-NAS: Assembling Zero-Cost Proxies for Network Architecture Search (CVPR 2024, arXiv 2403.19232). The
paper computes them with normal noise for images; the functions take the images that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.indicators.isometry import largest_singular_value, mean_channel_jacobian, random_signs
from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.scores import working_copy

_FLOOR = 1e-8
"""Added to shares in logarithms, as in the released code."""


def expressivity(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Sum over block outputs of the entropy of their channels' principal components (section 3.1).

    Entropy is -sum p log p, where p are the eigenvalues of the covariance of the channels over images and pixels,
    divided by their sum. Norms use the batch's statistics.

    Args:
        module: a module of at least two blocks, see `blocks`.
        images: (N, C, H, W), on the module's device.
        labels: not used.

    Raises:
        ScoreError: there are fewer than two blocks, or a map is not finite or the same at all pixels.
    """
    return math.fsum(_entropies(module, images))


def progressivity(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """The smallest growth from one block to the next of the entropy that `expressivity` sums up (section 3.2).

    Arguments and errors are those of `expressivity`.
    """
    entropies = _entropies(module, images)
    return min(after - before for before, after in zip(entropies, entropies[1:], strict=False))


def trainability(module: nn.Module, images: Tensor, labels: Tensor | None = None, *, seed: int = 0) -> float:
    """Mean over blocks of 2 - s - 1 / s, which is 0 where each block's mean channel Jacobian has s = 1 (section 3.3).

    s is the largest singular value, see `nasfast.indicators.isometry`. A block that passes its input on unchanged is
    refused, because it learns nothing; the released code gives it minus infinity.

    Args:
        module: a module of at least two blocks, see `blocks`; the first gives the map that the second begins with.
        images: (N, C, H, W), on the module's device.
        labels: not used.
        seed: seed of the random signs.

    Raises:
        ScoreError: there are fewer than two blocks, a map is not finite, or the output of a block does not depend on
            that of the block before it, or equals it.
    """
    generator = torch.Generator().manual_seed(seed)
    before: list[Tensor] = []
    terms: list[float] = []

    def measure(name: str, output: Tensor) -> Tensor:
        if before:
            if output.shape == before[-1].shape and torch.equal(output, before[-1]):
                raise ScoreError(f"block {name!r} passes its input on unchanged, so nothing in it can be trained")
            try:
                signs = random_signs(output, generator)
                s = largest_singular_value(mean_channel_jacobian(before[-1], output, signs))
            except ScoreError as error:
                raise ScoreError(f"block {name!r}: {error}") from error
            terms.append(2 - s - 1 / s)
        # a new leaf, so that a product of this block needs no other block's graph
        before[:] = [output.detach().requires_grad_()]
        return before[-1].clone()

    _run(module, images, measure)
    return math.fsum(terms) / len(terms)


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a module by name, of which the first is the stem.

    They are children with convolutions, in a plain `nn.Sequential`, list or dict its elements. A list or dict may also
    have blocks of other modules, such as a cell that only pools. A module that has all its blocks in one child of
    another kind is looked into.
    """

    def look(parent: nn.Module, prefix: str) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        listed = type(parent) in (nn.ModuleList, nn.ModuleDict)
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
                found |= look(child, f"{path}.")
            elif any(isinstance(m, nn.Conv2d) for m in child.modules()) or listed and any(child.children()):
                found[path] = child
        return found

    found = look(module, "")
    while len(found) == 1 and not isinstance(child := next(iter(found.values())), nn.Conv2d):
        inner = look(child, f"{next(iter(found))}.")
        if not inner:
            break
        found = inner
    return found


def _entropies(module: nn.Module, images: Tensor) -> list[float]:
    """The entropy of the principal components of each block's output, in the order in which blocks run."""
    entropies: list[float] = []

    def measure(name: str, output: Tensor) -> Tensor:
        flat = output.detach().transpose(0, 1).flatten(1).double()
        flat = flat - flat.mean(1, keepdim=True)
        values = torch.linalg.eigvalsh(flat @ flat.T / flat.shape[1]).clamp(min=0)
        if not values.any():
            raise ScoreError(f"block {name!r} has the same output at all pixels of all images")
        shares = values / values.sum()
        entropies.append(-(shares * (shares + _FLOOR).log()).sum().item())
        return output

    with torch.no_grad():
        _run(module, images, measure)
    return entropies


def _run(module: nn.Module, images: Tensor, measure: Callable[[str, Tensor], Tensor]) -> None:
    """Run a copy in at least single precision; `measure` gets the name and the output of each block, and replaces it.

    Raises:
        ScoreError: fewer than two blocks run, or an output is no map or not finite.
    """
    copied = working_copy(module)
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in copied.parameters()):
        # sums of half precision over all pixels of a batch would be noise
        copied, images = copied.float(), images.float()
    ran: list[str] = []

    def hook(name: str) -> Callable[..., Any]:
        def look(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
            first, rest = (output[0], output[1:]) if isinstance(output, tuple) and output else (output, None)
            if not isinstance(first, Tensor) or first.ndim != 4:
                raise ScoreError(f"block {name!r} must give maps (N, C, H, W), or a tuple that begins with them")
            if not first.isfinite().all():
                raise ScoreError(
                    f"this {type(module).__name__} has no finite score: block {name!r} gives no finite map"
                )
            ran.append(name)
            replaced = measure(name, first)
            return replaced if rest is None else (replaced, *rest)

        return look

    for name, block in blocks(copied).items():
        block.register_forward_hook(hook(name))
    copied(images)
    if len(ran) < 2:
        raise ScoreError(
            f"this {type(module).__name__} has {len(ran)} blocks, and the score compares at least two: give a module "
            "whose children, or elements of nn.Sequential, are blocks with convolutions"
        )
