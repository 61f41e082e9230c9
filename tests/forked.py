"""Programs of the tests in a fork of this process, which has imported PyTorch already: Python with it takes seconds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

import torch


def run_program(program: ModuleType, out: Path, *cases: str) -> str:
    """What `main(out, cases)` of a module prints, to standard error, too; an AssertionError if it fails.

    Where there is a GPU, its threads would not survive a fork: there Python starts again.
    """
    with tempfile.TemporaryFile("w+") as file:
        if torch.cuda.is_available():
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(program.__file__), str(out), *cases]
            code = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=300).returncode
        else:
            pid = os.fork()
            if pid == 0:
                _run(program, out, cases, file.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        said = file.read()
    assert code == 0, said
    return said


def _run(program: ModuleType, out: Path, cases: tuple[str, ...], file: int) -> None:
    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        logging.root.handlers.clear()  # of pytest
        sys.stdout, sys.stderr = (os.fdopen(d, "w", buffering=1, closefd=False) for d in (1, 2))
        program.main(out, list(cases))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
