"""What is watched before every chain: each change is seen, by Python's versions of dictionaries and without them."""

import ctypes
import struct
from collections import OrderedDict

import pytest
from torch import nn

from nasfast.fusion import fold, watch
from nasfast.ops import _native


@pytest.fixture(params=["versions", "entries"])
def found_by(request, monkeypatch):
    """The two ways in which a watch finds a change."""
    if request.param == "entries":
        monkeypatch.setattr(watch, "_VERSIONS", None)
    elif watch._VERSIONS is None:
        pytest.skip("this Python or this build has no versions of dictionaries")


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 1), nn.Sequential(nn.ReLU()))

    def watched(self) -> watch.Watch:
        places = [(vars(self[0]), "stride"), (self[0]._parameters, "bias"), (vars(self[0]), "absent")]
        return watch.Watch(places, [self[0], self[1], self[1][0]], [(Model, "watched")])


def another_hooks_dictionary(model: Model) -> None:
    model[1][0]._forward_hooks = OrderedDict({0: print})


CHANGES = {
    "a setting": lambda m: setattr(m[0], "stride", (2, 2)),
    "a parameter": lambda m: setattr(m[0], "bias", None),
    "something where nothing was": lambda m: setattr(m[0], "absent", 1),
    "an own forward": lambda m: setattr(m[0], "forward", print),
    "a class": lambda m: setattr(m[1][0], "__class__", nn.Tanh),
    "a module": lambda m: m[1].__setitem__(0, nn.ReLU()),
    "one module more": lambda m: m[1].append(nn.ReLU()),
    "a hook": lambda m: m[1][0].register_forward_hook(print),
    "a hook with an argument": lambda m: m[1][0].register_forward_pre_hook(print, with_kwargs=True),
    "another dictionary of hooks": another_hooks_dictionary,
}


@pytest.mark.usefixtures("found_by")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = Model()
    watched = model.watched()
    assert watched.same() and watched.same()
    model[0].nothing_watched = 1
    assert watched.same() and watched.same()
    CHANGES[change](model)
    assert not watched.same()
    assert not watched.same()


@pytest.mark.usefixtures("found_by")
def test_what_is_undone_is_the_same_again():
    model = Model()
    watched = model.watched()
    for _ in range(2):
        handle = model[1][0].register_forward_hook(print)
        stride, model[0].stride = model[0].stride, (3, 3)
        assert not watched.same()
        handle.remove()
        model[0].stride = stride
        assert watched.same()


@pytest.mark.usefixtures("found_by")
def test_a_new_dictionary_of_hooks_is_watched():
    model = Model()
    watched = model.watched()
    model[1][0]._forward_hooks = OrderedDict()
    assert watched.same()
    model[1][0].register_forward_hook(print)
    assert not watched.same()


@pytest.mark.usefixtures("found_by")
def test_a_function_of_a_class_is_seen(monkeypatch):
    watched = Model().watched()
    monkeypatch.setattr(nn.ReLU, "forward", print)
    assert not watched.same()


@pytest.mark.skipif(watch._VERSIONS is None, reason="this Python or this build has no versions of dictionaries")
def test_versions_are_numbers_of_dictionaries():
    one, other = {"key": 1}, OrderedDict()
    before = watch._VERSIONS([one, other], [one])
    assert before == watch._VERSIONS([one, other], [{}])
    assert len(before) == 24
    other["new"] = 1
    after = watch._VERSIONS([one, other], [one])
    assert [i for i in range(3) if after[8 * i : 8 * i + 8] != before[8 * i : 8 * i + 8]] == [1]
    assert watch._VERSIONS([], []) == b""
    with pytest.raises(TypeError, match="dictionaries only"):
        watch._VERSIONS([[]], [])


@pytest.mark.skipif(not hasattr(_native.extension, "memory_at"), reason="this build does not have it")
def test_the_extension_reads_the_memory_that_python_reads():
    memory = ctypes.create_string_buffer(b"0123456789", 10)
    start = ctypes.addressof(memory)
    places = struct.pack("=6Q", start + 7, 3, start, 0, start + 1, 4)
    assert fold._memory_at(places) == _native.extension.memory_at(places) == b"7891234"
    assert _native.extension.memory_at(b"") == b""
    with pytest.raises(ValueError, match="pairs of numbers"):
        _native.extension.memory_at(places[:8])
