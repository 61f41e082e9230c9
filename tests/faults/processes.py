"""Runs of the command line that can be disturbed: new processes, and forks of a process that has imported torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL = 0.002
"""Seconds between two checks of a process or file; the work of a run takes about one second."""

_ROOT = Path(__file__).parents[2]


class Run:
    """One started command.

    Attributes:
        pid: number of its process.
        log: file with its output.
        code: its exit status; None until it has ended.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.code: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        raise NotImplementedError

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the end of the run; returns its exit status.

        Raises:
            TimeoutError: it did not end within `timeout` seconds, and was killed.
        """
        if not self.wait_until(lambda: False, timeout):
            self.send(signal.SIGKILL)
            self.wait_until(lambda: False, timeout)
            raise TimeoutError(f"no end within {timeout:.0f} s: {self.output()[-300:]}")
        return self.code

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120.0) -> bool:
        """Wait until the condition is true or the process ends; returns whether that was within `timeout` seconds."""
        end = time.monotonic() + timeout
        while self.poll() is None and not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return True

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the process by SIGSTOP and wait until all its threads have stopped; SIGCONT continues it."""
        self.send(signal.SIGSTOP)
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            while _state(path) not in ("T", "Z", "gone"):
                time.sleep(_POLL)

    def children(self) -> list[int]:
        """Child processes that have not ended, such as loader workers."""
        children = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # the process has ended
                continue
            if int(parent) == self.pid and state != "Z":
                children.append(int(path.parent.name))
        return children

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _environment(changes: dict[str, str | None]) -> dict[str, str]:
    """The environment of this process with `changes`, one thread, because runs share the cores, and this checkout."""
    merged = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    paths = [changes.get("PYTHONPATH"), os.environ.get("PYTHONPATH"), os.fspath(_ROOT)]
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {name: value for name, value in merged.items() if value is not None}


def _state(path: Path) -> str:
    """State of a process or thread in its `stat` file: `T` stopped, `Z` ended; `gone` if there is no such file."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


class RealRun(Run):
    """`python -m nasfast ...` as users start it.

    Args:
        argv: command and flags.
        log: file for its output.
        environment: changes to the environment of this process; None removes a variable.
    """

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str | None] | None = None) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nasfast", *argv],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(environment or {}),
            )
        super().__init__(self._process.pid, log)

    def poll(self) -> int | None:
        self.code = self._process.poll()
        return self.code


class _Fork(Run):
    def __init__(self, pid: int, log: Path, answers: Any) -> None:
        super().__init__(pid, log)
        self._answers = answers

    def poll(self) -> int | None:
        if self.code is None and _state(Path(f"/proc/{self.pid}/stat")) in ("Z", "gone"):
            self.code = json.loads(self._answers.readline())["code"]
        return self.code


class ForkServer:
    """Starts commands, one after the other, as forks of a process that has already imported what they need."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment({}),
        )
        self._server.stdout.readline()  # the server writes a line when it has imported everything

    def start(self, argv: list[str], log: Path) -> Run:
        """Start a command like `RealRun`, but with the environment and working directory of the server."""
        self._server.stdin.write(json.dumps({"argv": argv, "log": os.fspath(log)}) + "\n")
        self._server.stdin.flush()
        return _Fork(json.loads(self._server.stdout.readline())["pid"], log, self._server.stdout)

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._log.close()


def _serve() -> None:
    """Fork for every request on standard input; answer with the number of the child, then with its exit status."""
    import nasfast.cli.commands  # noqa: F401, PLC0415  imported once here, because it takes seconds
    from nasfast.cli.main import main  # noqa: PLC0415

    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            try:
                code = main(request["argv"])
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    _serve()
