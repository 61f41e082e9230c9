"""Features: what a network's classifier reads. They say more of an image than the logits of a few classes do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nasfast.shrink.graph import ShrinkError
from nasfast.shrink.recipe import Recipe


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Path and module of the classifier, the last linear layer.

    Raises:
        ShrinkError: there is none.
    """
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ShrinkError(f"{type(model).__name__} has no nn.Linear as its classifier: give a network that has one")
    return found[-1]


def split(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """A network up to its classifier, and the classifier; both have the parameters and buffers of the model itself."""
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    body = copy.deepcopy(model, own)
    path, classifier = last_linear(body)
    body.set_submodule(path, nn.Identity())
    return body, classifier


@torch.no_grad()
def gives_features(model: nn.Module, images: Tensor) -> bool:
    """Whether the logits (N, classes) of images are those of the classifier on the features (N, its inputs)."""
    logits = model(images)
    body, classifier = split(model)
    try:
        features = body(images)
    except Exception:  # a forward that reads more of the classifier than its outputs raises anything
        return False
    if not isinstance(features, Tensor) or features.shape != (len(images), classifier.in_features):
        return False
    return torch.allclose(classifier(features), logits, rtol=1e-4, atol=1e-5)


def kept_features(model: nn.Module, recipe: Recipe | None) -> Tensor:
    """Indices of the features that the network of a recipe keeps of those of the larger one; without one all."""
    path, classifier = last_linear(model)
    columns = [part.columns for part in recipe.slices if part.module == path] if recipe is not None else []
    kept = columns[0] if columns else None
    return torch.arange(classifier.in_features) if kept is None else torch.tensor(kept)


def with_features(model: nn.Module, recipe: Recipe | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A teacher for `adapt`: it gives logits (N, classes) of images, and the features that a smaller network keeps.

    Args:
        model: the larger network, in evaluation mode.
        recipe: from `make_recipe`, of the smaller network; None where it keeps all features.

    Raises:
        ShrinkError: the model has no classifier.
    """
    body, classifier = split(model)
    kept = kept_features(model, recipe)

    def teacher(images: Tensor) -> tuple[Tensor, Tensor]:
        features = body(images)
        return classifier(features), features[:, kept.to(features.device)]

    return teacher
