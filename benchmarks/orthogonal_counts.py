"""What the CUDA kernels of orthogonalize do by size: `python -m benchmarks.orthogonal_counts 9x9 352x352`.

It needs no GPU. For each float32 matrix: launches, which it shares with the others of a call; waits of a team for its
own threads on the longest way, which is through the panels; and MB of global memory that tiles load and store. Counted
by hand from the steps of csrc/orthogonal/householder.h.
"""

import argparse

PANEL, TILE = 16, 64
# waits of begin, of an update, of a column, around the columns of a panel that is copied on chip, and of finish
BEGIN, UPDATE, COLUMN, COPIES, FINISH = 2, 4, 2, 2, 1
SMALL, SMALL_BYTES = 32, 24 * 1024  # columns and bytes of a matrix that a warp does on chip


def counts(rows: int, columns: int) -> tuple[int, int, float]:
    """(launches, waits, MB) of a matrix."""
    rows, columns = max(rows, columns), min(rows, columns)
    panels = -(-columns // PANEL)
    ld = panels * PANEL
    whole = 4 * (
        2 * rows * ld + panels * PANEL**2 + max(32 + PANEL**2 + 3 * PANEL + rows * (PANEL + 2), 2 * PANEL * 32)
    )
    small = columns <= SMALL and whole <= SMALL_BYTES
    factored = COLUMN * columns + COPIES * panels
    if small:  # a warp does all tiles, of 32 columns, one after the other
        updates = sum(1 + -(-(panels - 1 - i) // 2) if i else 0 for i in range(panels))
        updates += sum(-(-(panels - i) // 2) for i in range(panels))
        return 1, (BEGIN + FINISH) * panels + factored + UPDATE * updates, 4e-6 * 3 * rows * columns
    waits = BEGIN + factored + UPDATE * (2 * panels - 1) + FINISH
    elements = 2 * rows * columns + 2 * rows * ld + 2 * rows * columns  # begin reads twice, finish once
    for i in range(panels):
        below = rows - i * PANEL
        elements += 2 * below * PANEL  # to the chip and back
        for width in ([PANEL, *tiles(ld - (i + 2) * PANEL)] if i + 1 < panels else []) + tiles(ld - i * PANEL):
            elements += below * (3 * width + 2 * PANEL)  # c twice and back, v twice
    return 2 * panels + 2, waits, 4e-6 * elements


def tiles(columns: int) -> list[int]:
    """Their widths."""
    return [min(TILE, columns - first) for first in range(0, columns, TILE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="ROWSxCOLUMNS")
    for shape in parser.parse_args().shapes:
        launches, waits, megabytes = counts(*map(int, shape.split("x")))
        print(f"{shape}: {launches} launches, {waits} waits, {megabytes:.3g} MB")


if __name__ == "__main__":
    main()
