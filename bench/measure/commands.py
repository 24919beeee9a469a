"""CPU time of short commands, beside another commit's with `--before`."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Final

from bench import daemon
from bench.figures import Figure, Samples
from bench.plan import Plan

COMMANDS: Final = ("mgctl get devices", "metagpu --help")
HALF: Final = 0.5
"""The target: at most this part of the other commit's CPU time."""
_TARGET_MS: Final = 200


def commands(plan: Plan) -> list[Figure]:
    """Measure the CPU time of commands, this tree's and the other's in turn."""
    figures = []

    with daemon.folder() as folder:
        with daemon.start(folder, config=daemon.POOL.format(shares=100)) as subject:
            assert subject.socket.exists()
            answer = subject.ask("usage")
        with _answering(folder / "control", answer) as run_dir:
            for command in COMMANDS:
                program, *arguments = command.split()
                if arguments[0] == "get":
                    arguments += ["--run-dir", str(run_dir)]
                figures += _compare(plan, folder, command, [program, *arguments])
    return figures


def _compare(plan: Plan, folder: Path, name: str, command: list[str]) -> list[Figure]:
    now, before = Samples(), Samples()
    for number in range(-1, plan.count(30, 2)):  # the first run writes the bytecode
        for root, samples in ((daemon.HERE, now), (plan.before, before)):
            if root is not None:
                spent = _cpu_seconds(root, command, folder)
                if number >= 0:
                    samples.seconds.append(spent)
    plan.report(f"commands: {name}: {1000 * now.p50:.0f} ms of CPU")

    figures = [now.figure(f"{name}, CPU", target=_TARGET_MS)]
    if before.seconds:
        figures.append(now.ratio(f"{name}, CPU, to the commit before", before, target=HALF))
    return figures


def _cpu_seconds(root: Path, command: list[str], folder: Path) -> float:
    """Run a command of a source tree; return the CPU time of its process."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[command[0]].partition(":")
    code = f"import sys; from {module} import {function} as main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command[1:]],
        cwd=root,  # before all other folders that Python looks for modules in
        env=_environment(folder / f"bytecode-{root.name}"),
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} of {root} failed")
    return usage.ru_utime + usage.ru_stime


def _environment(bytecode: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(bytecode)}


@contextmanager
def _answering(run_dir: Path, answer: object) -> Iterator[Path]:
    """Serve one answer on a control socket, also under the key names of older commits."""
    assert isinstance(answer, dict)
    line = json.dumps({"ok": {**answer, "warnings": [], "hints": []}}).encode() + b"\n"
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "metagpu.sock"))
        listener.listen()
        Thread(target=_serve, args=(listener, line), daemon=True).start()
        yield run_dir


def _serve(listener: socket.socket, line: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the bench has closed the socket
            return
        with connection:
            connection.makefile("rb").readline()
            connection.sendall(line)
