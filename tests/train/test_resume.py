"""Resuming a training: from which checkpoint, with which settings, and to the same bytes."""

from __future__ import annotations

import pytest
import torch
from tiny import batches, net_and_sampler, tiny_space
from torch.utils.data import DataLoader, Dataset

from nasfast.spaces import FairSampler, UniformSampler, digits_mini
from nasfast.supernet import Supernet
from nasfast.train import CheckpointError, TrainConfig, train_supernet
from nasfast.train.batches import as_epochs
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.log import read_metrics

CFG = TrainConfig(epochs=2, lr=0.2, checkpoint_every=3, log_every=2)


def finished(tmp_path, **changes):
    torch.manual_seed(0)  # the state of the global generator is in the checkpoints
    net, sampler = net_and_sampler()
    return train_supernet(net, batches(4), sampler, CFG.replace(**changes), run_dir=tmp_path)


@pytest.mark.parametrize(("every", "keep", "steps"), [(3, 9, [3, 6, 8]), (3, 1, [8]), (3, 2, [6, 8]), (0, 9, [4, 8])])
def test_checkpoints_at_their_steps(tmp_path, every, keep, steps):
    """0 is one at the end of every epoch."""
    finished(tmp_path, checkpoint_every=every, keep_checkpoints=keep)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"supernet-{s:08d}.safetensors" for s in steps]


def test_a_finished_stage_resumes_to_nothing(tmp_path):
    final = finished(tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}, read_metrics(tmp_path)
    net, sampler = net_and_sampler(seed=5)

    class Untouched:
        def __len__(self):
            return 4

        def __iter__(self):
            raise AssertionError("a finished stage asked for data")

    sampler = FairSampler(tiny_space(), seed=0)
    assert train_supernet(net, Untouched(), sampler, CFG, run_dir=tmp_path, resume=True) == final
    assert ({p.name: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}, read_metrics(tmp_path)) == before
    weights = load_checkpoint(final).part("model.")
    assert all(torch.equal(t, weights[n]) for n, t in net.state_dict().items())


def test_starting_over_an_existing_run_needs_resume(tmp_path):
    finished(tmp_path)
    with pytest.raises(
        FileExistsError, match="holds checkpoints of 'supernet': continue them \\(--resume, resume=True\\)"
    ):
        finished(tmp_path)


def test_resume_without_checkpoints_starts(tmp_path):
    net, sampler = net_and_sampler()
    assert train_supernet(net, batches(4), sampler, CFG, run_dir=tmp_path, resume=True).exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.3}, "train.lr was 0.2, now 0.3"),
        ({"epochs": 3, "momentum": 0.5}, "train.epochs was 2, now 3; train.momentum was 0.9, now 0.5"),
    ],
)
def test_changed_settings_are_refused_and_named(tmp_path, changes, named):
    finished(tmp_path)
    net, sampler = net_and_sampler()
    with pytest.raises(CheckpointError, match="was written with other settings") as error:
        train_supernet(net, batches(4), sampler, CFG.replace(**changes), run_dir=tmp_path, resume=True)
    assert named in str(error.value)
    assert "delete its checkpoints (supernet-*.safetensors) to train anew" in str(error.value)


def test_the_checkpoint_of_another_space_is_refused(tmp_path):
    finished(tmp_path)
    space = digits_mini(num_classes=4, resolution=16)
    net = Supernet(space)
    with pytest.raises(CheckpointError, match=f"{tiny_space().fingerprint}.*{space.fingerprint}"):
        train_supernet(net, batches(4), FairSampler(space), CFG, run_dir=tmp_path, resume=True)


def test_another_kind_of_sampler_or_network_is_refused(tmp_path):
    finished(tmp_path)
    net, _ = net_and_sampler()
    with pytest.raises(CheckpointError, match="does not fit this run: sampler state is of a FairSampler"):
        train_supernet(
            net, batches(4), UniformSampler(tiny_space(), layer_indicators=True), CFG, run_dir=tmp_path, resume=True
        )
    bare = Supernet(tiny_space(), layer_indicators=False)
    with pytest.raises(CheckpointError, match="roles was .*'layer_indicators'.*, now"):
        sampler = FairSampler(tiny_space(), layer_indicators=False)
        train_supernet(bare, batches(4), sampler, CFG, run_dir=tmp_path, resume=True)


def test_a_damaged_newest_checkpoint_falls_back_to_the_same_end(tmp_path, caplog):
    expected = finished(tmp_path / "good").read_bytes()
    final = finished(tmp_path / "bad")
    final.write_bytes(final.read_bytes()[:-3])
    net, sampler = net_and_sampler(seed=7)
    torch.manual_seed(99)
    sampler = FairSampler(tiny_space(), seed=7)
    again = train_supernet(net, batches(4), sampler, CFG, run_dir=tmp_path / "bad", resume=True)
    assert again == final
    assert again.read_bytes() == expected
    assert "trying the checkpoint before it" in caplog.text


class Noisy(Dataset):
    """Augments with the global generator, as torchvision's transforms do."""

    def __init__(self) -> None:
        self.images = torch.cat([x for x, _ in batches(4)])
        self.labels = torch.cat([y for _, y in batches(4)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index] + 0.3 * torch.randn(3, 16, 16), self.labels[index]


def data_loader(generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True, generator=generator)


class Interrupted:
    """A loader that is interrupted at a step, as by Ctrl-C."""

    def __init__(self, loader, at: int) -> None:
        self.loader, self.left = loader, at

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_shuffling_augmenting_data_loader_resumes_to_the_same_bytes(tmp_path, at):
    torch.manual_seed(0)
    net, sampler = net_and_sampler()
    want = train_supernet(net, data_loader(), sampler, CFG, run_dir=tmp_path / "whole").read_bytes()
    torch.manual_seed(0)
    net, sampler = net_and_sampler()
    with pytest.raises(KeyboardInterrupt):
        train_supernet(net, Interrupted(data_loader(), at), sampler, CFG, run_dir=tmp_path / "broken")
    torch.manual_seed(0)
    torch.rand(7)  # only the seed counts, not the numbers drawn since
    net, sampler = net_and_sampler()
    got = train_supernet(net, data_loader(), sampler, CFG, run_dir=tmp_path / "broken", resume=True).read_bytes()
    assert got == want


def one_epoch(made, epoch: int, *, start: int = 0) -> torch.Tensor:
    return torch.cat([x for x, _ in made.epoch(epoch, start=start)])


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_epochs_of_a_data_loader_differ_and_repeat_and_leave_the_generators_as_they_were(own):
    generator = torch.Generator().manual_seed(5) if own else torch.default_generator
    made = as_epochs(data_loader(generator=generator if own else None))
    first = one_epoch(made, 0)
    generator.manual_seed(99)
    before = generator.get_state(), torch.default_generator.get_state()
    assert not torch.equal(first, one_epoch(made, 1))
    assert torch.equal(first, one_epoch(made, 0))
    assert torch.equal(first[16:], one_epoch(made, 0, start=2))
    for now, then in zip((generator.get_state(), torch.default_generator.get_state()), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_batches_of_a_data_loader_follow_the_seed_of_their_generator(own):
    first = []
    for seed in (1, 1, 2):
        torch.manual_seed(0 if own else seed)
        generator = torch.Generator().manual_seed(seed) if own else None
        epoch = as_epochs(data_loader(generator=generator)).epoch(0)
        first.append(next(epoch)[1])
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
