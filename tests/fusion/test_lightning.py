"""The callback for Lightning's `BackboneFinetuning`: the same training, with the backbone fused while it is frozen."""

import copy

import pytest
import torch
from fused_models import disturb, unit
from torch import Tensor, nn

from nasfast.fusion.region import FusedForward

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning

from nasfast.fusion.lightning import FuseFrozenBackbone


class Classifier(LightningModule):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(4, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.backbone(x).mean((2, 3))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Watch(Callback):
    """In each epoch whether the backbone is fused."""

    def __init__(self) -> None:
        self.fused: list[bool] = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.fused.append(isinstance(vars(pl_module.backbone).get("forward"), FusedForward))


def train(callbacks: list[Callback], path) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)
    model = Classifier(disturb(nn.Sequential(unit(), unit()))).double()
    data = [(torch.randn(4, 4, 6, 6, dtype=torch.double), torch.randint(3, (4,))) for _ in range(2)]
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False), *callbacks],
        default_root_dir=path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    assert "forward" not in vars(model.backbone)
    return copy.deepcopy(model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_backbone_is_fused_and_trains_the_same(tmp_path, executed):
    want = train([], tmp_path)
    watch = Watch()
    got = train([FuseFrozenBackbone(only_faster=False), watch], tmp_path)
    assert watch.fused == [True] * 4 + [False] * 2
    assert len(executed) == 4
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_a_backbone_that_is_not_there_is_named(tmp_path):
    with pytest.raises(AttributeError, match="trunk"):
        train([FuseFrozenBackbone("trunk")], tmp_path)
