"""Text tables for terminals and pipes, drawn without a library."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from metagpu.display.colours import shows_colours, takes_codes

_STYLES: Final = {
    "red": "31",
    "green": "32",
    "yellow": "33",
    "bold": "1",
    "dim": "2",
    "bold red": "1;31",
    "bold yellow": "1;33",
}
_CUT_COLUMNS: Final = ("CMD", "NOTE", "HEALTH", "PRODUCT", "POD (CONTAINER)")
"""Columns that are cut, in this order, where a terminal is too narrow."""
_NARROWEST: Final = 8
_LONGEST_BAR: Final = 20
_SHORTEST_BAR: Final = 5
"""Bars are shortened before any text is cut."""
_GAP: Final = "   "


class Terminal(msgspec.Struct, frozen=True):
    """The reader's terminal.

    Attributes:
        columns: characters in a line; `None` for no limit.
        rows: visible lines; `None` for no limit.
        colours: whether it shows colours.
    """

    columns: int | None = None
    rows: int | None = None
    colours: bool = False


PLAIN: Final = Terminal()
"""A pipe, a file, or a terminal without codes: no limits, no colours."""
CLEAR_SCREEN: Final = "\x1b[H\x1b[2J"
"""The terminal's code for an empty screen, written from its top."""


class Cell(msgspec.Struct, frozen=True):
    """A text and its colour, a key of `_STYLES`.

    Attributes:
        part: from 0 to 1, drawn as a bar before the text; `None` draws none.
    """

    text: str
    style: str = ""
    part: float | None = None


Lines = tuple[Cell, ...]
"""The lines of one table cell."""


class TextTable(msgspec.Struct):
    """A table: columns, rows, and sums below them.

    Attributes:
        folded: columns whose cells are folded between words where a terminal is too narrow; `None`
            cuts the columns of `_CUT_COLUMNS` instead.
        droppable: columns left out, in this order, where folding is not enough.
        has_head: whether the names of the columns are drawn.
    """

    columns: tuple[str, ...]
    rows: list[Sequence[Lines]] = msgspec.field(default_factory=list)
    foot: Sequence[str] = ()
    folded: frozenset[str] | None = None
    droppable: Sequence[str] = ()
    has_head: bool = True

    def add(self, *cells: str | Cell | Sequence[Cell], style: str = "") -> None:
        """Add a row of cells of one or more lines; `style` is the cells' default."""
        self.rows.append([tuple(_lines(cell, style)) for cell in cells])

    def add_sums(self, *cells: object) -> None:
        """Put sums below the first columns."""
        self.foot = [str(cell) for cell in cells]


def stdout_terminal() -> Terminal:
    """Return stdout's terminal, `PLAIN` if it is none; NO_COLOR switches colours off."""
    if not takes_codes(sys.stdout):
        return PLAIN
    size = shutil.get_terminal_size()
    return Terminal(size.columns, size.lines, colours=shows_colours(sys.stdout))


def render(parts: Iterable[TextTable | Cell], terminal: Terminal) -> str:
    """Draw tables and lines, with an empty line on each side of a table."""
    drawn: list[str] = []
    after_table = False
    for part in parts:
        if isinstance(part, TextTable):
            text, is_table = _draw_table(part, terminal), True
        else:
            text, is_table = f"{_styled(printable(part.text), part.style, terminal)}\n", False
        if drawn and (is_table or after_table) and "\n" not in {text, drawn[-1]}:
            drawn.append("\n")
        drawn.append(text)
        after_table = is_table
    return "".join(drawn)


def fold(cell: Cell, terminal: Terminal) -> Sequence[Cell]:
    """Fold a line between words to the terminal's width; a longer word stays whole."""
    if not terminal.columns or len(cell.text) <= terminal.columns:
        return [cell]
    return [msgspec.structs.replace(cell, text=line) for line in _wrap(cell.text, terminal.columns)]


def redraw(text: str, terminal: Terminal) -> str:
    """Return a text that replaces the screen; lines beyond the screen are left out."""
    lines = text.splitlines(keepends=True)
    if terminal.rows and len(lines) >= terminal.rows:
        lines = [*lines[: max(1, terminal.rows - 2)], "…\n"]
    return CLEAR_SCREEN + "".join(lines)


def printable(text: str) -> str:
    """Replace control characters: a process name may not steer a terminal."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _lines(cell: str | Cell | Sequence[Cell], style: str) -> Iterable[Cell]:
    given = [Cell(cell)] if isinstance(cell, str) else [cell] if isinstance(cell, Cell) else cell
    for each in given:
        yield Cell(printable(each.text), each.style or style, each.part)


def _draw_table(table: TextTable, terminal: Terminal) -> str:
    columns, rows = list(table.columns), [list(row) for row in table.rows]
    if table.folded is not None and terminal.columns:
        rows = _fit(columns, rows, table, terminal.columns)
    head: list[Lines] = [(Cell(column, "bold"),) for column in columns]
    foot: list[Lines] = [(Cell(text, "bold"),) for text in table.foot]
    cut = table.folded is None
    widths, bar = _widths(columns, [head, *rows, foot], terminal if cut else PLAIN)
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))

    lines = [*_draw_row(head, widths, bar, terminal), rule] if table.has_head else []
    for row in rows:
        lines += _draw_row(row, widths, bar, terminal)
    if foot:
        lines += ["", *_draw_row(foot, widths, bar, terminal)]
    return "".join(f" {line}".rstrip() + "\n" for line in lines)


def _fit(
    columns: list[str], rows: list[list[Lines]], table: TextTable, limit: int
) -> list[list[Lines]]:
    """Drop columns in place until the table fits; return the rows, folded."""
    folded = table.folded or frozenset()
    droppable = [name for name in table.droppable if name in columns]

    while True:
        widths = _natural(len(columns), [[(Cell(name),) for name in columns], *rows], _LONGEST_BAR)
        least = [
            max(
                [
                    len(name),
                    *(len(word) for row in rows for cell in row[n] for word in cell.text.split()),
                ]
            )
            if name in folded
            else widths[n]
            for n, name in enumerate(columns)
        ]
        room = limit - 1 - len(_GAP) * (len(columns) - 1)
        if sum(least) <= room or not droppable:
            break
        place = columns.index(droppable.pop(0))
        del columns[place]
        for row in rows:
            del row[place]

    while sum(widths) > room and widths != least:
        shrinkable = [n for n, width in enumerate(widths) if width > least[n]]
        widths[max(shrinkable, key=lambda n: widths[n])] -= 1
    return [
        [
            tuple(_fold_cell(cell, width)) if name in folded else cell
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        for row in rows
    ]


def _fold_cell(cell: Lines, width: int) -> Iterable[Cell]:
    for line in cell:
        if len(line.text) <= width:
            yield line
        else:
            yield from (Cell(text, line.style) for text in _wrap(line.text, width))


def _wrap(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[Lines]], terminal: Terminal
) -> tuple[Sequence[int], int]:
    """Return the characters of each column, and of each bar."""
    bars = {
        place
        for row in rows
        for place, cell in enumerate(row)
        if any(line.part is not None for line in cell)
    }
    bar = _LONGEST_BAR
    widths = _natural(len(columns), rows, bar)

    if terminal.columns:
        missing = 1 + sum(widths) + len(_GAP) * (len(widths) - 1) - terminal.columns
        if bars and missing > 0:
            bar = max(_SHORTEST_BAR, bar - -(-missing // len(bars)))
            missing -= sum(widths)
            widths = _natural(len(columns), rows, bar)
            missing += sum(widths)
        for name in _CUT_COLUMNS:
            if name in columns and missing > 0:
                place = columns.index(name)
                given = min(missing, max(0, widths[place] - _NARROWEST))
                widths[place] -= given
                missing -= given
    return widths, bar


def _natural(count: int, rows: Iterable[Sequence[Lines]], bar: int) -> list[int]:
    """Return the characters of each column's longest line."""
    widths = [0] * count
    for row in rows:
        for place, cell in enumerate(row):
            widths[place] = max([widths[place], *(len(_text(line, bar)) for line in cell)])
    return widths


def _text(cell: Cell, bar: int) -> str:
    if cell.part is None:
        return cell.text
    full = min(bar, round(bar * cell.part))
    return "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (bar - full) + f" {cell.text}"


def _draw_row(
    cells: Sequence[Lines], widths: Sequence[int], bar: int, terminal: Terminal
) -> Sequence[str]:
    lines = []
    for n in range(max((len(cell) for cell in cells), default=1)):
        texts = []
        for cell, width in zip(cells, widths, strict=False):  # sums stand below the first columns
            line = cell[n] if n < len(cell) else Cell("")
            whole = _text(line, bar)
            text = whole if len(whole) <= width else whole[: width - 1] + "…"
            texts.append(_styled(text, line.style, terminal) + " " * (width - len(text)))
        lines.append(_GAP.join(texts))
    return lines


def _styled(text: str, style: str, terminal: Terminal) -> str:
    code = _STYLES.get(style)
    return f"\x1b[{code}m{text}\x1b[0m" if code and text and terminal.colours else text
