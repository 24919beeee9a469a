"""The driver's own limits, kept as the enforcer's are: on simulated GPUs that refuse memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio import to_thread

from metagpu.core import driver_limits
from metagpu.core.backend import Guard
from metagpu.core.census import Census
from metagpu.core.driver_limits import DriverLimits
from metagpu.core.enforcement import Annotation, Enforcement, Policy
from metagpu.core.enforcer import Enforcer
from metagpu.core.facts import DriverRead, GpusFound, LeasesObserved, PodsTold
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.model import Holder, ShareId
from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Versions
from metagpu.core.units import Bytes, Duration
from metagpu.core.usage import Usage
from metagpu.nvml import Nvml
from metagpu.sim.gpu import SimError, SimProcess
from metagpu.sim.host import SimHost, container_of
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import board
from tests.build import laid_out, pool
from tests.heard import heard
from tests.waiting import becomes

NEW: Final = "615.71.09"
ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")
PERCENT: Final = 40960 * MIB // 100
LIMIT_OF_25: Final = (10085 + 512) * MIB
TERMS: Final = Enforcement(policy=Policy.KILL, period=Duration(0.02))


class Ground:
    """An enforcer with the driver's limits on a node of two A100s; `terms` may be replaced."""

    def __init__(self, node: SimNode, nvml: Nvml, machine: SimHost) -> None:
        self.node, self.nvml, self.machine = node, nvml, machine
        self.terms = TERMS
        self.registry = Registry()
        self._holders: dict[ShareId, Holder] = {}
        self.guards = {"fraction": Guard.ENFORCER}
        census = Census(nvml, machine.host, self.registry)
        self.limits = DriverLimits(nvml, machine.host, self.registry, census, self.guards)
        self.enforcer = Enforcer(
            census,
            machine.host,
            self.registry,
            lambda _: self.terms,
            self.guards,
            limits=self.limits,
        )

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Name the GPUs."""
        return tuple(self.registry.snapshot.gpus)

    def hold(self, holder: Holder, count: int, gpu: int = 0) -> None:
        """Let a container hold so many shares of a GPU."""
        state = self.registry.snapshot.gpus[self.gpus[gpu]]
        free = [share.id for share in state.shares if share.id not in self._holders]
        self._holders |= dict.fromkeys(free[:count], holder)
        self.registry.apply(LeasesObserved(self._holders, at=len(self._holders)))

    def usage(self, holder: Holder, uid: str | None = None) -> Usage:
        """Give what a container has of the first GPU."""
        return Usage(self.gpus[0], holder, uid, ())

    def set_limits(self, gpu: int = 0) -> list[int]:
        """Give the limits that the driver has on a GPU, in order."""
        return sorted(self.node.gpu(gpu).limits.values())

    def use(self, holder: Holder, pid: int, percent: int) -> None:
        """Let a process of a container allocate so much of the first GPU."""
        cgroup = str(self.machine.start(holder))
        process = SimProcess(pid, percent * PERCENT, cgroup=cgroup)
        self.node.add_process(self.node.gpu(0), process)


@asynccontextmanager
async def ground(
    tmp_path: Path, driver: str = NEW, terms: Enforcement = TERMS
) -> AsyncIterator[Ground]:
    """Run an enforcer while the block lasts."""
    node = SimNode(driver)
    for _ in range(2):
        node.add_gpu(board("a100-40gb"))
    nvml = Nvml(Library(node))
    async with nvml.session(), anyio.create_task_group() as group:
        gpus = (await nvml.survey()).gpus
        it = Ground(node, nvml, SimHost(tmp_path))
        it.terms = terms
        it.registry.apply(GpusFound(gpus, at=0))
        it.registry.apply(laid_out(*gpus, text=pool("sharesPerGpu: 100")).offered)
        it.registry.apply(DriverRead(Versions(driver)))
        group.start_soon(it.enforcer.run)
        yield it
        group.cancel_scope.cancel()


async def test_a_container_is_limited_before_it_has_a_process(tmp_path: Path) -> None:
    """As soon as it runs, the driver refuses what its share does not allow; to it alone."""
    async with ground(tmp_path) as it:
        await to_thread.run_sync(it.machine.start, ALICE)
        await to_thread.run_sync(it.machine.start, BOB)
        it.hold(ALICE, 25)
        await becomes(lambda: it.limits.holds(it.usage(ALICE)))

        assert it.set_limits() == [LIMIT_OF_25]
        assert it.set_limits(gpu=1) == []
        assert it.limits.count == 1
        assert not it.limits.holds(it.usage(BOB))
        assert it.limits.holds(it.usage(ALICE, container_of(ALICE).pod_uid))
        assert not it.limits.holds(it.usage(ALICE, "another"))

        await to_thread.run_sync(it.use, ALICE, 100, 20)
        with pytest.raises(SimError, match="out of memory: the limit of its cgroup leaves"):
            await to_thread.run_sync(it.use, ALICE, 101, 10)
        await to_thread.run_sync(it.use, BOB, 102, 50)


async def test_a_restarted_container_is_limited_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is started again has another cgroup, and a limit there."""
    monkeypatch.setattr(driver_limits, "RESTARTS", 0.02)
    async with ground(tmp_path) as it:
        first = await to_thread.run_sync(it.machine.start, ALICE)
        it.hold(ALICE, 25)
        await becomes(lambda: it.limits.count == 1)
        await to_thread.run_sync(first.rmdir)
        second = await to_thread.run_sync(it.machine.start, ALICE, 1)
        await becomes(lambda: it.limits.holds(it.usage(ALICE, container_of(ALICE, 1).pod_uid)))
        assert it.node.gpu(0).limits[second] == LIMIT_OF_25
        assert it.limits.count == 1


async def test_a_limit_follows_the_wish_of_its_pod(tmp_path: Path) -> None:
    """An annotation raises the driver's limit too, and another policy takes it away."""
    async with ground(tmp_path) as it:
        it.terms = Enforcement(
            policy=Policy.KILL, period=Duration(0.02), allow_annotations=tuple(Annotation)
        )
        await to_thread.run_sync(it.machine.start, ALICE)
        it.hold(ALICE, 25)
        await becomes(lambda: it.set_limits() == [LIMIT_OF_25])

        for wishes, expected in (
            ({"gpu-mem-limit.cnvrg.io/metagpu": "50"}, [(20170 + 512) * MIB]),
            ({"metagpu.io/memory-policy": "warn"}, []),
        ):
            uid = container_of(ALICE).pod_uid
            it.registry.apply(PodsTold((KnownPod(uid, "default", "alice", wishes=wishes),)))
            await becomes(lambda wanted=expected: it.set_limits() == wanted)  # type: ignore[misc] # of a loop
        await becomes(lambda: it.limits.count == 0)


@pytest.mark.parametrize(
    "terms",
    [
        Enforcement(policy=Policy.WARN, period=Duration(0.02)),
        Enforcement(policy=Policy.KILL, period=Duration(0.02), dry_run=True),
        Enforcement(policy=Policy.KILL, period=Duration(0.02), driver_limits=False),
        Enforcement(policy=Policy.OFF, period=Duration(0.02)),
    ],
)
async def test_a_pool_that_ends_nobody_has_nothing_refused(
    tmp_path: Path, terms: Enforcement
) -> None:
    """Only where processes may be ended does the driver refuse; and limits of before are lifted."""
    async with ground(tmp_path) as it:
        await to_thread.run_sync(it.machine.start, ALICE)
        it.hold(ALICE, 25)
        await becomes(lambda: it.set_limits() == [LIMIT_OF_25])
        it.terms = terms
        await becomes(lambda: it.set_limits() == [])
        await becomes(lambda: it.limits.count == 0)


async def test_an_older_driver_is_told_once_and_asked_again_after_an_upgrade(
    tmp_path: Path,
) -> None:
    """Where there are no such limits the enforcer does without; a new driver is asked anew."""
    with heard(driver_limits) as entries:
        async with ground(tmp_path, "580.65.06") as it:
            await to_thread.run_sync(it.machine.start, ALICE)
            it.hold(ALICE, 25)
            await becomes(lambda: bool(entries))
            assert not it.limits.holds(it.usage(ALICE))

            it.node.driver = NEW
            it.registry.apply(DriverRead(Versions(NEW)))
            await becomes(lambda: it.limits.count == 1)

    assert entries[0]["event"] == "the driver does not limit memory; it is enforced without"
    assert [entry["log_level"] for entry in entries] == ["info", "info"]


async def test_a_driver_that_was_loaded_again_is_told_anew(tmp_path: Path) -> None:
    """What a driver was told is forgotten with it, and nobody is said to be limited meanwhile."""
    async with ground(tmp_path) as it:
        await to_thread.run_sync(it.machine.start, ALICE)
        it.hold(ALICE, 25)
        await becomes(lambda: it.limits.count == 1)
        it.node.fail_driver()
        await becomes(lambda: it.limits.count == 0)
        assert not it.limits.holds(it.usage(ALICE))


async def test_a_limit_that_cannot_be_set_is_told_once(tmp_path: Path) -> None:
    """Without root, the log says why once, and the container stays the enforcer's."""
    with heard(driver_limits) as entries:
        async with ground(tmp_path) as it:
            it.node.root = False
            await to_thread.run_sync(it.machine.start, ALICE)
            await to_thread.run_sync(it.machine.start, BOB)
            it.hold(ALICE, 25)
            it.hold(BOB, 25)
            await becomes(lambda: bool(entries))
            await becomes(lambda: len(it.limits._kept[it.gpus[0]].later) == 2)
            assert it.limits.count == 0

    [entry] = entries
    assert entry["event"] == "the driver does not limit a container; it is looked at"
    assert "only root may" in entry["why"]


async def test_a_limit_that_cannot_be_changed_is_lifted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of before is there still: it does not count as ours, and is not left behind."""
    monkeypatch.setattr(driver_limits, "AGAIN", 0.02)
    async with ground(tmp_path) as it:
        await to_thread.run_sync(it.machine.start, ALICE)
        it.hold(ALICE, 25)
        await becomes(lambda: it.limits.count == 1)

        it.node.root = False
        it.terms = Enforcement(
            policy=Policy.KILL, period=Duration(0.02), headroom=Bytes(1024 * MIB)
        )
        await becomes(lambda: it.limits.count == 0)
        assert not it.limits.holds(it.usage(ALICE))
        assert it.set_limits() == [LIMIT_OF_25]

        it.terms = Enforcement(policy=Policy.WARN, period=Duration(0.02))
        it.node.root = True
        await becomes(lambda: it.set_limits() == [])


@pytest.mark.parametrize("policy", [Policy.OFF, Policy.REPORT, Policy.WARN])
async def test_what_an_earlier_daemon_limited_is_lifted_by_one_that_would_not(
    tmp_path: Path, policy: Policy
) -> None:
    """It is known by its value, which is what this daemon would set; another one's stays."""
    terms = Enforcement(policy=policy, period=Duration(0.02))
    async with ground(tmp_path, terms=terms) as it:
        ours = await to_thread.run_sync(it.machine.start, ALICE)
        others = await to_thread.run_sync(it.machine.start, BOB)
        it.node.gpu(0).limits.update({ours: LIMIT_OF_25, others: LIMIT_OF_25 + 7 * MIB})
        it.hold(ALICE, 25)
        it.hold(BOB, 25)

        await becomes(lambda: it.set_limits() == [LIMIT_OF_25 + 7 * MIB])
        await becomes(lambda: it.limits.count == 0)
        assert others in it.node.gpu(0).limits


async def test_an_older_driver_is_asked_for_no_limits_again_and_again(tmp_path: Path) -> None:
    """Where none can be read there is nothing to lift, nor anything to say."""
    terms = Enforcement(policy=Policy.WARN, period=Duration(0.02))
    with heard(driver_limits) as entries:
        async with ground(tmp_path, "580.65.06", terms=terms) as it:
            asked: list[str] = []
            read = it.nvml.memory_limit

            async def counted(gpu: GpuId, cgroup: str) -> int | None:
                asked.append(cgroup)
                return await read(gpu, cgroup)

            it.nvml.memory_limit = counted  # type: ignore[method-assign] # counts what is asked
            await to_thread.run_sync(it.machine.start, ALICE)
            it.hold(ALICE, 25)
            await becomes(lambda: len(asked) == 1)
            await to_thread.run_sync(it.machine.start, BOB)
            it.hold(BOB, 25)
            await becomes(lambda: len(asked) == 2)
    assert len(set(asked)) == 2
    assert entries == []
