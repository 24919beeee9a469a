"""Tables as text. Drawn without a library: the daemon draws them too, and has to stay small."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

_STYLES: Final = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "bold red": "1;31"}
_FLEXIBLE: Final = ("CMD", "NOTE", "HEALTH", "PRODUCT")
"""Columns that are cut, in this order, where a terminal has no room."""
_NARROWEST: Final = 8
_LONGEST_BAR: Final = 20
_SHORTEST_BAR: Final = 5
"""Bars are shortened before anything is cut."""
_GAP: Final = "   "


class Terminal(msgspec.Struct, frozen=True):
    """Who reads.

    Attributes:
        columns: letters in a line; `None` where lines may be as long as they like.
        rows: lines that can be seen at once; `None` where that is no matter.
        colours: it shows colours.
    """

    columns: int | None = None
    rows: int | None = None
    colours: bool = False


PLAIN: Final = Terminal()
AFRESH: Final = "\x1b[H\x1b[2J"
"""A terminal's words for an empty screen, written from its top."""


class Cell(msgspec.Struct, frozen=True):
    """A text that means what it says, and a colour: a key of `_STYLES`.

    Attributes:
        part: from 0 to 1, drawn as a bar before the text; `None` draws none.
    """

    text: str
    style: str = ""
    part: float | None = None


@dataclass(slots=True)
class Sheet:
    """A table: its columns, its rows, and what stands below them."""

    columns: tuple[str, ...]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    foot: Sequence[str] = ()

    def add(self, *cells: str | Cell, style: str = "") -> None:
        """Add a row; `style` is that of its cells without one."""
        whole = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
        self.rows.append([replace(cell, style=cell.style or style) for cell in whole])

    def sum_up(self, *cells: object) -> None:
        """Put sums below the first columns."""
        self.foot = [str(cell) for cell in cells]


def drawn(parts: Iterable[Sheet | Cell], terminal: Terminal) -> str:
    """Draw tables, and lines between or below them, each ended by a line feed."""
    return "\n".join(
        _sheet(part, terminal)
        if isinstance(part, Sheet)
        else f"{_styled(printable(part.text), part.style, terminal)}\n"
        for part in parts
    )


def afresh(text: str, terminal: Terminal) -> str:
    """Write a text in place of what is on the screen; what has no room there is left out."""
    lines = text.splitlines(keepends=True)
    if terminal.rows and len(lines) >= terminal.rows:
        lines = [*lines[: max(1, terminal.rows - 2)], "…\n"]
    return AFRESH + "".join(lines)


def printable(text: str) -> str:
    """Give a text that a terminal shows and does not obey: programs choose their own names."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _sheet(sheet: Sheet, terminal: Terminal) -> str:
    head = [Cell(column, "bold") for column in sheet.columns]
    foot = [Cell(text, "bold") for text in sheet.foot]
    body = [[replace(cell, text=printable(cell.text)) for cell in row] for row in sheet.rows]
    widths, bar = _widths(sheet.columns, [head, *body, foot], terminal)
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))

    lines = [_line(head, widths, bar, terminal), rule]
    lines += [_line(row, widths, bar, terminal) for row in body]
    if foot:
        lines += ["", _line(foot, widths, bar, terminal)]
    return "".join(f" {line}".rstrip() + "\n" for line in lines)


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], terminal: Terminal
) -> tuple[Sequence[int], int]:
    """Give the letters of each column, and of each bar."""
    bars = {place for row in rows for place, cell in enumerate(row) if cell.part is not None}
    bar = _LONGEST_BAR
    widths = _natural(len(columns), rows, bar)

    if terminal.columns:
        missing = 1 + sum(widths) + len(_GAP) * (len(widths) - 1) - terminal.columns
        if bars and missing > 0:
            bar = max(_SHORTEST_BAR, bar - -(-missing // len(bars)))
            missing -= sum(widths)
            widths = _natural(len(columns), rows, bar)
            missing += sum(widths)
        for name in _FLEXIBLE:
            if name in columns and missing > 0:
                place = columns.index(name)
                given = min(missing, max(0, widths[place] - _NARROWEST))
                widths[place] -= given
                missing -= given
    return widths, bar


def _natural(count: int, rows: Iterable[Sequence[Cell]], bar: int) -> list[int]:
    widths = [0] * count
    for row in rows:
        for place, cell in enumerate(row):
            widths[place] = max(widths[place], len(_text(cell, bar)))
    return widths


def _text(cell: Cell, bar: int) -> str:
    if cell.part is None:
        return cell.text
    full = min(bar, round(bar * cell.part))
    return "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (bar - full) + f" {cell.text}"


def _line(cells: Sequence[Cell], widths: Sequence[int], bar: int, terminal: Terminal) -> str:
    texts = []
    for cell, width in zip(cells, widths, strict=False):  # sums stand below the first columns
        whole = _text(cell, bar)
        text = whole if len(whole) <= width else whole[: width - 1] + "…"
        texts.append(_styled(text, cell.style, terminal) + " " * (width - len(text)))
    return _GAP.join(texts)


def _styled(text: str, style: str, terminal: Terminal) -> str:
    code = _STYLES.get(style)
    return f"\x1b[{code}m{text}\x1b[0m" if code and text and terminal.colours else text
