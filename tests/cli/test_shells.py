"""zsh and fish complete lines: the machine's own shells, or those of Debian's packages."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.rig.debian import provide
from tests.e2e.rig.errors import RigError

pytestmark = pytest.mark.e2e

PROGRAMS = {
    "metagpu": "metagpu.cli.metagpu",
    "mgctl": "metagpu.cli.mgctl",
    "kubectl-metagpu": "metagpu.kubectl.program",
}
LINES = {
    "metagpu": ("metagpu expl", "explain"),
    "mgctl": ("mgctl comp", "completion"),
    "kubectl-metagpu": ("kubectl-metagpu drain", "drain-gpu"),
}
PACKAGES = {"zsh": ("zsh", "zsh-common"), "fish": ("fish", "fish-common", "libpcre2-32-0")}
LIMIT_S = 60.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shell that finds the programs first, and nothing of the user."""
    for name, module in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    python = str(Path(__file__).parents[2])
    return {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "PYTHONPATH": python}


@pytest.mark.parametrize("program", PROGRAMS)
def test_fish_completes(program: str, environment: dict[str, str]) -> None:
    """A fish that has read the program's script completes a line of it."""
    fish = shell("fish")
    for folder in Path(fish).parents[2].glob("usr/lib/*/libpcre2-32.so.0"):
        environment["LD_LIBRARY_PATH"] = str(folder.parent)
    line, expected = LINES[program]
    script = f"{program} completion fish | source; complete -C '{line}'"
    done = subprocess.run(  # noqa: S603 - the shell of this test
        [fish, "-N", "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [expected]


@pytest.mark.parametrize("program", PROGRAMS)
def test_zsh_completes(program: str, environment: dict[str, str]) -> None:
    """A zsh at a terminal that has read the program's script completes a line at Tab."""
    zsh = shell("zsh")
    root = Path(zsh).parents[1] if Path(zsh).parts[-3] != "usr" else Path(zsh).parents[2]
    modules, functions = f"{root}/usr/lib/*/zsh/*(N/)", f"{root}/usr/share/zsh/functions"
    line, expected = LINES[program]
    terminal, side = pty.openpty()
    with subprocess.Popen(  # noqa: S603 - the shell of this test
        [zsh, "-f", "-i"], stdin=side, stdout=side, stderr=side, env=environment, process_group=0
    ) as process:
        try:
            os.write(terminal, f"module_path=({modules}); fpath=({functions}/**/*(N/))\n".encode())
            os.write(terminal, f"source =({program} completion zsh); print rea''dy\n".encode())
            read_until(terminal, "ready\r\n")
            os.write(terminal, f"{line}\t".encode())
            read_until(terminal, f"{program} {expected} ")
        finally:
            process.kill()
            os.close(terminal)
            os.close(side)


def shell(name: str) -> str:
    """Return the path of a shell; skip where it cannot be had."""
    try:
        return provide(name, *PACKAGES[name])
    except RigError as error:
        pytest.skip(f"no {name}: {error}")


def read_until(terminal: int, expected: str) -> None:
    """Read what the terminal shows, until this is part of it."""
    os.set_blocking(terminal, False)
    shown, deadline = "", time.monotonic() + LIMIT_S
    while expected not in shown:
        assert time.monotonic() < deadline, shown
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.05)
