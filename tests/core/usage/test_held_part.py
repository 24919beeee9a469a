"""The measure of how much of a GPU is held, whatever the backend."""

from random import Random
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from metagpu.core.availability.conflict import without_conflict
from metagpu.core.config.memory import MemoryEnforcement
from metagpu.core.model.shares import Holder, Lease, Share
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import LeasesObserved
from metagpu.core.usage.accounting import ContainerUsage, HeldParts, attribute_processes
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.report import ReportRules, usage_report
from metagpu.kubectl.tables import KINDS, read_rows
from metagpu.kubectl.viewer import NodeAnswer
from metagpu.plugins.metrics.exporter import NamespaceMeter
from metagpu.plugins.metrics.families import NAMESPACE_GPU_SECONDS
from tests.nvml.rig import opened
from tests.rigs.build import after, offered

BACKENDS = {
    "fraction": "{backend: fraction, sharesPerGpu: 100}",
    "uneven": "{backend: fraction, sharesPerGpu: 7}",
    "timeslice": "{backend: timeslice, replicas: 4}",
    "mps": "{backend: mps, unitsPerGpu: 10}",
    "whole": "{backend: whole}",
    "mig": "{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}",
    "shared mig": "{backend: mig, layout: {1g.5gb: 2, 3g.20gb: 1}, replicas: 3}",
    "all": (
        "{backend: fraction}, {backend: timeslice, replicas: 4}, {backend: mps}, {backend: whole}"
    ),
}
FULL = {"mig", "shared mig"}


async def snapshot_of(backends: str) -> Snapshot:
    """Return a node of one GPU with the shares of some backends."""
    async with opened("a100-40gb:1") as (node, nvml, _):
        node.gpu(0).mig.enabled = "mig" in backends
        text = f"version: metagpu/v1\npools: [{{name: all, backends: [{backends}]}}]\n"
        return offered(*(await nvml.survey()).gpus, text=text)[1]


async def state_of(backends: str) -> GpuState:
    """Return its GPU."""
    return next(iter((await snapshot_of(backends)).gpus.values()))


def taken(state: GpuState, seed: int) -> list[Share]:
    """Take shares in some order until nothing is left."""
    free, held = list(state.shares), list[Share]()
    while free:
        held.append(Random(seed).choice(free))  # noqa: S311 - a test
        free = without_conflict([share for share in free if share not in held], held)
    return held


@pytest.mark.parametrize("backends", BACKENDS)
async def test_never_more_is_held_than_there_is(backends: str) -> None:
    """Whatever pods take, in any order and until nothing is left, is at most one GPU."""
    state = await state_of(BACKENDS[backends])
    for seed in range(30):
        part = sum(map(HeldParts(state).of_share, taken(state, seed)))
        assert part <= 1 + 1e-6
        assert backends in FULL or part == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("backends", BACKENDS)
async def test_all_reports_measure_alike(backends: str) -> None:
    """Nodes, GPUs, pods, namespaces and the counter for showback have the same sum."""
    snapshot = await snapshot_of(BACKENDS[backends])
    (state,) = snapshot.gpus.values()
    held = taken(state, seed=1)[::2]
    holders = {
        share.id: Holder(f"ns-{i % 2}", f"pod-{i % 3}", "main") for i, share in enumerate(held)
    }
    snapshot = after(LeasesObserved(holders, at=1), since=snapshot)
    (state,) = snapshot.gpus.values()

    usage = NodeUsage(gpus={state.gpu.id: attribute_processes(state, (), {}, {})})
    report = usage_report(snapshot, usage, ReportRules(lambda _: MemoryEnforcement(), {}))
    sums = [
        sum(row["heldGpus"] for row in read_rows(kind, [NodeAnswer("node", report)])[0])
        for kind in KINDS
    ]
    meter = NamespaceMeter()
    meter.observe(snapshot, now=0)
    meter.advance(1)
    meter.samples()  # the first ones are 0
    meter.advance(2)
    found = [one.value for one in meter.samples() if one.family is NAMESPACE_GPU_SECONDS]
    sums.append(sum(value for value in found if isinstance(value, float)) / 2)

    assert sums == [pytest.approx(sum(map(HeldParts(state).of_share, held)), abs=0.011)] * 5


@pytest.mark.parametrize(
    ("share", "part"), [("1g.5gb@6", 1 / 8), ("3g.20gb@4", 4 / 8), ("7g.40gb@0", 1)]
)
async def test_an_instance_is_its_memory_slices(share: str, part: float) -> None:
    """An instance counts with the memory slices that nobody else can have."""
    state = await state_of(BACKENDS["mig"])
    instance = next(one for one in state.shares if one.id.endswith(share))
    assert HeldParts(state).of_share(instance) == part


async def test_a_share_without_memory_is_its_part_of_their_number() -> None:
    """Shares of a GPU of unknown memory are equal parts of it; an earlier one is all of it."""
    state = await state_of(BACKENDS["timeslice"])
    unknown = replace(state, gpu=replace(state.gpu, memory=None))
    assert HeldParts(unknown).of_share(state.shares[0]) == 1 / 4
    assert HeldParts(replace(unknown, shares=())).of_share(state.shares[0]) == 1


async def test_a_share_of_an_earlier_configuration_is_its_memory() -> None:
    """A share that is not on offer as it was granted is its memory of the GPU's, at most all."""
    state = await state_of(BACKENDS["timeslice"])
    for eighths, part in ((1, 1 / 8), (9, 1)):
        earlier = replace(state.shares[0], memory=(state.gpu.memory or 0) * eighths // 8)
        assert HeldParts(state).of_share(earlier) == pytest.approx(part)


async def test_a_share_of_several_containers_counts_once() -> None:
    """Containers that use one claim together hold its share once, and init containers nothing."""
    state = await state_of(BACKENDS["timeslice"])
    share = state.shares[0]
    first, second = Holder("a", "pod", "one"), Holder("a", "pod", "two")
    lease = Lease(share, since=0, holder=first, sharers=(second,))
    state = replace(state, leases=MappingProxyType({share.id: lease}))
    usages = [
        ContainerUsage(state.gpu.id, holder, None, (share,))
        for holder in (first, second, Holder("a", "pod", "init"))
    ]
    assert [HeldParts(state).of_container(usage) for usage in usages] == [1 / 8, 1 / 8, 0]
