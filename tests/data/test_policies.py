"""AutoAugment, RandAugment and TrivialAugment: torchvision's transforms, with draws that repeat."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import write_folder
from torchvision.transforms import v2

from nasfast.config import ConfigError
from nasfast.data import DataConfig, DigitsSource, FolderSource, make_loader, make_loaders
from nasfast.data.augment import AUTO_AUGMENT
from nasfast.seeds import derive_seed
from nasfast.settings import RetrainConfig, RunConfig

PLAIN = DataConfig(
    batch_size=5, augment="none", loader="torchvision", workers=0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
)
TRANSFORMS = {
    ("autoaugment", "none"): v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET),
    ("autoaugment", "cifar"): v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
    ("autoaugment", "shift"): v2.AutoAugment(v2.AutoAugmentPolicy.SVHN),
    ("randaugment", "none"): v2.RandAugment(),
    ("trivialaugment", "cifar"): v2.TrivialAugmentWide(),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return FolderSource(write_folder(tmp_path_factory.mktemp("images"), {"a": 9, "b": 8, "c": 6}))


def images(source, policy, *, epoch=1, start=0, seed=3, channels=3, **settings) -> torch.Tensor:
    loader = make_loader(
        PLAIN.replace(**settings), source, resolution=12, in_channels=channels, seed=seed, policy=policy
    )
    assert loader.policy == policy
    return torch.cat([x for x, _ in loader.epoch(epoch, start=start)])


@pytest.mark.parametrize(("policy", "kind"), TRANSFORMS)
def test_each_image_is_what_torchvision_makes_of_it(source, policy, kind):
    """The transform is applied to the image without a policy, with a generator of this image's seed."""
    plain = (images(source, None, augment=kind) * 255).round().byte()
    got = (images(source, policy, augment=kind) * 255).round().byte()
    assert len(got) == 20
    for place in range(20):
        picture = Image.fromarray(plain[place].permute(1, 2, 0).numpy())
        torch.manual_seed(derive_seed(3, AUTO_AUGMENT, 1, place))
        wanted = np.asarray(TRANSFORMS[policy, kind](picture))
        assert np.array_equal(got[place].permute(1, 2, 0).numpy(), wanted), place
    assert not torch.equal(got, plain)


def test_they_depend_on_seed_epoch_and_place_alone(source):
    want = images(source, "randaugment")
    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert torch.equal(images(source, "randaugment", start=2), want[10:])
    assert torch.equal(torch.get_rng_state(), state), "the generator of the training has moved"
    assert torch.equal(images(source, "randaugment", batch_size=10), want)
    for changed in ({"epoch": 2}, {"seed": 4}):
        assert not torch.equal(images(source, "randaugment", **changed), want)


def test_the_images_that_validate_have_none(source):
    cfg = PLAIN.replace(source="digits")
    with_policy = make_loaders(cfg, resolution=12, policy="randaugment")
    without = make_loaders(cfg, resolution=12)
    assert [loader.policy for loader in with_policy] == ["randaugment", None]
    assert torch.equal(next(with_policy[1].epoch(0))[0], next(without[1].epoch(0))[0])
    assert not torch.equal(next(with_policy[0].epoch(0))[0], next(without[0].epoch(0))[0])


def test_the_choice_of_a_loader_minds_them(caplog):
    caplog.set_level("INFO", "nasfast")
    loader = make_loader(PLAIN.replace(loader="auto"), DigitsSource("train"), resolution=12, policy="randaugment")
    assert loader.kind == "torchvision"
    assert "torchvision, because only it can augment by randaugment" in caplog.text
    assert make_loader(PLAIN.replace(loader="auto"), DigitsSource("train"), resolution=12).kind == "cache"


@pytest.mark.parametrize("loader", ["cache", "dali"])
def test_a_loader_that_cannot_is_refused_before_anything_is_trained(source, loader):
    message = f"data.loader='{loader}' cannot augment by 'autoaugment'.*torchvision or auto, or leave"
    with pytest.raises(ConfigError, match=message):
        make_loader(PLAIN.replace(loader=loader), source, resolution=12, policy="autoaugment")
    with pytest.raises(ValueError, match=message):
        RunConfig(data=PLAIN.replace(loader=loader), retrain=RetrainConfig(auto_augment="autoaugment"))
