"""Programs of the tests in forks of this process as it was when the tests had been collected.

It has imported PyTorch by then, which takes seconds, and has run nothing: threads of autograd do not survive a fork.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

_server: socket.socket | None = None


def start_server() -> None:
    """Fork the process that will fork the programs; it ends with this one. CUDA would not survive it."""
    global _server
    if torch.cuda.is_available():
        return
    _server, theirs = socket.socketpair()
    if os.fork() == 0:
        _server.close()
        _serve(theirs)
    theirs.close()


def _serve(connection: socket.socket) -> NoReturn:
    try:
        with connection.makefile("rw") as requests:
            for line in requests:
                *program, said = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _run(*program, said)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=requests, flush=True)
    finally:
        os._exit(0)


def _run(name: str, out: str, cases: Sequence[str], said: str) -> NoReturn:
    code = 1
    try:
        file = os.open(said, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(d, "w", buffering=1, closefd=False) for d in (1, 2))
        faulthandler.enable()  # of pytest it has another file
        logging.root.handlers.clear()  # of pytest
        importlib.import_module(name).main(Path(out), list(cases))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_program(program: ModuleType, out: Path, *cases: str) -> str:
    """What `main(out, cases)` of a module prints, to standard error, too; an AssertionError if it fails."""
    with tempfile.NamedTemporaryFile("r+") as file:
        if _server is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-X", "faulthandler", str(program.__file__), str(out), *cases]
            code = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=300).returncode
        else:
            with _server.makefile("rw") as requests:
                print(json.dumps([program.__name__, str(out), cases, file.name]), file=requests, flush=True)
                code = int(requests.readline())
        file.seek(0)
        said = file.read()
    assert code == 0, said
    return said
