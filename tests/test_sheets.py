"""Tables as text."""

import pytest

from metagpu.sheets import AFRESH, PLAIN, Cell, Sheet, Terminal, afresh, drawn, printable


def sheet(*rows: tuple[str | Cell, ...]) -> Sheet:
    """Make a table of pids and commands."""
    made = Sheet(("PID", "CMD"))
    for row in rows:
        made.add(*row)
    return made


def test_columns_stand_below_each_other() -> None:
    """A column is as wide as its widest text; nothing stands behind the last one's."""
    assert drawn([sheet(("7", "sh"), ("4242", "-"))], PLAIN) == (
        " PID    CMD\n ──────────\n 7      sh\n 4242   -\n"
    )


def test_sums_stand_below() -> None:
    """Sums belong to the first columns, behind an empty line."""
    made = sheet(("7", "sh"))
    made.sum_up(1)

    assert drawn([made, Cell("a note")], PLAIN) == (
        " PID   CMD\n ─────────\n 7     sh\n\n 1\n\na note\n"
    )


@pytest.mark.parametrize("columns", [20, 40, 79])
def test_a_narrow_terminal_cuts_what_may_be_cut(columns: int) -> None:
    """A long command gives way, and says so; a pid never does."""
    *_, row = drawn([sheet(("4242", "x" * 200))], Terminal(columns)).splitlines()

    assert len(row) == columns
    assert row.startswith(" 4242   x")
    assert row.endswith("x…")


@pytest.mark.parametrize(
    ("columns", "bar"), [(None, 20), (64, 20), (63, 19), (44, 10), (34, 5), (30, 5)]
)
def test_bars_are_shortened_before_words_are_cut(columns: int | None, bar: int) -> None:
    """The bars of all columns and rows are of one length, and no shorter than says something."""
    made = Sheet(("BUSY", "MEMORY", "HEALTH"))
    made.add(Cell("100%", "green", 1.0), Cell("0 MiB", "", 0.0), "good")
    made.add("-", Cell("7 MiB", "", 7.0), "good")

    _, _, first, second = drawn([made], Terminal(columns)).splitlines()
    full, empty = "\u2588" * bar, "\u2591" * bar
    assert first == f" {full} 100%   {empty} 0 MiB   good"
    assert second == f" -{' ' * (bar + 4)}   {full} 7 MiB   good"


def test_a_screen_shows_what_it_has_room_for() -> None:
    """What is longer than the screen is cut at its end: nothing scrolls away from the top."""
    text = "".join(f"{n}\n" for n in range(10))

    assert afresh(text, Terminal(80, 11)) == AFRESH + text
    assert afresh(text, Terminal(80, 6)) == f"{AFRESH}0\n1\n2\n3\n…\n"
    assert afresh(text, Terminal(80)) == AFRESH + text


def test_colours_are_a_terminals() -> None:
    """A row's colour is that of its cells; one with a colour of its own keeps it."""
    made = Sheet(("A", "B"))
    made.add(Cell("good", "green"), "bad", style="red")

    assert "\x1b[32mgood\x1b[0m   \x1b[31mbad\x1b[0m" in drawn([made], Terminal(80, colours=True))
    assert "\x1b" not in drawn([made], Terminal(80))


def test_a_text_cannot_steer_the_terminal() -> None:
    """Escapes, line feeds and overwritten lines are shown as what they are not obeyed as."""
    assert printable("a\x1b[2J\nb\rc\u202ed") == "a�[2J�b�c�d"
    assert "\x1b" not in drawn([sheet(("7", "\x1b[2J")), Cell("\x1b[2J")], PLAIN)
