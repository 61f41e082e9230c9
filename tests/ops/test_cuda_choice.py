"""Which chains go to the CUDA kernels, which to PyTorch, and what is said about it."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases.chain import ChainCase, planned_numbers

from nasfast import ops, spaces
from nasfast.ops import _native, backends, reference
from nasfast.ops.chain import call as chain_call
from nasfast.ops.chain.limits import served_stages
from nasfast.ops.chain.plan import stage_fields
from nasfast.ops.reference import ConvBNParams
from nasfast.supernet import Supernet

pytestmark = pytest.mark.skipif(_native.why_no_emulation() is not None, reason=str(_native.why_no_emulation()))
GOOD = ChainCase((2, 8, 6, 6), "pw24/relu6 dw3s2/relu6 pw16/identity", dtype=torch.bfloat16)
# a chain of which the CUDA kernels run nothing, and why
REFUSED = {
    "running": ("pw24/relu6! dw3/relu6 pw16/identity", "stage 0 uses running statistics"),
    "act": ("pw24/tanh dw3/relu6", "stage 0 has the activation tanh; the kernels have identity, relu, relu6"),
    "channels": ("pw20/relu6 pw24/relu6", "stage 0 has 20 channels, not a multiple of 8"),
    "dense": ("dense8k3/relu6 pw8/relu6", "the convolution of stage 0 is neither pointwise nor depthwise"),
    "wide": ("pw264/relu6 pw20/relu6", "none is depthwise, and one has more than 256 channels"),
}
# chains of which they run the first stages, and how many
BEGUN = {
    "pw24/relu6 dw3/relu6 pw16/identity!": 2,
    "pw24/relu6 pw20/relu6 pw16/relu6": 1,
    "pw8/relu6 dense8k3/relu6": 1,
    "dw3/relu6 pw8s2/relu6": 1,
    "dw3s2/relu6 pw264/relu6 pw16/silu pw8/identity": 2,
}
CASES = {name: (replace(GOOD, units=units), reason) for name, (units, reason) in REFUSED.items()}
CASES["few"] = replace(GOOD, shape=(2, 4, 6, 6)), "stage 0 has 4 channels, not a multiple of 8"
STEM = replace(GOOD, shape=(2, 4, 6, 8), units="dense8k3/relu6")
CASES["deep"] = STEM, "the kernels have 3 x 3, at most 3 channels and stride 1 or 2"
CASES["odd row"] = (replace(STEM, shape=(2, 3, 6, 9)), "a row of x has 27 numbers; dense stage 0 needs a multiple of 8")
CASES["shuffle"] = ChainCase((2, 16, 6, 6), "pw8/relu dw3/identity", shuffle=True, dtype=GOOD.dtype), "are shuffled"


def call(case: ChainCase, backend: str | None = None) -> torch.Tensor:
    inputs = case.draw_once()
    return ops.conv_bn_act_chain(inputs.x, inputs.stages, shuffle=inputs.shuffle, backend=backend)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors pass for those of a GPU; the list of backends that chains went to."""
    used = []

    def run_chain(x, stages, plan, *, residual, backend):
        used.append(backend)
        return torch.zeros(plan.out_shape, dtype=x.dtype)

    run_reference = reference.conv_bn_act_chain

    def on_pytorch(x, stages, **rest):
        used.append("reference")
        return run_reference(x, stages, **rest)

    monkeypatch.setattr(chain_call, "run_chain", run_chain)
    monkeypatch.setattr(reference, "conv_bn_act_chain", on_pytorch)
    for op in ("conv_bn_act", "conv_bn_act_chain"):
        cpu, cuda, triton, last = backends._TABLE[op]
        assert [cpu.name, cuda.name, triton.name, last.name] == ["cpu", "cuda", "triton", "reference"]
        cuda = replace(cuda, why_not=lambda x: "", automatic=None)
        row = cuda, replace(triton, why_not=lambda x: ""), last
        monkeypatch.setitem(backends._TABLE, op, row)
    return used


@pytest.mark.parametrize(
    ("channels", "width", "units", "reason"),
    [
        (8, 6, "pw3136/relu6", None),
        (8, 6, "pw3144/relu6", "has 3144 channels; the kernels have at most 3136"),
        (8, 6, "pw24/relu6", None),
        (8, 6, "pw20/relu6", "has 20 channels, not a multiple of 8"),
        (8, 6, "pw24/tanh", "has the activation tanh"),
        (12, 6, "pw24/relu", "has 12 channels, not a multiple of 8"),
        (3, 8, "dense8k3s2/identity", None),
        (4, 8, "dense8k3/relu6", "is dense, 3 x 3, of 4 channels, with stride 1"),
        (3, 8, "dense8k3s3/relu6", "is dense, 3 x 3, of 3 channels, with stride 3"),
        (1, 8, "dense8k5/relu6", "is dense, 5 x 5, of 1 channels, with stride 1"),
        (3, 9, "dense8k3/relu6", "a row of x has 27 numbers"),
    ],
)
def test_the_kernels_have_the_limits_that_python_knows(channels, width, units, reason, emulation):
    inputs = ChainCase((1, channels, 5, width), units, dtype=torch.bfloat16).draw_once()
    refusal = served_stages(inputs.x, inputs.stages, stage_fields(inputs.stages))[1]
    count = partial(torch.ops.nasfast.conv_bn_act_chain_gpu_counters, inputs.x, planned_numbers(inputs))
    if reason is None:
        assert refusal is None
        assert count() > 0
    else:
        assert refusal is not None and reason in refusal.reason
        with pytest.raises(RuntimeError, match="the CUDA kernels need|have no room for a product of 3144"):
            count()


def test_chains_go_to_cuda(on_a_gpu):
    call(GOOD)
    call(replace(GOOD, units="pw16s2/relu6 dw3/relu6"))
    inputs = GOOD.draw_once()
    units = [stage.params for stage in inputs.stages]
    ops.conv_bn_act(inputs.x, *units[0][:3])
    assert on_a_gpu == ["cuda"] * 3


@pytest.mark.parametrize("name", CASES)
def test_other_chains_go_to_pytorch_with_the_reason_unless_cuda_is_named(name, on_a_gpu, caplog):
    case, reason = CASES[name]
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        call(case)
        call(case)
    assert on_a_gpu and set(on_a_gpu) == {"reference"}
    (record,) = caplog.records  # once
    assert "conv_bn_act_chain runs on the reference backend (cuda: " in record.message and reason in record.message
    with pytest.raises(RuntimeError, match=f"backend 'cuda' .from backend. cannot serve: .*{reason}"):
        call(case, "cuda")
    # named for all operators, where the kernels have the operator but lack the shape
    on_a_gpu.clear()
    with ops.use_backend("cuda"):
        if name in ("act", "channels", "few", "deep", "odd row"):
            with pytest.raises(RuntimeError, match=f"backend 'cuda' .from use_backend. cannot serve: .*{reason}"):
                call(case)
            assert on_a_gpu == []
        else:
            call(case)
            assert set(on_a_gpu) == {"reference"}


@pytest.mark.parametrize("units", BEGUN)
def test_the_first_stages_run_on_cuda_and_the_others_on_pytorch(units, emulated, monkeypatch):
    ran = []
    run_chain = chain_call.run_chain

    def noted(x, stages, plan, **rest):
        ran.append((rest["backend"], len(stages)))
        return run_chain(x, stages, plan, **rest)

    monkeypatch.setattr(chain_call, "run_chain", noted)
    inputs = replace(GOOD, units=units).draw_once()
    exact = [
        s._replace(params=ConvBNParams(*(t if t is None else t.double() for t in s.params))) for s in inputs.stages
    ]
    variants = {
        "cuda": (inputs.x, inputs.stages),
        "reference": (inputs.x, inputs.stages),
        "exact": (inputs.x.double(), exact),
    }
    results, grad = {}, None
    for name, (x, stages) in variants.items():
        leaves = [x.clone().requires_grad_(), *(stage.params.bn_weight.requires_grad_() for stage in stages)]
        y = ops.conv_bn_act_chain(leaves[0], stages, backend="reference" if name == "exact" else name)
        grad = torch.randn_like(y) if grad is None else grad.to(y.dtype)
        results[name] = y.detach(), *torch.autograd.grad(y, leaves, grad)
    assert ran[0] == ("cuda", BEGUN[units])
    for ours, theirs, want in zip(*results.values(), strict=True):
        error, allowed = ((got - want).norm() / want.norm() for got in (ours, theirs))
        assert error <= 1.25 * allowed + 2**-7


def test_a_stem_goes_to_cuda_unless_the_gradient_of_its_input_is_wanted(on_a_gpu, caplog):
    inputs = replace(GOOD, shape=(2, 3, 6, 8), units="dense8k3s2/relu6 dw3/relu6 pw16/identity").draw_once()
    ops.conv_bn_act_chain(inputs.x, inputs.stages)
    assert on_a_gpu == ["cuda"]
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        ops.conv_bn_act_chain(inputs.x.requires_grad_(), inputs.stages)
    assert "cuda" not in on_a_gpu[1:]
    assert "nor of a stem, whose x has no gradient" in caplog.text


def test_weights_that_train_go_to_pytorch(on_a_gpu, caplog):
    inputs = GOOD.draw_once()
    inputs.stages[0].params.conv_weight.requires_grad_()
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        ops.conv_bn_act_chain(inputs.x, inputs.stages)
    assert "cuda" not in on_a_gpu
    assert "cuda: the weight of stage 0 trains" in caplog.text


def test_a_network_runs_with_cuda_named_for_all_operators(emulated, monkeypatch):
    """The kernels have its stem, too, and no bn_act alone."""
    used = []
    run_chain = chain_call.run_chain

    def noted(*arguments, backend, **rest):
        used.append(backend)
        return run_chain(*arguments, backend=backend, **rest)

    monkeypatch.setattr(chain_call, "run_chain", noted)
    torch.manual_seed(0)
    space = spaces.digits_mini()
    net = Supernet(space, init="gaussian")
    net.freeze("bn")
    net.to(memory_format=torch.channels_last).train()
    images = torch.randn(4, space.in_channels, space.resolution, space.resolution)
    results = {}
    for name in ("cuda", "reference"):
        with ops.use_backend(name), torch.autocast("cpu", torch.bfloat16):
            results[name] = net(images, [0] * len(space.layers))
    torch.testing.assert_close(results["cuda"], results["reference"], rtol=0.05, atol=0.05)
    assert set(used) == {"cuda"}


def test_types_that_it_lacks_raise_with_the_reason(emulated):
    inputs = replace(GOOD, dtype=torch.float32).draw_once()
    with pytest.raises(RuntimeError, match="computes in bfloat16 and float16, here it would be torch.float32"):
        ops.conv_bn_act_chain(inputs.x, inputs.stages, backend="cuda")
    half = [s._replace(params=s.params._replace(conv_weight=s.params.conv_weight.half())) for s in inputs.stages]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="weight of stage 0 is torch.float16"):
        ops.conv_bn_act_chain(inputs.x, half, backend="cuda")


def test_cpu_tensors_are_served_only_by_the_emulation_that_is_named(monkeypatch):
    assert ops.resolve_backend("conv_bn_act_chain", GOOD.draw_once().x).name == "cpu"
    with pytest.raises(RuntimeError, match="cannot serve: serves CUDA tensors, got one on cpu"):
        call(GOOD, "cuda")
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    assert call(GOOD, "cuda").isfinite().all()
    # float16 is not the CPU's, and still not the emulation's unless it is named
    assert ops.resolve_backend("conv_bn_act_chain", GOOD.draw_once().x.half()).name == "reference"


def test_a_gpu_before_ampere_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(backends, "_why_no_cuda_kernels", lambda device: "")

    class Image:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

    reason = "needs compute capability 8.0 (Ampere) or newer, cuda:0 has 7.5"
    assert backends.why_not_cuda_chain(Image()) == reason
