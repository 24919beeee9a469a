"""Tells of containers that were given MIG devices which are no more.

A reset and a reboot take all instances. The kubelet keeps its answer to a container for the life
of its pod, and gives it again at each start: nothing we do reaches that container. So it is told,
once, and for as long as it is so to whoever asks.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from time import time
from typing import Any, Final

import anyio
import msgspec
import structlog

from metagpu.core.driver import Driver
from metagpu.core.errors import DriverError
from metagpu.core.gpu import GpuId
from metagpu.core.model import Holder, Lease, ShareId, gpu_of
from metagpu.core.news import DevicesLost
from metagpu.core.registry import Registry

PERIOD: Final = 10.0
"""Seconds between two looks. What two of them have seen is told: in between a pod may have come."""

log = structlog.get_logger()


class Given(msgspec.Struct, frozen=True):
    """What a container was told for its shares of one resource, as the kubelet keeps it.

    Attributes:
        shares: their ids.
        devices: the MIG devices in the answer, by uuid.
    """

    pod_uid: str
    container: str
    shares: frozenset[ShareId]
    devices: frozenset[str]


class Lost(msgspec.Struct, frozen=True, order=True):
    """A container whose devices are no more, all or some of them."""

    namespace: str
    pod: str
    container: str
    pod_uid: str
    devices: tuple[str, ...]

    @property
    def holder(self) -> Holder:
        """The container."""
        return Holder(self.namespace, self.pod, self.container)

    @property
    def mend(self) -> str:
        """What helps."""
        return f"kubectl delete pod -n {self.namespace} {self.pod}"


Reader = Callable[[], Awaitable[Iterable[Given] | None]]
"""Reads what the kubelet keeps; `None` where that cannot be known."""


def explained(container: str, devices: Iterable[str], mend: str) -> str:
    """Say to whom it concerns what happened, and what helps."""
    gone = tuple(devices)
    those = "which are" if len(gone) > 1 else "which is"
    return (
        f"container {container} was given {', '.join(gone)}, {those} no more since its GPU was "
        "reset or the node rebooted, and it is given the same at each start; delete the pod, and "
        f"one that is made in its place gets another: {mend}"
    )


def lost(
    given: Iterable[Given],
    leases: Mapping[ShareId, Lease],
    there: AbstractSet[str],
    unasked: AbstractSet[GpuId] = frozenset(),
) -> frozenset[Lost]:
    """Find containers that were told what is not there. Pure.

    Args:
        given: what the kubelet keeps, also of pods that have ended.
        leases: those that have stood still since it was read.
        there: all MIG devices that there are.
        unasked: GPUs of which nobody knows.
    """
    found = set()
    for it in given:
        holders = {leases[share].holder if share in leases else None for share in it.shares}
        [holder] = holders if len(holders) == 1 else [None]
        gone = it.devices - there
        known = unasked.isdisjoint(map(gpu_of, it.shares))
        if holder is not None and holder.container == it.container and gone and known:
            devices = tuple(sorted(gone))
            where = holder.namespace, holder.pod, holder.container
            found.add(Lost(*where, it.pod_uid, devices))
    return frozenset(found)


class LostWatch:
    """Looks now and then, where MIG devices are held.

    Attributes:
        found: whom two looks have found, and the last one too.
    """

    def __init__(self, driver: Driver, registry: Registry, read: Reader) -> None:
        self.found: frozenset[Lost] = frozenset()
        self._driver = driver
        self._registry = registry
        self._read = read

    async def run(self) -> None:
        """Look until cancelled."""
        before = frozenset[Lost]()

        while True:
            await anyio.sleep(PERIOD)
            seen = await self._look()
            if seen is None:
                continue
            found = seen & before
            for it in sorted(found - self.found):
                self._tell(it)
            self.found, before = found, seen

    def report(self) -> list[dict[str, Any]]:
        """Say who it is and what helps, as plain data."""
        return [
            {
                "holder": str(it.holder),
                "podUid": it.pod_uid,
                "devices": list(it.devices),
                "why": explained(it.container, it.devices, it.mend),
                "mend": it.mend,
            }
            for it in sorted(self.found)
        ]

    async def _look(self) -> frozenset[Lost] | None:
        """Find whoever has lost something now; `None` where that cannot be known."""
        before = self._held()
        if not before:
            return frozenset()
        given = await self._read()
        if given is None:
            return None

        there, unasked = set[str](), set[GpuId]()
        for gpu in {gpu_of(share) for share in before}:
            try:
                instances = await self._driver.mig.instances(gpu)
            except DriverError:
                unasked.add(gpu)  # health tells
            else:
                there |= {part.uuid for instance in instances for part in instance.computes}
        still = {
            share: lease for share, lease in self._held().items() if before.get(share) == lease
        }
        return lost(given, still, there, unasked)

    def _held(self) -> Mapping[ShareId, Lease]:
        """Give the leases of GPUs that may have MIG devices."""
        return {
            share: lease
            for state in self._registry.snapshot.gpus.values()
            if state.gpu.mig_profiles
            for share, lease in state.leases.items()
        }

    def _tell(self, it: Lost) -> None:
        log.warning(
            "a container was given MIG devices that are no more",
            container=str(it.holder),
            devices=", ".join(it.devices),
            mend=it.mend,
        )
        self._registry.news.publish(
            DevicesLost(it.holder, it.pod_uid, it.devices, it.mend, at=time())
        )
