"""A copy of a model that is traced in its place, and what else a trace must leave as it is."""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from nasfast.fusion.replaced import ReplacedForward
from nasfast.fusion.watch import HOOKS


def twin_of(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and its own buffers, without hooks and without the forwards of `fuse`."""
    memo: dict[int, object] = {}
    # tensors that are not copied: they may be large, and a result that a forward has stored cannot be copied
    shared = []
    for module in model.modules():
        values = (*module._parameters.values(), *vars(module).values())
        shared += [value for value in values if isinstance(value, torch.Tensor)]
        for name in HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
        if isinstance(vars(module).get("forward"), ReplacedForward):
            memo[id(module.forward)] = None
    memo.update((id(tensor), tensor) for tensor in shared)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if vars(module).get("forward", ...) is None:
            del module.forward
    return twin


@contextmanager
def unchanged_surroundings() -> Iterator[None]:
    """Restore the random generators that a traced forward may use, and suppress its warnings."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def first_line(error: Exception) -> str:
    """The first line of its message, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
