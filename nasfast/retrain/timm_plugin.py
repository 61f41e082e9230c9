"""timm plug-in: a searched architecture as the timm model `nasfast`.

Importing this module registers it; `timm.create_model("nasfast", arch="retrain/best")` builds it from the folder of an
exported model. timm finds models only in modules that were imported; `nasfast.retrain.timm_train` imports this one for
an unmodified timm `train.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nasfast.retrain.export import load_model
from nasfast.supernet import ArchNetwork, build

try:
    from timm.models import register_model
except ImportError as error:
    raise RuntimeError("the timm plug-in needs timm: pip install 'nasfast[timm]'") from error


# timm's own defaults, for a network of which it is not known how images become its input
_CROP_SHARE, _MEAN, _STD = 0.875, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class TimmNetwork(nn.Module):
    """A standalone network with the methods that timm's scripts call; its preprocessing is that of `network.images`."""

    def __init__(self, network: ArchNetwork) -> None:
        super().__init__()
        self.network = network
        self.num_classes = network.space.num_classes
        self.num_features = self.head_hidden_size = network.classifier.in_features
        resolution, images = network.space.resolution, network.images
        self.pretrained_cfg = self.default_cfg = {
            "architecture": "nasfast",
            "num_classes": self.num_classes,
            "input_size": (network.space.in_channels, resolution, resolution),
            "pool_size": None,
            "crop_pct": _CROP_SHARE if images is None else images.resolution / images.short_side,
            "interpolation": "bilinear",
            "mean": _MEAN if images is None else images.mean,
            "std": _STD if images is None else images.std,
            "classifier": "network.classifier",
        }

    def get_classifier(self) -> nn.Linear:
        """The last layer."""
        return self.network.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; timm calls this with the data set's number of classes."""
        self.num_classes = num_classes
        bias = self.network.classifier.bias is not None
        self.network.classifier = nn.Linear(self.num_features, num_classes, bias=bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, C, H, W) images -> (N, num_features, H', W')."""
        return self.network.features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, num_features, H', W') -> logits (N, num_classes), or pooled features (N, num_features)."""
        pooled = x.mean((2, 3))
        return pooled if pre_logits else self.network.classifier(pooled)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@register_model
def nasfast(pretrained: bool = False, **kwargs: Any) -> TimmNetwork:
    """timm entry point.

    Args:
        pretrained: whether to load the weights beside arch.json; otherwise they are fresh and orthogonal.
        kwargs: `arch`, the folder of an exported model, is required; `num_classes` and `in_chans` are optional. Other
            arguments of timm's scripts (drop rates and the like) have no meaning here and must be unset.

    Raises:
        ValueError: `arch` is missing, or an argument would be ignored.
    """
    folder = kwargs.pop("arch", None)
    if folder is None:
        raise ValueError(
            "timm model 'nasfast' needs the folder of an exported model: --model-kwargs arch=RUN/retrain/best"
        )
    num_classes, in_chans = kwargs.pop("num_classes", None), kwargs.pop("in_chans", None)
    ignored = sorted(
        k for k, v in kwargs.items() if v and k not in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
    )
    if ignored:
        raise ValueError(f"timm model 'nasfast' has no {', '.join(ignored)}; allowed: arch, num_classes")
    network = load_model(folder).train()
    if not pretrained:
        seed = torch.initial_seed() % 2**63
        images = network.images
        network = build(network.space, network.arch, activation=network.activation, seed=seed)
        network.images = images
    if in_chans not in (None, network.space.in_channels):
        raise ValueError(
            f"timm model 'nasfast': the space has {network.space.in_channels} input channels, got in_chans={in_chans}"
        )
    model = TimmNetwork(network)
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    return model
