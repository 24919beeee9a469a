"""CPU and wall time of commands; of short ones also beside another commit's with `--before`."""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Final, NamedTuple

from bench import cluster, daemon
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.core.reports.reading import plain_report, read_report
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.core.usage.report import without_processes

COMMANDS: Final = ("mgctl get devices", "metagpu --help")
CLUSTERS: Final = {1: 0.6, 500: 5.0, 5000: 30.0}
"""Nodes of a cluster, and the target of `kubectl metagpu top nodes` there, in seconds."""
HALF: Final = 0.5
"""The target: at most this part of the other commit's CPU time."""
_TARGET_MS: Final = 200


class _Spent(NamedTuple):
    """Seconds that a command took, and those of CPU time."""

    wall: float
    cpu: float


def commands(plan: Plan) -> list[Figure]:
    """Measure commands, this tree's and the other's in turn, and one at whole clusters."""
    figures = []

    with daemon.folder() as folder:
        with daemon.start(folder, config=daemon.POOL.format(shares=100)) as subject:
            assert subject.socket.exists()
            answer = subject.ask("usage")
        assert isinstance(answer, dict)
        # As the status API has it.
        report = plain_report(without_processes(read_report(answer, UsageReport)))
        with _answering(folder / "control", answer) as run_dir:
            for command in COMMANDS:
                program, *arguments = command.split()
                if arguments[0] == "get":
                    arguments += ["--run-dir", str(run_dir)]
                figures += _compare(plan, folder, command, [program, *arguments])
        for nodes, target in CLUSTERS.items():
            with cluster.serving(folder, nodes, report) as kubeconfig:
                figures += _top(plan, folder, kubeconfig, nodes, target)
    return figures


def _top(plan: Plan, folder: Path, kubeconfig: Path, nodes: int, target: float) -> list[Figure]:
    """Measure the whole process, from its start to its end: into a pipe it draws once."""
    command = ["kubectl-metagpu", "top", "nodes", "--kubeconfig", str(kubeconfig)]
    command += ["--timeout", "60s"]  # where the machine is busy, it takes longer, and has all nodes
    count = plan.count(30 if nodes == 1 else 5, 1)
    spent = [_run(daemon.HERE, command, folder) for _ in range(count + 1)][1:]
    wall, cpu = Samples([other.wall for other in spent]), Samples([other.cpu for other in spent])
    plan.report(f"commands: top of {nodes} nodes: {wall.p50:.2f} s, {cpu.p50:.2f} s of CPU")
    name = f"kubectl metagpu top nodes, {nodes} node{'s' * (nodes > 1)}"
    return [wall.figure(name, target=target, unit="s"), cpu.figure(f"{name}, CPU", unit="s")]


def _compare(plan: Plan, folder: Path, name: str, command: list[str]) -> list[Figure]:
    now, before = Samples(), Samples()
    for number in range(-1, plan.count(30, 2)):  # the first run writes the bytecode
        for root, samples in ((daemon.HERE, now), (plan.before, before)):
            if root is not None:
                spent = _run(root, command, folder)
                if number >= 0:
                    samples.seconds.append(spent.cpu)
    plan.report(f"commands: {name}: {1000 * now.p50:.0f} ms of CPU")

    figures = [now.figure(f"{name}, CPU", target=_TARGET_MS)]
    if before.seconds:
        figures.append(now.ratio(f"{name}, CPU, to the commit before", before, target=HALF))
    return figures


def _run(root: Path, command: list[str], folder: Path) -> _Spent:
    """Run a command of a source tree; return what its process took."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[command[0]].partition(":")
    code = f"import sys; from {module} import {function} as main; sys.exit(main())"
    began = time.monotonic()
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
    return _Spent(time.monotonic() - began, usage.ru_utime + usage.ru_stime)


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
