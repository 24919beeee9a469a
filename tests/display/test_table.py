"""Tables as text."""

import pytest

from metagpu.display.table import (
    CLEAR_SCREEN,
    PLAIN,
    Cell,
    Terminal,
    TextTable,
    printable,
    redraw,
    render,
)


def text_table(*rows: tuple[str | Cell, ...]) -> TextTable:
    """Build a table of pids and commands."""
    made = TextTable(("PID", "CMD"))
    for row in rows:
        made.add(*row)
    return made


def test_columns_stand_below_each_other() -> None:
    """A column is as wide as its widest text, without blanks after the last one."""
    assert render([text_table(("7", "sh"), ("4242", "-"))], PLAIN) == (
        " PID    CMD\n ──────────\n 7      sh\n 4242   -\n"
    )


def test_sums_stand_below() -> None:
    """Sums are below the first columns, after an empty line."""
    made = text_table(("7", "sh"))
    made.add_sums(1)

    assert render([made, Cell("a note")], PLAIN) == (
        " PID   CMD\n ─────────\n 7     sh\n\n 1\n\na note\n"
    )


@pytest.mark.parametrize("columns", [20, 40, 79])
def test_a_narrow_terminal_shortens_commands(columns: int) -> None:
    """A long command is shortened with a mark; a pid never is."""
    *_, row = render([text_table(("4242", "x" * 200))], Terminal(columns)).splitlines()

    assert len(row) == columns
    assert row.startswith(" 4242   x")
    assert "x…x" in row


def test_names_are_shortened_in_their_middle() -> None:
    """Names in a narrow terminal keep beginning and end, the longest are cut first."""
    made = TextTable(("NAMESPACE", "POD", "GPU", "MEMORY"))
    made.add("team-a", "a-deployment-with-a-name-6d4cf56db6-x2x9k", "0", "9000/32000 MiB")
    made.add("t" * 60, "short", "1", "0/8 MiB")

    *_, first, second = render([made], Terminal(70)).splitlines()
    assert max(len(first), len(second)) <= 70
    assert first.split()[1].startswith("a-deploym")
    assert first.split()[1].endswith("b6-x2x9k")
    assert "…" in second.split()[0]
    assert first.endswith(" 0   9000/32000 MiB")


def test_a_narrower_terminal_has_no_bars() -> None:
    """The blanks between columns go first, then the bars; numbers stay whole."""
    made = TextTable(("BUSY", "MEMORY", "HEALTH"))
    made.add(Cell("100%", "green", 1.0), Cell("0 MiB", "", 0.0), "good")

    full, empty = "\u2588" * 5, "\u2591" * 5
    closer = render([made], Terminal(30)).splitlines()[2]
    assert closer == f" {full} 100% {empty} 0 MiB good"
    assert render([made], Terminal(20)).splitlines()[2] == " 100% 0 MiB  good"


def test_a_word_longer_than_its_column_is_broken() -> None:
    """A table fits where a word alone, such as a UUID, is too long; other words stay whole."""
    made = TextTable(("REASON", "NOTE"), folded=frozenset(("REASON", "NOTE")))
    made.add("GPUMemoryExceeded", f"uses GPU-{'ab' * 20} too much")

    drawn = render([made], Terminal(44)).splitlines()
    assert max(map(len, drawn)) <= 44
    assert "GPUMemoryExceeded" in drawn[2]
    notes = [line[20:].strip() for line in drawn[2:]]
    assert "".join(notes).replace(" ", "") == f"usesGPU-{'ab' * 20}toomuch"
    whole = render([made], Terminal(68)).splitlines()
    assert f"GPU-{'ab' * 20}" in " ".join(whole).split()


@pytest.mark.parametrize(("columns", "bar"), [(None, 20), (64, 20), (63, 19), (44, 10), (34, 5)])
def test_bars_are_shortened_before_words_are_cut(columns: int | None, bar: int) -> None:
    """Bars of all columns and rows have one length, with a useful minimum."""
    made = TextTable(("BUSY", "MEMORY", "HEALTH"))
    made.add(Cell("100%", "green", 1.0), Cell("0 MiB", "", 0.0), "good")
    made.add("-", Cell("7 MiB", "", 7.0), "good")

    _, _, first, second = render([made], Terminal(columns)).splitlines()
    full, empty = "\u2588" * bar, "\u2591" * bar
    assert first == f" {full} 100%   {empty} 0 MiB   good"
    assert second == f" -{' ' * (bar + 4)}   {full} 7 MiB   good"


def test_a_screen_is_cut_at_its_end() -> None:
    """Text longer than the screen is cut at its end, so that the top stays."""
    text = "".join(f"{n}\n" for n in range(10))

    assert redraw(text, Terminal(80, 11)) == CLEAR_SCREEN + text
    assert redraw(text, Terminal(80, 6)) == f"{CLEAR_SCREEN}0\n1\n2\n3\n…\n"
    assert redraw(text, Terminal(80)) == CLEAR_SCREEN + text


def test_colours_are_a_terminals() -> None:
    """A row's colour is that of its cells, except for cells with a colour of their own."""
    made = TextTable(("A", "B"))
    made.add(Cell("good", "green"), "bad", style="red")

    assert "\x1b[32mgood\x1b[0m   \x1b[31mbad\x1b[0m" in render([made], Terminal(80, colours=True))
    assert "\x1b" not in render([made], Terminal(80))


def test_a_text_cannot_control_the_terminal() -> None:
    """Escapes, line feeds and overwritten lines are printed as visible characters."""
    assert printable("a\x1b[2J\nb\rc\u202ed") == "a�[2J�b�c�d"
    assert "\x1b" not in render([text_table(("7", "\x1b[2J")), Cell("\x1b[2J")], PLAIN)
