"""What is watched before every forward of a fused module: each change is seen, and what is undone is the same again."""

from collections import OrderedDict

import pytest
from torch import nn

from nasfast.fusion.watch import Watch


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 1), nn.Sequential(nn.ReLU()))
        self.skip = True

    def watch(self) -> Watch:
        places = [(vars(self[0]), "stride"), (self[0]._parameters, "bias"), (vars(self[0]), "absent")]
        return Watch(self, ["skip"], [self[0], self[1], self[1][0]], places)


CHANGES = {
    "an attribute of the owner": lambda m: setattr(m, "skip", False),
    "a setting": lambda m: setattr(m[0], "stride", (2, 2)),
    "a parameter": lambda m: setattr(m[0], "bias", None),
    "something where nothing was": lambda m: setattr(m[0], "absent", 1),
    "an own forward": lambda m: setattr(m[0], "forward", print),
    "a class": lambda m: setattr(m[1][0], "__class__", nn.Tanh),
    "a module": lambda m: m[1].__setitem__(0, nn.ReLU()),
    "one module more": lambda m: m[1].append(nn.ReLU()),
    "a hook": lambda m: m[1][0].register_forward_hook(print),
    "a hook with an argument": lambda m: m[1][0].register_forward_pre_hook(print, with_kwargs=True),
    "another dictionary of hooks": lambda m: setattr(m[1][0], "_forward_hooks", OrderedDict({0: print})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = Model()
    watch = model.watch()
    model[0].nothing_watched = 1
    assert watch.same(model) and watch.same(model)
    CHANGES[change](model)
    assert not watch.same(model)


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_function_of_a_class_is_seen(name, monkeypatch):
    model = Model()
    watch = model.watch()
    monkeypatch.setattr(nn.Conv2d, name, print)
    assert not watch.same(model)


def test_what_is_undone_is_the_same_again():
    model = Model()
    watch = model.watch()
    handle = model[1][0].register_forward_hook(print)
    stride, model[0].stride = model[0].stride, (3, 3)
    handle.remove()
    assert not watch.same(model)
    model[0].stride = stride
    assert watch.same(model)
