"""One image as the input of a network: the same bits as at evaluation."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tiny import write_folder

from nasfast.data import DataConfig, DataError, FolderSource, ImageInfo, make_loader, preprocess


@pytest.mark.parametrize(("resolution", "channels"), [(12, 3), (80, 3), (80, 1)])
def test_it_is_what_the_evaluation_sees(tmp_path, resolution, channels):
    """80 pixels are above the sizes that keep the whole short side."""
    source = FolderSource(write_folder(tmp_path / "images", {"a": 2, "b": 2}))
    cfg = DataConfig(batch_size=4, workers=0, loader="torchvision")
    loader = make_loader(cfg, source, train=False, resolution=resolution, in_channels=channels)
    ((images, _),) = loader.epoch(0)
    info = loader.images
    assert info.classes == ("a", "b") and len(info.mean) == channels and info.resolution == resolution
    assert (info.short_side > resolution) == (resolution == 80)
    for i, image in enumerate(images):
        assert torch.equal(preprocess(source.path(i), info), image)
        assert torch.equal(preprocess(Image.open(source.path(i)), info), image)


INFO = ImageInfo(("a", "b"), 12, 12, (0.5,) * 3, (0.2,) * 3)


def test_what_is_no_image_is_named(tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(DataError, match="not an image that can be read: .*text.jpg"):
        preprocess(tmp_path / "text.jpg", INFO)
    with pytest.raises(DataError, match="gone.jpg does not exist: give the path of an image"):
        preprocess(tmp_path / "gone.jpg", INFO)
    with pytest.raises(DataError, match="no fixed range"):
        preprocess(Image.new("F", (20, 20)), INFO)


def test_another_resize_than_that_of_this_version_is_refused(tmp_path):
    with pytest.raises(DataError, match="evaluated with 99: use the version"):
        preprocess(Image.new("RGB", (20, 20)), INFO.replace(short_side=99))
