"""Freed memory that the process keeps, and gives back."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
from nasfast.runtime.memory import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

SIZE = 2**28
found = []
for keep in (None, True, False):
    if keep is not None:
        assert keep_freed_memory(keep)
    before = resident()
    block = bytearray(b"x") * SIZE
    del block
    found.append(resident() - before > SIZE // 2)
print(found)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_until_it_may_be_given_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "[False, True, False]", done.stderr
