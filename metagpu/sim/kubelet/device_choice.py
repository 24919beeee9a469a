"""The device manager's choice of devices (`devicesToAllocate`), no I/O (§1.5)."""

import random
from collections.abc import Collection, Generator

import msgspec

from metagpu.sim.kubelet.device_manager import DeviceManagerState
from metagpu.sim.kubelet.pods import DeviceError
from metagpu.sim.kubelet.topology import split_by_affinity


class DeviceRequest(msgspec.Struct, frozen=True):
    """A container's request for one resource.

    `reusable` are devices of the pod's earlier init containers, `nodes` the NUMA nodes of the
    topology policy's decision. `running` marks a container that the runtime reported as running
    while the kubelet started: the container keeps its devices, unchecked.
    """

    uid: str
    container: str
    resource: str
    count: int
    reusable: Collection[str] = ()
    nodes: frozenset[int] | None = None
    running: bool = False


class PreferenceQuestion(msgspec.Struct, frozen=True):
    """The request of GetPreferredAllocation, if the plugin announced it (case 45)."""

    available: Collection[str]
    must_include: Collection[str]
    size: int


DeviceChoice = Generator[PreferenceQuestion, Collection[str], frozenset[str]]


def choose_devices(
    state: DeviceManagerState, request: DeviceRequest, rng: random.Random
) -> DeviceChoice:
    """Choose devices and mark them allocated; yield at most one question on the way.

    Send the preferred ids as the answer, an empty collection for no preference. Returns the
    chosen ids: none when there is nothing to allocate.

    Raises:
        DeviceError: the request cannot be met; devices picked so far stay marked.
    """
    if request.running:
        return frozenset()
    _check(state, request)
    if request.count == 0 or state.devices_of(request.uid, request.container, request.resource):
        return frozenset()
    pick = _Pick(state, request, rng)
    if pick.take(request.reusable):
        return pick.done()
    available = state.available(request.resource)
    if len(available) < pick.missing:
        raise DeviceError(
            f"requested number of devices unavailable for {request.resource}. "
            f"Requested: {pick.missing}, Available: {len(available)}"
        )
    aligned, unaligned, rootless = split_by_affinity(
        state, request.resource, available, request.nodes
    )
    if pick.missing < len(aligned):
        preferred = yield pick.question(aligned)
        _ = pick.take(aligned.intersection(preferred)) or pick.take(aligned)
        return pick.done()
    if pick.take(aligned):
        return pick.done()
    preferred = yield pick.question(available)
    _ = pick.take(available.intersection(preferred)) or pick.take(unaligned) or pick.take(rootless)
    return pick.done()


def _check(state: DeviceManagerState, request: DeviceRequest) -> None:
    resource = request.resource
    held = state.devices_of(request.uid, request.container, resource)
    if held is not None and len(held) != request.count:
        raise DeviceError(
            f'pod "{request.uid}" container "{request.container}" changed request for resource '
            f'"{resource}" from {len(held)} to {request.count}'
        )
    healthy = state.healthy.get(resource)
    if healthy is None:
        raise DeviceError(f"cannot allocate unregistered device {resource}")
    if not healthy:
        raise DeviceError(
            f"no healthy devices present; cannot allocate unhealthy devices {resource}"
        )
    if held and not healthy >= held:
        raise DeviceError(
            "previously allocated devices are no longer healthy; "
            f"cannot allocate unhealthy devices {resource}"
        )


class _Pick:
    """The devices picked so far for one request."""

    def __init__(
        self, state: DeviceManagerState, request: DeviceRequest, rng: random.Random
    ) -> None:
        self._state = state
        self._request = request
        self._rng = rng
        self._picked: set[str] = set()

    @property
    def missing(self) -> int:
        return self._request.count - len(self._picked)

    def take(self, devices: Collection[str]) -> bool:
        """Pick the missing devices at random; return whether the request is complete."""
        fresh = sorted(set(devices) - self._picked)
        chosen = self._rng.sample(fresh, min(self.missing, len(fresh)))
        self._picked.update(chosen)
        # Looked up each time: a recount while the plugin is asked replaces the sets.
        self._state.allocated.setdefault(self._request.resource, set()).update(chosen)
        return self.missing == 0

    def question(self, devices: Collection[str]) -> PreferenceQuestion:
        picked = frozenset(self._picked)
        return PreferenceQuestion(picked.union(devices), picked, self._request.count)

    def done(self) -> frozenset[str]:
        if self.missing:
            raise DeviceError(
                "unexpectedly allocated less resources than required. Requested: "
                f"{self._request.count}, Got: {len(self._picked)}"
            )
        return frozenset(self._picked)
