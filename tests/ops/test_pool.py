"""The memory that the native operators' results come from: poisoned, reused, and safe to free from anywhere."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases.chain import ChainCase, forward_arguments
from torch.utils.data import DataLoader, Dataset

from nasfast import ops

# large enough for the pool: 1 MiB
LARGE = ChainCase((4, 16, 64, 64), "pw16/relu6 dw3/relu6 pw16/identity", "x")
SMALL = ChainCase((1, 3, 5, 3), "pw5")


@pytest.fixture(autouse=True)
def pool(native):
    """The extension; skipped under the sanitizer, where every tensor has memory of its own."""
    if "-fsanitize" in native.build_info().flags:
        pytest.skip("the sanitizer's build has no pool")
    gc.collect()
    native.empty_cache()
    return native


@pytest.fixture
def bytes_before(pool):
    """Bytes that tensors of earlier tests still use."""
    return pool.pool_bytes()[0]


def run(case):
    inputs = case.draw_once()
    return ops.conv_bn_act_chain(inputs.x, inputs.stages, residual=inputs.residual, backend="cpu")


def collect_saved(case):
    """The tensor kept for backward: it has gaps between the stages, which nothing writes."""
    return torch.ops.nasfast.conv_bn_act_chain_fwd(**forward_arguments(case.draw_once()))[1]


@pytest.mark.parametrize("case", [SMALL, ChainCase((1, 3, 201, 203), "pw5")], ids=["small", "large"])
def test_poison_reaches_what_the_operators_allocate(case):
    n, _, height, width = case.shape
    written = n * height * width * 5
    saved = collect_saved(case)
    assert saved.numel() > written
    assert saved[written:].isnan().all() and saved[:written].isfinite().all()


def test_only_large_tensors_are_in_the_pool_while_they_live(pool, bytes_before):
    before = pool.pool_bytes()
    small, large = run(SMALL), run(LARGE)
    used, reached = pool.pool_bytes()
    assert small.isfinite().all() and used == before[0] + large.nbytes == before[0] + (1 << 20) <= reached
    view = large[0, :1]
    del large
    assert pool.pool_bytes()[0] == used
    del view
    assert pool.pool_bytes()[0] == bytes_before


def test_steps_reuse_the_same_memory(pool, bytes_before):
    inputs = LARGE.draw_once()

    def step():
        x = inputs.x.detach().requires_grad_()
        ops.conv_bn_act_chain(x, inputs.stages, residual=x, backend="cpu").backward(inputs.grad)
        return x.grad

    step()
    used, reached = pool.pool_bytes()
    for _ in range(5):
        step()
        assert pool.pool_bytes() == (used, reached)
    assert used == bytes_before
    gradient = step()
    assert pool.pool_bytes()[1] == reached
    del gradient


def test_empty_cache_keeps_what_is_in_use(pool, bytes_before):
    kept, freed = run(LARGE), run(LARGE)
    want = kept.clone()
    del freed
    pool.empty_cache()
    assert torch.equal(kept, want)
    used, reached = pool.pool_bytes()
    assert used == bytes_before + kept.nbytes <= reached
    # pages that were given back come again, and hold what is written
    assert torch.equal(run(LARGE), want)
    del kept
    pool.empty_cache()
    assert pool.pool_bytes()[0] == bytes_before
    assert bytes_before or pool.pool_bytes()[1] == 0


@pytest.mark.parametrize("order", [[0, 2, 1], [1, 0, 2]], ids=str)
def test_neighbours_are_joined_in_any_order_of_freeing(order):
    tensors = sorted((run(LARGE) for _ in range(8)), key=torch.Tensor.data_ptr)
    addresses = [tensor.data_ptr() for tensor in tensors]
    size = tensors[0].nbytes
    first = next(i for i in range(6) if addresses[i + 2] - addresses[i] == 2 * size)
    neighbours = tensors[first : first + 3]
    del tensors[first : first + 3]
    for i in order:
        neighbours[i] = None
    # a tensor of the size of all three fits where they were
    assert run(ChainCase((12, 16, 64, 64), "pw16")).data_ptr() <= addresses[first]


def test_two_tensors_never_share_memory(pool):
    generator = torch.Generator().manual_seed(0)
    alive = []
    for i in range(60):
        channels = int(torch.randint(1, 40, (1,), generator=generator))
        y = run(ChainCase((1, 2, 90, 91), f"pw{channels}"))
        y.fill_(i)
        alive.append((i, y))
        if len(alive) > 8:
            alive.pop(int(torch.randint(len(alive), (1,), generator=generator)))
        assert all((tensor == value).all() for value, tensor in alive)


def test_threads_allocate_and_free_at_once(pool, bytes_before):
    want = run(LARGE)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: torch.equal(run(LARGE), want), range(40)))
    assert pool.pool_bytes()[0] == bytes_before + want.nbytes


def test_a_result_is_an_ordinary_tensor(tmp_path):
    y = run(LARGE)
    torch.save(y, tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt"), y)
    assert torch.equal(torch.from_dlpack(y), y)
    assert torch.equal(torch.from_numpy(y.numpy()), y)
    shared = y.clone().share_memory_()
    assert shared.is_shared() and torch.equal(shared, y)
    moved = y.share_memory_()
    assert moved.is_shared() and torch.equal(moved, shared)


class Features(Dataset):
    """Items made from a tensor of the pool, by an operator that uses the pool, in whichever process asks."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return 4

    def __getitem__(self, i):
        torch.set_num_threads(1)
        return float(self.y[i].sum()), float(run(LARGE)[i].sum())


def test_workers_that_are_forked_have_their_own(pool, bytes_before):
    # OpenMP's threads do not survive a fork
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    y = run(LARGE)
    want = y.clone()
    loader = DataLoader(Features(y), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for expected, got in loader:
        assert torch.equal(expected, got)
    torch.set_num_threads(threads)
    assert torch.equal(y, want)
    assert pool.pool_bytes()[0] == bytes_before + y.nbytes
