"""Write the table of docs/integrations.md: `python table.py`."""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "integrations.md"
BEGIN, END = "<!-- table: written by tests/integrations/table.py -->", "<!-- end of table -->"


def rows() -> list:
    """Return the rows of every case_*.py, in the order of the file names."""
    from tqdm import tqdm

    found = []
    for path in tqdm(sorted(HERE.glob("case_*.py")), unit="framework"):
        found += importlib.import_module(path.stem).compare()
    return found


def markdown(found: list) -> str:
    """Return the rows as a table of relative differences from the exact updates, and numbers of updates."""
    lines = [
        "| framework | case | its own | fusedacc | updates: due / its own / fusedacc | what its own does |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        updates = f"{row.updates} / {row.their_updates} / {row.our_updates}"
        figures = f"{_figure(row.theirs)} | {_figure(row.ours)}"
        remark = row.remark or "exact"
        lines.append(f"| {row.framework} | {row.case} | {figures} | {updates} | {remark} |")
    return "\n".join(lines)


def _figure(difference: float) -> str:
    """Show rounding errors as a power of ten, and larger differences in per cent."""
    return f"{difference:.0e}" if difference < 1e-3 else f"{100 * difference:.0f} %"


def main() -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{markdown(rows())}\n\n{END}{after}")


if __name__ == "__main__":
    main()
