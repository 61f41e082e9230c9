"""Check a wheel: which Pythons it serves, its size, and for which GPUs it has machine code.

python tests/check_wheel.py WHEEL [CUOBJDUMP]    # with CUOBJDUMP, a wheel with CUDA kernels
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

# the GPUs whose first call waits for no compiler, and the PTX from which the driver compiles for all later ones
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PTX = "sm_90"
MOST_BYTES = 25_000_000


def code_of(library: Path, cuobjdump: str, kind: str) -> Counter[str]:
    """How many files of machine code (kind elf) or PTX (kind ptx) a library has for each architecture."""
    command = [cuobjdump, f"--list-{kind}", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"\.(sm_\d+)\.", listed))


def check(wheel: Path, cuobjdump: str | None) -> str:
    """What the wheel has, in a line.

    Raises:
        AssertionError: it lacks something.
    """
    assert "-py3-none-" in wheel.name, f"{wheel.name} serves one Python alone"
    size = wheel.stat().st_size
    assert size <= MOST_BYTES, f"{wheel.name} has {size} bytes, more than {MOST_BYTES}"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as files:
        assert [name for name in files.namelist() if name.endswith(".so")] == ["nasfast/_C.so"], files.namelist()
        library = Path(files.extract("nasfast/_C.so", folder))
        # undefined names of Python's C API
        used = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        of_python = re.findall(r"\b_?Py\w+", used)
        assert not of_python, f"{wheel.name} uses Python's {of_python}"
        if cuobjdump is None:
            return f"{wheel.name}: {size / 1e6:.1f} MB"
        machine_code, ptx = code_of(library, cuobjdump, "elf"), code_of(library, cuobjdump, "ptx")
    assert set(machine_code) == set(ARCHITECTURES), f"{wheel.name} has machine code for {sorted(machine_code)}"
    assert len(set(machine_code.values())) == 1, f"some kernels lack an architecture: {machine_code}"
    assert set(ptx) == {PTX}, f"{wheel.name} has PTX for {sorted(ptx)}"
    return f"{wheel.name}: {size / 1e6:.1f} MB, machine code for {', '.join(ARCHITECTURES)}, PTX for {PTX}"


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
