"""What it costs to know who uses what, and how soon somebody who uses too much has gone."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from bench import machine
from bench.figures import Figure, Samples
from bench.ground import Ground, ground
from bench.plan import Plan
from metagpu.core.backend import Guard
from metagpu.core.census import Census
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.enforcer import Enforcer
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder

GPUS: Final = 8
PODS: Final = 25
"""Of each GPU, with four shares and four processes each: 200 pods and 800 processes."""
BOARDS: Final = f"a100-40gb:{GPUS}"
TERMS: Final = Enforcement(policy=Policy.KILL)
STUBBORN: Final = (
    "import signal\nsignal.signal(15, signal.SIG_IGN)\n"
    "print(flush=True)\nwhile True: signal.pause()"
)


def enforcement(plan: Plan) -> list[Figure]:
    """Measure the cost of a pass, the delay of an end, and what pods leave behind."""
    with Path(os.devnull).open("w") as nowhere:
        # Lines are made, as on a node, and read by nobody.
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(nowhere))
        figures = [*anyio.run(_passes, plan), *anyio.run(_ends, plan), anyio.run(_lifetimes, plan)]
        structlog.reset_defaults()
    return figures


async def _passes(plan: Plan) -> list[Figure]:
    count = plan.count(100, 5)
    full, brief = Samples(), Samples()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metagpu-bench-")))
        real = [stack.enter_context(_Child("import signal; signal.pause()")).pid for _ in range(4)]
        async with ground(folder, BOARDS) as it:
            _populate(it, real)
            census = Census(it.nvml, it.machine.host, it.registry)
            found = await census.take()
            assert sum(len(u.processes) for a in found.accounts.values() for u in a.usages) == 800
            plan.say(f"enforcement: {count} passes over {GPUS} GPUs and 800 processes")
            for _ in range(count):
                full.seconds.append(await _cpu_of(census.take))
                brief.seconds.append(await _cpu_of(lambda: _look(census, it)))

    name = "8 GPUs, 800 processes, 200 pods"
    return [
        full.figure(f"CPU of a full pass, {name}", target=150),
        brief.figure(f"CPU of the enforcer's pass, {name}"),
    ]


async def _look(census: Census, it: Ground) -> None:
    for gpu in it.gpus:
        await census.account(gpu.id)


async def _cpu_of(work: Callable[[], Awaitable[object]]) -> float:
    before = time.process_time()
    await work()
    return time.process_time() - before


def _populate(it: Ground, real: Sequence[int]) -> None:
    pid = 100_000
    for gpu in range(GPUS):
        for number in range(PODS):
            holder = Holder("bench", f"pod-{gpu}-{number}", "main")
            it.hold(holder, gpu, 4 * number, 4)
            for which in real:
                pid += 1
                it.machine.house(pid, holder, real=which)
                it.use(gpu, pid, 300 * MIB, busy=1)
    it.observe()


class _Child:
    """A real process while the block lasts."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __enter__(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", self._code]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def _ends(plan: Plan) -> list[Figure]:
    """Time from an excess to the end of a process, one after the other, at the default period."""
    count = plan.count(30, 2)
    figures = []
    chance = random.Random(1)  # noqa: S311 - when in the period it happens

    for name, code in (
        ("of a process", "print(flush=True); import signal; signal.pause()"),
        ("of one that ignores SIGTERM", STUBBORN),
    ):
        plan.say(f"enforcement: {count} ends {name}")
        samples = Samples()
        with tempfile.TemporaryDirectory(prefix="metagpu-bench-") as folder:
            async with (
                ground(Path(folder), "a100-40gb:1") as it,
                anyio.create_task_group() as group,
            ):
                guards = {"fraction": Guard.ENFORCER}
                census = Census(it.nvml, it.machine.host, it.registry)
                enforcer = Enforcer(census, it.machine.host, it.registry, lambda _: TERMS, guards)
                group.start_soon(enforcer.run)
                for life in range(count):
                    await anyio.sleep(chance.random() * TERMS.period)
                    samples.seconds.append(await _one_end(it, code, life))
                group.cancel_scope.cancel()
        figures += [
            samples.figure(f"excess to the end {name}", target=2, unit="s"),
            samples.worst(f"excess to the end {name}, worst", unit="s"),
        ]
    return figures


async def _one_end(it: Ground, code: str, life: int) -> float:
    holder = Holder("bench", "greedy", "main")
    it.holders.clear()
    it.hold(holder, 0, 0, 25)
    it.observe()

    with _Child(code) as child:
        assert child.stdout is not None
        await to_thread.run_sync(child.stdout.readline)
        it.machine.house(child.pid, holder, life)
        it.use(0, child.pid, 1 * MIB)
        await anyio.sleep(TERMS.period)
        began = time.monotonic()
        it.use(0, child.pid, 20480 * MIB)
        await to_thread.run_sync(child.wait)
        took = time.monotonic() - began
        it.node.end_process(it.node.gpu(0), child.pid)
    return took


async def _lifetimes(plan: Plan) -> Figure:
    """Let pods come and go, each seen with a process, and read what memory is left with us."""
    early, late = plan.count(1000, 20), plan.count(10_000, 100)
    plan.say(f"enforcement: {late} lifetimes of a pod")
    pid, at = 100_000, 0.0

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metagpu-bench-")))
        real = stack.enter_context(_Child("import signal; signal.pause()")).pid
        async with ground(folder, "a100-40gb:1") as it:
            census = Census(it.nvml, it.machine.host, it.registry)
            for life in range(1, late + 1):
                holder = Holder("bench", f"pod-{life}", "main")
                it.holders.clear()
                it.hold(holder, 0, 0, 4)
                it.observe()
                it.machine.house(pid, holder, life, real=real)
                it.use(0, pid, 1 * MIB)
                account = await census.account(it.gpus[0].id)
                assert account.usages[0].processes
                it.machine.forget()
                if life == early:
                    at = machine.resident(os.getpid())
            growth = machine.resident(os.getpid()) - at

    return Figure(
        name=f"growth from pod {early} to {late}",
        unit="MB",
        measured=growth,
        target=2,
        calls=late - early,
    )
