"""timm plug-in: exported networks as timm models.

Importing this module registers the architecture `nasfast`, which config.json names. `timm.create_model` then builds an
exported network from its folder, `local-dir:RUN/retrain/best`, or from Hugging Face's hub, `hf-hub:OWNER/NAME`. timm
finds models only in modules that were imported; `nasfast.retrain.timm_train` imports this one for an unmodified timm
`train.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nasfast.retrain.export import network_form
from nasfast.spaces import space_kind
from nasfast.supernet import ArchNetwork, build, standalone_network

try:
    from timm.models import build_model_with_cfg, register_model
except ImportError as error:
    raise RuntimeError("the timm plug-in needs timm: pip install 'nasfast[timm]'") from error


_POOLING = ("global_pool", "avg")
"""The argument of what every network does."""


@register_model
def nasfast(
    pretrained: bool = False,
    *,
    space: Mapping[str, Any] | None = None,
    arch: Sequence[int] = (),
    activation: str | None = None,
    features_only: bool = False,
    pretrained_cfg: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """timm entry point.

    Args:
        pretrained: whether to load the weights beside config.json; otherwise they are fresh and orthogonal, by torch's
            seed.
        space, arch, activation: `model_args` of config.json.
        features_only: give the last map of each size (`feature_info`) instead of logits; `out_indices` chooses some.
        pretrained_cfg: that of config.json.
        kwargs: `num_classes` and `in_chans` are optional. Other arguments of timm's scripts (drop rates and the like)
            have no meaning here and must be unset.
    """
    if space is None:
        raise ValueError(
            "timm model 'nasfast' needs an exported network: name the model local-dir:RUN/retrain/best or "
            "hf-hub:OWNER/NAME"
        )
    written = space_kind(space).from_dict(space)
    network = standalone_network(written, arch, activation=activation)
    if not pretrained:
        network = build(written, arch, activation=activation, seed=torch.initial_seed() % 2**63)
    if features_only and not network.feature_info:
        raise ValueError(
            "features_only: a cell gives several maps at a time; leave it out, or take a network of layers"
        )
    return build_model_with_cfg(
        functools.partial(_adapted, network),
        "nasfast",
        pretrained,
        pretrained_cfg=dict(pretrained_cfg or network_form(network)["pretrained_cfg"]),
        feature_cfg={"flatten_sequential": True, "out_indices": tuple(range(len(network.feature_info)))},
        features_only=features_only,
        **kwargs,
    )


def _is_unset(key: str, value: Any) -> bool:
    """Whether an argument asks for nothing: an empty `global_pool` asks for maps, but a rate of 0 for no dropout."""
    return value is None or value is False or (key.startswith("drop") and value == 0) or (key, value) == _POOLING


def _adapted(network: ArchNetwork, *, num_classes: int, in_chans: int, **others: Any) -> ArchNetwork:
    """The network with so many classes; raises ValueError for what would be ignored."""
    if ignored := sorted(key for key, value in others.items() if not _is_unset(key, value)):
        raise ValueError(f"timm model 'nasfast' has no {', '.join(ignored)}; allowed: num_classes, features_only")
    if in_chans != network.space.in_channels:
        raise ValueError(
            f"timm model 'nasfast': the space has {network.space.in_channels} input channels, got in_chans={in_chans}"
        )
    if num_classes != network.num_classes:
        network.reset_classifier(num_classes)
    return network.train()
