"""The schedules of the CUDA kernels, chosen by modelled times."""

import re

import pytest
import torch

from nasfast.ops import cuda_times, plan
from nasfast.ops.cuda_times import Chain, Times
from nasfast.ops.reference import ConvBNParams, Stage

BLOCK = (("pointwise", 1, 1), ("depthwise", 5, 1), ("pointwise", 1, 1))
SMALL, WIDE = Chain(BLOCK, 2 * 36, (8, 48, 48, 8)), Chain(BLOCK, 2 * 36, (64, 384, 384, 64))
MADE_UP = {SMALL: Times(stored=8, recomputed=6), WIDE: Times(stored=8, recomputed=9)}


@pytest.fixture(autouse=True)
def fresh_plans():
    """Plans are kept, and the tests change what they depend on."""
    plan._decide_once.cache_clear()
    yield
    plan._decide_once.cache_clear()


@pytest.fixture
def schedule_of(monkeypatch):
    """The schedule of a chain of 2 or 32 images, whose CPU tensors pass for those of a GPU."""

    def schedule(chain: Chain, act: str = "relu6", gpu: str = "H200") -> str:
        monkeypatch.setattr(plan, "modelled_gpu", lambda x: gpu)
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
        return plan.plan_chain("cuda", x, plan.stage_fields(stages)).schedule

    return schedule


@pytest.mark.parametrize("gpu", cuda_times.TIMES)
def test_every_modelled_chain_runs_in_the_fastest_schedule(gpu, schedule_of):
    """Except that a kept megabyte counts as 0.6 us."""
    for chain, times in cuda_times.TIMES[gpu].items():
        kept = 0.6 * 2e-6 * chain.pixels * (chain.channels[1] - chain.channels[0])
        costs = {"stored": times.stored + kept, "released": times.released, "recomputed": times.recomputed}
        known = {name: cost for name, cost in costs.items() if cost is not None}
        assert schedule_of(chain, gpu=gpu) == min(known, key=known.get)


def test_a_chain_is_decided_as_the_most_similar_one(schedule_of, monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "H200", MADE_UP)
    assert schedule_of(SMALL._replace(channels=(16, 64, 64, 8))) == "recomputed"
    assert schedule_of(WIDE._replace(channels=(56, 336, 336, 40))) == "stored"
    # no 7x7 is modelled, so it is decided as a chain with another kernel
    assert schedule_of(SMALL._replace(stages=(BLOCK[0], ("depthwise", 7, 1), BLOCK[2]))) == "recomputed"
    # nothing like this is modelled
    assert schedule_of(Chain(BLOCK[:2], 2 * 36, (8, 48, 48))) == "stored"
    # the kernels cannot compute this expansion again
    assert schedule_of(SMALL, act="identity") == "stored"


@pytest.mark.parametrize(("released", "schedule"), [(8.1, "released"), (8.2, "stored")])
def test_an_expansion_is_released_where_that_takes_little_for_each_megabyte(
    released, schedule, schedule_of, monkeypatch
):
    # it has 40 channels more than the input, and so 0.25 MB more, which count as 0.15 us
    chain = SMALL._replace(pixels=2 * 1600)
    times = Times(stored=8, recomputed=8.3, released=released)
    monkeypatch.setitem(cuda_times.TIMES, "H200", {chain: times})
    assert schedule_of(chain) == schedule


def test_gpus_are_taken_for_the_modelled_one_with_the_same_kind_of_memory():
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    hbm, others = "H200", "RTX 3080"
    assert [cuda_times.similar_gpu(c) for c in capabilities] == [hbm, others, others, hbm, hbm, others]


def test_the_summary_counts_schedules(monkeypatch):
    monkeypatch.setitem(cuda_times.TIMES, "RTX 3080", MADE_UP)
    said = "14 us for the 2 chains .* of the 2 expansions that it can compute again, 1 are, and 0 in backward only"
    assert re.search(said, cuda_times.summary("RTX 3080"))
