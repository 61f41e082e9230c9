"""Which tests have the mark `gpu`, and tensors moved with their strides."""

import devices
import pytest
import torch


def test_what_asks_for_the_device_has_the_mark(device, request):
    assert request.node.get_closest_marker("gpu")
    assert device == devices.DEVICE


def test_what_needs_a_gpu_has_the_mark_and_runs_only_there(gpu, request):
    assert request.node.get_closest_marker("gpu")
    assert torch.cuda.is_available()


def test_the_others_have_not(request):
    assert not request.node.get_closest_marker("gpu")


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 6, 8)[1:, ::2, 3:], torch.ones(2, 3, 4, 5).mT, torch.ones(()), torch.ones(0, 3)]
)
def test_a_tensor_keeps_its_strides_on_the_device(tensor, monkeypatch):
    monkeypatch.setattr(devices, "DEVICE", "meta")
    moved = devices.on_device(tensor)
    assert moved.device.type == "meta"
    assert (moved.shape, moved.stride(), moved.storage_offset(), moved.dtype) == (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
    )  # fmt: skip
