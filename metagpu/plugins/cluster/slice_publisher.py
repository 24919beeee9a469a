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
)
from metagpu.core.devices.slices import SliceSpec, comparable, dropped_fields, gpu_slices
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
    has_needed,
    pool_of,
    slice_name,
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
        for it in items:
            self.on_update(it)

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


_Rendered = dict[GpuId, tuple[tuple[object, ...], tuple[SliceSpec, ...]]]
"""The slices of each GPU, with all that they were computed from."""


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
    """The slices of a pool as they were written, and the API server's answers."""

    specs: tuple[SliceSpec, ...]
    answers: tuple[KubeObject, ...]


@dataclass(eq=False)
class SlicePublisher:
    """Compares the slices of each GPU with the snapshot, and writes what differs.

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
    _rendered: _Rendered = field(default_factory=dict)
    _written: dict[str, float] = field(default_factory=dict)
    _probe_at: float = inf

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(0, self.timing.rate)
        self.classes = DeviceClasses(self.client)
        self.own = OwnSlices(self.client, self.node.name, self._on_change)
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
            pools=len(self._published),
            problem=problem,
            dropped=self._dropped_problem,
            extended_resources=dict(resources),
            classes_problem=self.classes.problem,
            contested={it: name for it, name in resources.items() if it in by_plugin},
        )

    async def reconcile(self) -> float | None:
        """Write what differs; return the seconds until more is to be written."""
        snapshot, node = self.registry.snapshot, self.node.object
        if not self.own.known or node is None or not snapshot.offers:
            return None  # before a layout is applied, slices of an earlier daemon stay
        wanted = await self._wanted(snapshot)
        self._bucket.burst = self.timing.burst * sum(map(len, wanted.values()))
        waits, refused = list[float | None](), list[ClusterError]()
        for specs in sorted(wanted.values(), key=self._last_written):
            try:
                waits.append(await self._reconcile_pool(specs, node))
            except ClusterError as error:
                if error.status != _INVALID:
                    raise
                refused.append(error)  # the pools of other GPUs are published
        if not snapshot.unreadable_gpus:  # one of them may be a GPU that had slices
            await self._delete_leftovers(wanted.values())
        if refused:
            raise refused[0]
        if self.dropped:
            if anyio.current_time() >= self._probe_at:
                self._probe_at = anyio.current_time() + self.timing.probe
                await self._probe_dropped(snapshot, node)
            waits.append(self._probe_at - anyio.current_time())
        return min((wait for wait in waits if wait is not None), default=None)

    def _last_written(self, specs: tuple[SliceSpec, ...]) -> float:
        """Return when a pool was written: a GPU that changes seldom waits for no other."""
        return self._written.get(specs[0]["pool"]["name"], -1)

    async def _wanted(self, snapshot: Snapshot) -> Mapping[GpuId, tuple[SliceSpec, ...]]:
        """Return the wanted slices, the same objects for a GPU without a change."""
        for gpu, state in snapshot.gpus.items():
            if gpu not in self._roots:
                self._roots[gpu] = await to_thread.run_sync(self.pcie_root, state.gpu)

        driver, plain = self.driver(), self._is_plain
        rendered = {}
        for gpu, state in snapshot.gpus.items():
            parts = (state, snapshot.offers, snapshot.versions, driver, plain)
            known = self._rendered.get(gpu)
            if known is None or any(a is not b for a, b in zip(known[0], parts, strict=True)):
                root, node = self._roots[gpu], self.node.name
                specs = gpu_slices(snapshot, gpu, node, driver, root, plain=plain)
                known = parts, specs
            rendered[gpu] = known
        self._rendered = rendered
        return {gpu: specs for gpu, (_, specs) in rendered.items() if specs}

    async def _reconcile_pool(self, specs: tuple[SliceSpec, ...], node: KubeObject) -> float | None:
        """Write a pool that differs; return the seconds until that may be done."""
        pool, now = specs[0]["pool"]["name"], anyio.current_time()
        found = [self.own.objects.get(slice_name(it, number)) for number, it in enumerate(specs)]
        present = [it for it in found if it is not None]
        if len(present) == len(specs) and self._is_published(pool, specs, present):
            return None

        published = self._published.get(pool)
        if published is not None and published.specs == specs and len(present) == len(specs):
            wait = self._edited.get(pool, now) - now
            if wait > 0:
                return wait
        wait = self._bucket.wait(now)
        if wait > 0:
            return wait
        self._written[pool] = now
        await self._write(pool, specs, node)
        return None

    def _is_published(
        self, pool: str, specs: tuple[SliceSpec, ...], present: Sequence[KubeObject]
    ) -> bool:
        """Return whether the API server has these slices, as far as it takes them."""
        published = self._published.get(pool)
        if published is not None and published.specs == specs:
            wanted: Sequence[Any] = [it["spec"] for it in published.answers]
            if all(a is b for a, b in zip(present, published.answers, strict=True)):
                return True
        else:
            wanted = specs
        same_generation = len({generation_of(it) for it in present}) == 1
        if not same_generation or comparable(wanted) != comparable([it["spec"] for it in present]):
            return False
        self._published[pool] = _Published(specs, tuple(present))
        return True

    async def _write(self, pool: str, specs: tuple[SliceSpec, ...], node: KubeObject) -> None:
        """Write the slices of a pool, and delete others.

        If only one differs, it is replaced in its generation: the pool stays complete. Otherwise
        all are written in the next one.
        """
        before = self.own.in_pool(specs[0]["driver"], pool)
        generation = max(map(generation_of, before.values()), default=0)
        as_wanted = self._as_wanted(pool, specs, generation)
        if len(as_wanted) + 1 < len(specs) or len(before) != len(specs):
            generation, as_wanted = generation + 1, {}
        self._published.pop(pool, None)
        answers, dropped = [], list(self.dropped)
        for number, spec in enumerate(specs):
            wanted = slice_object(spec, number, generation, node)
            answers.append(answer := as_wanted.get(number) or await self._put(wanted))
            dropped += dropped_fields(wanted["spec"], answer["spec"])
        for name in before.keys() - {it["metadata"]["name"] for it in answers}:
            await self._delete(name)
        self._published[pool] = _Published(specs, tuple(answers))
        self._edited.pop(pool, None)
        self._set_dropped(tuple(dict.fromkeys(dropped)))

    def _as_wanted(
        self, pool: str, specs: tuple[SliceSpec, ...], generation: int
    ) -> Mapping[int, KubeObject]:
        """Return the slices of a generation that the API server has as they are wanted."""
        published, found = self._published.get(pool), dict[int, KubeObject]()
        for number, spec in enumerate(specs):
            it = self.own.objects.get(slice_name(spec, number))
            if it is None or generation_of(it) != generation:
                continue
            wanted: Any = spec
            if published is not None and spec in published.specs:
                wanted = published.answers[published.specs.index(spec)]["spec"]
            if comparable(wanted) == comparable(it["spec"]):
                found[number] = it
        return found

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

    async def _delete_leftovers(self, wanted: Iterable[tuple[SliceSpec, ...]]) -> None:
        """Delete the slices of GPUs that are published no more, or under another driver."""
        pools = {(specs[0]["driver"], specs[0]["pool"]["name"]) for specs in wanted}
        for name, it in list(self.own.objects.items()):
            if (it["spec"]["driver"], pool_of(it)) not in pools:
                await self._delete(name)
                self._published.pop(pool_of(it), None)

    async def _probe_dropped(self, snapshot: Snapshot, node: KubeObject) -> None:
        """Ask by a dry run which fields are still dropped; write again if fewer are.

        An upgrade of the control plane turns features on. Written in earnest, devices would be
        published for a moment that exclude each other.
        """
        driver, name = self.driver(), self.node.name
        slices = (
            slice_object(spec, number, 1, node)
            for gpu in snapshot.gpus
            for number, spec in enumerate(
                gpu_slices(snapshot, gpu, name, driver, self._roots.get(gpu))
            )
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

    def _on_change(self, pool: str) -> None:
        if pool:
            self._edited[pool] = anyio.current_time() + self.timing.edited
        self.reconciler.trigger()

    async def _follow_layout(self) -> None:
        """Reconcile after a reload, which may change the driver's name alone."""
        with self.registry.events.subscribe(LayoutApplied) as events:
            async for _ in events:
                self.reconciler.trigger()


def _watched(snapshot: Snapshot) -> tuple[object, ...]:
    states: Iterable[GpuState] = snapshot.gpus.values()
    dra = tuple(it for it in states if it.api is Api.DRA)
    return dra, snapshot.versions, bool(snapshot.offers), bool(snapshot.unreadable_gpus)
