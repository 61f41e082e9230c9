"""Image folders, the digits, and the held-out split."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import write_folder

from nasfast.data import ClutteredDigitsSource, DataConfig, DataError, DigitsSource, FolderSource, make_loaders
from nasfast.data.datasets import ListSource, SubsetSource, random_subset, split_source


def load_digits():
    import sklearn.datasets  # seconds, which every process that collects the tests would take

    return sklearn.datasets.load_digits()


def test_labels_follow_the_sorted_class_names(tmp_path):
    write_folder(tmp_path, {"zebra": 2, "ant": 3, "10": 1, "9": 1})
    source = FolderSource(tmp_path)
    assert source.classes == ("10", "9", "ant", "zebra")
    assert source.labels.tolist() == [0, 1, 2, 2, 2, 3, 3]
    for index, label in enumerate(source.labels):
        assert source.name(index).startswith(str(tmp_path / source.classes[label]))


def test_images_are_found_in_sub_folders_and_hidden_files_are_not(tmp_path):
    write_folder(tmp_path, {"a": 1, "b": 1, "a/deep/deeper": 2, ".cache": 1})
    (tmp_path / "a" / ".DS_Store").write_text("x")
    (tmp_path / "a" / "._hidden.png").write_text("x")
    source = FolderSource(tmp_path)
    assert source.classes == ("a", "b")
    assert source.labels.tolist() == [0, 0, 0, 1]
    assert source.not_images == []


def test_hidden_folders_and_those_of_systems_are_left_out_and_named(tmp_path, caplog):
    systems = (".thumbnails/large", ".@__thumb", ".Trash-1000/files", "@eaDir", "__MACOSX", ".ipynb_checkpoints")
    made = {f"{name}/{inner}": 2 for name in "ab" for inner in ("", "more", *systems)}
    write_folder(tmp_path, {**made, "__MACOSX": 2, "@eaDir": 2, "lost+found": 0, "$RECYCLE.BIN": 1})
    with caplog.at_level(logging.INFO, logger="nasfast"):
        source = FolderSource(tmp_path)
    assert source.classes == ("a", "b") and source.labels.tolist() == [0] * 4 + [1] * 4
    assert {Path(source.name(i)).parent.relative_to(tmp_path).as_posix() for i in range(8)} == {
        *("a", "a/more", "b", "b/more")
    }
    assert f"{tmp_path / 'b'}: left out the hidden folders .@__thumb, .Trash-1000" in caplog.text
    assert DataConfig(train=str(tmp_path)).classes == 2


def test_files_that_are_not_images_are_passed_over_and_named(tmp_path, caplog):
    write_folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a" / "notes.txt").write_text("x")
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        source = FolderSource(tmp_path)
    assert source.not_images == [str(tmp_path / "a" / "notes.txt")]
    assert "skipped 1 file without" in caplog.text
    assert "notes.txt" in caplog.text
    assert len(source) == 4


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA"])
def test_every_colour_mode_becomes_rgb(tmp_path, mode):
    write_folder(tmp_path, {"a": 1, "b": 1}, mode=mode)
    image = FolderSource(tmp_path).image(0)
    assert (image.mode, image.size) == ("RGB", (12, 12))
    if mode == "L":
        channels = np.asarray(image)
        assert (channels[..., 0] == channels[..., 1]).all()
        assert len(np.unique(channels)) > 2


@pytest.mark.parametrize("ending", [".png", ".tif", ".pgm"])
def test_sixteen_bit_grey_keeps_its_upper_eight_bits(tmp_path, ending):
    write_folder(tmp_path, {"a": 1, "b": 1})
    pixels = np.array([[0, 255, 256, 513], [32768, 40000, 65279, 65535]], dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "a" / f"000{ending}")
    if ending != ".png":
        (tmp_path / "a" / "000.png").unlink()
    image = FolderSource(tmp_path).image(0)
    assert image.mode == "RGB"
    assert np.asarray(image)[..., 0].tolist() == [[0, 0, 1, 2], [128, 156, 254, 255]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_fixed_range_are_unreadable(tmp_path, mode):
    write_folder(tmp_path, {"a": 1, "b": 1}, ending=".tif")
    Image.new(mode, (4, 4), 70000).save(tmp_path / "a" / "000.tif")
    with pytest.raises(OSError, match=f"000.tif: ValueError: pixels of mode '{mode}' have no fixed range: save"):
        FolderSource(tmp_path).image(0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (None, "does not exist: give a folder with one sub-folder per class"),
        ({}, "has no class folder: put each image into a folder named like its class, .*images/CLASS/IMAGE.jpg"),
        ({"": 3}, "has 3 images and no class folder: put each"),
        ({"only": 3}, r"has one class only \('only'\): a classifier needs two or more, as .*images/CLASS/IMAGE.jpg"),
        ({"train": 1, "val": 1}, "has the folders train, val, which are no classes: give one of them, .*images/train"),
        ({"a": 2, "b": 0}, "images/b has no image .*: delete the folder, or put the images of the class into it"),
    ],
    ids=["missing", "empty", "flat", "one class", "splits", "empty class"],
)
def test_folders_that_cannot_be_used(tmp_path, counts, message):
    root = tmp_path / "images"
    if counts is not None:
        root.mkdir()
        write_folder(root, counts)
    with pytest.raises(DataError, match=message):
        FolderSource(root)


def test_classes_unlike_the_training_folder(tmp_path):
    train, val = write_folder(tmp_path / "t", {"a": 1, "b": 1}), write_folder(tmp_path / "v", {"a": 1, "c": 1})
    with pytest.raises(DataError, match=r"missing \['b'\], extra \['c'\]; both need the same sub-folders"):
        FolderSource(val, classes=FolderSource(train).classes)
    assert FolderSource(train, classes=("a", "b")).classes == ("a", "b")


def damage(path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("<html>404</html>")
    elif kind == "bomb":
        # a bitmap header that claims 60000 x 60000 pixels: PIL raises DecompressionBombError, which is no OSError
        path.write_bytes(data[:18] + (60000).to_bytes(4, "little") * 2 + data[26:])
    elif kind == "header":
        # the width is not a number: PIL raises ValueError
        path.write_bytes(data.replace(b"12 12", b"1x 12"))


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("truncated", ".png"),
        ("truncated", ".jpg"),
        ("empty", ".jpg"),
        ("text", ".jpeg"),
        ("bomb", ".bmp"),
        ("header", ".ppm"),
    ],
)
def test_a_damaged_file_is_an_oserror(tmp_path, kind, ending):
    write_folder(tmp_path, {"a": 1, "b": 1}, ending=ending, side=12)
    source = FolderSource(tmp_path)
    damage(tmp_path / "a" / f"000{ending}", kind)
    with pytest.raises(OSError):
        source.image(0)
    source.image(1)


def test_digits_are_split_into_disjoint_parts_of_every_class():
    train, val = DigitsSource("train"), DigitsSource("val")
    assert (len(train), len(val)) == (1797 - len(val), 355)
    names = [{s.name(i) for i in range(len(s))} for s in (train, val)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 1797
    for label in range(10):
        total = int((load_digits().target == label).sum())
        assert int((val.labels == label).sum()) == total // 5


def test_digits_are_their_pixels_with_their_labels():
    source, digits = DigitsSource("val"), load_digits()
    assert source.classes == tuple("0123456789")
    for index in (0, 100, 354):
        original = int(source.name(index).split()[1])
        assert source.labels[index] == digits.target[original]
        image = source.image(index)
        assert (image.mode, image.size) == ("RGB", (32, 32))
        small = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX)) / 255 * 16
        assert np.abs(small - digits.images[original]).mean() < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_cluttered_digit_holds_a_digit_of_its_label_and_of_its_part(split):
    source, again, digits = ClutteredDigitsSource(split), ClutteredDigitsSource(split), load_digits()
    assert len(source) == {"train": 2000, "val": 1000}[split]
    plain = DigitsSource(split)
    part = {plain.name(i) for i in range(len(plain))}
    enlarged = [Image.fromarray((im * (255 / 16)).round().astype(np.uint8)) for im in digits.images]
    enlarged = [im.resize((20, 20), Image.Resampling.BICUBIC) for im in enlarged]
    templates = np.stack(enlarged).astype(np.float32).reshape(1797, -1)
    for index in (0, 17, len(source) - 1):
        image = np.asarray(source.image(index))
        assert image.shape == (32, 32, 3) and np.array_equal(image, np.asarray(again.image(index)))
        windows = np.lib.stride_tricks.sliding_window_view(image[..., 0].astype(np.float32), (20, 20)).reshape(-1, 400)
        # clutter and noise only brighten what is dark: distance where the digit is bright
        bright = (templates > 100).astype(np.float32)
        squares = (
            bright @ (windows**2).T - 2 * (bright * templates) @ windows.T + (bright * templates**2).sum(1)[:, None]
        )
        best = int(np.unravel_index((squares / bright.sum(1)[:, None]).argmin(), squares.shape)[0])
        assert digits.target[best] == source.labels[index]
        assert f"digit {best}" in part


class _Labels(SubsetSource):
    """A source of labels alone, for the split."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.classes = tuple(counts)
        self.labels = np.repeat(np.arange(len(counts)), list(counts.values()))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_hold_out_is_stratified_and_disjoint(fraction):
    counts = {"a": 50, "b": 20, "c": 2}
    source = _Labels(counts)
    train, val = split_source(source, fraction, seed=1)
    indices = [set(part.indices.tolist()) for part in (train, val)]
    assert not indices[0] & indices[1]
    assert indices[0] | indices[1] == set(range(72))
    for label, count in enumerate(counts.values()):
        held_out = int((val.labels == label).sum())
        assert held_out == min(max(1, round(count * fraction)), count - 1)
    assert train.labels.tolist() == source.labels[train.indices].tolist()


def test_no_class_looks_through_all_labels(tmp_path):
    """20,000 classes of 20 images took the comparison of 8 billion labels."""

    class Labels(np.ndarray):
        def __eq__(self, other):
            raise AssertionError("all labels are compared with one")

        def __contains__(self, label):
            raise AssertionError("a label is looked for in all labels")

    root = write_folder(tmp_path, {"a": 3, "b": 4, "c": 5})
    source = FolderSource(root)
    source.labels = source.labels.view(Labels)
    train, val = split_source(source, 0.34, 0)
    assert np.bincount(val.labels).tolist() == [1, 1, 2] and len(train) == 8


def test_a_class_with_one_image_cannot_be_split():
    with pytest.raises(DataError, match="class 'b' has 1 image"):
        split_source(_Labels({"a": 5, "b": 1}), 0.2, 0)


# lists of files


def write_list(path, lines: list[str]):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_list_with_numbers(tmp_path):
    write_folder(tmp_path / "pictures", {"a": 2, "b b": 1})
    lines = [
        "# training images",
        "pictures/a/000.png 1",
        "",
        "pictures/b b/002.png\t0",
        f"{tmp_path}/pictures/a/001.png 01",
    ]
    source = ListSource(write_list(tmp_path / "train.txt", lines))
    assert source.classes == ("0", "1")
    assert source.labels.tolist() == [1, 0, 1]
    folder = FolderSource(tmp_path / "pictures")
    for index, other in enumerate((0, 2, 1)):
        assert source.image(index).tobytes() == folder.image(other).tobytes()


def test_a_list_with_names_and_its_validation_list(tmp_path):
    for name in "xv":  # the others may be missing: some unreadable images are allowed
        (tmp_path / f"{name}.jpg").touch()
    train = ListSource(write_list(tmp_path / "train.txt", ["x.jpg zebra", "y.jpg ant", "z.jpg bär"]))
    assert train.classes == ("ant", "bär", "zebra")
    assert train.labels.tolist() == [2, 0, 1]
    val = ListSource(write_list(tmp_path / "val.txt", ["v.jpg zebra"]), classes=train.classes)
    assert (val.classes, val.labels.tolist()) == (train.classes, [2])
    with pytest.raises(DataError, match="val.txt has labels that the training images lack: horse"):
        ListSource(write_list(tmp_path / "val.txt", ["v.jpg horse"]), classes=train.classes)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lists_as_other_systems_write_them(encoding, end, tmp_path):
    """Names hold separators of lines and words: U+2028, U+0085, U+00A0, U+3000, a form feed."""
    names = ["a\u2028b.png", "c\x85.png", "d\xa0e.png", "\u3000f g.png", "h\x0ci.png"]
    labels = ["new\xa0york", "cat", "new\xa0york", "cat", "new\xa0york"]
    text = end.join(["# images", *map(" ".join, zip(names, labels, strict=True)), ""])
    (tmp_path / "list.txt").write_bytes(text.encode(encoding))
    for name in names:
        (tmp_path / name).touch()
    source = ListSource(tmp_path / "list.txt")
    assert [source.name(i) for i in range(len(source))] == [str(tmp_path / name) for name in names]
    assert source.classes == ("cat", "new\xa0york") and source.labels.tolist() == [1, 0, 1, 0, 1]
    assert DataConfig(train=str(tmp_path / "list.txt")).classes == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["pictures\\x.jpg 0", "pictures\\y.jpg 1"], "their folders end with /"),
        (["x\0.jpg 0", "y.jpg 1"], "bytes of value 0: save it as text in UTF-8"),
        (["x.jpg 0", "y.jpg"], "line 2: expected 'IMAGE LABEL', got 'y.jpg'"),
        (["x.jpg 0", "y.jpg 0"], "has images of 1 class only: a classifier needs two"),
        (["x.jpg 0", "y.jpg 3"], "has labels up to 3, but no image of label 1, 2: number the labels from 0"),
        (["x.jpg 0", f"y.jpg {10**15}"], f"has labels up to {10**15}, but no image of label 1, 2, 3, 4, 5: number"),
        (["# none"], "lists no image"),
        (["x.jpg 0", "y.jpg 1"], "none of the first 2 listed images exists, e.g. .*x.jpg"),
    ],
)
def test_lists_that_cannot_be(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        ListSource(write_list(tmp_path / "train.txt", lines))
    with pytest.raises(DataError, match="cannot read the list of images"):
        ListSource(tmp_path / "absent.txt")


def test_lists_are_taken_where_folders_are(tmp_path):
    write_folder(tmp_path, {"a": 6, "b": 6})
    lines = [f"{'ab'[i // 6]}/{i:03d}.png {i // 6}" for i in range(12)]
    cfg = DataConfig(train=str(write_list(tmp_path / "list.txt", lines)), batch_size=4, workers=0, val_fraction=0.5)
    train, val = make_loaders(cfg, resolution=12)
    assert (len(train.source), len(val.source)) == (6, 6)
    assert next(iter(val.epoch(0)))[1].tolist() == [0, 0, 0, 1]


def test_a_random_subset_mixes_the_classes():
    source = DigitsSource("val")
    subset = random_subset(source, 100, seed=3)
    names = [subset.name(i) for i in range(100)]
    assert len(set(names)) == 100 and len(set(subset.labels[:30].tolist())) > 5
    labels = {source.name(i): source.labels[i] for i in range(len(source))}
    assert [labels[name] for name in names] == list(subset.labels)
    assert names == [random_subset(source, 100, seed=3).name(i) for i in range(100)]
    assert len(random_subset(source, 10_000, seed=3)) == len(source)
