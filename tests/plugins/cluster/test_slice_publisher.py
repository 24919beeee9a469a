"""ResourceSlices at the API server: written, kept, and as few writes as that takes."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from metagpu.core.errors import ClusterError
from metagpu.core.model.shares import Fault, ResourceClaimRef
from metagpu.core.reports.schema.daemon import SlicesReport
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    GpuUncordoned,
    SharesClaimed,
    UnreadableGpusFound,
)
from metagpu.plugins.cluster.leftovers import find_at_api_server
from metagpu.plugins.cluster.settings import ClusterSettings, ClusterTiming, Feature
from metagpu.plugins.cluster.slice_publisher import SliceTiming
from metagpu.sim.apiserver.objects import ApiError
from metagpu.sim.apiserver.server import SimApiServer
from tests.core.devices.test_devices import FOUR
from tests.plugins.cluster.rig import NODE, QUICK, Scene, client_of, cluster_at_work
from tests.rigs.build import gpu, layout_of, pool
from tests.rigs.reported import complete
from tests.rigs.waiting import becomes, skip

COLLECTION = "resourceslices"
WHOLE = """\
version: metagpu/v1
pools: [{name: all, api: dra, backends: [{backend: whole}]}]
"""
ONE_OF_TWO = """\
version: metagpu/v1
pools:
  - {name: b, gpus: {index: 0}, backends: [{backend: whole, resource: example.com/gpu}]}
  - name: all
    api: dra
    backends: [{backend: whole}, {backend: timeslice, replicas: 4}]
"""
SLOW = ClusterTiming(backoff_first=20)
UUIDS = tuple(gpu(n).id for n in range(2))
PATH = "/apis/resource.k8s.io/v1/resourceslices"


def named_slices(server: SimApiServer, index: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and specs of a GPU's slices in the pool of the node, in order."""
    found = [
        (key[2], document) for key, document in server.store.objects.items() if key[0] == COLLECTION
    ]
    return [
        (name, document["spec"])
        for name, document in sorted(found, key=lambda each: each[0])
        if document["spec"]["pool"]["name"] == NODE
        for part in (
            *document["spec"].get("sharedCounters", ()),
            *document["spec"].get("devices", ()),
        )[:1]
        if part["name"].startswith(UUIDS[index].lower())
    ]


def slices(server: SimApiServer, index: int) -> list[Mapping[str, Any]]:
    """Return the specs of a GPU's slices in the pool of the node, in order."""
    return [spec for _, spec in named_slices(server, index)]


def devices(server: SimApiServer, index: int) -> list[str]:
    """Return the names of a GPU's devices in the pool of the node."""
    return [device["name"] for spec in slices(server, index) for device in spec.get("devices", ())]


def names(server: SimApiServer) -> list[str]:
    """Return the names of all slices."""
    return sorted(key[2] for key in server.store.objects if key[0] == COLLECTION)


def generations(server: SimApiServer, index: int) -> list[int]:
    """Return the generations of a GPU's slices."""
    return [piece["pool"]["generation"] for piece in slices(server, index)]


def taints(server: SimApiServer, index: int) -> set[str]:
    """Return the keys of all taints of a GPU's devices."""
    devices = [device for spec in slices(server, index) for device in spec.get("devices", ())]
    return {taint["key"] for device in devices for taint in device.get("taints", ())}


def writes(server: SimApiServer) -> list[str]:
    """Return the writes of slices, in order."""
    return [
        f"{request.method} {request.target.rpartition('/')[2]}"
        for request in server.requests
        if request.method != "GET" and COLLECTION in request.target
    ]


@asynccontextmanager
async def publishing(
    tmp_path: Path,
    text: str = FOUR,
    server: SimApiServer | None = None,
    further: Sequence[Feature] = (),
    timing: ClusterTiming = ClusterTiming(),  # noqa: B008 - it is frozen
) -> AsyncIterator[Scene]:
    """Run the cluster plugin until the block ends, from the moment its slices are there."""
    features = Feature.LABELS, *further
    async with cluster_at_work(tmp_path, *features, server=server, timing=timing) as scene:
        scene.offer(text)
        await scene.server.until(lambda: is_complete(scene.server))
        await becomes(lambda: knows_all(scene))
        yield scene


def knows_all(scene: Scene) -> bool:
    """Return whether the publisher knows the slices as the API server has them."""
    publisher = scene.cluster.connection.slices if scene.cluster.connection else None
    known = publisher.own.objects if publisher else {}
    if publisher is None or not known.keys() <= publisher._published.keys():
        return False  # the answer to a write is under way
    return {name: each["metadata"]["resourceVersion"] for name, each in known.items()} == {
        key[2]: each["metadata"]["resourceVersion"]
        for key, each in scene.server.store.objects.items()
        if key[0] == COLLECTION and each["spec"]["driver"] == scene.driver
    }


def is_complete(server: SimApiServer) -> bool:
    """Return whether both pools have all their slices, of one generation."""
    pools = defaultdict[str, list[Mapping[str, Any]]](list)
    for key, document in server.store.objects.items():
        if key[0] == COLLECTION:
            pools[document["spec"]["pool"]["name"]].append(document["spec"]["pool"])
    wanted = {NODE, f"{NODE}/monitor"}
    parts = [
        (len(found), [entry["resourceSliceCount"] for entry in found]) for found in pools.values()
    ]
    same = all(len({entry["generation"] for entry in found}) == 1 for found in pools.values())
    return pools.keys() == wanted and same and all(set(n) == {count} for count, n in parts)


async def test_the_node_owns_the_slices_of_its_gpus(tmp_path: Path) -> None:
    """The Node owns counters and devices; what changes nothing in them writes nothing."""
    async with publishing(tmp_path) as scene:
        counters, offered = slices(scene.server, 0)
        assert counters["sharedCounters"]
        assert len(offered["devices"]) == 4
        assert offered["devices"][0]["attributes"]["resource.kubernetes.io/pcieRoot"]
        assert generations(scene.server, 0) == generations(scene.server, 1) == [1, 1]

        owner = scene.server.store.objects[COLLECTION, "", names(scene.server)[0]]["metadata"]
        assert owner["ownerReferences"][0]["uid"] == scene.server.node(NODE)["metadata"]["uid"]
        [(_, looking)] = [
            (key, document["spec"])
            for key, document in scene.server.store.objects.items()
            if key[0] == COLLECTION and document["spec"]["pool"]["name"] == f"{NODE}/monitor"
        ]
        assert len(looking["devices"]) == 2
        assert len(writes(scene.server)) == 5
        scene.registry.events.publish(LayoutApplied())
        scene.registry.apply(_claimed(scene, NODE))
        await anyio.sleep(0.15)
        assert len(writes(scene.server)) == 5


def _claimed(scene: Scene, pool: str) -> SharesClaimed:
    claim, shares = ResourceClaimRef("ns", "a", "u"), scene.registry.snapshot.gpus[UUIDS[0]].shares
    pools = {share.id: f"gpu.metagpu.io/{pool}" for share in shares}
    return SharesClaimed(shares[1:3], at=1, resource_claim=claim, pools=pools)


async def test_a_change_of_one_gpu_writes_its_devices_alone(tmp_path: Path) -> None:
    """A fault taints every device of the GPU, in one write of one slice."""
    async with publishing(tmp_path) as scene:
        earlier = writes(scene.server)
        scene.registry.apply(GpuFaulted(UUIDS[1], "XID 79", 1, Fault.XID))
        await scene.server.until(lambda: taints(scene.server, 1) == {"metagpu.io/unhealthy"})
        assert generations(scene.server, 1) == [1, 1]
        assert (generations(scene.server, 0), taints(scene.server, 0)) == ([1, 1], set())
        [write] = writes(scene.server)[len(earlier) :]
        assert write == f"PUT {named_slices(scene.server, 1)[1][0]}"


async def test_gpus_that_change_all_the_time_share_two_writes_a_second(tmp_path: Path) -> None:
    """The node writes two slices a second, however many of its GPUs change."""
    async with publishing(tmp_path, timing=QUICK) as scene:
        before, began = len(writes(scene.server)), anyio.current_time()
        for number in range(201):
            for uuid in UUIDS:
                odd, even = GpuUncordoned(uuid, 1), GpuCordoned(uuid, "x", 1)
                scene.registry.apply(odd if number % 2 else even)
            await anyio.sleep(0.001)
        cordoned = {"metagpu.io/cordoned"}
        await becomes(lambda: all(taints(scene.server, n) == cordoned for n in (0, 1)))
        assert len(writes(scene.server)) - before <= _most(scene.server, began) < 200


def _most(server: SimApiServer, began: float) -> float:
    """Return the most writes of slices since a time: some at once, then by the rate."""
    timing = SliceTiming()
    return timing.burst * len(names(server)) + timing.rate * (anyio.current_time() - began)


async def test_a_gpu_that_changes_seldom_is_written_first(tmp_path: Path) -> None:
    """The fault of a GPU does not wait for those that change all the time."""
    async with publishing(tmp_path) as scene:
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await scene.server.until(lambda: taints(scene.server, 0) == {"metagpu.io/cordoned"})
        before = len(writes(scene.server))
        scene.registry.apply(GpuUncordoned(UUIDS[0], 1))
        scene.registry.apply(GpuFaulted(UUIDS[1], "XID 79", 1, Fault.XID))
        await scene.server.until(lambda: not taints(scene.server, 0) and taints(scene.server, 1))
        first, second = writes(scene.server)[before:]
        assert first.endswith(named_slices(scene.server, 1)[1][0])
        assert second.endswith(named_slices(scene.server, 0)[1][0])


async def test_faults_of_all_gpus_keep_the_pool_complete(tmp_path: Path) -> None:
    """Each GPU is written by itself, in the generation that is there."""
    async with publishing(tmp_path) as scene:
        before = len(writes(scene.server))
        for uuid in UUIDS:
            scene.registry.apply(GpuFaulted(uuid, "XID 79", 1, Fault.XID))
        await scene.server.until(lambda: taints(scene.server, 0) and taints(scene.server, 1))
        assert len(writes(scene.server)) - before == 2
        assert generations(scene.server, 0) == generations(scene.server, 1) == [1, 1]


async def test_slices_that_come_are_of_a_new_generation(tmp_path: Path) -> None:
    """Readers of a pool see all of a change, or nothing: an incomplete pool is not read."""
    async with publishing(tmp_path) as scene:
        scene.offer(FOUR, count=3)
        await scene.server.until(lambda: generations(scene.server, 0) == [2, 2])
        await scene.server.until(lambda: generations(scene.server, 1) == [2, 2])
        await scene.server.until(lambda: is_complete(scene.server))


async def test_an_incomplete_pool_is_completed_in_its_generation(tmp_path: Path) -> None:
    """Only the slice that is missing is written: also after a write that failed."""
    async with publishing(tmp_path) as scene:
        before = names(scene.server)
        count = len(writes(scene.server))
        scene.server.store.delete((COLLECTION, "", before[0]))
        await scene.server.until(lambda: names(scene.server) == before)
        await anyio.sleep(0.3)
        assert writes(scene.server)[count:] == ["POST resourceslices"]
        assert generations(scene.server, 0) == generations(scene.server, 1) == [1, 1]


class FlakyServer(SimApiServer):
    """An API server that throttles some writes of slices.

    Attributes:
        every: it answers every such write, in order, with 429; none with 0.
        method: the method of these writes, any with an empty text.
    """

    every, method, _count = 0, "", 0

    def _check(self, request: web.Request) -> None:
        super()._check(request)
        if request.method != "GET" and COLLECTION in request.path and self.every:
            if request.method != (self.method or request.method):
                return
            self._count += 1
            if self._count % self.every == 0:
                raise ApiError(429, "TooManyRequests", "slow")


async def test_a_throttled_pool_becomes_complete(tmp_path: Path) -> None:
    """After a write that failed the others of its generation stay."""
    server = FlakyServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server, timing=QUICK) as scene:
        server.every = 6
        scene.offer(FOUR, count=8)
        await server.until(lambda: is_complete(server))
        assert generations(server, 0) == [1, 1]
        assert writes(server).count("POST resourceslices") == 17 + 3  # three were refused


async def test_deletions_that_fail_are_tried_alone(tmp_path: Path) -> None:
    """A pool that is whole is not written again, since a surplus slice is still there."""
    server = FlakyServer()
    async with publishing(tmp_path, server=server) as scene:
        server.every, server.method = 1, "DELETE"
        count = len(writes(server))
        scene.offer(ONE_OF_TWO)
        await becomes(lambda: sum("DELETE" in w for w in writes(server)) >= 3)
        assert sum("PUT" in w for w in writes(server)[count:]) == 2
        assert generations(server, 1)[:2] == [2, 2]
        server.every = 0
        await server.until(lambda: len(names(server)) == 3)


async def test_gpus_that_change_places_are_of_a_new_generation(tmp_path: Path) -> None:
    """Replaced one by one, the slices would show one GPU twice in a complete pool."""
    async with publishing(tmp_path, WHOLE) as first:
        assert generations(first.server, 1) == [1]
    server = first.server
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as second:
        _offer(second, 1, 2, text=WHOLE)
        await server.until(lambda: slices(server, 0) == [] and is_complete(server))
        assert generations(server, 1) == [2]


def _offer(scene: Scene, *indices: int, text: str = FOUR) -> None:
    gpus = tuple(map(gpu, indices))
    scene.registry.apply(GpusFound(gpus, at=0))
    scene.registry.apply(layout_of(*gpus, text=text).offer_fact)


async def test_gpus_that_cannot_be_read_keep_their_slices(tmp_path: Path) -> None:
    """A daemon that cannot read a GPU at its start takes it for unknown, not for gone."""
    async with publishing(tmp_path) as first:
        server, before = first.server, names(first.server)
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as second:
        second.registry.apply(UnreadableGpusFound({0: "Unknown Error"}, at=0))
        _offer(second, 1)
        await server.until(lambda: taints(server, 0) == {"metagpu.io/unhealthy"})
        second.registry.apply(GpuCordoned(UUIDS[1], "x", 1))
        await server.until(lambda: taints(server, 1) == {"metagpu.io/cordoned"})
        assert (names(server), generations(server, 0)) == (before, [1, 1])
        second.registry.apply(UnreadableGpusFound({}, at=0))
        await server.until(lambda: slices(server, 0) == [] and is_complete(server))


async def test_slices_of_an_earlier_shape_go_before_the_new_ones_come(tmp_path: Path) -> None:
    """In two pools at once the scheduler would allocate one GPU twice."""
    server = SimApiServer()
    name, earlier = _leave_earlier_shape(server)
    async with publishing(tmp_path, server=server) as scene:
        tried = ["POST resourceslices"] * 2  # of both pools, by dry runs
        assert writes(server)[:3] == [*tried, f"DELETE {name}"]
        scene.registry.apply(_claimed(scene, earlier))
        await server.until(lambda: taints(server, 0) == {"metagpu.io/held"})


def _leave_earlier_shape(server: SimApiServer) -> tuple[str, str]:
    """Leave a slice in a pool of one GPU; return the names of both."""
    earlier = f"{NODE}/{UUIDS[0].lower()}"
    pool = {"name": earlier, "generation": 1, "resourceSliceCount": 1}
    name = f"gpu.metagpu.io-{NODE}-{UUIDS[0].lower()}-00"
    metadata = {"name": name, "labels": {"app.kubernetes.io/managed-by": "metagpu"}}
    spec = {"driver": "gpu.metagpu.io", "nodeName": NODE, "pool": pool, "devices": []}
    server.store.put((COLLECTION, "", name), {"metadata": metadata, "spec": spec})
    return name, earlier


async def test_slices_of_an_earlier_shape_stay_while_the_new_ones_are_refused(
    tmp_path: Path,
) -> None:
    """A policy of an earlier version knows no pool of a node."""
    server = SimApiServer()
    name, _ = _leave_earlier_shape(server)
    server.denied.append(("POST", COLLECTION))
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer(FOUR)
        await becomes(lambda: _problem(scene))
        assert names(server) == [name]
        server.denied.clear()
        await server.until(lambda: name not in names(server) and is_complete(server))


async def test_slices_that_another_driver_of_the_name_left_go(tmp_path: Path) -> None:
    """They are of the same pool: of a later generation, they would hide those of metagpu."""
    server = SimApiServer()
    pool = {"name": NODE, "generation": 7, "resourceSliceCount": 1}
    spec = {"driver": "gpu.metagpu.io", "nodeName": NODE, "pool": pool, "devices": []}
    server.store.put((COLLECTION, "", "left"), {"metadata": {"name": "left"}, "spec": spec})
    async with publishing(tmp_path, server=server):
        await server.until(lambda: "left" not in names(server))
        assert generations(server, 0) == [8, 8]


async def test_a_slice_that_exists_unknown_is_replaced(tmp_path: Path) -> None:
    """A creation that is refused, for the slice exists, says nothing of what it contains."""
    async with publishing(tmp_path) as scene:
        name = names(scene.server)[0]
        publisher = scene.connection.slices
        assert publisher
        publisher.own.on_update = lambda _: None  # type: ignore[assignment, method-assign] # of late news too
        del publisher.own.objects[name]
        scene.registry.events.publish(LayoutApplied())
        await scene.server.until(lambda: f"PUT {name}" in writes(scene.server))
        assert generations(scene.server, 0) == [1, 1]


async def test_deleted_slices_are_back_at_once(tmp_path: Path) -> None:
    """The kubelet deletes all slices of its node when it starts, also after a registration."""
    async with publishing(tmp_path) as scene:
        before = names(scene.server)
        for name in before:
            scene.server.store.delete((COLLECTION, "", name))
        await scene.server.until(
            lambda: names(scene.server) == before, within=20
        )  # of 30 s at rest
        # The deletions may arrive one by one: then slices that are gone are updated too, in vain.
        assert writes(scene.server).count("POST resourceslices") >= 2 * len(before)


async def test_a_slice_that_ends_before_its_write_is_answered_comes_back(tmp_path: Path) -> None:
    """The watch may be faster than the answer, which then says nothing of what is there."""
    async with publishing(tmp_path) as scene:
        publisher, before = scene.connection.slices, names(scene.server)
        assert publisher
        call = publisher.client.call

        async def late(method: str, path: str, **more: Any) -> Mapping[str, Any]:  # noqa: ANN401
            answer = await call(method, path, **more)
            if method == "PUT":
                publisher.client.call = call  # type: ignore[method-assign]
                name = answer["metadata"]["name"]
                scene.server.store.delete((COLLECTION, "", name))
                await becomes(lambda: name not in publisher.own.objects)
            return answer

        publisher.client.call = late  # type: ignore[method-assign]
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await scene.server.until(lambda: names(scene.server) != before)
        await scene.server.until(lambda: names(scene.server) == before)


async def test_a_slice_that_a_list_lacks_before_its_write_is_answered_comes_back(
    tmp_path: Path,
) -> None:
    """A watch that broke begins with a list, and shows no deletion of before."""
    async with publishing(tmp_path) as scene:
        publisher, before = scene.connection.slices, names(scene.server)
        assert publisher
        call, own = publisher.client.call, publisher.own

        async def late(method: str, path: str, **more: Any) -> Mapping[str, Any]:  # noqa: ANN401
            answer = await call(method, path, **more)
            if method == "PUT":
                publisher.client.call = call  # type: ignore[method-assign]
                own.list_again()
                name = answer["metadata"]["name"]
                scene.server.store.delete((COLLECTION, "", name))
                await becomes(lambda: name not in own.objects)
            return answer

        publisher.client.call = late  # type: ignore[method-assign]
        own.on_delete = lambda _: None  # type: ignore[assignment, method-assign] # the watch is broken
        own.on_update = lambda _: None  # type: ignore[assignment, method-assign] # as before
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await scene.server.until(lambda: names(scene.server) != before)
        await scene.server.until(lambda: names(scene.server) == before)


async def test_a_write_whose_answer_is_lost_is_no_edit_of_somebody_else(tmp_path: Path) -> None:
    """A GPU that is as before by then has its taint taken away at once."""
    async with publishing(tmp_path) as scene:
        publisher = scene.connection.slices
        assert publisher
        call, own = publisher.client.call, publisher.own

        async def lost(method: str, path: str, **more: Any) -> Mapping[str, Any]:  # noqa: ANN401
            answer = await call(method, path, **more)
            if method == "PUT":
                publisher.client.call = call  # type: ignore[method-assign]
                version = answer["metadata"]["resourceVersion"]
                found = own.objects[answer["metadata"]["name"]]["metadata"]
                await becomes(
                    lambda: own.objects[found["name"]]["metadata"]["resourceVersion"] == version
                )
                scene.registry.apply(GpuUncordoned(UUIDS[0], 2))
                raise ClusterError("the API server did not answer in time")
            return answer

        publisher.client.call = lost  # type: ignore[method-assign]
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await scene.server.until(lambda: bool(taints(scene.server, 0)))
        await scene.server.until(lambda: not taints(scene.server, 0), within=20)  # of 30 s at rest


async def test_an_edited_slice_is_written_again_after_a_while(tmp_path: Path) -> None:
    """Somebody who edits a slice sees the effect for half a minute."""
    async with publishing(tmp_path) as scene:
        name = named_slices(scene.server, 0)[1][0]
        edited = scene.server.store.objects[COLLECTION, "", name]
        devices = edited["spec"]["devices"][:1]
        scene.server.store.put(
            (COLLECTION, "", name), {**edited, "spec": {**edited["spec"], "devices": devices}}
        )
        await becomes(lambda: knows_all(scene))
        await anyio.sleep(0.2)  # the reconciler waits for the end of half a minute
        assert len(slices(scene.server, 0)[1]["devices"]) == 1

        skip(31)
        await becomes(lambda: len(slices(scene.server, 0)[1]["devices"]) == 4)
        assert generations(scene.server, 0) == [1, 1]


async def test_a_new_daemon_writes_nothing_twice(tmp_path: Path) -> None:
    """Slices of before that are as wanted stay, whatever their generation; others go."""
    async with publishing(tmp_path) as first:
        pass
    server, count = first.server, len(writes(first.server))
    for name in names(server):
        spec = server.store.objects[COLLECTION, "", name]["spec"]
        later = {**spec, "pool": {**spec["pool"], "generation": 7}}
        server.store.merge((COLLECTION, "", name), {"spec": later}, status=False, manager="x")

    async with publishing(tmp_path, server=server) as second:
        await anyio.sleep(0.2)
        assert writes(server)[count:] == []

        second.driver = "gpu.example.com"
        second.registry.events.publish(LayoutApplied())
        await server.until(
            lambda: ["gpu.example.com" in name for name in names(server)] == [True] * 5,
            within=20,  # of 30 s at rest
        )


async def test_a_pool_of_another_api_takes_its_slices_back(tmp_path: Path) -> None:
    """After a reload to the device plugin API nothing is published."""
    async with publishing(tmp_path) as scene:
        scene.offer(pool())
        await scene.server.until(lambda: not names(scene.server))


async def test_an_uninstallation_deletes_the_slices(tmp_path: Path) -> None:
    """An uninstallation removes slices and taints of metagpu; those of others stay."""
    server = SimApiServer()
    others_taint = {"key": "example.com/gpu", "effect": "NoSchedule"}
    our_taint = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
    server.add_node(NODE, taints=[our_taint, others_taint])
    async with publishing(tmp_path, server=server):
        others = {"driver": "nic.example.com", "nodeName": NODE, "pool": {"name": NODE}}
        server.resource_slices.put("nic", {"metadata": {"name": "nic"}, "spec": others})
    settings = ClusterSettings(NODE)
    async with client_of(server, tmp_path) as client:
        found = await find_at_api_server(client, settings, (), ())
        left = [leftover.where for leftover in found if leftover.kind == "ResourceSlice"]
        assert left == [name for name in names(server) if name != "nic"]
        assert f"Node {NODE}: metagpu.io/starting" in [leftover.where for leftover in found]
        for leftover in found:
            await leftover.remove()
        assert await find_at_api_server(client, settings, (), ()) == []
    assert names(server) == ["nic"]
    assert server.node(NODE)["spec"]["taints"] == [others_taint]


async def test_an_api_server_without_the_features_gets_whole_gpus(tmp_path: Path) -> None:
    """Dropped fields are reported, and no fraction is published beside a whole GPU."""
    server = SimApiServer()
    server.resource_slices.dropped = {"sharedCounters", "consumesCounters", "requestPolicy"}
    async with publishing(tmp_path, server=server, further=(Feature.EVENTS,)) as scene:
        await server.until(lambda: devices(server, 0) == [UUIDS[0].lower()])
        await server.until(lambda: devices(server, 1) == [UUIDS[1].lower()])
        problem = slices_of(scene).problem
        assert problem.startswith(
            "the API server dropped sharedCounters, devices[].consumesCounters, "
            "devices[].capacity.shares.requestPolicy"
        )
        assert "use Kubernetes 1.36 or newer" in problem
        reason = "ResourceSliceFieldsDropped"
        await server.until(
            lambda: problem in [e["note"] for e in server.events() if e["reason"] == reason]
        )
        await server.until(lambda: is_complete(server))
        count = len(writes(server))
        scene.registry.events.publish(LayoutApplied())
        await anyio.sleep(0.2)
        assert len(writes(server)) == count


async def test_an_api_server_that_gets_the_features_gets_all_devices(tmp_path: Path) -> None:
    """A dry run asks every 10 minutes, and publishes nothing."""
    server = SimApiServer()
    server.resource_slices.dropped = {"sharedCounters", "taints"}
    async with publishing(tmp_path, server=server) as scene:
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await server.until(lambda: [len(slices(server, n)) for n in (0, 1)] == [1, 1])
        await becomes(lambda: "devices[].taints from" in _problem(scene))
        await server.until(lambda: is_complete(server))
        await anyio.sleep(0.1)
        before = writes(server)

        skip(601)
        await becomes(lambda: len(writes(server)) > len(before))
        assert writes(server)[len(before) :] == ["POST resourceslices"]
        assert [len(slices(server, n)) for n in (0, 1)] == [1, 1]
        # A clock that jumps ends the watches: that is the problem for a moment.
        await becomes(lambda: "sharedCounters" in _problem(scene))

        server.resource_slices.dropped = {"taints"}
        skip(601)
        await server.until(lambda: [len(slices(server, n)) for n in (0, 1)] == [2, 2])
        await becomes(lambda: "dropped devices[].taints from" in _problem(scene))
        server.resource_slices.dropped = set()
        skip(601)
        await server.until(lambda: taints(server, 0) == {"metagpu.io/cordoned"})
        await becomes(lambda: not _problem(scene))


async def test_a_field_that_no_slice_has_now_is_still_dropped(tmp_path: Path) -> None:
    """A dry run has each field that was dropped: an uncordoned GPU shows nothing about taints."""
    server = SimApiServer()
    server.resource_slices.dropped = {"taints"}
    async with publishing(tmp_path, server=server, further=(Feature.EVENTS,)) as scene:
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await becomes(lambda: "devices[].taints from" in _problem(scene))
        scene.registry.apply(GpuUncordoned(UUIDS[0], 1))
        before = writes(server)

        skip(601)
        await becomes(lambda: len(writes(server)) >= len(before) + 2)
        scene.registry.apply(GpuCordoned(UUIDS[1], "x", 1))
        await becomes(lambda: writes(server)[-1] == f"PUT {named_slices(server, 1)[1][0]}")
        assert "devices[].taints from" in slices_of(scene).dropped
        assert writes(server)[len(before) : -1] == ["POST resourceslices"] * 2


async def test_an_api_server_without_dry_runs_gets_slices(tmp_path: Path) -> None:
    """A webhook may refuse every dry run: that is no fault of the slices, which come first."""
    server = SimApiServer()
    server.resource_slices.dropped, server.resource_slices.dry_runs = {"taints"}, False
    async with publishing(tmp_path, server=server) as scene:
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await becomes(lambda: "devices[].taints from" in _problem(scene))
        before = writes(server)
        skip(601)
        scene.registry.apply(GpuCordoned(UUIDS[1], "x", 1))
        await becomes(lambda: len(writes(server)) >= len(before) + 2)
        first, second = writes(server)[len(before) :]
        assert first.startswith("PUT ")
        assert second == "POST resourceslices"
        await anyio.wait_all_tasks_blocked()
        assert "devices[].taints from" in slices_of(scene).dropped


async def test_a_gpu_that_is_refused_keeps_no_other_from_being_published(tmp_path: Path) -> None:
    """The pool of the other GPUs is complete, and the problem is reported."""
    server = SimApiServer()
    server.resource_slices.refused.add(f"{UUIDS[0].lower()}-mps")
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer(FOUR)
        await becomes(lambda: "a test made it invalid" in _problem(scene))
        await server.until(lambda: is_complete(server))
        assert slices(server, 0) == []
        assert [spec["pool"]["resourceSliceCount"] for spec in slices(server, 1)] == [2, 2]
        assert len(set(generations(server, 1))) == 1
        server.resource_slices.refused.clear()
        await server.until(lambda: len(slices(server, 0)) == 2)


async def test_slices_stay_where_all_gpus_are_refused(tmp_path: Path) -> None:
    """A policy that refuses every write takes nothing from the node."""
    server = SimApiServer()
    async with publishing(tmp_path, server=server) as scene:
        before = names(server)
        server.resource_slices.refused.update(f"{uuid.lower()}-mps" for uuid in UUIDS)
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        await becomes(lambda: "a test made it invalid" in _problem(scene))
        await anyio.sleep(0.5)
        assert (names(server), generations(server, 0)) == (before, [1, 1])
        assert is_complete(server)
        server.resource_slices.refused.clear()
        await server.until(lambda: taints(server, 0) == {"metagpu.io/cordoned"})
        await becomes(lambda: not _problem(scene))


async def test_a_refused_gpu_that_changes_stays_refused(tmp_path: Path) -> None:
    """Only a dry run of its slices brings it back; a fault of another GPU does not wait for it."""
    server = SimApiServer()
    server.resource_slices.refused.add(f"{UUIDS[0].lower()}-mps")
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server, timing=SLOW) as scene:
        scene.offer(FOUR)
        await server.until(lambda: is_complete(server) and slices(server, 1))
        before = len(writes(server))
        scene.registry.apply(GpuCordoned(UUIDS[0], "x", 1))
        scene.registry.apply(GpuFaulted(UUIDS[1], "XID 79", 1, Fault.XID))
        await server.until(lambda: taints(server, 1), within=15)  # of 20 s
        assert writes(server)[before:] == [f"PUT {named_slices(server, 1)[1][0]}"]
        assert "a test made it invalid" in _problem(scene)


BOTH_APIS = """\
version: metagpu/v1
pools:
  - {name: a, gpus: {index: 0}, api: dra, backends: [{backend: whole}]}
  - {name: b, gpus: {index: 1}, backends: [{backend: timeslice, replicas: 4}]}
"""


def _device_class(server: SimApiServer, name: str, resource: str, created: str, **of: str) -> None:
    driver = of.get("driver", "gpu.metagpu.io")
    more = ' && "resource" in device.attributes'
    selectors = [{"cel": {"expression": f"device.driver == '{driver}'{more}"}}]
    server.store.put(
        ("deviceclasses", "", name),
        {
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"extendedResourceName": resource, "selectors": selectors},
        },
    )


async def test_extended_resources_are_those_of_device_classes(tmp_path: Path) -> None:
    """The younger class of a name counts; a name that the device plugin has is contested."""
    server = SimApiServer()
    _device_class(server, "older", "nvidia.com/gpu", "2026-01-01T00:00:00Z")
    _device_class(server, "nic", "example.com/nic", "2026-01-01T00:00:00Z", driver="nic.example")
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer(BOTH_APIS)

        def report() -> tuple[Any, Any]:
            return slices_of(scene).extended_resources, slices_of(scene).contested

        await becomes(lambda: report() == ({"nvidia.com/gpu": "older"}, {}))
        _device_class(server, "a-younger", "nvidia.com/gpu", "2026-01-02T00:00:00Z")
        _device_class(server, "shared", "nvidia.com/gpu.shared", "2026-01-01T00:00:00Z")
        contested = {"nvidia.com/gpu.shared": "shared"}
        named = {"nvidia.com/gpu": "a-younger", **contested}
        await becomes(lambda: report() == (named, contested))
        _device_class(server, "shared", "", "2026-01-01T00:00:00Z")
        await becomes(lambda: report() == ({"nvidia.com/gpu": "a-younger"}, {}))


async def test_unread_device_classes_are_a_problem_of_their_own(tmp_path: Path) -> None:
    """Without the right to read them, slices are published; the report has the reason."""
    server = SimApiServer()
    server.denied.append(("GET", "deviceclasses"))
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer(FOUR)
        await server.until(lambda: len(slices(server, 1)) == 2)

        def report() -> Any:  # noqa: ANN401 - any JSON
            return slices_of(scene).classes_problem

        await becomes(lambda: "deviceclasses" in str(report()))
        assert not _problem(scene)


def slices_of(scene: Scene) -> SlicesReport:
    """Return the report of the slices, once there is a connection."""
    return scene.cluster.report().resource_slices or complete({}, SlicesReport)


def _problem(scene: Scene) -> str:
    return slices_of(scene).problem


async def test_no_slice_is_there_before_the_kubelet_has_the_driver(tmp_path: Path) -> None:
    """A pod that is allocated a device must find the driver at the kubelet."""
    async with cluster_at_work(tmp_path, Feature.LABELS, registered=False) as scene:
        scene.offer(FOUR)
        await scene.has_labels(nvidia_com__gpu_count="2")
        await anyio.sleep(0.2)
        assert names(scene.server) == []
        scene.registered.set()
        await scene.server.until(lambda: is_complete(scene.server))


async def test_slices_of_an_earlier_shape_go_where_no_dry_run_is_possible(tmp_path: Path) -> None:
    """A webhook that supports none says nothing of the slices that replace them."""
    server = SimApiServer()
    server.resource_slices.dry_runs = False
    name, _ = _leave_earlier_shape(server)
    async with publishing(tmp_path, server=server):
        assert name not in names(server)
