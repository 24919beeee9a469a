"""The cost of usage collection, and the delay until an excess is ended."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from bench import machine
from bench.enforcement_node import EnforcementNode, simulated_node
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.core.config.memory import Burst, EnforcementPolicy, MemoryEnforcement
from metagpu.core.config.units import Bytes
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.enforcer import Enforcer

GPUS: Final = 8
PODS: Final = 25
"""Of each GPU, with four shares and four processes each: 200 pods and 800 processes."""
NODE: Final = f"a100-40gb:{GPUS}"
SETTINGS: Final = MemoryEnforcement(policy=EnforcementPolicy.KILL)
LENDING: Final = MemoryEnforcement(
    policy=EnforcementPolicy.KILL, burst=Burst(reserve=Bytes(2048 * MIB))
)
PATIENT: Final = "print(flush=True); import signal; signal.pause()"
STUBBORN: Final = (
    "import signal\nsignal.signal(15, signal.SIG_IGN)\n"
    "print(flush=True)\nwhile True: signal.pause()"
)


def enforcement(plan: Plan) -> list[Figure]:
    """Measure the cost of a pass, the delay of an end, and what pods leave behind."""
    with Path(os.devnull).open("w") as nowhere:
        # Log lines are formatted, as on a node, and discarded.
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
        async with simulated_node(folder, NODE) as node:
            collector = populate(node, real)
            found = await collector.collect()
            assert sum(len(u.processes) for a in found.gpus.values() for u in a.containers) == 800
            plan.report(f"enforcement: {count} passes over {GPUS} GPUs and 800 processes")
            for _ in range(count):
                full.seconds.append(await _cpu_of(lambda: _collect_all(collector)))
                brief.seconds.append(await _cpu_of(lambda: collect_gpus(collector, node)))

    name = "8 GPUs, 800 processes, 200 pods"
    return [
        full.figure(f"CPU of a full pass, {name}", target=150),
        brief.figure(f"CPU of the enforcer's pass, {name}"),
    ]


async def _collect_all(collector: UsageCollector) -> None:
    await collector.describe(await collector.collect())


async def collect_gpus(collector: UsageCollector, node: EnforcementNode) -> None:
    """Read what the enforcer's pass reads."""
    for gpu in node.gpus:
        await collector.collect_gpu(gpu.id)


async def _cpu_of(work: Callable[[], Awaitable[object]]) -> float:
    before = time.process_time()
    await work()
    return time.process_time() - before


def populate(node: EnforcementNode, real: Sequence[int]) -> UsageCollector:
    """Add pods with four processes each to all GPUs; return what reads their use.

    The kernel's data on `real` processes is that of all.
    """
    pid = 100_000
    for gpu in range(GPUS):
        for number in range(PODS):
            holder = Holder("bench", f"pod-{gpu}-{number}", "main")
            node.hold(holder, gpu, 4 * number, 4)
            for which in real:
                pid += 1
                node.machine.add_container_process(pid, holder, real=which)
                node.use(gpu, pid, 300 * MIB, busy=1)
    node.observe()
    return UsageCollector(node.nvml, node.machine.host, node.registry)


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
    """Time from an excess to the end of a process, one by one, at the default period."""
    count = plan.count(30, 2)
    figures = []
    chance = random.Random(1)  # noqa: S311 - when in the period it happens

    for name, code, settings in (
        ("excess to the end of a process", PATIENT, SETTINGS),
        ("excess to the end of one that ignores SIGTERM", STUBBORN, SETTINGS),
        ("a neighbour's need to the end of a borrower", PATIENT, LENDING),
    ):
        plan.report(f"enforcement: {count} times from {name}")
        samples = Samples()
        with tempfile.TemporaryDirectory(prefix="metagpu-bench-") as folder:
            async with (
                simulated_node(Path(folder), "a100-40gb:1") as node,
                anyio.create_task_group() as group,
            ):
                guards = {"fraction": MemoryGuard.ENFORCER}
                collector = UsageCollector(node.nvml, node.machine.host, node.registry)
                enforcer = Enforcer(
                    collector, node.machine.host, node.registry, partial(_for_all, settings), guards
                )
                group.start_soon(enforcer.run)
                for life in range(count):
                    await anyio.sleep(chance.random() * settings.period)
                    lends = settings.burst is not None
                    samples.seconds.append(await _one_end(node, code, life, lends=lends))
                group.cancel_scope.cancel()
        figures += [
            samples.figure(name, target=2, unit="s"),
            samples.worst(f"{name}, worst", unit="s"),
        ]
    return figures


def _for_all(settings: MemoryEnforcement, _: GpuId) -> MemoryEnforcement:
    return settings


async def _one_end(node: EnforcementNode, code: str, life: int, *, lends: bool) -> float:
    """Return the seconds until a process ends that has, or borrows, what it must not keep."""
    holder, neighbour = Holder("bench", "greedy", "main"), Holder("bench", "modest", "main")
    node.holders.clear()
    node.hold(holder, 0, 0, 25)
    node.hold(neighbour, 0, 25, 50)
    node.observe()

    with _Child(code) as child, _Child(PATIENT) as other:
        assert child.stdout is not None
        await to_thread.run_sync(child.stdout.readline)
        node.machine.add_container_process(child.pid, holder, life)
        node.machine.add_container_process(other.pid, neighbour, life)
        node.use(0, child.pid, 36864 * MIB if lends else 1 * MIB)
        await anyio.sleep(2 * SETTINGS.period)
        began = time.monotonic()
        # Both stay within what the GPU has; the neighbour's is within the reserve.
        node.use(0, *((other.pid, 2048 * MIB) if lends else (child.pid, 20480 * MIB)))
        await to_thread.run_sync(child.wait)
        took = time.monotonic() - began
        for process in (child, other) if lends else (child,):
            node.node.end_process(node.node.gpu(0), process.pid)
    return took


async def _lifetimes(plan: Plan) -> Figure:
    """Run pods with a process each, and return the memory that stays in use."""
    early, late = plan.count(1000, 20), plan.count(10_000, 100)
    plan.report(f"enforcement: {late} lifetimes of a pod")
    pid, at = 100_000, 0.0

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metagpu-bench-")))
        real = stack.enter_context(_Child("import signal; signal.pause()")).pid
        async with simulated_node(folder, "a100-40gb:1") as node:
            collector = UsageCollector(node.nvml, node.machine.host, node.registry)
            for life in range(1, late + 1):
                holder = Holder("bench", f"pod-{life}", "main")
                node.holders.clear()
                node.hold(holder, 0, 0, 4)
                node.observe()
                node.machine.add_container_process(pid, holder, life, real=real)
                node.use(0, pid, 1 * MIB)
                account = await collector.collect_gpu(node.gpus[0].id)
                assert account.containers[0].processes
                node.machine.remove_log_links()
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
