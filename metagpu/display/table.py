"""Text tables for terminals and pipes, drawn without a library."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TextIO

import msgspec

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
"""Columns that are cut first, in this order, where a terminal is too narrow."""
_CUT_NAMES: Final = frozenset(
    {
        *("NAMESPACE", "POD", "CONTAINER", "NODE", "UUID", "POD UID", "RESOURCE", "SHARES"),
        *("CONTROLLER", "DRAIN", "GUARD"),
    }
)
"""Columns that are cut then, the widest first."""
_NARROWEST: Final = 8
_LONGEST_BAR: Final = 20
_SHORTEST_BAR: Final = 5
"""Bars are shortened before any text is cut."""
_GAP: Final = 3
"""Blanks between two columns; a narrow terminal has fewer."""


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
        folded: columns whose cells are folded, between words if that is enough, where a terminal is
            too narrow; `None` cuts the columns of `_CUT_COLUMNS` instead.
        droppable: columns left out, in this order, where folding is not enough; a line names them.
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


def fold(cell: Cell, terminal: Terminal, indent: str = "") -> Sequence[Cell]:
    """Fold a line between words to the terminal's width; a longer word stays whole."""
    if not terminal.columns or len(cell.text) <= terminal.columns:
        return [cell]
    lines = textwrap.wrap(
        cell.text,
        terminal.columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [msgspec.structs.replace(cell, text=line) for line in lines]


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
    left_out: list[str] = []
    if table.folded is not None and terminal.columns:
        rows = _fit(columns, rows, table, terminal.columns)
        left_out = [name for name in table.columns if name not in columns]
    head: list[Lines] = [(Cell(column, "bold"),) for column in columns]
    foot: list[Lines] = [(Cell(text, "bold"),) for text in table.foot]
    cut = table.folded is None
    place = _widths(columns, [head, *rows, foot], terminal if cut else PLAIN)
    rule = "─" * (sum(place.widths) + place.gap * (len(columns) - 1))

    lines = [*_draw_row(head, place, terminal), rule] if table.has_head else []
    for row in rows:
        lines += _draw_row(row, place, terminal)
    if foot:
        lines += ["", *_draw_row(foot, place, terminal)]
    if left_out:
        lines += [f"… not in this narrow table: {', '.join(left_out)}; -o json has all"]
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
        room = limit - 1 - _GAP * (len(columns) - 1)
        if sum(least) <= room or not droppable:
            break
        place = columns.index(droppable.pop(0))
        del columns[place]
        for row in rows:
            del row[place]

    shortest = [
        min(width, max(_NARROWEST, len(name))) if name in folded else width
        for name, width in zip(columns, least, strict=True)
    ]
    for smallest in (least, shortest):  # words are broken only where nothing else is enough
        while sum(widths) > room and widths != smallest:
            shrinkable = [n for n, width in enumerate(widths) if width > smallest[n]]
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
            texts = textwrap.wrap(line.text, width, break_on_hyphens=False)
            yield from (Cell(text, line.style) for text in texts)


class _Widths(NamedTuple):
    """The characters of each column, of each bar, and between two columns."""

    widths: list[int]
    bar: int
    gap: int


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Lines]], terminal: Terminal) -> _Widths:
    """Return the widths with which a table fits, without bars as a last resort."""
    bars = {
        place
        for row in rows
        for place, cell in enumerate(row)
        if any(line.part is not None for line in cell)
    }
    widths = _natural(len(columns), rows, _LONGEST_BAR)
    missing = _missing(widths, _GAP, terminal)
    if missing <= 0:
        return _Widths(widths, _LONGEST_BAR, _GAP)
    bar = max(_SHORTEST_BAR, _LONGEST_BAR - -(-missing // len(bars))) if bars else 0
    for length, gap in ((bar, _GAP), (bar, 1), (0, 1)):
        widths = _natural(len(columns), rows, length)
        missing = _missing(widths, gap, terminal)
        if _shrink(columns, widths, missing, names=gap < _GAP) <= 0:
            break
    return _Widths(widths, length, gap)


def _missing(widths: Sequence[int], gap: int, terminal: Terminal) -> int:
    if not terminal.columns:
        return 0
    return 1 + sum(widths) + gap * (len(widths) - 1) - terminal.columns


def _shrink(columns: Sequence[str], widths: list[int], missing: int, *, names: bool) -> int:
    """Take missing characters from columns, in place; return what is missing still.

    Only with `names`, names are cut too.
    """
    for name in _CUT_COLUMNS:
        if name in columns and missing > 0:
            place = columns.index(name)
            given = min(missing, max(0, widths[place] - _NARROWEST))
            widths[place] -= given
            missing -= given
    least = {
        place: max(_NARROWEST, len(name))
        for place, name in enumerate(columns)
        if names and name in _CUT_NAMES
    }
    while missing > 0 and (wide := [place for place in least if widths[place] > least[place]]):
        widths[max(wide, key=lambda place: widths[place])] -= 1
        missing -= 1
    return missing


def _natural(count: int, rows: Iterable[Sequence[Lines]], bar: int) -> list[int]:
    """Return the characters of each column's longest line."""
    widths = [0] * count
    for row in rows:
        for place, cell in enumerate(row):
            widths[place] = max([widths[place], *(len(_text(line, bar)) for line in cell)])
    return widths


def _text(cell: Cell, bar: int) -> str:
    if cell.part is None or not bar:
        return cell.text
    full = min(bar, round(bar * cell.part))
    return "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (bar - full) + f" {cell.text}"


def _draw_row(cells: Sequence[Lines], place: _Widths, terminal: Terminal) -> Sequence[str]:
    lines = []
    for n in range(max((len(cell) for cell in cells), default=1)):
        texts = []
        for cell, width in zip(
            cells, place.widths, strict=False
        ):  # sums stand below the first columns
            line = cell[n] if n < len(cell) else Cell("")
            whole = _text(line, place.bar)
            text = _shorten(whole, width)
            texts.append(_styled(text, line.style, terminal) + " " * (width - len(text)))
        lines.append((" " * place.gap).join(texts))
    return lines


def _shorten(text: str, width: int) -> str:
    """Cut a text with a mark: a sentence at its end, and a name in its middle."""
    if len(text) <= width:
        return text
    begin = width - 1 if " " in text else width // 2
    end = width - 1 - begin
    return f"{text[:begin]}…{text[len(text) - end :]}"


def _styled(text: str, style: str, terminal: Terminal) -> str:
    code = _STYLES.get(style)
    return f"\x1b[{code}m{text}\x1b[0m" if code and text and terminal.colours else text


def takes_codes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that follows codes.

    A terminal without a name in TERM, or with the name `dumb`, is written as a file is.
    """
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def shows_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours; NO_COLOR switches them off."""
    return takes_codes(stream) and "NO_COLOR" not in os.environ
