"""Batches of a user's own loader are checked before they reach a network."""

from __future__ import annotations

import pytest
import torch

from nasfast.train.batches import as_epochs

X, Y = torch.zeros(4, 3, 8, 8), torch.arange(4)


def first(batch, classes=10):
    return next(as_epochs([batch], classes=classes).epoch(0))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": X, "label": Y}, "pair of tensors .*got dict of Tensor, Tensor: give e.g. a torch.utils.data"),
        ((X.numpy(), Y.numpy()), "pair of tensors .*got tuple of ndarray, ndarray"),
        ((X, Y, Y), "pair of tensors .*got tuple of Tensor, Tensor, Tensor"),
        (X, "pair of tensors .*got Tensor:"),
    ],
)
def test_what_is_no_pair_of_tensors_is_refused(batch, message):
    with pytest.raises(TypeError, match=message):
        first(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X[0], Y), r"images must be floating .*\(N, C, H, W\), got torch.float32 of shape \(3, 8, 8\)"),
        ((X.to(torch.uint8), Y), "images must be floating .*got torch.uint8"),
        ((X, Y[:2]), r"labels must be integers of shape \(4,\), .*got torch.int64 of shape \(2,\)"),
        ((X, Y.float()), "labels must be integers .*got torch.float32"),
        ((X, torch.eye(4)), r"labels must be integers .*of shape \(4, 4\)"),
        ((X, Y + 7), "labels must be from 0 to 9, as the network has 10 classes, got 7 to 10"),
        ((X, Y - 1), "labels must be from 0 to 9, .*got -1 to 2"),
    ],
)
def test_wrong_images_and_labels_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        first(batch)


def test_without_a_number_of_classes_only_negative_labels_are_refused():
    assert first((X, Y + 1000), classes=None)[1].tolist() == [1000, 1001, 1002, 1003]
    with pytest.raises(ValueError, match="labels must be at least 0, got -1 to 2"):
        first((X, Y - 1), classes=None)


def test_labels_of_any_integer_type_are_taken():
    x, y = first([X, Y.to(torch.int32)])
    assert y.dtype == torch.int64 and y.tolist() == [0, 1, 2, 3]
    assert x.is_contiguous(memory_format=torch.channels_last)
