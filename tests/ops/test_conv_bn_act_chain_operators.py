"""The registered operators of a chain, and the arguments that they and the function refuse."""

import pytest
import torch
from kernel_cases.chain import (
    BFLOAT16,
    ChainCase,
    Drawn,
    native_chain,
    planned_numbers,
)
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast import ops
from nasfast.ops import ConvBNParams, Stage, reference


def forward_arguments(drawn: Drawn, *, recompute: bool = False, **changes) -> dict:
    """Arguments of torch.ops.nasfast.conv_bn_act_chain_fwd by name."""
    stages = drawn.stages
    params = [stage.params for stage in stages]
    empty = torch.empty(0)
    return {
        "x": drawn.x,
        "conv_weights": [p.conv_weight for p in params],
        "bn_weights": [p.bn_weight for p in params],
        "bn_biases": [p.bn_bias for p in params],
        "running_means": [empty if s.training else s.params.running_mean for s in stages],
        "running_vars": [empty if s.training else s.params.running_var for s in stages],
        "residual": None if drawn.residual is drawn.x else drawn.residual,
        "plan": planned_numbers(drawn, recompute=recompute),
        "eps": [stage.eps for stage in stages],
        "add_input": drawn.residual is drawn.x,
        "keep": True,
        **changes,
    }


def backward_arguments(drawn: Drawn, wants: list[bool] | None = None, *, recompute: bool = False, **changes) -> dict:
    """Arguments of torch.ops.nasfast.conv_bn_act_chain_bwd by name, after a forward with the changes it shares."""
    forward = forward_arguments(drawn, recompute=recompute)
    forward |= {name: value for name, value in changes.items() if name in forward}
    with torch.no_grad():
        _, saved, statistics = FORWARD(**forward)
    shared = ("conv_weights", "bn_weights", "bn_biases", "plan", "eps", "add_input")
    return {
        "grad": drawn.grad,
        "x": drawn.x if recompute else None,
        "saved": saved,
        "statistics": statistics,
        "batch_statistics": [stage.training for stage in drawn.stages],
        "wants": [True] * (1 + 2 * len(drawn.stages)) if wants is None else wants,
        **{name: forward[name] for name in shared},
        **changes,
    }


# None without the extension, where every test that calls them is skipped
FORWARD, BACKWARD = (getattr(torch.ops.nasfast, f"conv_bn_act_chain_{way}", None) for way in ("fwd", "bwd"))


def wide(grad: torch.Tensor) -> torch.Tensor:
    """The same gradient as the channels from 2 on of a wider tensor, whose other channels are NaN."""
    n, channels, height, width = grad.shape
    whole = torch.full((n, channels + 5, height, width), torch.nan, dtype=grad.dtype).contiguous(memory_format=NHWC)
    whole[:, 2 : 2 + channels] = grad
    return whole[:, 2 : 2 + channels]


BLOCK = ChainCase((2, 6, 5, 4), "pw18/relu6 dw3/relu6 pw6/identity")


# outputs that leave no gap in the saved tensor, whose content is undefined and so is compared with itself
OPCHECKED = [
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {}),
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {"recompute": True}),
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {"recompute": True, "add_input": True}),
    (ChainCase((2, 5, 4, 4), "pw16! dw3s2! pw8!", "tensor", dtype=BFLOAT16), {}),
    (ChainCase((4, 1, 4, 4), "pw1"), {}),
    (ChainCase((2, 3, 8, 8), "dense8k3s2", x_grad=False), {}),
    (ChainCase((2, 16, 4, 4), "dw3 pw8", shuffle=True), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "changes"), OPCHECKED, ids=str)
def test_opcheck(case, changes, native):
    drawn = case.draw_once()
    arguments = forward_arguments(drawn, **changes)
    arguments["x"].requires_grad_(case.x_grad)
    for tensor in arguments["bn_weights"] + arguments["bn_biases"]:
        tensor.requires_grad_()
    # aot_dispatch compares gradients of traced and untraced calls too, with tensors of dynamic shape
    torch.library.opcheck(FORWARD.default, (), arguments)
    if not case.x_grad:
        return
    arguments = backward_arguments(drawn._replace(x=drawn.x.detach()), **changes)
    detached = {
        name: [t.detach() for t in value] if isinstance(value, list) and torch.is_tensor(value[0]) else value
        for name, value in arguments.items()
    }
    for wants in (None, [False, True, False] + [True] * (2 * len(drawn.stages) - 2)):
        torch.library.opcheck(BACKWARD.default, (), detached | ({} if wants is None else {"wants": wants}))


@pytest.mark.parametrize("channels, units, shuffle, recompute", [
    (3, "dense8k3s2 pw24/relu dw5s2 pw8", False, False),
    (16, "pw64/relu6 dw3/tanh pw8", False, True),
    (16, "pw8 dw3 pw8 dw7 pw8", True, False),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_without_backward_nothing_is_kept_and_the_result_is_the_same(channels, units, shuffle, recompute, training):
    units = units if training else " ".join(f"{unit}!" for unit in units.split())
    drawn = ChainCase((2, channels, 17, 9), units, shuffle=shuffle, x_grad=False).draw_once()
    assert all(stage.training == training for stage in drawn.stages)
    arguments = forward_arguments(drawn, recompute=recompute)
    y, saved, statistics = FORWARD(**arguments)
    y_alone, nothing, statistics_alone = FORWARD(**arguments | {"keep": False})
    assert saved.numel() > 0 and nothing.numel() == 0
    assert torch.equal(y, y_alone) and torch.equal(statistics, statistics_alone)
    arguments["bn_weights"][-1].requires_grad_()
    with pytest.raises(RuntimeError, match="`keep` must be true"):
        FORWARD(**arguments | {"keep": False})


def test_a_trainable_convolution_is_refused_by_the_operator_and_served_by_the_function(native):
    drawn = BLOCK.draw_once()
    arguments = forward_arguments(drawn)
    arguments["conv_weights"][1].requires_grad_()
    with pytest.raises(RuntimeError, match="a convolution weight requires grad.*freeze it with requires_grad_"):
        FORWARD(**arguments)
    y = native_chain(drawn.x, drawn.stages)
    y.backward(drawn.grad)
    assert drawn.stages[1].params.conv_weight.grad is not None


def broken(**changes):
    """The block's arguments with some replaced by a function of themselves."""
    return {name: change if callable(change) else lambda _, value=change: value for name, change in changes.items()}


# places of numbers in the header of a plan, and in the part of each stage
HEADER = {"batch": 0, "channels": 1, "height": 2, "width": 3, "shuffle": 4, "saved_size": 5}


STAGE = {
    "kind": 0, "act": 1, "out_channels": 2, "kernel": 3, "stride": 4,
    "out_height": 5, "out_width": 6, "saved_at": 7, "statistics_at": 8,
}  # fmt: skip


def broken_plan(i_stage=None, **numbers):
    """The block's plan with other numbers in the header, or in stage i_stage."""
    begin = 0 if i_stage is None else len(HEADER) + i_stage * len(STAGE)
    places = {(HEADER if i_stage is None else STAGE)[name] + begin: value for name, value in numbers.items()}
    return broken(plan=lambda plan: [places.get(place, number) for place, number in enumerate(plan)])


NHWC = torch.channels_last


BAD_PLAN = {
    "no stages": broken(plan=lambda plan: plan[: len(HEADER)]),
    "no plan": broken(plan=[]),
    "a number missing": broken(plan=lambda plan: plan[:-1]),
    "two stages": broken(plan=lambda plan: plan[: -len(STAGE)]),
    "another batch": broken_plan(batch=3),
    "batch 0": broken_plan(batch=0),
    "negative batch": broken_plan(batch=-2),
    "huge batch": broken_plan(batch=2**62),
    "another height": broken_plan(height=6),
    "height 0": broken_plan(height=0),
    "negative size": broken_plan(height=-5, width=-4),
    "no channels": broken_plan(channels=0),
    "other channels": broken_plan(channels=7),
    "shuffle of another shape": broken_plan(shuffle=1),
    "too little saved": broken_plan(saved_size=100),
    "huge saved": broken_plan(saved_size=2**62),
    "unknown kind": broken_plan(0, kind=3),
    "negative kind": broken_plan(0, kind=-1),
    "another kind": broken_plan(0, kind=1),
    "pointwise instead of depthwise": broken_plan(1, kind=0),
    "dense in the middle": broken_plan(1, kind=2),
    "unknown act": broken_plan(0, act=len(reference.ACTIVATIONS)),
    "negative act": broken_plan(0, act=-1),
    "no output channels": broken_plan(0, out_channels=0),
    "other output channels": broken_plan(0, out_channels=17),
    "another kernel": broken_plan(1, kernel=5),
    "even kernel": broken_plan(1, kernel=2),
    "kernel too large": broken_plan(1, kernel=9),
    "kernel 0": broken_plan(1, kernel=0),
    "stride 0": broken_plan(1, stride=0),
    "stride -1": broken_plan(1, stride=-1),
    "stride 2 without its size": broken_plan(1, stride=2),
    "stride 3": broken_plan(1, stride=3, out_height=2, out_width=2),
    "pointwise stride": broken_plan(2, stride=2, out_height=3, out_width=2),
    "another output": broken_plan(1, out_height=6),
    "saved over another stage": broken_plan(1, saved_at=0),
    "saved at no vector's place": broken_plan(1, saved_at=18 * 40 + 49),
    "saved behind the end": broken_plan(2, saved_at=10**6),
    "saved nowhere": broken_plan(0, saved_at=2**62),
    "the second computed again": broken_plan(1, saved_at=-1),
    "saved before the beginning": broken_plan(0, saved_at=-3),
    "statistics over another stage": broken_plan(1, statistics_at=0),
}


BAD_FORWARD = {
    "x dtype": broken(x=lambda t: t.double()),
    "x half": broken(x=lambda t: t.half()),
    "x layout": broken(x=lambda t: t.contiguous()),
    "x strided": broken(x=lambda t: t[:, :, ::2]),
    "x expanded": broken(x=lambda t: t[:1].expand(2, -1, -1, -1)),
    "x 3-d": broken(x=lambda t: t[0]),
    "x empty": broken(x=lambda t: t[:0]),
    "x channels": broken(x=lambda t: t[:, :5].contiguous(memory_format=NHWC)),
    "x without channels": broken(x=lambda t: t[:, :0].contiguous(memory_format=NHWC)),
    "weight dtype": broken(conv_weights=lambda w: [w[0].double(), *w[1:]]),
    "weight int": broken(conv_weights=lambda w: [w[0].int(), *w[1:]]),
    "weight 2-d": broken(conv_weights=lambda w: [w[0][:, :, 0, 0], *w[1:]]),
    "weight strided": broken(conv_weights=lambda w: [w[0].mT.expand(-1, -1, 1, 1)[::2], *w[1:]]),
    "weight not square": broken(conv_weights=lambda w: [w[0], w[1][:, :, :1], w[2]]),
    "weight even": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 1, 2, 2), w[2]]),
    "weight too large": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 1, 9, 9), w[2]]),
    "weight channels": broken(conv_weights=lambda w: [w[0], w[1], w[2][:, :17].contiguous()]),
    "weight empty": broken(conv_weights=lambda w: [torch.zeros(0, 6, 1, 1), *w[1:]]),
    "dense in the middle": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 18, 3, 3), w[2]]),
    "grouped": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 2, 3, 3), w[2]]),
    "short weights": broken(conv_weights=lambda w: w[:2]),
    "short bn_weights": broken(bn_weights=lambda w: w[:2]),
    "short bn_biases": broken(bn_biases=lambda w: w[:2]),
    "long bn_biases": broken(bn_biases=lambda w: w + w),
    "short running_means": broken(running_means=lambda w: w[:2]),
    "short running_vars": broken(running_vars=lambda w: w[:2]),
    "short eps": broken(eps=[1e-5]),
    "bn_weight shape": broken(bn_weights=lambda w: [w[0][:17], *w[1:]]),
    "bn_weight dtype": broken(bn_weights=lambda w: [w[0].double(), *w[1:]]),
    "bn_weight strided": broken(bn_weights=lambda w: [w[0].repeat(2)[::2], *w[1:]]),
    "bn_weight 2-d": broken(bn_weights=lambda w: [w[0][None], *w[1:]]),
    "bn_bias shape": broken(bn_biases=lambda w: [w[0], w[1][:1], w[2]]),
    "running_mean shape": broken(running_means=[torch.zeros(17), *2 * [torch.empty(0)]]),
    "running_mean dtype": broken(running_means=[torch.zeros(18).double(), *2 * [torch.empty(0)]]),
    "running_var shape": broken(running_means=[torch.zeros(18), *2 * [torch.empty(0)]]),
    "residual shape": broken(residual=torch.zeros(2, 6, 5, 5).contiguous(memory_format=NHWC)),
    "residual dtype": broken(residual=lambda _: torch.zeros(2, 6, 5, 4).double().contiguous(memory_format=NHWC)),
    "residual layout": broken(residual=torch.zeros(2, 6, 5, 4)),
    "residual 3-d": broken(residual=torch.zeros(6, 5, 4)),
    "input added to another shape": broken(add_input=True, x=lambda t: t[:, :5].contiguous(memory_format=NHWC)),
}  # fmt: skip


BAD_BACKWARD = {
    "grad shape": broken(grad=lambda g: g[:, :5].contiguous(memory_format=NHWC)),
    "grad batch": broken(grad=lambda g: g[:1]),
    "grad dtype": broken(grad=lambda g: g.double()),
    "grad layout": broken(grad=lambda g: g.contiguous()),
    "grad expanded": broken(grad=lambda g: g[:1, :1, :1, :1].expand_as(g)),
    "grad without pixels between": broken(grad=lambda g: g.as_strided(g.shape, (100, 1, 20, 5))),
    "wide grad where x was added": broken(grad=wide, add_input=lambda _: True),
    "saved shape": broken(saved=lambda t: t[:-1]),
    "saved empty": broken(saved=lambda t: t[:0]),
    "saved strided": broken(saved=lambda t: t.repeat(2)[::2]),
    "saved type": broken(saved=lambda t: t.to(BFLOAT16)),
    "saved double": broken(saved=lambda t: t.double()),
    "statistics shape": broken(statistics=lambda t: t[:-1]),
    "statistics dtype": broken(statistics=lambda t: t.float()),
    "x without recomputation": broken(x=lambda _: torch.zeros(2, 6, 5, 4).contiguous(memory_format=NHWC)),
    "recomputation without x": broken_plan(0, saved_at=-1),
    "short wants": broken(wants=[True] * 6),
    "long wants": broken(wants=[True] * 8),
    "short batch_statistics": broken(batch_statistics=[True]),
    "weights": broken(conv_weights=lambda w: w[:2]),
    "weight channels": broken(conv_weights=lambda w: [w[0], w[1], w[2][:, :17].contiguous()]),
    "bn_weight": broken(bn_weights=lambda w: [w[0][:17], *w[1:]]),
    "eps": broken(eps=[]),
}


@pytest.mark.parametrize("changes", [*BAD_FORWARD.values(), *BAD_PLAN.values()], ids=[*BAD_FORWARD, *BAD_PLAN])
def test_bad_arguments_of_forward_are_refused(changes, native):
    arguments = forward_arguments(BLOCK.draw_once())
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
        FORWARD(**arguments)


@pytest.mark.parametrize("changes", [*BAD_BACKWARD.values(), *BAD_PLAN.values()], ids=[*BAD_BACKWARD, *BAD_PLAN])
def test_bad_arguments_of_backward_are_refused(changes, native):
    arguments = backward_arguments(BLOCK.draw_once())
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
        BACKWARD(**arguments)


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
    drawn = ChainCase((2, 6, 5, 4), "pw4/relu").draw_once()
    seen = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    y, grad = ops.conv_bn_act_chain(drawn.x.requires_grad_(), drawn.stages, backend="cpu"), wide(drawn.grad)
    with Calls():
        torch.autograd.grad(y, drawn.x, grad)
    assert not [name for name in seen if "copy" in name or "clone" in name]


def test_bad_x_of_a_recomputing_backward_is_refused(native):
    good = backward_arguments(BLOCK.draw_once(), recompute=True)
    x = good["x"]
    for bad in (x.contiguous(), x[:1], x.double(), x[:, :5].contiguous(memory_format=NHWC), None):
        with pytest.raises(RuntimeError, match="conv_bn_act_chain: x "):
            BACKWARD(**good | {"x": bad})


def test_a_dense_stage_has_no_input_gradient(native):
    drawn = ChainCase((2, 3, 5, 4), "dense8k3s2").draw_once()
    with pytest.raises(RuntimeError, match="a dense stage has no input gradient"):
        BACKWARD(**backward_arguments(drawn))


@pytest.mark.parametrize("case", [ChainCase((2, 6, 5, 4), "pw4"), ChainCase((2, 6, 5, 4), "dw3s2")], ids=str)
def test_a_backward_that_adds_the_input_to_another_shape_is_refused(case, native):
    with pytest.raises(RuntimeError, match="conv_bn_act_chain: x can be added only"):
        BACKWARD(**backward_arguments(case.draw_once()) | {"add_input": True})


@pytest.mark.parametrize("name", ["conv_weights", "bn_weights", "bn_biases", "running_means", "residual"])
def test_tensors_of_another_device_are_refused(name, native):
    arguments = forward_arguments(BLOCK.draw_once(), residual=torch.zeros(2, 6, 5, 4).contiguous(memory_format=NHWC))
    given = arguments[name]
    elsewhere = [given[0].to("meta"), *given[1:]] if isinstance(given, list) else given.to("meta")
    with pytest.raises((RuntimeError, ValueError), match="device"):
        FORWARD(**arguments | {name: elsewhere})


GOOD = Stage(ConvBNParams(torch.ones(6, 4, 1, 1), torch.ones(6), torch.zeros(6)))


X = torch.ones(2, 4, 5, 5)


WRONG = {
    "no stages": (ValueError, "needs at least one stage", {"stages": []}),
    "tuple": (TypeError, r"stages\[0\]: must be a Stage, got tuple", {"stages": [tuple(GOOD)]}),
    "3-d x": (ValueError, "x must be 4-d", {"x": X[0]}),
    "int x": (TypeError, "x must be float32", {"x": X.long()}),
    "second stage": (ValueError, r"stages\[1\]: conv_weight of shape.*takes 4 channels", {"stages": [GOOD, GOOD]}),
    "act": (ValueError, r"stages\[0\]: act must be one of", {"stages": [GOOD._replace(act="gelu")]}),
    "eval": (ValueError, r"stages\[0\]: training=False", {"stages": [GOOD._replace(training=False)]}),
    "running": (
        ValueError,
        r"stages\[0\]: running_mean must have shape \(6,\), got \(4,\)",
        {"stages": [GOOD._replace(params=ConvBNParams(*GOOD.params[:3], torch.zeros(4), torch.ones(6)))]},
    ),
    "a stage that shrinks to one value": (
        ValueError,
        r"stages\[0\]: cannot take batch statistics of a single value",
        {"x": X[:1, :, :2, :2], "stages": [GOOD._replace(stride=2)]},
    ),
    "residual": (ValueError, "residual must have the shape of the result", {"residual": X}),
    "empty": (ValueError, "empty batch", {"x": X[:0]}),
    "one value": (ValueError, "single value per channel", {"x": X[:1, :, :1, :1]}),
    "odd shuffle": (ValueError, "splits an even number of channels", {"x": torch.ones(2, 3, 5, 5), "shuffle": True}),
    "shuffle": (ValueError, "keep the shape", {"x": torch.ones(2, 8, 5, 5), "shuffle": True}),
    "backend": (RuntimeError, "backend 'cuda'.*cannot serve", {"backend": "cuda"}),
    "weight type": (
        (TypeError, RuntimeError, ValueError),
        "type",
        {"stages": [GOOD._replace(params=GOOD.params._replace(conv_weight=torch.ones(6, 4, 1, 1, dtype=BFLOAT16)))]},
    ),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    with pytest.raises(error, match=message):
        ops.conv_bn_act_chain(**{"x": X, "stages": [GOOD], **change})


def test_an_empty_batch_in_eval_mode_is_empty(backend):
    running = torch.zeros(6), torch.ones(6)
    stage = Stage(ConvBNParams(*GOOD.params[:3], *running), training=False)
    assert ops.conv_bn_act_chain(X[:0], [stage], backend=backend).shape == (0, 6, 5, 5)
