"""Batches: their content depends on (seed, epoch, position) alone; unreadable files; the choices of `make_loaders`."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import write_folder

from nasfast.config import ConfigError
from nasfast.data import DataConfig, DataError, DigitsSource, FolderSource, Loader, make_loader, make_loaders
from nasfast.data.loader import augment_of


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images", {"a": 9, "b": 7, "c": 7})


def loader(folder, *, train: bool = True, seed: int = 3, rank: int = 0, world: int = 1, **settings) -> Loader:
    plain = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "workers": 0, "max_bad_files": 0, "loader": "torchvision"}
    cfg = DataConfig(**{"batch_size": 5, "augment": "cifar", **plain, **settings})
    return make_loader(cfg, FolderSource(folder), train=train, resolution=12, seed=seed, rank=rank, world=world)


def same(one, other) -> bool:
    one, other = list(one), list(other)
    return len(one) == len(other) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, other, strict=True)
    )


@pytest.mark.slow
def test_batches_do_not_depend_on_the_number_of_workers(folder):
    want = list(loader(folder).epoch(2))
    for workers in (1, 2):
        assert same(loader(folder, workers=workers).epoch(2), want)
    assert same(loader(folder, workers=2).epoch(2, start=2), want[2:])


def test_start_continues_the_epoch(folder):
    want = list(loader(folder).epoch(1))
    for start in range(len(want) + 1):
        assert same(loader(folder).epoch(1, start=start), want[start:])


def test_each_loop_over_a_loader_takes_the_next_epoch(folder):
    train, held = loader(folder), loader(folder, train=False)
    for epoch in range(3):
        assert same(train, loader(folder).epoch(epoch))
        assert same(held, loader(folder, train=False).epoch(0)), "without shuffling all epochs are the same"
    # a training of its own counts for itself
    assert same(train.epoch(0), loader(folder).epoch(0))


def test_the_global_generator_neither_matters_nor_moves(folder):
    torch.manual_seed(1)
    want = list(loader(folder).epoch(0))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert same(loader(folder).epoch(0), want)
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_and_seeds_differ_in_order(folder):
    def order(seed: int, epoch: int):
        return torch.cat([y for _, y in loader(folder, seed=seed, augment="none").epoch(epoch)])

    assert not torch.equal(order(3, 0), order(3, 1))
    assert not torch.equal(order(3, 0), order(4, 0))


def test_every_image_with_its_label(folder):
    """Without shuffling the order is the source's. Each image has its own colours, so the pairs show mistakes."""
    source = FolderSource(folder)
    pixels = {np.asarray(source.image(i)).tobytes(): int(source.labels[i]) for i in range(23)}
    assert len(pixels) == 23
    for train in (False, True):
        seen = []
        for x, y in loader(folder, augment="none", train=train).epoch(0):
            for image, label in zip(x, y.tolist(), strict=True):
                key = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy().tobytes()
                assert pixels[key] == label
                seen.append(key)
        assert len(seen) == len(set(seen)) == (20 if train else 23)
        if not train:
            assert seen == list(pixels)


@pytest.mark.parametrize(
    ("images", "train", "sizes"),
    [
        (23, True, [5] * 4),
        (23, False, [5, 5, 5, 5, 3]),
        (20, True, [5] * 4),
        (20, False, [5] * 4),
        (3, True, [3]),
        (3, False, [3]),
    ],
)
def test_the_last_smaller_batch(tmp_path, images, train, sizes):
    """The last batch is dropped when shuffling, unless it is the only one."""
    made = loader(write_folder(tmp_path, {"a": images - 1, "b": 1}), train=train)
    assert [len(y) for _, y in made.epoch(0)] == sizes
    assert len(made) == len(sizes)
    assert len(made.source) == images


def test_normalisation_type_and_layout(folder):
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    raw = next(loader(folder, train=False, augment="none").epoch(0))[0]
    x, y = next(loader(folder, train=False, augment="none", mean=mean, std=std).epoch(0))
    want = (raw - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(x, want)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert raw.min() >= 0 and 0.9 < raw.max() <= 1


def spoil(folder, *names: str) -> list[str]:
    paths = [folder / name for name in names]
    for i, path in enumerate(paths):
        path.write_bytes((b"not an image", path.read_bytes()[:60], b"")[i % 3])
    return [str(path) for path in paths]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_are_skipped_counted_and_named(folder, caplog, workers):
    bad = spoil(folder, "a/003.png", "b/010.png")
    made = loader(folder, train=False, augment="none", max_bad_files=2, workers=workers)
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        labels = torch.cat([y for _, y in made.epoch(0)]).tolist()
    assert labels == [0] * 8 + [1] * 6 + [2] * 7
    assert made.bad_files == set(bad)
    assert all(name in caplog.text for name in bad)
    assert "2 so far" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        list(made.epoch(1))
    assert not caplog.records, "each file is named once"


def test_more_unreadable_files_than_allowed_stop_the_run(folder):
    bad = spoil(folder, "a/003.png", "b/010.png", "c/020.png")
    with pytest.raises(DataError, match="3 images could not be read, more than data.max_bad_files=2") as error:
        list(loader(folder, train=False, max_bad_files=2).epoch(0))
    assert all(name in str(error.value) for name in bad)
    assert "raise the limit" in str(error.value)


def test_a_training_batch_without_a_readable_image_is_an_error(folder):
    # three good images cannot be in all four batches
    spoil(folder, *(f"{name}/{i:03d}.png" for i, name in enumerate("aaaaaaaaabbbbbbbcccc")))
    with pytest.raises(DataError, match="none of the 5 images of a batch could be read"):
        list(loader(folder, max_bad_files=23).epoch(1))


def test_a_validation_batch_without_a_readable_image_is_left_out(folder):
    spoil(folder, *(f"a/{i:03d}.png" for i in range(5)))
    labels = [y.tolist() for _, y in loader(folder, train=False, max_bad_files=5).epoch(0)]
    assert labels == [[0] * 4 + [1], [1] * 5, [1] + [2] * 4, [2] * 3]


def test_augmentation_of_the_rest_does_not_depend_on_a_bad_file(folder):
    made = loader(folder)
    clean = list(made.epoch(0))
    (batch,), (row,) = np.nonzero([[1 in r.indices[[k]] for k in range(5)] for r in made._requests(0, 0)])
    spoil(folder, "a/001.png")
    rest = list(loader(folder, max_bad_files=1).epoch(0))[batch][0]
    assert torch.equal(rest, clean[batch][0][[k for k in range(5) if k != row]])


# ranks


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("train", [True, False])
def test_ranks_share_out_the_batches_of_one_process(folder, train, world):
    """The ranks show every image once, in the order and with the augmentation of a single process."""
    whole = list(loader(folder, train=train).epoch(1))
    shares = [list(loader(folder, train=train, rank=rank, world=world).epoch(1)) for rank in range(world)]
    for number, (x, y) in enumerate(whole):
        parts = [share[number] for share in shares if number < len(share)]
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)
        if len(y) == 5:
            assert {len(part[1]) for part in parts} <= {5 // world, -(-5 // world)}


def test_more_ranks_than_images_of_a_batch_are_refused(folder):
    with pytest.raises(DataError, match="batches of 5 images cannot be shared by 6 ranks: set data.batch_size higher"):
        loader(folder, rank=0, world=6)


# data sets of the user


class Colours:
    """A map-style data set: one image per colour."""

    def __init__(self, form: str, *, targets: bool) -> None:
        self.form, self.pixels = form, np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
        if targets:
            self.targets = [0, 1, 2, 0, 1, 2]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        if index >= 6:
            raise IndexError(index)
        pixels = self.pixels[index]
        image = {
            "PIL": Image.fromarray,
            "array": lambda p: p,
            "tensor": lambda p: torch.from_numpy(p).permute(2, 0, 1),
            "float": lambda p: torch.from_numpy(p).permute(2, 0, 1) / 255,
        }[self.form](pixels)
        return image, index % 3


@pytest.mark.parametrize("form", ["PIL", "array", "tensor"])
@pytest.mark.parametrize("targets", [True, False])
def test_any_map_style_data_set(form, targets):
    data = Colours(form, targets=targets)
    cfg = DataConfig(batch_size=4, workers=0, mean=(0, 0, 0), std=(1, 1, 1))
    made = make_loader(cfg, data, train=False, resolution=12)
    batches = list(made.epoch(0))
    assert torch.cat([y for _, y in batches]).tolist() == [0, 1, 2, 0, 1, 2]
    got = (torch.cat([x for x, _ in batches]) * 255).round().permute(0, 2, 3, 1)
    assert np.array_equal(got.numpy(), data.pixels)
    assert made.source.classes == ("0", "1", "2")


def test_a_data_set_of_floats_is_refused_with_the_reason():
    cfg = DataConfig(batch_size=4, workers=0)
    with pytest.raises(DataError, match="item 0 of Colours: expected a PIL image.*leave out transforms to floats"):
        next(make_loader(cfg, Colours("float", targets=True), train=False, resolution=12).epoch(0))


@pytest.mark.parametrize(
    "data", [[], iter("ab"), [("x", 0.5), ("y", 1.5)], [("x", 0), ("y", 0)], [("x", -1), ("y", 1)]]
)
def test_data_sets_that_cannot_be(data):
    with pytest.raises(DataError):
        make_loader(DataConfig(), data, resolution=12)


# make_loaders


def test_hold_out_never_shows_the_validation_images():
    cfg = DataConfig(source="digits", workers=0, val_fraction=0.2)
    train, held = make_loaders(cfg, resolution=16, hold_out=True)
    val = DigitsSource("val")
    judged = {val.name(i) for i in range(355)}
    parts = [{s.source.name(i) for i in range(len(s.source))} for s in (train, held)]
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & judged
    assert len(parts[0] | parts[1]) == 1442
    assert len(parts[1]) == pytest.approx(0.2 * 1442, abs=10)


def test_folders_with_and_without_a_validation_folder(tmp_path):
    a, b = write_folder(tmp_path / "t", {"x": 10, "y": 10}), write_folder(tmp_path / "v", {"x": 3, "y": 4})
    common = {"train": str(a), "batch_size": 4, "workers": 0, "val_fraction": 0.3}
    train, val = make_loaders(DataConfig(**common), resolution=12)
    assert (len(train.source), len(val.source)) == (14, 6)
    train, val = make_loaders(DataConfig(**common, val=str(b)), resolution=12)
    assert (len(train.source), len(val.source)) == (20, 7)
    train, held = make_loaders(DataConfig(**common, val=str(b)), resolution=12, hold_out=True)
    assert (len(train.source), len(held.source)) == (14, 6)
    train, val = make_loaders(DataConfig(**common), resolution=12)
    search, held = make_loaders(DataConfig(**common), resolution=12, hold_out=True)
    names = lambda made: {made.source.name(i) for i in range(len(made.source))}  # noqa: E731
    assert names(search) | names(held) == names(train)
    assert not names(held) & names(val)


def test_the_training_folder_is_required():
    with pytest.raises(ConfigError, match="data.train is not set"):
        make_loaders(DataConfig(), resolution=32)


@pytest.mark.parametrize(
    ("augment", "source", "resolution", "kind"),
    [
        ("auto", "digits", 32, "shift"),
        ("auto", "folder", 64, "cifar"),
        ("auto", "folder", 65, "imagenet"),
        ("cifar", "digits", 32, "cifar"),
    ],
)
def test_augment_choices(augment, source, resolution, kind):
    assert augment_of(DataConfig(source=source, augment=augment), resolution) == kind


@pytest.mark.parametrize("augment", ["imagenet", "cifar", "shift", "none"])
def test_grey_images_for_a_space_of_one_channel(tmp_path, augment):
    for name, colour in (("a", (255, 0, 0)), ("b", (0, 255, 0))):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8), colour).save(tmp_path / name / f"{number}.png")
    cfg = DataConfig(train=str(tmp_path), augment=augment, workers=0, batch_size=2, val_fraction=0.5)
    cfg = cfg.replace(mean=(0.2, 0.3, 0.4), std=(0.1, 0.2, 0.6))
    for made in make_loaders(cfg, resolution=8, in_channels=1):
        x, y = next(made.epoch(0))
        assert x.shape == (2, 1, 8, 8)
        # luma of red and green (ITU-R 601), then the averages of mean and std
        for image, label in zip(x, y.tolist(), strict=True):
            assert image.max().item() == pytest.approx(((76, 150)[label] / 255 - 0.3) / 0.3, abs=1e-4)


@pytest.mark.parametrize("in_channels", [2, 4])
def test_other_numbers_of_channels_are_refused(in_channels):
    with pytest.raises(ConfigError, match=rf"in_channels must be 3 \(RGB\) or 1 \(grey\).*got {in_channels}"):
        make_loaders(DataConfig(source="digits"), resolution=32, in_channels=in_channels)


def test_large_images_are_cropped_to_the_resolution(tmp_path):
    for name, size in itertools.product("ab", [(90, 40), (30, 120)]):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", size, (255, 0, 0)).save(tmp_path / name / f"{size[0]}.jpg")
    cfg = DataConfig(train=str(tmp_path), workers=0, batch_size=2, val_fraction=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    train, val = make_loaders(cfg, resolution=80)
    for made in (train, val):
        x, _ = next(made.epoch(0))
        assert x.shape == (2, 3, 80, 80)
        assert x[:, 0].mean() > 0.8
