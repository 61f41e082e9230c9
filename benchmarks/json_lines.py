"""Files of JSON lines, one row a line, which grow while a program measures.

It imports nothing of nasfast (whose `runtime.files.locked_lines` locks the file besides), because the plan for a GPU
writes rows also where nasfast cannot be imported.
"""

import json
from pathlib import Path
from typing import Any


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row, and make the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # a program was stopped within its last line, which no row may continue
                file.write(b"\n")
        file.write((json.dumps(row) + "\n").encode())


def read(path: Path) -> list[dict[str, Any]]:
    """The rows, without lines that were cut off; none if there is no file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
