"""Freed memory that the process keeps, and gives back."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from pathlib import Path
from nasfast.runtime.memory import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

SIZE = 2**28
found, faults = [], []
for keep in (None, True, False):
    if keep is not None:
        assert keep_freed_memory(keep)
    before = resident()
    block = bytearray(b"x") * SIZE
    del block
    found.append(resident() - before > SIZE // 2)
    # blocks below 32 MB are never given back one by one, unless something has set their threshold
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = bytearray(b"x") * 2**22
        del block
    faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin) // 20)
print(found, [count < 500 for count in faults])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_until_it_may_be_given_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "[False, True, False] [True, True, True]", done.stderr
