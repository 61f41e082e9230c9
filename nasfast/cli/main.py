"""Entry point of the `nasfast` script: errors and exit status; `commands` does the rest."""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from nasfast import extensions
from nasfast.runtime.files import NO_ROOM
from nasfast.runtime.launcher import environment_rank
from nasfast.runtime.memory import keep_freed_memory
from nasfast.runtime.termination import Terminated, raise_on_sigterm
from nasfast.settings import CONFIG_FILE

_JOINT = ("run", "supernet", "retrain")
"""Commands that several processes run together."""

_RESUMED = (*_JOINT, "shrink")
"""Commands that --resume continues."""

_SPINS = "100"
"""Rounds (less than a microsecond) in which a thread looks for work before it sleeps, instead of OpenMP's 300,000.

Where more threads want to run than there are cores, those that load images among them, a thread that spins takes the
core of the one that it waits for.
"""

_NO_ROOM_REMEDY = (
    "; files that were saved before are intact. Free some space and run again (run, supernet, retrain and shrink with "
    "--resume)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Errors that a user can correct are printed without a traceback and give status 1; the environment variable
    NASFAST_TRACEBACK=1 shows the traceback too. Wrong flags give 2. SIGTERM gives 143 after the training is saved, and
    a reader of standard output that has ended, as in `nasfast doctor | head`, gives 141.

    All processes that torchrun started run the commands that train; those other than rank 0 show only warnings and
    errors. Only rank 0 runs the other commands.

    Args:
        argv: the command and its flags; None takes those of the process.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter would fail to flush the rest when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # characters that the locale's encoding lacks are written as escapes, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("nasfast").setLevel(logging.INFO)
    command, dry_run, out = argv[0] if argv else "", False, None
    if os.environ.get("NASFAST_KEEP_MEMORY") != "0":
        keep_freed_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read where torch is imported, which is later
    try:
        if environment_rank():
            if command not in _JOINT:
                return 0
            logging.getLogger("nasfast").setLevel(logging.WARNING)
        with raise_on_sigterm():
            # jsonargparse takes half a second, and torch seconds, for which help must not wait
            commands = importlib.import_module("nasfast.cli.commands")
            line = commands.parse(argv)
            dry_run, out = bool(line.values.get("dry_run")), line.values.get("out")
            commands.execute(line)
    except Terminated as stopped:
        _say_stopped(command, stopped.reason, stopped.saved, dry_run=dry_run)
        return stopped.code
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if os.environ.get("NASFAST_TRACEBACK") == "1":
            traceback.print_exc()
        text = extensions.explain_missing(error, command) if isinstance(error, ModuleNotFoundError) else str(error)
        remedy = _NO_ROOM_REMEDY if isinstance(error, OSError) and error.errno in NO_ROOM else ""
        print(f"nasfast {command}: {text}{remedy}", file=sys.stderr)
        return getattr(error, "exit_status", 1)
    except KeyboardInterrupt as stopped:
        # a run says in which stage
        begun = not isinstance(out, str) or Path(out, CONFIG_FILE).exists()
        saved = "what was saved before is kept" if begun else "nothing was saved yet"
        _say_stopped(command, f"stopped by Ctrl-C {stopped}".strip(), saved, dry_run=dry_run)
        return 128 + signal.SIGINT
    return 0


def _say_stopped(command: str, reason: str, saved: str, *, dry_run: bool) -> None:
    """Say why a command stopped, and how it is continued; one process of several says it."""
    if dry_run:
        saved, more = "", "no run began, and nothing was trained"
    elif command in _RESUMED:
        more = "the same command with --resume continues"
    else:
        more = "run the same command again"
    if not environment_rank():
        # a line of its own: the terminal has shown ^C, or a line of progress
        print(f"\nnasfast {command}: {'; '.join(filter(None, (reason, saved, more)))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
