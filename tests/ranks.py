"""Small jobs of several ranks, for the tests of distributed training.

As a script, `ranks.py OUT CASE ...` runs each case in OUT/CASE, one forked process per rank; torch is imported once for
all. Every line it prints is a case and how its processes ended. The case "torchrun" is what torchrun does for `nasfast
supernet`, of which rank 1 dies in the middle of step 7, until it is started again.
"""

from __future__ import annotations

import ast
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from killable import at_call, die  # which imports what the optimizers would import in each forked rank
from tiny import batches, tiny_space
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

import nasfast.cli.commands
import nasfast.cli.output
import nasfast.pipeline.stages  # noqa: F401, so that not every forked command imports it
import nasfast.train.loop as loop_module
from benchmarks.captures import EagerCapture
from nasfast.cli import main as cli
from nasfast.engine import GraphEngine
from nasfast.fusion import fuse
from nasfast.runtime.distributed import RankError, World, start
from nasfast.runtime.termination import Terminated
from nasfast.spaces import FairSampler
from nasfast.supernet import Supernet, build
from nasfast.train import CheckpointError, TrainConfig, TrainExtras, TrainStage, evaluate, train, train_supernet

ARCH = (1, 0, 2, 1)
SETTINGS = TrainConfig(epochs=2, lr=0.2, checkpoint_every=3, log_every=1)
# the last one has one image more on rank 1 than on rank 0
BATCHES = [*batches(3), *batches(1, size=7, seed=1)]
HELD_OUT = [*batches(2, seed=2), *batches(1, size=1, seed=3)]


class Shares:
    """A rank's shares of fixed batches, as those of `nasfast.data.Loader` are: in order, differing by one image."""

    def __init__(self, made: list[tuple[Tensor, Tensor]], world: World) -> None:
        self.made, self.world = made, world

    def __len__(self) -> int:
        return len(self.made)

    def epoch(self, epoch: int, *, start: int = 0, device: object = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.made[start:]:
            low, high = (len(y) * r // self.world.size for r in (self.world.rank, self.world.rank + 1))
            if low < high:
                yield x[low:high], y[low:high]


def supernet(out: Path, world: World, *, resume: bool = False, **changes) -> nn.Module:
    torch.manual_seed(0)
    # every rank begins with the weights and paths of rank 0, whatever it was given
    net, sampler = (kind(tiny_space(), seed=world.rank) for kind in (Supernet, FairSampler))
    train_supernet(
        net, Shares(BATCHES, world), sampler, SETTINGS.replace(**changes), run_dir=out, resume=resume, world=world
    )
    return net


class Dropout(nn.Sequential):
    """A network that draws random numbers, which differ between ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(), build(tiny_space(), ARCH, seed=3))


def network(
    out: Path,
    world: World,
    *,
    resume: bool = False,
    model: nn.Module | None = None,
    extras: TrainExtras = TrainExtras(),
    **changes,
) -> nn.Module:
    torch.manual_seed(0)
    model = build(tiny_space(), ARCH, seed=world.rank) if model is None else model
    held_out = Shares(HELD_OUT, world)
    train(
        model,
        Shares(BATCHES, world),
        SETTINGS.replace(**changes),
        TrainStage("retrain/best", out, "f", resume=resume),
        evaluate=lambda m: evaluate(m, held_out, world=world),
        extras=extras,
        world=world,
    )
    return model


def terminated_at(call: int, *ranks: int) -> Callable[[World], None]:
    """A function that sends SIGTERM to some of the ranks, in the middle of their step number `call`."""

    def arm(world: World) -> None:
        if world.rank in ranks:
            term = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
            loop_module.update = at_call(call, loop_module.update, before=term)

    return arm


def _nothing(world: World) -> None:
    return


def _talk(out: Path, world: World) -> None:
    """Make every exchange once, and write the results as text."""
    tensor, sent = torch.full((3,), 1.5 + world.rank), torch.arange(12.0).view(1, 3, 2, 2) * (1 + world.rank)
    world.all_reduce(tensor)
    sent = sent.contiguous(memory_format=torch.channels_last)
    world.broadcast([sent, empty := torch.zeros(0)])
    told = [world.broadcast_bytes(text if world.is_main else b"not this") for text in (b"abc", b"")]
    (out / f"{world.rank}.txt").write_text(
        f"{tensor.tolist()} {sent.flatten().tolist()} {empty.tolist()} {told} {world.all_gather(b'x' * world.rank)}"
    )


def _fused(out: Path, world: World) -> None:
    """A fused model has under DDP and FSDP2 the mean of the gradients that it has of each rank's batch alone."""

    def made() -> nn.Module:
        # large maps and smooth activations, so that rounding decides nothing
        torch.manual_seed(0)
        convs = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 1, bias=False), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        net = nn.Sequential(*(m for conv in convs for m in (conv, nn.BatchNorm2d(conv.out_channels), nn.Tanh())))
        for module in net:
            module.requires_grad_(isinstance(module, nn.BatchNorm2d))
        return net

    def gradients(net: nn.Module, rank: int) -> list[Tensor]:
        net.zero_grad()
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(rank))
        net(x).square().mean().backward()
        found = [p.grad for p in net.parameters() if p.requires_grad]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in found]

    alone = made()
    assert "3 of 3 convolutions" in str(fuse(alone, only_faster=False))
    mean = [(a + b) / 2 for a, b in zip(*(gradients(alone, rank) for rank in range(world.size)), strict=True)]
    first, second, sharded, late = made(), DistributedDataParallel(made()), made(), made()
    for net in (first, second, sharded):
        assert "3 of 3 convolutions" in str(fuse(net, only_faster=False))
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(sharded, mesh=mesh)
    assert "FSDP does not support deepcopy" in str(fuse(fully_shard(late, mesh=mesh)))  # said, and left as it was
    for net in (DistributedDataParallel(first), second, sharded, late):
        for grad, wanted in zip(gradients(net, world.rank), mean, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)


def _gone(out: Path, world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    world.broadcast_bytes(b"")


def _other_settings(out: Path, world: World) -> None:
    supernet(out, world, lr=0.2 + world.rank)


def _as_graphs(out: Path, world: World) -> nn.Module:
    """Train the supernet with the engine of CUDA graphs, whose functions are called instead of captured."""
    loop_module.make_engine = lambda net, name, *, batch, **loss: GraphEngine(
        net, batch, **loss, capture=EagerCapture()
    )
    return supernet(out, world)


def _different_dropout(out: Path, world: World, **options) -> nn.Module:
    return network(out, world, model=Dropout(), **options)


def _with_recipe(out: Path, world: World, **options) -> nn.Module:
    mix = v2.MixUp(alpha=1.0, num_classes=4)
    return network(out, world, extras=TrainExtras(ema=0.7, patience=5, mix=mix), **options)


def _command(*argv: str) -> Callable[[Path, World], None]:
    """A command of `nasfast` in OUT/CASE with the settings of OUT/settings.yaml; it joins the ranks by itself."""

    def run(out: Path, world: World) -> None:
        code = cli.main([argv[0], "--out", str(out), "--config", str(out.parent / "settings.yaml"), *argv[1:]])
        if code:
            sys.exit(code)

    return run


# case: ranks, job, what happens to it, whether it is done again with `resume` afterwards
CASES = {
    "talk": (3, _talk, _nothing, False),
    "gone": (2, _gone, _nothing, False),
    "fused": (2, _fused, _nothing, False),
    "other settings": (2, _other_settings, _nothing, False),
    "supernet": (2, supernet, _nothing, False),
    "supernet terminated": (2, supernet, terminated_at(4, 1), True),
    "supernet as graphs": (2, _as_graphs, _nothing, False),
    "network": (2, network, _nothing, False),
    "network terminated": (2, network, terminated_at(5, 0, 1), True),
    "recipe": (2, _with_recipe, _nothing, False),
    "recipe terminated": (2, _with_recipe, terminated_at(5, 1), True),
    "three": (3, _different_dropout, _nothing, False),
    "three terminated": (3, _different_dropout, terminated_at(2, 2), True),
}
COMMANDS = {
    "unbroken": (2, _command("supernet"), _nothing, False),
    "terminated": (1, _command("supernet"), terminated_at(5, 0), False),
    "refused": (2, _command("supernet", "--data.batch_size", "1"), _nothing, False),
    "score": (2, _command("score"), _nothing, False),
    "networks": (2, _command("retrain", "--retrain.parallel", "networks"), _nothing, False),
    "batch": (2, _command("retrain", "--retrain.parallel", "batch"), _nothing, False),
}
ALL = CASES | COMMANDS
_UNEXPECTED = 4


def _rank(case: str, out: Path, port: int, rank: int, resume: bool) -> None:
    size, job, arm, _ = ALL[case]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 0
    try:
        if case in COMMANDS:
            arm(World())
            job(out, World())
        else:
            with start("cpu") as world:
                if not resume:
                    arm(world)
                made = job(out, world, **({"resume": True} if resume else {}))
                if isinstance(made, nn.Module):
                    (out / f"weights {rank}").write_text(digest(made))
    except SystemExit as error:
        code = error.code
        if isinstance(error, Terminated):
            (out / f"error {rank}").write_text(error.saved)
    except (CheckpointError, RankError) as error:
        (out / f"error {rank}").write_text(f"{type(error).__name__}: {error}")
        code = 3
    except BaseException:
        traceback.print_exc()
        code = _UNEXPECTED
    os._exit(code)


def digest(model: nn.Module) -> str:
    """A digest of all weights, and of the buffers that are part of the state."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def run(case: str, out: Path, *, resume: bool = False) -> list[int]:
    """How the processes of a case ended, in the order of their ranks."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(ALL[case][0]):
        processes.append(pid := os.fork())
        if pid == 0:
            _rank(case, out, port, rank, resume)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]


def codes(said: str) -> dict[str, list[int]]:
    """How the processes of each case ended, from what this program printed.

    Raises:
        AssertionError: a process ended by an error of no case, or by a signal; with all that was printed.
    """
    found = (line.partition("=") for line in said.splitlines())
    ended = {case: ast.literal_eval(codes) for case, _, codes in found if case in ALL}
    assert all(0 <= code != _UNEXPECTED for codes in ended.values() for code in codes), said
    return ended


def main(out: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if COMMANDS.keys() & set(cases):
        import sklearn.datasets  # noqa: F401, so that not every rank imports it to read the digits
    for case in cases:
        if case == "torchrun":
            torchrun(out)
            continue
        codes = run(case, out / case)
        if ALL[case][3]:
            codes += run(case, out / case, resume=True)
        print(f"{case}={codes}", flush=True)


def torchrun(out: Path) -> None:
    """`nasfast supernet` on two ranks of torchrun's agent, of which rank 1 is killed once.

    torchrun itself would import torch in the agent and in each of four workers; here the workers are forked.
    """

    def end(*_, **__) -> None:
        (out / "rank 1 was killed").touch()
        die()

    def worker() -> None:
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            loop_module.update = at_call(7, loop_module.update, before=end)
        assert cli.main(["supernet", "--out", str(out / "torchrun"), "--config", str(out / "settings.yaml")]) == 0

    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(agent, worker)()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
