"""The registered operators of a chain, and the arguments that they refuse."""

import pytest
import torch
from kernel_cases.chain import BFLOAT16, ChainCase, backward_arguments, check_opcheck, forward_arguments, native_chain
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast import ops
from nasfast.ops import reference

# None without the extension, where every test that calls them is skipped
FORWARD, BACKWARD = (getattr(torch.ops.nasfast, f"conv_bn_act_chain_{way}", None) for way in ("fwd", "bwd"))


def wide(grad: torch.Tensor) -> torch.Tensor:
    """The same gradient as the channels from 2 on of a wider tensor, whose other channels are NaN."""
    n, channels, height, width = grad.shape
    whole = torch.full((n, channels + 5, height, width), torch.nan, dtype=grad.dtype).contiguous(memory_format=NHWC)
    whole[:, 2 : 2 + channels] = grad
    return whole[:, 2 : 2 + channels]


BLOCK = ChainCase((2, 6, 5, 4), "pw18/relu6 dw3/relu6 pw6/identity")


SMALL = ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity")
OPCHECKED = [
    (SMALL, {"recompute": True, "add_input": True}),
    (ChainCase((2, 5, 4, 4), "pw16! dw3s2! pw8!", "tensor", dtype=BFLOAT16), {}),
    (ChainCase((2, 3, 8, 8), "dense8k3s2", x_grad=False), {}),
    (ChainCase((2, 16, 4, 4), "dw3 pw8", shuffle=True), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "changes"), OPCHECKED, ids=str)
def test_opcheck(case, changes, native):
    check_opcheck(case.draw_once(), x_grad=case.x_grad, **changes)


@pytest.mark.parametrize("channels, units, shuffle, recompute", [
    (3, "dense8k3s2 pw24/relu dw5s2 pw8", False, False),
    (16, "pw64/relu6 dw3/tanh pw8", False, True),
    (16, "pw8 dw3 pw8 dw7 pw8", True, False),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_without_backward_nothing_is_kept_and_the_result_is_the_same(channels, units, shuffle, recompute, training):
    units = units if training else " ".join(f"{unit}!" for unit in units.split())
    inputs = ChainCase((2, channels, 17, 9), units, shuffle=shuffle, x_grad=False).draw_once()
    assert all(stage.training == training for stage in inputs.stages)
    arguments = forward_arguments(inputs, recompute=recompute)
    y, saved, statistics = FORWARD(**arguments)
    y_alone, nothing, statistics_alone = FORWARD(**arguments | {"keep": False})
    assert saved.numel() > 0 and nothing.numel() == 0
    assert torch.equal(y, y_alone) and torch.equal(statistics, statistics_alone)
    arguments["bn_weights"][-1].requires_grad_()
    with pytest.raises(RuntimeError, match="`keep` must be true"):
        FORWARD(**arguments | {"keep": False})


def test_a_trainable_convolution_is_refused_by_the_operator_and_served_by_the_function(native):
    inputs = BLOCK.draw_once()
    arguments = forward_arguments(inputs)
    arguments["conv_weights"][1].requires_grad_()
    with pytest.raises(RuntimeError, match="a convolution weight requires grad.*freeze it with requires_grad_"):
        FORWARD(**arguments)
    y = native_chain(inputs.x, inputs.stages)
    y.backward(inputs.grad)
    assert inputs.stages[1].params.conv_weight.grad is not None


def spoilt(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensor with one thing that the kernels would read wrongly."""
    return {
        "type": tensor.float() if tensor.dtype == torch.float64 else tensor.double(),
        "rows": tensor[:-1],
        "dimensions": tensor[None],
        "strides": torch.stack([tensor, tensor], -1)[..., 0],
        "device": tensor.to("meta"),
    }


def check_refused(operator, arguments: dict) -> None:
    """Every tensor that is not what the plan says, and every list of another length, is refused."""
    for name, value in arguments.items():
        parts = list(enumerate(value)) if isinstance(value, list) else [(0, value)]
        for i, tensor in parts:
            if not torch.is_tensor(tensor) or not tensor.numel():
                continue  # empty: of a stage without running statistics
            for what, bad in spoilt(tensor).items():
                if what == "dimensions" and name in ("saved", "statistics"):
                    continue  # only their number of elements counts
                wrong = [*value[:i], bad, *value[i + 1 :]] if isinstance(value, list) else bad
                with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain|device|meta"):
                    operator(**arguments | {name: wrong})
                    pytest.fail(f"{what} of {name}[{i}]")
        if isinstance(value, list) and name != "plan":
            for wrong in (value[:-1], value + value[:1]):
                with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
                    operator(**arguments | {name: wrong})
                    pytest.fail(f"{len(wrong)} {name}")
    plan, stages = arguments["plan"], len(arguments["conv_weights"])
    header = len(plan) % STAGE_NUMBERS
    assert len(plan) == header + stages * STAGE_NUMBERS
    for wrong in ([], plan[:header], plan[:-1], plan[:-STAGE_NUMBERS]):
        with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
            operator(**arguments | {"plan": wrong})
    for place, number in enumerate(plan):
        for other in (number - 1, number + 1, -3, 2**62):
            what = (place - header) % STAGE_NUMBERS if place >= header else None
            if what == ACT and 0 <= other < len(reference.ACTIVATIONS):
                continue  # another activation
            if place == header + SAVED_AT and other in (-1, -2):
                continue  # the expansion computed again
            if operator is FORWARD and place == SAVED_SIZE and abs(other - number) == 1:
                continue  # the last output has room behind it
            with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
                operator(**arguments | {"plan": [*plan[:place], other, *plan[place + 1 :]]})
                pytest.fail(f"{other} at place {place} of the plan")


# numbers of a stage in a plan, the places of two of them, and that of a number of the plan
STAGE_NUMBERS, ACT, SAVED_AT, SAVED_SIZE = 9, 1, 7, 5
NHWC = torch.channels_last
MIXED = ChainCase((2, 6, 5, 4), "pw18/relu6! dw3/relu6 pw6/identity!", "tensor")


def test_bad_arguments_of_forward_are_refused(native):
    check_refused(FORWARD, forward_arguments(MIXED.draw_once()))


@pytest.mark.parametrize("recompute", [False, True])
def test_bad_arguments_of_backward_are_refused(recompute, native):
    arguments = backward_arguments(BLOCK.draw_once(), recompute=recompute)
    check_refused(BACKWARD, arguments)
    x = arguments["x"]
    for bad in (BLOCK.draw_once().x,) if x is None else (x.contiguous(), x[:, :5].contiguous(memory_format=NHWC), None):
        with pytest.raises(RuntimeError, match="conv_bn_act_chain"):
            BACKWARD(**arguments | {"x": bad})
    grad = arguments["grad"]
    for bad in (grad.contiguous(), grad[:1, :1, :1, :1].expand_as(grad), grad.as_strided(grad.shape, (100, 1, 20, 5))):
        with pytest.raises(RuntimeError, match="conv_bn_act_chain"):
            BACKWARD(**arguments | {"grad": bad})
    with pytest.raises(RuntimeError, match="conv_bn_act_chain"):
        BACKWARD(**arguments | {"grad": wide(grad), "add_input": True})


def test_convolutions_that_the_operator_lacks_are_refused(native):
    arguments = forward_arguments(BLOCK.draw_once())
    first, second, third = arguments["conv_weights"]
    for bad in (
        [first, second[:, :, :1], third],  # not square
        [first, torch.zeros(18, 1, 2, 2), third],
        [first, torch.zeros(18, 1, 9, 9), third],
        [first, torch.zeros(18, 18, 3, 3), third],  # dense in the middle
        [first, torch.zeros(18, 2, 3, 3), third],  # grouped
        [torch.zeros(0, 6, 1, 1), second, third],
        [first, second, third[:, :17].contiguous()],
        [first.int(), second, third],
    ):
        with pytest.raises(RuntimeError, match="conv_bn_act_chain"):
            FORWARD(**arguments | {"conv_weights": bad})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        BLOCK,
        ChainCase((2, 16, 9, 7), "pw32/relu pw5/relu"),
        ChainCase((2, 6, 5, 4), "pw18/relu6 dw3s2"),
        ChainCase((2, 16, 4, 4), "dw3 pw8/relu", shuffle=True),
        ChainCase((3, 5, 1, 1), "pw4 dw5", dtype=BFLOAT16),
    ],
    ids=str,
)
def test_backward_reads_a_range_of_the_channels_of_a_wider_gradient(case, recompute, native):
    if recompute and not case.units.startswith("pw18"):
        pytest.skip("begins without an expansion")
    arguments = backward_arguments(case.draw_once(), recompute=recompute)
    want = BACKWARD(**arguments)
    got = BACKWARD(**arguments | {"grad": wide(arguments["grad"])})
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_gradient_of_a_concatenation_is_not_copied(native):
    inputs = ChainCase((2, 6, 5, 4), "pw4/relu").draw_once()
    seen = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    y, grad = ops.conv_bn_act_chain(inputs.x.requires_grad_(), inputs.stages, backend="cpu"), wide(inputs.grad)
    with Calls():
        torch.autograd.grad(y, inputs.x, grad)
    assert not [name for name in seen if "copy" in name or "clone" in name]


def test_a_dense_stage_has_no_input_gradient(native):
    inputs = ChainCase((2, 3, 5, 4), "dense8k3s2").draw_once()
    with pytest.raises(RuntimeError, match="a dense stage has no input gradient"):
        BACKWARD(**backward_arguments(inputs))


@pytest.mark.parametrize("case", [ChainCase((2, 6, 5, 4), "pw4"), ChainCase((2, 6, 5, 4), "dw3s2")], ids=str)
def test_a_backward_that_adds_the_input_to_another_shape_is_refused(case, native):
    with pytest.raises(RuntimeError, match="conv_bn_act_chain: x can be added only"):
        BACKWARD(**backward_arguments(case.draw_once()) | {"add_input": True})
