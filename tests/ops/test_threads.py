import time

import pytest
import torch

from nasfast.ops.threads import on_threads


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_results_are_in_the_order_of_the_items_each_of_one_thread():
    got = on_threads(lambda i: (i, torch.get_num_threads(), torch.is_grad_enabled()), list(range(8)), [1.0] * 8)
    assert got == [(i, 1, False) for i in range(8)]


def test_nothing_begins_after_an_error():
    begun = []

    def work(item):
        begun.append(item)
        time.sleep(0.05)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        on_threads(work, list(range(60)), [1.0] * 60)
    assert len(begun) <= 3
