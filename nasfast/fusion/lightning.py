"""For PyTorch Lightning: a backbone runs fused while it is frozen; `pip install nasfast[lightning]`."""

from __future__ import annotations

from typing import Any

from torch import nn

from nasfast.fusion.api import fuse, unfuse
from nasfast.fusion.modules import convolutions

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise RuntimeError("FuseFrozenBackbone needs PyTorch Lightning: pip install 'nasfast[lightning]'") from error


class FuseFrozenBackbone(Callback):
    """Fuses a backbone while none of its convolutions trains, and undoes it as soon as one does.

    `lightning.pytorch.callbacks.BackboneFinetuning` freezes a backbone for the first epochs, and leaves its BatchNorms
    trainable. That is what the fused operators are made for.

        Trainer(callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=10), FuseFrozenBackbone()])

    Args:
        backbone: path of the backbone in the LightningModule.
        only_faster: as in `nasfast.fuse`.

    Raises:
        AttributeError: the LightningModule has no module at this path; from the first batch.
    """

    def __init__(self, backbone: str = "backbone", *, only_faster: bool = True) -> None:
        self.backbone, self.only_faster = backbone, only_faster
        self._fused: nn.Module | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at what trains once in an epoch, after every callback that freezes or unfreezes."""
        if batch_idx > 0:
            return
        backbone = pl_module.get_submodule(self.backbone)
        trains = any(p.requires_grad for conv in convolutions(backbone).values() for p in conv.parameters())
        if trains:
            self._undo()
        elif self._fused is not backbone:
            self._undo()
            fuse(backbone, only_faster=self.only_faster)
            self._fused = backbone

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the backbone as it was."""
        self._undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the backbone as it was."""
        self._undo()

    def _undo(self) -> None:
        if self._fused is not None:
            unfuse(self._fused)
            self._fused = None
