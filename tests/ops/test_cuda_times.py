"""The choice between CUDA and Triton kernels, and between the schedules of the CUDA kernels, by modelled times."""

import json
import logging
from pathlib import Path

import pytest
import torch

from nasfast import ops
from nasfast.measure import doctor
from nasfast.ops import _triton, backends, conv, cuda_reasons, cuda_times, plan
from nasfast.ops.cuda_times import Chain, Times
from nasfast.ops.reference import ConvBNParams, Stage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cuda_times.json"
BLOCK = (("pointwise", 1, 1), ("depthwise", 5, 1), ("pointwise", 1, 1))
STRIDED = (("pointwise", 1, 1), ("depthwise", 5, 2), ("pointwise", 1, 1))
SMALL, WIDE = Chain(BLOCK, 2 * 36, (8, 48, 48, 8)), Chain(BLOCK, 2 * 36, (64, 384, 384, 64))
HALVED = Chain(STRIDED, 2 * 36, (8, 48, 48, 16))
MADE_UP = {
    SMALL: Times(triton=10, stored=8, recomputed=6),
    WIDE: Times(triton=10, stored=8, recomputed=9),
    HALVED: Times(triton=10, stored=12, recomputed=11),
}


@pytest.fixture(autouse=True)
def empty_caches():
    """Plans and refusals are kept, and the tests change what they depend on."""
    caches = plan._decide_once, plan._refuse_once
    yield [cache.cache_clear() for cache in caches]
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors pass for those of a GPU; the list of backends and plans of the chains that run."""
    used = []

    def run_chain(x, stages, plan, *, residual, backend):
        used.append((backend, plan.schedule))
        return torch.zeros(1, dtype=x.dtype).expand(plan.out_shape)

    monkeypatch.setattr(conv, "run_chain", run_chain)
    monkeypatch.setattr(plan, "modelled_gpu", lambda x: "H200")
    monkeypatch.setattr(_triton, "interpreted", lambda: False)
    row = tuple(backends.Backend("", name, lambda x: "") for name in ("cuda", "triton"))
    monkeypatch.setitem(backends._TABLE, "conv_bn_act_chain", row)
    monkeypatch.setattr(backends, "_logged", set())
    return used


def run(chain: Chain, act: str = "relu6") -> None:
    """Run a chain of 2 or 32 images on tensors that are all zero."""
    images = 32 if chain.pixels % (32 * 49) == 0 else 2
    side = round((chain.pixels // images) ** 0.5)
    assert images * side * side == chain.pixels
    stages = []
    for (kind, kernel, stride), before, after in zip(
        chain.stages, chain.channels[:-1], chain.channels[1:], strict=True
    ):
        groups = after if kind == "depthwise" else 1
        weight = torch.zeros(1, dtype=torch.bfloat16).expand(after, before // groups, kernel, kernel)
        params = ConvBNParams(weight, torch.ones(after), torch.zeros(after))
        stages.append(Stage(params, stride, kernel // 2, groups, act))
    x = torch.zeros(1, dtype=torch.bfloat16).expand(images, chain.channels[0], side, side)
    ops.conv_bn_act_chain(x, stages)


def test_the_package_decides_by_the_committed_results():
    results = json.loads(RESULTS.read_text())["rows"]
    shipped = json.loads(Path(cuda_times.__file__).with_name("cuda_times.json").read_text())
    assert shipped == {row["gpu"]: row["chains"] for row in results}


@pytest.mark.parametrize("gpu", cuda_times.TIMES)
def test_every_modelled_chain_runs_on_what_is_chosen(gpu, on_a_gpu, monkeypatch):
    """The fastest schedule, except that a kept megabyte counts as 0.6 us; and Triton where that is faster."""
    monkeypatch.setattr(plan, "modelled_gpu", lambda x: gpu)
    shipped = json.loads(Path(cuda_times.__file__).with_name("cuda_times.json").read_text())
    for row in shipped[gpu]:
        run(Chain(tuple(map(tuple, row["stages"])), row["pixels"], tuple(row["channels"])))
        backend, schedule = on_a_gpu.pop()
        x, expansion, *_ = row["channels"]
        costs = {name: row[name] for name in ("released", "recomputed") if row[name] is not None}
        costs["stored"] = row["stored"] + 0.6 * 2e-6 * row["pixels"] * (expansion - x)
        chosen = min(costs, key=costs.get)
        assert (backend, schedule) == ("cuda", chosen) if row[chosen] <= row["triton"] else backend == "triton"


def test_a_chain_is_decided_as_the_most_similar_one(on_a_gpu, monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "H200", MADE_UP)
    run(SMALL._replace(channels=(16, 64, 64, 8)))
    run(WIDE._replace(channels=(56, 336, 336, 40)))
    run(HALVED._replace(pixels=2 * 100))
    # no 7x7 is modelled, so it is decided as a chain with another kernel
    run(SMALL._replace(stages=(BLOCK[0], ("depthwise", 7, 1), BLOCK[2])))
    # nothing like this is modelled
    run(Chain(BLOCK[:2], 2 * 36, (8, 48, 48)))
    assert on_a_gpu == [
        ("cuda", "recomputed"),
        ("cuda", "stored"),
        ("triton", "stored"),
        ("cuda", "recomputed"),
        ("cuda", "stored"),
    ]


def test_the_kernels_store_an_expansion_that_they_cannot_compute_again(on_a_gpu, monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "H200", MADE_UP)
    run(SMALL, act="identity")
    assert on_a_gpu == [("cuda", "stored")]


def test_an_expansion_is_released_where_that_takes_little_for_each_megabyte(on_a_gpu, monkeypatch):
    # it has 40 channels more than the input, and so 0.25 MB more, which count as 0.15 us
    chain = SMALL._replace(pixels=2 * 1600)
    for released in (8.1, 8.2):
        plan._decide_once.cache_clear()
        times = Times(triton=10, stored=8, recomputed=8.3, released=released)
        monkeypatch.setitem(cuda_times.TIMES, "H200", {chain: times})
        run(chain)
    assert on_a_gpu == [("cuda", "released"), ("cuda", "stored")]


def test_an_expansion_that_cannot_be_computed_again_is_decided_by_the_time_of_storing_it(on_a_gpu, monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "H200", {SMALL: Times(triton=10, stored=12, recomputed=6)})
    run(SMALL)
    run(SMALL, act="identity")
    assert on_a_gpu == [("cuda", "recomputed"), ("triton", "stored")]


def test_a_strided_pointwise_stage_is_decided_by_the_pixels_that_it_reads(on_a_gpu, monkeypatch):
    plain, strided = (("pointwise", 1, 1),), (("pointwise", 1, 2),)
    large, small = Chain(plain, 2 * 144, (8, 16)), Chain(plain, 2 * 36, (8, 16))
    times = {large: Times(10, 8), small: Times(10, 12)}
    monkeypatch.setitem(cuda_times.TIMES, "H200", times)
    for chain in (large, large._replace(stages=strided)):
        run(chain)
    assert [backend for backend, _ in on_a_gpu] == ["cuda", "triton"]


def test_the_reason_is_logged_once_and_a_named_backend_does_not_mind(on_a_gpu, monkeypatch, caplog):
    monkeypatch.setitem(cuda_times.TIMES, "H200", MADE_UP)
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        run(HALVED)
        run(HALVED)
        with ops.use_backend("cuda"):
            run(HALVED)
    assert [backend for backend, _ in on_a_gpu] == ["triton", "triton", "cuda"]
    (message,) = {record.message for record in caplog.records}
    assert (
        len(caplog.records) == 1 and "cuda: by the model of an H200, 11 us, and 10 us with triton, for poi" in message
    )


def test_the_reason_says_when_the_times_are_those_of_another_chain(monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "H200", MADE_UP)
    other = HALVED._replace(pixels=2 * 100)
    own, others = (cuda_times.slower("H200", chain, "recomputed") for chain in (HALVED, other))
    assert own.endswith(f" with triton, for {HALVED}")
    assert others.endswith(f" for the modelled chain that is most similar: {HALVED}")


@pytest.mark.parametrize(
    ("capability", "gpu"),
    [
        ((8, 0), "H200"),
        ((8, 6), "RTX 3080"),
        ((8, 9), "RTX 3080"),
        ((9, 0), "H200"),
        ((10, 0), "H200"),
        ((12, 0), "RTX 3080"),
    ],
)
def test_gpus_are_taken_for_the_modelled_one_with_the_same_kind_of_memory(capability, gpu):
    assert cuda_times.similar_gpu(capability) == gpu


def test_doctor_says_what_the_model_decides(monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "RTX 3080", MADE_UP)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 9))
    monkeypatch.setattr(cuda_reasons, "shared_kb", lambda: 227)
    monkeypatch.setattr(backends, "explain", lambda device, dtype: [])
    lines = doctor._operators()
    assert lines[2:5] == [
        "cuda runs 0 of the 2 depthwise stages of a mobilenet_v2 step on tensor cores",
        "  not 1: the kernel that computes an expansion again has no such stencil",
        "  not 1: with kernel 5 it is slower by the model on maps of at most 8 columns",
    ]
    assert lines[-len(cuda_reasons.Unjoined) :] == [f"  {reason.value}" for reason in cuda_reasons.Unjoined]
    assert lines[:2] == [
        "cuda by the model of an RTX 3080: 25 us, and 30 us with triton, for the 3 chains of a mobilenet_v2 step; of "
        "the 3 expansions that it can compute again, 2 are, and 0 in backward only",
        f"not cuda by the model of an RTX 3080, 11 us, and 10 us with triton, for {HALVED}",
    ]
