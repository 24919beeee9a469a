"""The driver's own memory limits, beside the enforcer's, on simulated GPUs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from metagpu.core.config.memory import (
    AnnotationKind,
    Burst,
    EnforcementPolicy,
    MemoryEnforcement,
)
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.host import ContainerCgroup
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, ResourceClaimRef, ShareId
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.facts import (
    DriverRead,
    GpusFound,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
)
from metagpu.core.state.registry import Registry
from metagpu.core.usage import driver_limits
from metagpu.core.usage.accounting import ContainerUsage
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.driver_limits import DriverLimits
from metagpu.core.usage.enforcer import Enforcer
from metagpu.core.usage.timing import UsageTiming
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimError, SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import find_model
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import out
from tests.rigs.build import layout_of, pool
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip

NEW: Final = "615.71.09"
ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")
PERCENT: Final = 40960 * MIB // 100
LIMIT_OF_25: Final = (10085 + 512) * MIB
QUICK: Final = UsageTiming(idle_period=0.02)
TERMS: Final = MemoryEnforcement(policy=EnforcementPolicy.KILL, period=Duration(0.02))


class Ground:
    """An enforcer with the driver's limits on a node of two A100s; `terms` may be replaced."""

    def __init__(
        self, node: SimNode, nvml: NvmlDriver, machine: SimHost, timing: UsageTiming
    ) -> None:
        self.node, self.nvml, self.machine = node, nvml, machine
        self.terms = TERMS
        self.registry = Registry()
        self._holders: dict[ShareId, Holder] = {}
        self.guards = {"fraction": MemoryGuard.ENFORCER}
        census = UsageCollector(nvml, machine.host, self.registry)
        self.limits = DriverLimits(
            nvml, machine.host, self.registry, census, self.guards, timing=timing
        )
        self.enforcer = Enforcer(
            census,
            machine.host,
            self.registry,
            lambda _: self.terms,
            self.guards,
            limits=self.limits,
            timing=timing,
        )

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Name the GPUs."""
        return tuple(self.registry.snapshot.gpus)

    def hold(self, holder: Holder, count: int, gpu: int = 0) -> None:
        """Add a container with leases on so many shares of a GPU."""
        state = self.registry.snapshot.gpus[self.gpus[gpu]]
        free = [share.id for share in state.shares if share.id not in self._holders]
        self._holders |= dict.fromkeys(free[:count], holder)
        self.registry.apply(LeasesObserved(self._holders, at=len(self._holders)))

    async def start(self, target: ContainerCgroup) -> int:
        """Limit a container that starts; return the number of its limits."""
        return await self.limits.limit_starting(target, lambda _: self.terms, checkpoint)

    def usage(self, holder: Holder, uid: str | None = None) -> ContainerUsage:
        """Return a container's usage of the first GPU."""
        return ContainerUsage(self.gpus[0], holder, uid, ())

    def set_limits(self, gpu: int = 0) -> list[int]:
        """Return the driver's limits on a GPU, in order."""
        return sorted(self.node.gpu(gpu).memory_limits.values())

    def use(self, holder: Holder, pid: int, percent: int) -> None:
        """Allocate so much memory of the first GPU by a process of a container."""
        cgroup = str(self.machine.start(holder))
        process = SimProcess(pid, percent * PERCENT, cgroup=cgroup)
        self.node.start_process(self.node.gpu(0), process)


@asynccontextmanager
async def ground(
    tmp_path: Path,
    driver: str = NEW,
    terms: MemoryEnforcement = TERMS,
    timing: UsageTiming = QUICK,
) -> AsyncIterator[Ground]:
    """Run an enforcer while the block lasts."""
    node = SimNode(driver)
    for _ in range(2):
        node.add_gpu(find_model("a100-40gb"))
    nvml = NvmlDriver(SimLibrary(node))
    async with nvml.session(), anyio.create_task_group() as group:
        gpus = (await nvml.survey()).gpus
        live_ground = Ground(node, nvml, SimHost(tmp_path), timing)
        live_ground.terms = terms
        live_ground.registry.apply(GpusFound(gpus, at=0))
        live_ground.registry.apply(layout_of(*gpus, text=pool("sharesPerGpu: 100")).offer_fact)
        live_ground.registry.apply(DriverRead(Versions(driver)))
        group.start_soon(live_ground.enforcer.run)
        yield live_ground
        group.cancel_scope.cancel()


async def test_a_container_is_limited_before_it_has_a_process(tmp_path: Path) -> None:
    """A container's limit is set when it runs, for this container alone."""
    async with ground(tmp_path) as live_ground:
        await to_thread.run_sync(live_ground.machine.start, ALICE)
        await to_thread.run_sync(live_ground.machine.start, BOB)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.limits.is_limited(live_ground.usage(ALICE)))

        assert live_ground.set_limits() == [LIMIT_OF_25]
        assert live_ground.set_limits(gpu=1) == []
        assert live_ground.limits.count == 1
        assert not live_ground.limits.is_limited(live_ground.usage(BOB))
        assert live_ground.limits.is_limited(live_ground.usage(ALICE, container_of(ALICE).pod_uid))
        assert not live_ground.limits.is_limited(live_ground.usage(ALICE, "another"))

        await to_thread.run_sync(live_ground.use, ALICE, 100, 20)
        with pytest.raises(SimError, match="out of memory: the limit of its cgroup leaves"):
            await to_thread.run_sync(live_ground.use, ALICE, 101, 10)
        await to_thread.run_sync(live_ground.use, BOB, 102, 50)

        live_ground.terms = replace(TERMS, burst=Burst())  # the limit is the borrower's
        await becomes(lambda: live_ground.set_limits() == [40960 * MIB])


async def test_a_restarted_container_is_limited_again(tmp_path: Path) -> None:
    """A restarted container has another cgroup, and a limit on it."""
    async with ground(tmp_path, timing=replace(QUICK, cgroup_period=0.02)) as live_ground:
        first = await to_thread.run_sync(live_ground.machine.start, ALICE)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.limits.count == 1)
        await to_thread.run_sync(first.rmdir)
        second = await to_thread.run_sync(live_ground.machine.start, ALICE, 1)
        await becomes(
            lambda: live_ground.limits.is_limited(
                live_ground.usage(ALICE, container_of(ALICE, 1).pod_uid)
            )
        )
        assert live_ground.node.gpu(0).memory_limits[second] == LIMIT_OF_25
        assert live_ground.limits.count == 1


async def test_a_limit_follows_the_annotation_of_its_pod(tmp_path: Path) -> None:
    """An annotation raises the driver's limit too, and another policy takes it away."""
    async with ground(tmp_path) as live_ground:
        live_ground.terms = MemoryEnforcement(
            policy=EnforcementPolicy.KILL,
            period=Duration(0.02),
            allow_annotations=tuple(AnnotationKind),
        )
        await to_thread.run_sync(live_ground.machine.start, ALICE)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.set_limits() == [LIMIT_OF_25])

        for annotations, expected in (
            ({"gpu-mem-limit.cnvrg.io/metagpu": "50"}, [(20170 + 512) * MIB]),
            ({"metagpu.io/memory-policy": "warn"}, []),
        ):
            uid = container_of(ALICE).pod_uid
            live_ground.registry.apply(
                PodsListed((KnownPod(uid, "default", "alice", memory_annotations=annotations),))
            )
            await becomes(lambda wanted=expected: live_ground.set_limits() == wanted)  # type: ignore[misc] # of a loop
        await becomes(lambda: live_ground.limits.count == 0)


@pytest.mark.parametrize(
    "terms",
    [
        MemoryEnforcement(policy=EnforcementPolicy.WARN, period=Duration(0.02)),
        MemoryEnforcement(policy=EnforcementPolicy.KILL, period=Duration(0.02), dry_run=True),
        MemoryEnforcement(
            policy=EnforcementPolicy.KILL, period=Duration(0.02), driver_limits=False
        ),
        MemoryEnforcement(policy=EnforcementPolicy.OFF, period=Duration(0.02)),
    ],
)
async def test_a_pool_without_signals_has_no_driver_limits(
    tmp_path: Path, terms: MemoryEnforcement
) -> None:
    """The driver has limits only where processes may be ended; earlier ones are lifted."""
    async with ground(tmp_path) as live_ground:
        await to_thread.run_sync(live_ground.machine.start, ALICE)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.set_limits() == [LIMIT_OF_25])
        live_ground.terms = terms
        await becomes(lambda: live_ground.set_limits() == [])
        await becomes(lambda: live_ground.limits.count == 0)


async def test_an_older_driver_is_logged_once_and_asked_again_after_an_upgrade(
    tmp_path: Path,
) -> None:
    """Without driver limits the enforcer works alone; a new driver is asked again."""
    with capture_module_logs(driver_limits) as entries:
        async with ground(tmp_path, "580.65.06") as live_ground:
            await to_thread.run_sync(live_ground.machine.start, ALICE)
            live_ground.hold(ALICE, 25)
            await becomes(lambda: bool(entries))
            assert not live_ground.limits.is_limited(live_ground.usage(ALICE))

            live_ground.node.driver = NEW
            live_ground.registry.apply(DriverRead(Versions(NEW)))
            await becomes(lambda: live_ground.limits.count == 1)

    assert entries[0]["event"] == "driver memory limits unsupported"
    assert [entry["log_level"] for entry in entries] == ["info", "info"]


async def test_a_reloaded_driver_gets_its_limits_again(tmp_path: Path) -> None:
    """A reloaded driver has no limits: they are set again, and none is reported meanwhile."""
    async with ground(tmp_path) as live_ground:
        await to_thread.run_sync(live_ground.machine.start, ALICE)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.limits.count == 1)
        live_ground.node.unload_driver()
        await becomes(lambda: live_ground.limits.count == 0)
        assert not live_ground.limits.is_limited(live_ground.usage(ALICE))


async def test_a_limit_that_cannot_be_set_is_logged_once(tmp_path: Path) -> None:
    """Without root, the log has the reason once, and the enforcer guards the container."""
    with capture_module_logs(driver_limits) as entries:
        async with ground(tmp_path) as live_ground:
            live_ground.node.root = False
            await to_thread.run_sync(live_ground.machine.start, ALICE)
            await to_thread.run_sync(live_ground.machine.start, BOB)
            live_ground.hold(ALICE, 25)
            live_ground.hold(BOB, 25)
            await becomes(lambda: bool(entries))
            await becomes(lambda: len(live_ground.limits._gpus[live_ground.gpus[0]].retry_at) == 2)
            assert live_ground.limits.count == 0

    [entry] = entries
    assert entry["event"] == "driver memory limit failed"
    assert "only root may" in entry["error"]


async def test_a_limit_that_cannot_be_changed_is_lifted_later(tmp_path: Path) -> None:
    """An outdated limit of the driver does not count as the container's, and is lifted later."""
    async with ground(tmp_path, timing=replace(QUICK, limit_retry=0.02)) as live_ground:
        await to_thread.run_sync(live_ground.machine.start, ALICE)
        live_ground.hold(ALICE, 25)
        await becomes(lambda: live_ground.limits.count == 1)

        live_ground.node.root = False
        live_ground.terms = MemoryEnforcement(
            policy=EnforcementPolicy.KILL, period=Duration(0.02), headroom=Bytes(1024 * MIB)
        )
        await becomes(lambda: live_ground.limits.count == 0)
        assert not live_ground.limits.is_limited(live_ground.usage(ALICE))
        assert live_ground.set_limits() == [LIMIT_OF_25]

        live_ground.terms = MemoryEnforcement(policy=EnforcementPolicy.WARN, period=Duration(0.02))
        live_ground.node.root = True
        await becomes(lambda: live_ground.set_limits() == [])


@pytest.mark.parametrize(
    "policy", [EnforcementPolicy.OFF, EnforcementPolicy.REPORT, EnforcementPolicy.WARN]
)
async def test_a_limit_of_an_earlier_daemon_is_lifted(
    tmp_path: Path, policy: EnforcementPolicy
) -> None:
    """An earlier daemon's limit is known by its value; other limits stay."""
    terms = MemoryEnforcement(policy=policy, period=Duration(0.02))
    async with ground(tmp_path, terms=terms) as live_ground:
        ours = await to_thread.run_sync(live_ground.machine.start, ALICE)
        others = await to_thread.run_sync(live_ground.machine.start, BOB)
        live_ground.node.gpu(0).memory_limits.update(
            {ours: LIMIT_OF_25, others: LIMIT_OF_25 + 7 * MIB}
        )
        live_ground.hold(ALICE, 25)
        live_ground.hold(BOB, 25)

        await becomes(lambda: live_ground.set_limits() == [LIMIT_OF_25 + 7 * MIB])
        await becomes(lambda: live_ground.limits.count == 0)
        assert others in live_ground.node.gpu(0).memory_limits


async def test_an_older_driver_is_asked_for_limits_once(tmp_path: Path) -> None:
    """A driver without limits is asked once, and nothing is logged."""
    terms = MemoryEnforcement(policy=EnforcementPolicy.WARN, period=Duration(0.02))
    with capture_module_logs(driver_limits) as entries:
        async with ground(tmp_path, "580.65.06", terms=terms) as live_ground:
            asked: list[str] = []
            read = live_ground.nvml.memory_limit

            async def counted(gpu: GpuId, cgroup: str) -> int | None:
                asked.append(cgroup)
                return await read(gpu, cgroup)

            live_ground.nvml.memory_limit = counted  # type: ignore[method-assign] # counts what is asked
            await to_thread.run_sync(live_ground.machine.start, ALICE)
            live_ground.hold(ALICE, 25)
            await becomes(lambda: len(asked) == 1)
            await to_thread.run_sync(live_ground.machine.start, BOB)
            live_ground.hold(BOB, 25)
            await becomes(lambda: len(asked) == 2)
    assert len(set(asked)) == 2
    assert entries == []


async def test_a_container_that_starts_has_the_limit_of_its_own_pods_shares(tmp_path: Path) -> None:
    """A pod with the name of a predecessor is not held to the shares of that one, by the uid."""
    async with ground(tmp_path) as live_ground:
        first, second = live_ground.gpus
        old, new = (live_ground.registry.snapshot.gpus[gpu].shares[0] for gpu in (first, second))
        container = container_of(ALICE)
        cgroup = await to_thread.run_sync(live_ground.machine.start, ALICE)
        containers = {
            old.id: frozenset({("an earlier pod", ALICE.container)}),
            new.id: frozenset({(container.pod_uid, ALICE.container)}),
        }
        allocated = dict.fromkeys(containers, old.resource)
        live_ground.registry.apply(
            LeasesObserved({old.id: ALICE}, at=1, allocated=allocated, containers=containers)
        )
        target = ContainerCgroup(container, ALICE, str(cgroup))
        assert await live_ground.start(target) == 1
        assert cgroup in live_ground.node.gpu(1).memory_limits


async def test_a_container_that_starts_has_the_limit_that_is_known_where_the_kubelet_is_silent(
    tmp_path: Path,
) -> None:
    """A restart of a container waits for half of its deadline, and does not fail."""
    timing = replace(QUICK, start_deadline=60.0)
    async with ground(tmp_path, timing=timing) as live_ground:

        async def silent() -> None:
            await becomes(lambda: not out(live_ground.nvml))  # whose deadline would pass too
            skip(timing.start_deadline / 2)
            await anyio.sleep_forever()

        live_ground.hold(ALICE, 25)
        cgroup = await to_thread.run_sync(live_ground.machine.start, ALICE)
        target = ContainerCgroup(container_of(ALICE), ALICE, str(cgroup))
        limiting = live_ground.limits.limit_starting
        assert await limiting(target, lambda _: live_ground.terms, silent) == 1


@pytest.mark.parametrize("by", ["checkpoint", "claim"])
async def test_the_limit_of_an_init_container_is_kept(tmp_path: Path, by: str) -> None:
    """An init container is in no list; its limit follows the settings until its cgroup is gone."""
    timing = replace(QUICK, cgroup_period=0.02)
    async with ground(tmp_path, timing=timing) as live_ground:
        container, registry = container_of(ALICE), live_ground.registry
        shares = registry.snapshot.gpus[live_ground.gpus[0]].shares[-25:]
        if by == "claim":
            claim = ResourceClaimRef("default", "quarter", "uid-1")
            registry.apply(SharesClaimed(shares, at=1, resource_claim=claim))
            claims = {"main": frozenset({("quarter", "")})}
            pod = KnownPod(container.pod_uid, "default", "alice", claims=claims)
            registry.apply(PodsListed((pod,)))
        else:
            own = frozenset({(container.pod_uid, ALICE.container)})
            ids = [share.id for share in shares]
            allocated = dict.fromkeys(ids, shares[0].resource)
            containers = dict.fromkeys(ids, own)
            registry.apply(LeasesObserved({}, at=1, allocated=allocated, containers=containers))
        cgroup = await to_thread.run_sync(live_ground.machine.start, ALICE)
        target = ContainerCgroup(container, ALICE, str(cgroup))
        assert await live_ground.start(target) == 1
        assert live_ground.node.gpu(0).memory_limits == {cgroup: LIMIT_OF_25}

        live_ground.hold(BOB, 10)  # another lease: the cgroups are searched again
        await to_thread.run_sync(live_ground.machine.start, BOB)
        await becomes(lambda: len(live_ground.set_limits()) == 2)
        await becomes(lambda: live_ground.limits.count == 2)
        live_ground.terms = replace(TERMS, headroom=Bytes(1024 * MIB))
        limits = live_ground.node.gpu(0).memory_limits
        await becomes(lambda: limits[cgroup] == LIMIT_OF_25 + 512 * MIB)
        live_ground.terms = replace(TERMS, policy=EnforcementPolicy.WARN)
        await becomes(lambda: live_ground.limits.count == 0)
        assert live_ground.set_limits() == []
