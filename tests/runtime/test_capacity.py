"""Cores and memory of a machine and of its container."""

import os

import pytest

from nasfast.runtime.capacity import cores, free_memory


def test_memory_is_what_the_machine_and_the_container_leave(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   50 kB\n")
    assert free_memory(tmp_path) == 50 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1400\n")
    (group / "memory.stat").write_text("anon 900\ninactive_file 400\nactive_file 100\n")
    for limit, free in (("max", 50 * 1024), ("21000", 20000), ("500", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cores_are_those_of_the_container(files, found, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cores(tmp_path) == found
