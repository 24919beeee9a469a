"""Writes the table of reasons in `docs/pools.md`, from `metagpu/core/availability/reasons.py`.

`python docs/availability.py` writes it, `--check` compares.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from metagpu.core.availability.reasons import REASONS, Listing, Reason

PAGE: Final = Path(__file__).parent / "pools.md"
HEADING: Final = "## Reasons\n"
_HEAD: Final = (
    "| Reason | Concerns | Listed Healthy | On the Node | Counted as free | Granted | Taint |",
    "|---|---|---|---|---|---|---|",
)


def render(page: str) -> str:
    """Return the page with the table that the code says.

    Raises:
        ValueError: the page has no such heading, or no table below it.
    """
    before, heading, rest = page.partition(HEADING)
    text, bar, table = rest.partition("\n|")
    if not bar:
        raise ValueError(f"docs/pools.md has no table below {HEADING.strip()!r}")
    after = table.partition("\n\n")[2]
    return f"{before}{heading}{text}\n" + "\n".join((*_HEAD, *map(_row, REASONS))) + f"\n\n{after}"


def _row(row: Reason) -> str:
    return f"| {' | '.join(_cells(row))} |"


def _cells(row: Reason) -> Iterator[str]:
    yield f"`{row.name}`"
    yield row.meaning
    yield str(row.listed)
    yield str(row.listed) if row.counted or row.listed is not Listing.YES else "no"
    yield "yes" if row.free else "no"
    yield "no" if row.refusal else "yes"
    yield f"`{row.taint}`" if row.taint else ""


def main(arguments: Sequence[str]) -> int:
    """Write the table, or compare it; return the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if "--check" not in arguments:
        PAGE.write_text(rendered, encoding="utf-8")
    elif rendered != page:
        problem = "docs/pools.md is not what the code says: run `python docs/availability.py`"
        print(problem, file=sys.stderr)  # noqa: T201 - a script
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
