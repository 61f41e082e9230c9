"""Runs of the command line as processes that can be disturbed: real ones, and forks of one that has torch imported."""

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
"""Seconds between two looks at a process or file; a run's work takes about one."""

_ROOT = Path(__file__).parents[2]


class Run:
    """One started command.

    Attributes:
        pid: its process.
        log: file with what it printed.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.code: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        raise NotImplementedError

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit status.

        Raises:
            TimeoutError: it did not end; it was killed.
        """
        if not self.wait_until(lambda: False, timeout):
            self.send(signal.SIGKILL)
            self.wait_until(lambda: False, timeout)
            raise TimeoutError(f"no end within {timeout:.0f} s: {self.output()[-300:]}")
        return self.code

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120.0) -> bool:
        """Whether the condition came true, or the process ended, in time."""
        end = time.monotonic() + timeout
        while self.poll() is None and not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return True

    def send(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it by SIGSTOP, and wait until all its threads stand still; SIGCONT lets it go on."""
        self.send(signal.SIGSTOP)
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            while _state(path) not in ("T", "Z", "gone"):
                time.sleep(_POLL)

    def children(self) -> list[int]:
        """Its living child processes, such as loader workers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has just ended
                continue
            if int(parent) == self.pid and state != "Z":
                found.append(int(path.parent.name))
        return found

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _environment(changes: dict[str, str | None]) -> dict[str, str]:
    """This process's environment changed, with one thread, for two runs share two cores, and with this checkout."""
    merged = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    paths = [changes.get("PYTHONPATH"), os.environ.get("PYTHONPATH"), os.fspath(_ROOT)]
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {name: value for name, value in merged.items() if value is not None}


def _state(path: Path) -> str:
    """Of a process or thread, by its `stat` file: `T` stopped, `Z` ended, `gone`, ..."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


class RealRun(Run):
    """`python -m nasfast ...` as users start it.

    Args:
        argv: command and flags.
        log: where its output goes.
        environment: changes to this process's; None removes a variable.
    """

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str | None] | None = None) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nasfast", *argv],
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=_environment(environment or {}),
            )  # fmt: skip
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
    """Starts commands in forks of a process that has imported what they need, one after the other."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=_environment({}),
        )  # fmt: skip
        self._server.stdout.readline()  # it has imported everything

    def start(self, argv: list[str], log: Path) -> Run:
        """Like `RealRun`, in this process's environment and working directory."""
        self._server.stdin.write(json.dumps({"argv": argv, "log": os.fspath(log)}) + "\n")
        self._server.stdin.flush()
        return _Fork(json.loads(self._server.stdout.readline())["pid"], log, self._server.stdout)

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._log.close()


def _serve() -> None:
    """Fork for every request on standard input; answer with the child's number, and at its end with its status."""
    import nasfast.cli.commands  # noqa: F401, PLC0415  (what takes seconds, once for all)
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
