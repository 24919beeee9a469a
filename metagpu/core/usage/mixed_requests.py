"""Detection of containers of several resources that see the devices of one.

By the strategy `envvar` each answer to Allocate sets NVIDIA_VISIBLE_DEVICES, and the kubelet keeps
one of the values, by chance, at each start of the container. Allocate names no container, so the
answer cannot join them; PodResources shows the container when it is admitted.
"""

from collections.abc import Callable, Mapping
from time import time
from typing import Any

import anyio
import structlog

from metagpu.core.model.mig import is_mig, slot_of
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import UNKNOWN_BACKEND, Holder, ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import MixedRequestFound
from metagpu.core.state.registry import Registry
from metagpu.core.usage.lease_differences import claims_of_holders
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()


def find_mixed_requests(snapshot: Snapshot) -> Mapping[Holder, Mapping[ResourceName, str]]:
    """Return the containers whose resources name different devices. Pure."""
    held: dict[Holder, dict[ResourceName, dict[str, None]]] = {}
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            if lease.holder is not None and lease.share.backend != UNKNOWN_BACKEND:
                devices = held.setdefault(lease.holder, {}).setdefault(lease.share.resource, {})
                devices[_device(lease.share, state.gpu.index)] = None
    return {
        holder: {name: " and ".join(devices) for name, devices in sorted(by_name.items())}
        for holder, by_name in held.items()
        if len({tuple(devices) for devices in by_name.values()}) > 1
    }


def _holders_by_variable(snapshot: Snapshot) -> set[Holder]:
    """Return the containers with shares of pools whose GPUs CDI does not name anyway."""
    return {
        lease.holder
        for state in snapshot.gpus.values()
        if state.api is Api.DEVICE_PLUGIN
        for lease in state.leases.values()
        if lease.holder is not None and lease.resource_claim is None
    }


def _device(share: Share, index: int) -> str:
    return f"{slot_of(share.id)} of GPU {index}" if is_mig(share.id) else f"GPU {index}"


def describe_mixed_request(event: MixedRequestFound) -> str:
    """Describe which devices a container does not see, and how to ask for them."""
    held = ", ".join(f"{devices} by {name}" for name, devices in event.devices.items())
    return (
        f"container {event.holder.container or 'of unknown name'} holds {held}, and sees what one "
        "of these resources gives, by chance at each start: deviceListStrategy envvar names GPUs "
        "in one variable. Request each resource in a container of its own, or let the operator "
        "set deviceListStrategy to cdi-cri, cdi-annotations or volume-mounts"
    )


class MixedRequestWatch:
    """A watch for containers that see the devices of one resource alone.

    Attributes:
        found: these containers, as they were reported.

    Args:
        hides: returns whether a container sees one of several answers now, in a pool of the API of
            device plugins.
    """

    def __init__(
        self,
        registry: Registry,
        hides: Callable[[], bool],
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: dict[Holder, MixedRequestFound] = {}
        self._claims = claims_of_holders(registry.snapshot)
        self._registry = registry
        self._hides = hides
        self._timing = timing

    async def run(self) -> None:
        """Check all leases periodically, until cancelled."""
        while True:
            # First a wait: after a start, the writer of Events is a moment behind the leases.
            await anyio.sleep(self._timing.mixed_period)
            self._check()

    def report(self) -> list[dict[str, Any]]:
        """Return the containers as plain data."""
        return [
            {"holder": str(it.holder), "podUid": it.pod_uid, "reason": describe_mixed_request(it)}
            for it in self.found.values()
        ]

    def _check(self) -> None:
        snapshot = self._registry.snapshot
        mixed, before = find_mixed_requests(snapshot), self._claims
        claims = self._claims = claims_of_holders(snapshot)
        # A container keeps the answers of its admission: a later strategy changes nothing for it.
        self.found = {
            it: event
            for it, event in self.found.items()
            if it in mixed and claims[it] == before.get(it)
        }
        hidden = _holders_by_variable(snapshot) if self._hides() else set()
        for holder in (mixed.keys() - self.found.keys()) & hidden:
            pod = snapshot.pods.find(holder, None)
            event = MixedRequestFound(holder, pod.uid if pod else None, mixed[holder], at=time())
            self.found[holder] = event
            log.warning(
                "container sees the devices of one resource alone",
                container=str(holder),
                reason=describe_mixed_request(event),
            )
            self._registry.events.publish(event)
