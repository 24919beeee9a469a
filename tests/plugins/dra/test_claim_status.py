"""The writer of `status.devices`: which claims it writes, and when it stops."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from metagpu.core.errors import ClusterError
from metagpu.core.grants.cdi import MONITOR_KIND
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import HardwareDevice, ProvisionedState, ResourceClaimRef
from metagpu.core.state.facts import (
    BackendAttached,
    BackendResumed,
    Fact,
    GpusFound,
    ProvisioningReported,
    UnreadableGpusFound,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.claim_status import ClaimStatuses, ClaimStatusTiming, device_statuses
from metagpu.plugins.dra.prepared_claim import PreparedDevice
from metagpu.plugins.dra.preparer import ClaimStates
from tests.backends.mig.gpus import mig_gpu
from tests.plugins.dra.rig import DRIVER, DraNode
from tests.rigs.build import after, gpu
from tests.rigs.waiting import becomes, skip

MIG = """
version: metagpu/v1
pools:
  - name: mig
    api: dra
    backends: [{backend: mig, profiles: [1g.5gb]}]
"""


def a_registry() -> Registry:
    """Return a registry with the GPU of the claims."""
    registry = Registry()
    registry.apply(GpusFound((gpu(0),), at=0))
    return registry


class Server:
    """Claims at an API server.

    Attributes:
        written: the names of claims in the order of their patches.
        errors: what each claim's patch is answered.
        uids: other uids than those of the prepared claims.
        drops: whether it drops the field.
    """

    def __init__(
        self, registry: Registry | None = None, timing: ClaimStatusTiming | None = None
    ) -> None:
        self.written: list[str] = []
        self.errors: dict[str, ClusterError] = {}
        self.uids: dict[str, str] = {}
        self.devices: dict[str, list[dict[str, Any]]] = {}
        self.drops = False
        self.states = ClaimStates()
        self.statuses = ClaimStatuses(
            registry or a_registry(),
            DRIVER,
            self.states.prepared,
            read=self.read,
            apply=self.apply,
            timing=timing or ClaimStatusTiming(rest=0, first_retry=0.01),
        )

    async def read(self, ref: ResourceClaimRef) -> Mapping[str, Any]:
        """Return a claim."""
        uid = self.uids.get(ref.name, ref.uid)
        return {"metadata": {"uid": uid}, "status": {"devices": self.devices.get(ref.name, [])}}

    async def apply(self, ref: ResourceClaimRef, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the status of a claim, or answer an error."""
        self.written.append(ref.name)
        if error := self.errors.get(ref.name):
            raise error
        self.devices[ref.name] = [] if self.drops else status["devices"]
        return await self.read(ref)

    def prepare(self, name: str, backend: str = "fraction", slot: str = "m00") -> ResourceClaimRef:
        """Note a claim that is prepared."""
        ref = ResourceClaimRef("default", name, str(UUID(int=len(self.states.prepared) + 1)))
        own = ClaimDevice(ref.uid, gpu(0).id, backend, (slot,))
        device = PreparedDevice(("gpu",), "pool", "device", (own.qualified_name,))
        self.states.prepared[ref] = (device,)
        self.statuses.note(ref)
        return ref

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the writer while the block lasts."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.statuses.run)
            yield
            group.cancel_scope.cancel()


OTHERS = GpusFound((gpu(1),), at=0)
HOLDS = ClaimDevice("u", gpu(0).id, "fraction", ("m00",)).qualified_name
LOOKS = f"{MONITOR_KIND}={gpu(0).id}"


@pytest.mark.parametrize("name", [HOLDS, LOOKS])
@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ((), []),
        ((GpusFound((gpu(0),), at=0),), ["Prepared"]),
        ((OTHERS, UnreadableGpusFound({0: "it hangs"}, at=0)), []),
        ((OTHERS,), ["GPUGone"]),
    ],
    ids=["no GPU is read yet", "it is there", "another cannot be read", "it is gone"],
)
def test_a_gpu_is_gone_once_all_gpus_are_read(
    facts: tuple[Fact, ...], reasons: list[str], name: str
) -> None:
    """Before that its claim has no state; a device of no GPU of ours has none either."""
    found = [PreparedDevice(("gpu",), "pool", text, (text,)) for text in (name, "other/a=b")]
    for devices in (found[:1], found):
        assert [each.reason for each in device_statuses(devices, after(*facts))] == reasons


async def test_claims_that_the_kubelet_asks_for_come_before_the_status_of_others() -> None:
    """A burst of claims has no status until it is over, or lasts too long."""
    timing = ClaimStatusTiming(rest=100, longest_rest=450)
    server = Server(timing=timing)
    async with server.running():
        for name in ("a", "b", "c"):
            server.prepare(name)
            await anyio.wait_all_tasks_blocked()
            skip(60)
            await anyio.wait_all_tasks_blocked()
            assert server.written == []
        skip(60)
        await becomes(lambda: server.written == ["a", "b", "c"])

        for number in range(8):
            server.prepare(f"burst-{number}")
            await anyio.wait_all_tasks_blocked()
            skip(60)
        await becomes(lambda: "burst-0" in server.written)


async def test_a_status_of_an_earlier_daemon_is_not_written_again() -> None:
    """After a restart the API server has most of them already."""
    before, after = Server(), Server()
    async with before.running():
        ref = before.prepare("a")
        await becomes(lambda: "a" in before.devices)
    after.devices, after.states.prepared[ref] = before.devices, before.states.prepared[ref]
    after.statuses.note(ref, restored=True)
    async with after.running():
        after.prepare("b")
        await becomes(lambda: "b" in after.written)
    assert after.written == ["b"]


async def test_a_field_that_is_dropped_is_not_sent_again() -> None:
    """The API server would drop it of the next claim too."""
    server = Server()
    server.drops = True
    async with server.running():
        server.prepare("a")
        await becomes(lambda: server.statuses.problem)
        server.prepare("b")
        await anyio.wait_all_tasks_blocked()
        assert server.written == ["a"]


async def test_a_claim_that_is_refused_by_itself_delays_no_other() -> None:
    """The same devices are not sent again; the problem is shown until the claim ends."""
    server = Server()
    server.errors["bad"] = ClusterError("422: status.devices is invalid", status=422)
    async with server.running():
        bad = server.prepare("bad")
        await becomes(lambda: server.written == ["bad"])
        server.prepare("good")
        await becomes(lambda: server.written == ["bad", "good"])
        assert "422" in server.statuses.problem
        del server.states.prepared[bad]
        server.prepare("last")
        await becomes(lambda: server.written == ["bad", "good", "last"])
        await becomes(lambda: server.statuses.problem == "")


async def test_a_conflict_is_tried_again_unless_the_claim_is_another_one() -> None:
    """A claim may be made again under its name; else somebody wrote it at the same moment."""
    server = Server()
    conflict = ClusterError("409: conflict", status=409)
    server.errors |= {"again": conflict, "other": conflict}
    server.uids["other"] = "another"
    async with server.running():
        server.prepare("other")
        server.prepare("again")
        await becomes(lambda: server.written.count("again") > 1)
        del server.errors["again"]
        await becomes(lambda: server.devices.get("again"))
        assert server.written.count("other") == 1


async def test_nothing_is_kept_of_claims_that_have_ended() -> None:
    """Also while the first claim of all cannot be written."""
    server = Server()
    server.errors["first"] = ClusterError("403: forbidden", status=403)
    async with server.running():
        refs = [server.prepare(name) for name in ("a", "b", "c")]
        await becomes(lambda: len(server.devices) == 3)
        first = server.prepare("first")
        server.states.prepared[first] = server.states.prepared.pop(first)
        for ref in refs:
            del server.states.prepared[ref]
        await becomes(lambda: server.written.count("first") > 1)
        assert not server.statuses._written


async def test_a_mig_device_is_not_reported_lost_before_its_backend_has_looked(
    tmp_path: Path,
) -> None:
    """As after each start of the daemon; later it is reported as it is."""
    node = DraNode(tmp_path)
    server = Server(node.registry)
    gpus = [mig_gpu()]
    node.offer(gpus, MIG)
    own = gpus[0].id
    share = next(other.id for other in node.layout.shares)
    node.registry.apply(BackendAttached(own, "mig", needs_setup=True, needs_cleanup=True, at=1))
    async with server.running():
        server.prepare("mig", "mig", share.partition("::")[2])
        server.prepare("fraction")
        await becomes(lambda: server.written == ["fraction"])
        made = ProvisionedState({share: HardwareDevice("MIG-1", 1, 0)})
        node.registry.apply(ProvisioningReported(own, "mig", made, at=2))
        node.registry.apply(BackendResumed(own, "mig", at=2))
        await becomes(lambda: server.written == ["fraction", "mig"])
        assert server.devices["mig"][0]["conditions"][0]["status"] == "True"
        node.registry.apply(ProvisioningReported(own, "mig", ProvisionedState(), at=3))
        await becomes(lambda: len(server.written) > 2)
        assert server.devices["mig"][0]["conditions"][0]["reason"] == "MIGDeviceMissing"
