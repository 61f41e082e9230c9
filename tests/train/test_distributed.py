"""Several ranks: the numbers of one process with BatchNorm per rank, the same weights on all, one writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from forked import run_program
from tiny import tiny_space
from torch import nn

from nasfast.engine import StepResult
from nasfast.runtime.distributed import SINGLE, World
from nasfast.spaces import FairSampler
from nasfast.supernet import Supernet, build
from nasfast.train import TrainStage, evaluate, train
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.exchange import exchange
from nasfast.train.log import read_metrics

pytestmark = pytest.mark.kill

# sums of float32 in another order, through eight steps
CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, dict[str, list[int]]]:
    """A folder with every case of `ranks.CASES`, and how its processes ended."""
    out = tmp_path_factory.mktemp("ranks")
    return out, ranks.codes(run_program(ranks, out, *ranks.CASES))


class PerRank(nn.Module):
    """A network that normalises by each rank's images, in one process: what several ranks compute together."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network, self.size = network, size
        self._norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d) and m.track_running_stats]

    def forward(self, x, *path):
        if not self.training:
            return self.network(x)
        bounds = [len(x) * r // self.size for r in range(self.size + 1)]
        logits = []
        for low, high in zip(bounds, bounds[1:], strict=False):
            logits.append(self.network(x[low:high], *path))
            for bn in self._norms:  # rank 0's running statistics are the network's
                bn.momentum = 0.0
        for bn in self._norms:
            bn.momentum = 0.1
        return torch.cat(logits)


def assert_same_run(out: Path, other: Path) -> None:
    """Compare metrics except for times, and weights, up to rounding."""
    lines, expected = read_metrics(out), read_metrics(other)
    assert [m["step"] for m in lines] == [m["step"] for m in expected]
    for line, want in zip(lines, expected, strict=True):
        for name in want.keys() - {"stage", "images_per_s"}:
            assert line[name] == pytest.approx(want[name], rel=1e-4), (name, line["step"])
    got, want = (load_checkpoint(max((d / "checkpoints").glob("*0*"))) for d in (out, other))
    for name, tensor in got.part("model.").items():
        if "num_batches" not in name:
            torch.testing.assert_close(
                tensor, want.tensors[f"model.network.{name}"], **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_two_ranks_train_a_supernet_as_one_process_with_batchnorm_per_rank(done, tmp_path):
    torch.manual_seed(0)
    net, sampler = Supernet(tiny_space()), FairSampler(tiny_space())
    train(
        PerRank(net, 2),
        ranks.Shares(ranks.BATCHES, SINGLE),
        ranks.SETTINGS,
        TrainStage("supernet", tmp_path, "f"),
        sampler=sampler,
    )
    assert done[1]["supernet"] == [0, 0]
    assert_same_run(done[0] / "supernet", tmp_path)
    # the test can fail: normalising over the whole batch gives other losses
    whole = ranks.supernet(tmp_path / "whole", SINGLE)
    assert read_metrics(tmp_path / "whole")[0]["loss"] != pytest.approx(read_metrics(tmp_path)[0]["loss"], rel=1e-3)
    assert whole.training


def test_two_ranks_train_a_network_as_one_process_with_batchnorm_per_rank(done, tmp_path):
    torch.manual_seed(0)
    held_out = ranks.Shares(ranks.HELD_OUT, SINGLE)
    train(
        PerRank(build(tiny_space(), ranks.ARCH), 2),
        ranks.Shares(ranks.BATCHES, SINGLE),
        ranks.SETTINGS,
        TrainStage("retrain/best", tmp_path, "f"),
        evaluate=lambda m: evaluate(m, held_out),
    )
    assert done[1]["network"] == [0, 0]
    assert_same_run(done[0] / "network", tmp_path)
    assert [m["step"] for m in read_metrics(tmp_path) if "eval_top1" in m] == [4, 8]


@pytest.mark.parametrize("case", ["supernet", "network", "recipe", "three"])
def test_all_ranks_end_with_the_same_bits(done, case):
    digests = [path.read_text() for path in sorted((done[0] / case).glob("weights *"))]
    assert len(digests) == ranks.CASES[case][0]
    assert len(set(digests)) == 1


def test_a_fused_model_is_trained_by_ddp_and_fsdp(done):
    """The job itself compares the gradients."""
    assert done[1]["fused"] == [0, 0]


@pytest.mark.parametrize("ended", [[4, 0], [0, -6]])
def test_what_a_rank_said_before_it_ended_unexpectedly_is_shown(ended):
    with pytest.raises(AssertionError, match="Fatal Python error: Aborted"):
        ranks.codes(f"Fatal Python error: Aborted\nfused={ended}\n")
    assert ranks.codes("a line\ngone=[3, 7]\n") == {"gone": [3, 7]}


def test_a_parameter_that_a_rank_may_have_left_out_is_named():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    used.grad = torch.ones(2)
    result = StepResult(torch.ones(()), torch.ones(()))
    with pytest.raises(RuntimeError, match="1 of 2 parameters that train have no gradient after a step"):
        exchange([used, unused], result, 4, stop=False, world=World(size=2), same_path=False)


def test_the_engine_of_graphs_exchanges_the_same_gradients(done):
    names = ("supernet", "supernet as graphs")
    one, other = ((done[0] / name / "weights 1").read_text() for name in names)
    assert one == other


@pytest.mark.parametrize("case", ["supernet", "network", "recipe", "three"])
def test_one_rank_told_to_stop_stops_all_and_nothing_is_lost(done, case):
    out, codes = done
    size = ranks.CASES[case][0]
    stopped = f"{case} terminated"
    assert codes[stopped] == [143] * size + [0] * size
    messages = {path.read_text() for path in (out / stopped).glob("error *")}
    assert len(messages) == 1
    assert " of 8 is saved in " in messages.pop()
    unbroken, resumed = (
        {p.name: p.read_bytes() for p in (out / name / "checkpoints").iterdir()} for name in (case, stopped)
    )
    assert resumed == unbroken
    assert {path.read_text() for path in (out / stopped).glob("weights *")} == {(out / case / "weights 0").read_text()}
    lines = [
        [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(out / n)] for n in (case, stopped)
    ]
    assert lines[0] == lines[1]


def test_ranks_with_other_settings_do_not_train(done):
    out, codes = done
    assert codes["other settings"] == [3, 3]
    error = (out / "other settings" / "error 1").read_text()
    assert "rank 1 has other settings than rank 0: train.lr was 0.2, now 1.2" in error
    assert not list((out / "other settings").rglob("*.safetensors"))


def test_a_sharded_evaluation_counts_every_image_once(done):
    """17 images, shared as 8 and 9, the last batch of one image by rank 1 alone."""
    checkpoint = load_checkpoint(done[0] / "network" / "checkpoints" / "retrain-best-00000008.safetensors")
    network = build(tiny_space(), ranks.ARCH)
    network.load_state_dict(checkpoint.part("model."))
    found = evaluate(network.eval(), ranks.Shares(ranks.HELD_OUT, SINGLE))
    line = read_metrics(done[0] / "network")[-1]
    assert found.images == 17
    assert (found.top1, found.top5) == (line["eval_top1"], line["eval_top5"])
    assert found.loss == pytest.approx(line["eval_loss"], rel=1e-5)


def test_another_number_of_ranks_continues_the_run(done, tmp_path):
    """One process continues from the checkpoint of two ranks to the end; the result is not the same bit for bit."""
    (tmp_path / "checkpoints").mkdir()
    name = "supernet-00000006.safetensors"
    (tmp_path / "checkpoints" / name).write_bytes((done[0] / "supernet" / "checkpoints" / name).read_bytes())
    ranks.supernet(tmp_path, SINGLE, resume=True)
    lines = read_metrics(tmp_path)
    assert [m["step"] for m in lines] == [7, 8]
    assert lines[0]["loss"] == pytest.approx(read_metrics(done[0] / "supernet")[6]["loss"], rel=0.3)


def test_a_restarted_run_resumes(tmp_path):
    world = World(store=dist.HashStore())
    ranks.supernet(tmp_path / "whole", SINGLE)
    ranks.supernet(tmp_path / "again", world)
    with pytest.raises(FileExistsError):  # a second job of the same attempt
        ranks.supernet(tmp_path / "again", world)
    world = replace(world, attempt=1)
    final = "checkpoints/supernet-00000008.safetensors"
    (tmp_path / "again" / final).unlink()
    ranks.supernet(tmp_path / "again", world)
    assert (tmp_path / "again" / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()
    for other in (SINGLE, World(attempt=1, store=dist.HashStore())):  # they did not begin it
        for _ in range(2):
            with pytest.raises(FileExistsError):
                ranks.supernet(tmp_path / "again", other)
