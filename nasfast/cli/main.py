"""Entry point of the `nasfast` script: usage, errors and exit status; `flags` and `commands` do the rest."""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from nasfast import __version__, extensions
from nasfast.config import nearest
from nasfast.runtime.files import NO_ROOM
from nasfast.runtime.launcher import environment_rank
from nasfast.runtime.memory import keep_freed_memory
from nasfast.runtime.termination import Terminated, raised

_COMMANDS = {
    "run": "everything: train a supernet, score, search, retrain, report",
    "supernet": "train the supernet",
    "score": "score the candidates of the trained supernet into indicators.json",
    "search": "best architectures under MACs and parameter limits into archs.json",
    "retrain": "train the chosen architectures as plain networks",
    "export": "files of a retrained network, ONNX included",
    "rank": "rank correlation of a predictor with trained accuracies, beside trivial baselines",
    "report": "write report.html of a run directory, or one page that compares several",
    "latency": "latency of every candidate on this machine, as a table for --search.max_latency_ms",
    "step": "times of a training step: the rows of the paper's Table 2 on this machine, beside the published figures",
    **extensions.COMMANDS,
    "doctor": "versions, CPU and GPU, and which backend every operator uses and why",
}

_JOINT = ("run", "supernet", "retrain")
"""Commands that several processes run together."""

_NO_ROOM_REMEDY = (
    "; files that were saved before are intact. Free some space and run again (run, supernet and retrain with --resume)"
)


def _usage() -> str:
    lines = [f"  {name:10} {text}" for name, text in _COMMANDS.items()]
    return (
        "usage: nasfast COMMAND [FLAGS]\n\n"
        + "\n".join(lines)
        + "\n\nflags of a command: nasfast COMMAND --help; version: nasfast --version"
        + "\nwith every command: --import MODULE or --import FILE.py, which has e.g. block kinds of your own"
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
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter would fail to flush the rest when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _run(argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # characters that the locale's encoding lacks are written as escapes, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("nasfast").setLevel(logging.INFO)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"nasfast {__version__}")
        return 0
    command, *rest = argv
    if command not in _COMMANDS:
        text = "it is Python: nasfast.fuse(model)" if command == "fuse" else nearest(command, _COMMANDS)
        print(f"nasfast: unknown command {command!r}; {text}", file=sys.stderr)
        return 2
    if os.environ.get("NASFAST_KEEP_MEMORY") != "0":
        keep_freed_memory()
    try:
        if environment_rank():
            if command not in _JOINT:
                return 0
            logging.getLogger("nasfast").setLevel(logging.WARNING)
        with raised():
            # imported here, because usage needs neither, and help not the commands, whose torch takes seconds
            arguments = importlib.import_module("nasfast.cli.flags").parse(command, _COMMANDS[command], rest)
            importlib.import_module("nasfast.cli.commands").execute(command, arguments)
    except Terminated as stopped:
        _say_stopped(command, rest, stopped, stopped.reason, stopped.saved)
        return stopped.code
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("NASFAST_TRACEBACK") == "1":
            traceback.print_exc()
        remedy = _NO_ROOM_REMEDY if isinstance(error, OSError) and error.errno in NO_ROOM else ""
        print(f"nasfast {command}: {error}{remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        _say_stopped(command, rest, stopped, "stopped by Ctrl-C", "what was saved before is kept")
        return 128 + signal.SIGINT
    return 0


def _say_stopped(command: str, flags: Sequence[str], stopped: BaseException, reason: str, saved: str) -> None:
    """Say why a command stopped, in which stage, and how it is continued; one process of several says it."""
    stage = getattr(stopped, "stage", command)  # the stages of a run note their names
    if "--dry-run" in flags:
        saved, more = "", "no run began, and nothing was trained"
    elif command in _JOINT:
        more = "the same command with --resume continues"
    else:
        more = "run the same command again"
    if not environment_rank():
        how = reason if stage == command else f"{reason} in the stage `{stage}`"
        # a line of its own: the terminal has shown ^C, or a line of progress
        print(f"\nnasfast {command}: {'; '.join(filter(None, (how, saved, more)))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
