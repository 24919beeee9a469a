"""The publisher of ResourceSlices: keeps them as the snapshot wants them.

The kubelet deletes the slices of all drivers when it starts, and people may edit them: the
publisher watches its own slices. Loaded only where a pool has DRA.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu.core.devices.devices import (
    ExtendedResource,
    classes_of_driver,
    extended_resource_of,
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
from metagpu.core.reports.schema import SlicesReport
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.resource_slices import (
    SLICES,
    OwnSlices,
    find_still_dropped,
    generation_of,
    gpu_of_slice,
    has_needed,
    named,
    pool_of,
    probe_of,
    slice_object,
)
from metagpu.plugins.cluster.watch import Informer, WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"


class DeviceClasses(Informer):
    """The DeviceClasses that have an extended resource."""

    def __init__(self, client: "KubeClient") -> None:
        super().__init__(client, CLASSES, "", "DeviceClasses")
        self._known: dict[str, ExtendedResource] = {}

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all DeviceClasses."""
        self._known = {}
        for item in items:
            self.on_update(item)

    def on_update(self, item: KubeObject) -> None:
        """Take in one of them; it may have lost its extended resource."""
        self.on_delete(item)
        if (found := extended_resource_of(item)) is not None:
            self._known[found.device_class] = found

    def on_delete(self, item: KubeObject) -> None:
        """Take in a deletion."""
        self._known.pop(item["metadata"]["name"], None)

    def of_driver(self, driver: str) -> Mapping[str, str]:
        """Return the class of each extended resource whose selectors name a driver."""
        return classes_of_driver(self._known.values(), driver)


_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_INVALID: Final = 422

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


class _Refused(msgspec.Struct, frozen=True):
    """The slices of a GPU that the API server refuses, and its answer."""

    slices: GpuSlices | None
    error: ClusterError


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
    _refused: dict[GpuId, _Refused] = field(default_factory=dict)
    _written: dict[str, float] = field(default_factory=dict)
    _probe_at: float = inf

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(0, self.timing.rate)
        self.classes = DeviceClasses(self.client)
        self.own = OwnSlices(self.client, self.node.name, self.driver, self._on_change)
        self.reconciler = Reconciler("resource slices", self.reconcile, self.client.timing)

    async def run(self) -> None:
        """Publish the slices until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.own.run)
            group.start_soon(self.classes.run)
            group.start_soon(self.reconciler.run)
            group.start_soon(self._follow_layout)
            async for _ in self.registry.watch(_watched):
                self.reconciler.trigger()

    def report(self) -> SlicesReport:
        """Return published pools, the problem with others, extended resources, and theirs.

        A resource is contested that the device plugin has on this node, and a DeviceClass too.
        """
        problem = self.reconciler.problem or self.own.problem or self._dropped_problem
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
        for gpu, refused in list(self._refused.items()):
            same = gpu in self._rendered and self._rendered[gpu].slices is refused.slices
            if not same or refused.slices is None or await self._is_taken(refused.slices, node):
                del self._refused[gpu]
        waits = await self._write_all(node)
        if self._refused:
            raise next(iter(self._refused.values())).error
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
        self._rendered = rendered

    async def _write_all(self, node: KubeObject) -> list[float]:
        """Write what differs in all pools; return the seconds until more may be written.

        A GPU whose slices the API server refuses is left out: the pool of the others is complete.
        """
        while True:
            refused = dict(self._refused)
            taken = (
                rendered.slices for gpu, rendered in self._rendered.items() if gpu not in refused
            )
            pools = pools_of(list(filter(None, taken)), self.node.name, self.driver())
            self._bucket.burst = self.timing.burst * sum(map(len, pools.values()))
            # First: in a pool of before the scheduler would find the same GPUs once more.
            await self._delete_others(pools)
            try:
                waits = [await self._reconcile_pool(specs, node) for specs in pools.values()]
            except ClusterError:
                if self._refused == refused:
                    raise
            else:
                return [wait for wait in waits if wait is not None]

    async def _is_taken(self, slices: GpuSlices, node: KubeObject) -> bool:
        """Return whether the API server takes the slices of a GPU, by a dry run."""
        specs = pools_of([slices], self.node.name, self.driver())[pool_name(self.node.name)]
        try:
            for name, spec in named(specs).items():
                body = probe_of(slice_object(name, spec, 1, node))
                await self.client.call("POST", SLICES, query={"dryRun": "All"}, body=body)
        except ClusterError:
            return False
        return True

    async def _reconcile_pool(self, specs: tuple[SliceSpec, ...], node: KubeObject) -> float | None:
        """Write what differs in a pool; return the seconds until more may be written.

        Slices that differ are replaced in their generation, one by one: the pool stays complete.
        If slices come or go, or counters change together with devices, all are written in the next
        generation.
        """
        before = self.own.in_pool(specs[0]["driver"], specs[0]["pool"]["name"])
        generations, now = set(map(generation_of, before.values())), anyio.current_time()
        wanted, generation = named(specs), max(generations, default=0)
        differing = {
            text: spec for text, spec in wanted.items() if not self._is_as_wanted(text, spec)
        }
        waits = {name: self._edit_ends(name, spec) - now for name, spec in differing.items()}
        due = {name: differing[name] for name, wait in waits.items() if wait <= 0}
        is_complete = before.keys() == wanted.keys() and len(generations) == 1
        if is_complete and not due:
            return min(waits.values(), default=None)
        apart = len(due) == 1 or not any("sharedCounters" in document for document in due.values())
        if is_complete and apart:
            later = min((wait for wait in waits.values() if wait > 0), default=None)
            return await self._write(due, generation, node) or later
        if (wait := self._bucket.wait(now)) > 0:
            return wait
        await self._write(wanted, generation + 1, node, together=True)
        for name in before.keys() - wanted.keys():
            await self._delete(name)
        return None

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
                self._edited.pop(name, None)
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
            if error.status == _NOT_FOUND:
                self.own.objects.pop(name, None)  # the next attempt creates it
            elif error.status == _CONFLICT:
                unread = {key: wanted["spec"][key] for key in ("driver", "pool")}
                self.own.objects[name] = {**wanted, "spec": unread}  # the next attempt replaces it
            elif error.status == _INVALID and pool_of(wanted) == pool_name(self.node.name):
                gpu = gpu_of_slice(wanted)
                self._refused[gpu] = _Refused(self._rendered[gpu].slices, error)
            raise
        self._bucket.reserve(anyio.current_time())
        self.own.objects[name] = answer
        return answer

    async def _delete(self, name: str) -> None:
        try:
            await self.client.call("DELETE", f"{SLICES}/{name}")
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
        self.own.objects.pop(name, None)
        self._published.pop(name, None)

    async def _delete_others(self, pools: Mapping[str, object]) -> None:
        """Delete the slices of pools that are published no more, or under another driver."""
        driver = self.driver()
        for name, published_slice in list(self.own.objects.items()):
            if published_slice["spec"]["driver"] != driver or pool_of(published_slice) not in pools:
                await self._delete(name)

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

    async def _follow_layout(self) -> None:
        """Reconcile after a reload, which may change the driver's name alone."""
        with self.registry.events.subscribe(LayoutApplied) as events:
            async for _ in events:
                self.reconciler.trigger()


def _watched(snapshot: Snapshot) -> tuple[object, ...]:
    states: Iterable[GpuState] = snapshot.gpus.values()
    dra = tuple(state for state in states if state.api is Api.DRA)
    return dra, snapshot.versions, bool(snapshot.offers)
