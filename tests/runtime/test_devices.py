"""Which tests have the mark `gpu`, and tensors moved with their strides."""

import os
import subprocess
import sys
from pathlib import Path

import devices
import pytest
import torch


def test_what_asks_for_the_device_has_the_mark(device, request):
    assert request.node.get_closest_marker("gpu")
    assert device == devices.DEVICE


def test_what_needs_a_gpu_has_the_mark_and_runs_only_there(gpu, request):
    assert request.node.get_closest_marker("gpu")
    assert torch.cuda.is_available()


def test_the_others_have_not_and_find_no_gpu(request):
    assert not request.node.get_closest_marker("gpu")
    assert not torch.cuda.is_available()


# a machine with a GPU, as far as torch says
WITH_A_GPU = """
import os, torch
torch.cuda.is_available = lambda: True
os.environ["TRITON_INTERPRET"] = "1"
"""
TESTS = """
import os, pytest, torch

@pytest.fixture(scope="module")
def seen():
    return torch.cuda.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES")

def test_first(seen):
    assert seen == (False, "") == (torch.cuda.is_available(), os.environ["CUDA_VISIBLE_DEVICES"])

def test_on_it(gpu):
    assert gpu == "cuda" and torch.cuda.is_available() and "CUDA_VISIBLE_DEVICES" not in os.environ

def test_last():
    assert not torch.cuda.is_available()
"""


@pytest.mark.slow
def test_where_there_is_a_gpu_only_tests_with_the_mark_find_it(tmp_path):
    (tmp_path / "with_a_gpu.py").write_text(WITH_A_GPU)
    (tmp_path / "test_some.py").write_text(TESTS)
    tests = Path(devices.__file__).parent
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(tests), str(tests.parent)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "with_a_gpu", "-p", "conftest", "test_some.py"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "3 passed" in result.stdout, result.stdout


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 6, 8)[1:, ::2, 3:], torch.ones(2, 3, 4, 5).mT, torch.ones(()), torch.ones(0, 3)]
)
def test_a_tensor_keeps_its_strides_on_the_device(tensor, monkeypatch):
    monkeypatch.setattr(devices, "DEVICE", "meta")
    moved = devices.on_device(tensor)
    assert moved.device.type == "meta"
    assert (moved.shape, moved.stride(), moved.storage_offset(), moved.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
    )
