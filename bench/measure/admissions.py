"""Admissions of pods through the kubelet's own device manager."""

import os
import subprocess
import time
from pathlib import Path

from bench import daemon, machine
from bench.figures import Figure, Samples
from bench.plan import Plan
from tests.e2e.rig.build import build_command, build_settings, find_go
from tests.e2e.rig.go_programs import kubernetes


def admissions(plan: Plan) -> list[Figure]:
    """Admit pods of one share and of fifty, one after the other."""
    go = find_go()
    if go is None:
        plan.report("admissions: skipped, because there is no Go to build the device manager with")
        return []
    figures = []
    with daemon.folder() as folder:
        program = folder / "admissions"
        plan.report("admissions: building the kubelet's device manager; minutes, the first time")
        pinned = kubernetes()
        command = build_command(go, pinned, "./admissions", program)
        settings = os.environ | build_settings(pinned)
        subprocess.run(command, cwd=pinned.source, env=settings, check=True)
        for shares in (1, 50):
            figures += _admit(plan, program, shares)
    return figures


def _admit(plan: Plan, program: Path, shares: int) -> list[Figure]:
    count = plan.count(300, 20)
    plan.report(f"admissions: {count} pods of {shares}")

    with daemon.folder() as folder:
        kubelet = folder / "kubelet"
        manager = subprocess.Popen(
            [program, kubelet, daemon.RESOURCE, str(shares), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        config = daemon.POOL.format(shares=100)
        with daemon.start(folder, config=config, kubelet=False) as subject, manager:
            assert manager.stdout is not None
            first = manager.stdout.readline()
            before, began = machine.cpu_seconds(subject.pid), time.perf_counter()
            lines = [first, *manager.stdout]
            took = time.perf_counter() - began
            spent = machine.cpu_seconds(subject.pid) - before
            assert manager.wait() == 0, "the device manager failed"

    samples = Samples([int(line) / 1e9 for line in lines[1:]])
    name = f"admissions, pods of {shares}"
    rate, cpu = (count - 1) / took, 1e6 * spent / (count - 1)
    return [
        Figure(
            name=f"{name}: a second",
            unit="/s",
            measured=rate,
            target=None,
            better="higher",
            calls=count - 1,
        ),
        samples.figure(f"{name}: each"),
        Figure(
            name=f"{name}: CPU of the plugin", unit="us", measured=cpu, target=None, calls=count - 1
        ),
    ]
