"""The manual pages: what the parsers say, in the form that `man` reads."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from docs import manpages
from metagpu.cli.options import Variable
from metagpu.cli.parser import completions

PAGES = {page.name: page for page in manpages.pages()}
CHECKS = {
    "groff": ("groff", "-man", "-ww", "-z"),
    "mandoc": ("mandoc", "-Tlint", "-W", "warning"),
}
"""Programs that report a page's mistakes, each Debian's package of its name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all pages."""
    folder = tmp_path_factory.mktemp("man1")
    manpages.write(folder)
    return folder


def words_of(page: manpages.Page, words: Sequence[str] = ()) -> set[str]:
    """Return what a shell completes below a command: commands, objects and options."""
    found = set(completions(page.parser, [*words, "--"]))
    for word in completions(page.parser, [*words, ""]):
        if completions(page.parser, [*words, word, "--"]) and word not in words:
            found |= {word, *words_of(page, [*words, word])}
    return found


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_command_and_option_is_named(page: manpages.Page, folder: Path) -> None:
    """The page has what a shell completes, and every variable of an option."""
    text = (folder / f"{page.name}.1").read_text().replace("\\-", "-")
    expected = words_of(page) - {"--help", "--version"}
    for command in manpages.commands(page.parser):
        for action in command.parser._actions:
            if isinstance(action.default, Variable):
                expected.update(action.default.names)

    assert len(expected) > 20
    assert {name for name in expected if name not in text} == set()


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_whole(page: manpages.Page, folder: Path) -> None:
    """Each page has the sections that readers of manual pages look for."""
    lines = (folder / f"{page.name}.1").read_text().splitlines()
    names = {line.removeprefix(".SH ") for line in lines if line.startswith(".SH ")}
    assert names >= {"ENVIRONMENT", "FILES", "EXIT STATUS", "EXAMPLES", "SEE ALSO"}


@pytest.mark.parametrize("name", CHECKS)
def test_a_page_is_good(name: str, folder: Path) -> None:
    """The programs find nothing to warn of."""
    if shutil.which(name) is None:
        pytest.skip(f"Debian's package {name} has {name}, which this machine lacks")
    command = [*CHECKS[name], *sorted(map(str, folder.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a checker
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
