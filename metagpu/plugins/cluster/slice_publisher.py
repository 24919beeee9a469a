"""The publisher of ResourceSlices: keeps them as the snapshot wants them.

The kubelet deletes the slices of all drivers when it starts, and people may edit them: the
publisher watches its own slices. Loaded only where a pool has DRA.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu.core.devices.devices import (
    monitor_pool_name,
    pool_name,
)
from metagpu.core.devices.slices import (
    GpuSlices,
    SliceSpec,
    comparable,
    dropped_fields,
    gpu_slices,
    has_counters,
    pools_of,
    slices_of,
)
from metagpu.core.errors import ClusterError
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.offers import Api
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.reports.schema.daemon import SlicesReport
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.resource_slices import (
    SLICES,
    DeviceClasses,
    OwnSlices,
    find_still_dropped,
    has_needed,
    named,
    plan_pool,
    pool_of,
    slice_object,
    unread_slices,
    version_of,
)
from metagpu.plugins.cluster.slice_refusals import SliceRefusals
from metagpu.plugins.cluster.watch import WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

_NO_DRY_RUN: Final = 400
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409

log = structlog.get_logger()


class _Rendered(msgspec.Struct, frozen=True):
    """The slices of a GPU, with all that they were computed from."""

    parts: tuple[object, ...]
    slices: GpuSlices | None


class SliceTiming(msgspec.Struct, frozen=True):
    """The delays of the publisher, in seconds.

    Attributes:
        edited: before a slice that somebody edited is written again; a deleted one is at once.
        burst: how often as many slices may be written at once as the node has.
        rate: writes of slices of the node a second, after these.
        probe: between two questions whether the API server still drops fields.
    """

    edited: float = 30.0
    burst: int = 2
    rate: float = 2.0
    probe: float = 600.0


class _Published(msgspec.Struct, frozen=True):
    """A slice as it was written, and the API server's answer."""

    spec: SliceSpec
    answer: KubeObject


@dataclass(eq=False)
class SlicePublisher:
    """Compares the slices of the node with the snapshot, and writes what differs.

    Attributes:
        node: the Node, which owns the slices.
        driver: returns the name of the DRA driver.
        pcie_root: returns the PCIe root complex of a GPU, `None` if unknown; blocks.
        note_dropped: gets what the API server dropped, in words, whenever that is something else.
        dropped: the fields that the API server dropped from what it was sent.
    """

    client: "KubeClient"
    node: WatchedObject
    registry: Registry
    driver: Callable[[], str]
    pcie_root: Callable[[Gpu], str | None]
    note_dropped: Callable[[str], None]
    timing: SliceTiming = field(default_factory=SliceTiming)
    dropped: tuple[str, ...] = ()
    _published: dict[str, _Published] = field(default_factory=dict)
    _edited: dict[str, float] = field(default_factory=dict)
    _roots: dict[GpuId, str | None] = field(default_factory=dict)
    _rendered: dict[GpuId, _Rendered] = field(default_factory=dict)
    _written: dict[str, float] = field(default_factory=dict)
    _probe_at: float = inf

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(0, self.timing.rate)
        self._refused = SliceRefusals(self.client, self.node.name, self.driver)
        self.classes = DeviceClasses(self.client)
        self.own = OwnSlices(self.client, self.node.name, self.driver, self._on_change)
        self.reconciler = Reconciler("resource slices", self.reconcile, self.client.timing)

    async def run(self) -> None:
        """Publish the slices until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.own.run)
            group.start_soon(self.classes.run)
            group.start_soon(self.reconciler.run)
            async for _ in self.registry.watch(_watched):
                self.reconciler.trigger()

    def report(self) -> SlicesReport:
        """Return published pools, the problem with others, extended resources, and theirs.

        A resource is contested that the device plugin has on this node, and a DeviceClass too.
        """
        problem = (
            self.reconciler.problem
            or self.own.problem
            or next(iter(self._refused.problems.values()), self._dropped_problem)
        )
        resources = self.classes.of_driver(self.driver())
        by_plugin = self.registry.snapshot.offers_of(Api.DEVICE_PLUGIN)
        return SlicesReport(
            pools=len({pool_of(published.answer) for published in self._published.values()}),
            problem=problem,
            dropped=self._dropped_problem,
            extended_resources=dict(resources),
            classes_problem=self.classes.problem,
            contested={
                resource: name for resource, name in resources.items() if resource in by_plugin
            },
        )

    async def reconcile(self) -> float | None:
        """Write what differs; return the seconds until more is to be written."""
        snapshot, node = self.registry.snapshot, self.node.object
        if not self.own.known or node is None or not snapshot.offers:
            return None  # before a layout is applied, slices of an earlier daemon stay
        await self._render(snapshot)
        await self._refused.ask({gpu: each.slices for gpu, each in self._rendered.items()}, node)
        waits = await self._write_all(node)
        if (wait := self._refused.wait()) is not None:
            waits.append(wait)
        if self.dropped:
            if anyio.current_time() >= self._probe_at:
                self._probe_at = anyio.current_time() + self.timing.probe
                await self._probe_dropped(snapshot, node)
            waits.append(self._probe_at - anyio.current_time())
        return min(waits, default=None)

    async def _render(self, snapshot: Snapshot) -> None:
        """Compute the slices of each GPU; the same objects for one without a change."""
        for gpu, state in snapshot.gpus.items():
            if gpu not in self._roots:
                self._roots[gpu] = await to_thread.run_sync(self.pcie_root, state.gpu)

        driver, plain = self.driver(), self._is_plain
        counted, rendered = has_counters(snapshot) and not plain, {}
        for gpu, state in snapshot.gpus.items():
            parts = (state, snapshot.offers, snapshot.versions, driver, plain, counted)
            known = self._rendered.get(gpu)
            if known is None or any(a is not b for a, b in zip(known.parts, parts, strict=True)):
                root, node = self._roots[gpu], self.node.name
                known = _Rendered(
                    parts,
                    gpu_slices(snapshot, gpu, node, driver, root, plain=plain, counted=counted),
                )
            rendered[gpu] = known
        if snapshot.unreadable_gpus:
            rendered = self._with_unread(rendered)
        self._rendered = rendered

    def _with_unread(self, rendered: Mapping[GpuId, _Rendered]) -> dict[GpuId, _Rendered]:
        """Add what is published of GPUs that cannot be read now, in the order of the pool.

        An index that cannot be read names no GPU: each that the snapshot lacks may be it.
        """
        driver, node = self.driver(), self.node.name
        present = unread_slices(
            self.own.in_pool(driver, pool_name(node)).values(),
            self.own.in_pool(driver, monitor_pool_name(node)).values(),
        )
        found = {gpu: _Rendered((), slices) for gpu, slices in present.items()}
        found = {**found, **self._rendered, **rendered}
        place = {gpu: number for number, gpu in enumerate(present)}
        order = sorted(found, key=lambda gpu: place.get(gpu, len(place)))
        return {gpu: found[gpu] for gpu in order}

    async def _write_all(self, node: KubeObject) -> list[float]:
        """Write what differs in all pools; return the seconds until more may be written.

        A GPU whose slices the API server refuses is left out: the pool of the others is complete.
        """
        while True:
            refused, found = set(self._refused.problems), self._rendered.items()
            taken = [each.slices for gpu, each in found if each.slices and gpu not in refused]
            if refused and not taken:
                return []  # slices of before stay
            pools = pools_of(taken, self.node.name, self.driver())
            self._bucket.burst = self.timing.burst * sum(map(len, pools.values()))
            try:
                # First: in a pool of before the scheduler would find the same GPUs once more.
                await self._delete_others(pools, node)
                waits = [await self._reconcile_pool(specs, node) for specs in pools.values()]
            except ClusterError:
                if self._refused.problems.keys() == refused:
                    raise
                for gpu, each in found:
                    if gpu not in self._refused.problems:
                        await self._refused.is_taken(each.slices, node)
            else:
                return [wait for wait in waits if wait is not None]

    async def _reconcile_pool(self, specs: tuple[SliceSpec, ...], node: KubeObject) -> float | None:
        """Write what differs in a pool; return the seconds until more may be written."""
        before = self.own.in_pool(specs[0]["driver"], specs[0]["pool"]["name"])
        wanted, now = named(specs), anyio.current_time()
        waits = {
            name: self._edit_ends(name, spec) - now
            for name, spec in wanted.items()
            if not self._is_as_wanted(name, spec)
        }
        plan = plan_pool(wanted, before, waits)
        if plan.together and (wait := self._bucket.wait(now)) > 0:
            return wait
        later = await self._write(plan.apart, plan.generation, node) or plan.later
        for step in plan.together:
            await self._write(step, plan.generation, node, together=True)
        await self._delete_all(before.keys() - wanted.keys())
        return later

    async def _write(
        self,
        due: Mapping[str, SliceSpec],
        generation: int,
        node: KubeObject,
        *,
        together: bool = False,
    ) -> float | None:
        """Write slices, the oldest first; return the seconds until others may be written.

        Slices that only TOGETHER are a pool do not wait.
        """
        dropped = list(self.dropped)
        try:
            for name in sorted(due, key=lambda text: self._written.get(text, -1)):
                wait = self._bucket.wait(anyio.current_time())
                if wait > 0 and not together:
                    return wait
                answer = await self._put(slice_object(name, due[name], generation, node))
                self._written[name] = anyio.current_time()
                self._published[name] = _Published(due[name], answer)
                dropped += dropped_fields(due[name], answer["spec"])
        finally:
            self._set_dropped(tuple(dict.fromkeys(dropped)))
        return None

    def _is_as_wanted(self, name: str, spec: SliceSpec) -> bool:
        """Return whether the API server has a slice, as far as it takes it."""
        present, published = self.own.objects.get(name), self._published.get(name)
        if present is None:
            return False
        wanted: Any = spec
        if published is not None and published.spec == spec:
            if present is published.answer:
                return True
            wanted = published.answer["spec"]
        if comparable(wanted) != comparable(present["spec"]):
            return False
        self._published[name] = _Published(spec, present)
        return True

    def _edit_ends(self, name: str, spec: SliceSpec) -> float:
        """Return when a slice that differs is written: later, if somebody else changed it."""
        published = self._published.get(name)
        ours = published is None or published.spec != spec
        return 0 if ours else self._edited.get(name, 0)

    async def _put(self, wanted: KubeObject) -> KubeObject:
        """Create or replace a slice; return the answer."""
        name = wanted["metadata"]["name"]
        try:
            if name in self.own.objects:
                answer = await self.client.call("PUT", f"{SLICES}/{name}", body=wanted)
            else:
                answer = await self.client.call("POST", SLICES, body=wanted)
        except ClusterError as error:
            self._published.pop(name, None)  # what the watch shows by now may be ours
            if error.status == _NOT_FOUND:
                self.own.objects.pop(name, None)  # the next attempt creates it
            elif error.status == _CONFLICT:
                pool = {**wanted["spec"]["pool"], "generation": 0}
                unread = {"driver": wanted["spec"]["driver"], "pool": pool}
                self.own.objects[name] = {**wanted, "spec": unread}  # the next attempt replaces it
            self._refused.note(wanted, error)
            raise
        self._bucket.reserve(anyio.current_time())
        if version_of(answer) > self.own.version:  # else it was watched, and maybe its end too
            self.own.objects[name] = answer
        return answer

    async def _delete_all(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self.client.call("DELETE", f"{SLICES}/{name}")
            except ClusterError as error:
                if error.status != _NOT_FOUND:
                    raise
            self.own.objects.pop(name, None)
            self._published.pop(name, None)

    async def _delete_others(
        self, pools: Mapping[str, tuple[SliceSpec, ...]], node: KubeObject
    ) -> None:
        """Delete the slices of pools that are published no more, or under another driver.

        They stay while the API server refuses those that replace them, as an older policy may.
        """
        driver = self.driver()
        others = [
            name
            for name, old in self.own.objects.items()
            if old["spec"]["driver"] != driver or pool_of(old) not in pools
        ]
        try:
            for specs in pools.values() if others else ():
                await self._refused.try_slices(specs[:1], node)
        except ClusterError as error:
            if error.status != _NO_DRY_RUN:
                raise
        await self._delete_all(others)

    async def _probe_dropped(self, snapshot: Snapshot, node: KubeObject) -> None:
        """Ask by a dry run which fields are still dropped; write again if fewer are.

        An upgrade of the control plane turns features on. Written in earnest, devices would be
        published for a moment that exclude each other.
        """
        roots = {gpu: root for gpu, root in self._roots.items() if root}
        slices = (
            slice_object(name, spec, 1, node)
            for specs in slices_of(snapshot, self.node.name, self.driver(), roots).values()
            for name, spec in named(specs).items()
        )
        try:
            still = await find_still_dropped(self.client, slices, self.dropped)
        except ClusterError as error:  # the slices themselves are published
            log.info("resource slices not sent by a dry run", error=str(error))
            return
        if still != self.dropped:
            self._published.clear()
            self._set_dropped(still)

    def _set_dropped(self, dropped: tuple[str, ...]) -> None:
        if dropped == self.dropped:
            return
        self.dropped = dropped
        self._probe_at = anyio.current_time() + self.timing.probe
        self.reconciler.trigger()
        if not dropped:
            log.info("api server takes all fields of resource slices")
            return
        log.warning("api server dropped fields of resource slices", problem=self._dropped_problem)
        self.note_dropped(self._dropped_problem)

    @property
    def _is_plain(self) -> bool:
        """True if whole GPUs alone may be published."""
        return has_needed(self.dropped)

    @property
    def _dropped_problem(self) -> str:
        if not self.dropped:
            return ""
        alone = "; whole GPUs alone are published" if self._is_plain else ""
        return (
            f"the API server dropped {', '.join(self.dropped)} from ResourceSlices{alone}: use "
            "Kubernetes 1.36 or newer, with the feature gates DRAPartitionableDevices, "
            "DRAConsumableCapacity and DRADeviceTaints on"
        )

    def _on_change(self, name: str) -> None:
        if name:
            self._edited[name] = anyio.current_time() + self.timing.edited
        self.reconciler.trigger()


def _watched(snapshot: Snapshot) -> tuple[object, ...]:
    states: Iterable[GpuState] = snapshot.gpus.values()
    dra = tuple(state for state in states if state.api is Api.DRA)
    return dra, snapshot.versions, bool(snapshot.offers), snapshot.unreadable_gpus
