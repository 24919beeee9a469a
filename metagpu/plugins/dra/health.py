"""The health of devices: a stream that the kubelet shows in the status of pods."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from metagpu.core.devices.devices import Device, devices_of, pool_name
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.grpc_server import StreamingCalls
from metagpu.plugins.kubelet.pb import v1alpha1

if TYPE_CHECKING:
    from grpclib.server import Stream

SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The names of the service at registration; the messages of both are the same."""
_REPEAT: Final = 30.0
"""Seconds to the next list without a change."""
_TIMEOUT: Final = 90
"""Seconds after which the kubelet takes the health of a device for unknown."""
_LONGEST: Final = 1024
"""Bytes of a message."""


class DeviceState(msgspec.Struct, frozen=True):
    """The health of one device, with the reason of a fault."""

    pool: str
    device: str
    healthy: bool
    reason: str = ""


def device_states(snapshot: Snapshot, node: str) -> tuple[DeviceState, ...]:
    """Return the health of all devices of a node."""
    return tuple(
        DeviceState(pool_name(node, gpu), device.name, not reason, reason)
        for gpu, state in snapshot.gpus.items()
        for device in devices_of(state)
        for reason in (_fault(state, device),)
    )


def _fault(state: GpuState, device: Device) -> str:
    """Return why a device is out of service, empty if it is not.

    Of a device with several shares, the fault of one is that of all: they are on one MIG instance.
    """
    if not state.verdict.healthy:
        return state.verdict.reason
    faults = filter(None, (state.device_fault(share.id) for share in device.shares))
    return next((fault.reason for fault in faults), "")


class HealthStream:
    """The service of the stream."""

    def __init__(self, registry: Registry, node: str, repeat: float = _REPEAT) -> None:
        self._registry = registry
        self._node = node
        self._repeat = repeat

    def methods(self, calls: StreamingCalls) -> Mapping[str, Method]:
        """Return the service's methods by path; streams register with `calls`."""

        async def watch(stream: "Stream[bytes, bytes]") -> None:
            await stream.recv_message()
            with calls.track():
                await self._send_all(stream)

        method = Method(watch, Cardinality.UNARY_STREAM, bytes, bytes)
        return {f"/{service}/NodeWatchResources": method for service in SERVICES}

    async def _send_all(self, stream: "Stream[bytes, bytes]") -> None:
        sending = anyio.Lock()

        async def send() -> None:
            async with sending:  # two messages at once would mix on the stream
                await stream.send_message(_encode(self._view(self._registry.snapshot)))

        async def repeat() -> None:
            while True:
                await anyio.sleep(self._repeat)
                await send()

        async with anyio.create_task_group() as group:
            group.start_soon(repeat)
            async for _ in self._registry.watch(self._view):
                await send()

    def _view(self, snapshot: Snapshot) -> tuple[DeviceState, ...]:
        return device_states(snapshot, self._node)


def _encode(states: tuple[DeviceState, ...]) -> bytes:
    now, status = int(time.time()), v1alpha1.HealthStatus
    return bytes(
        v1alpha1.NodeWatchResourcesResponse(
            devices=[
                v1alpha1.DeviceHealth(
                    device=v1alpha1.DeviceIdentifier(pool_name=it.pool, device_name=it.device),
                    health=status.HEALTHY if it.healthy else status.UNHEALTHY,
                    last_updated_time=now,
                    health_check_timeout_seconds=_TIMEOUT,
                    message=it.reason.encode()[:_LONGEST].decode(errors="ignore"),
                )
                for it in states
            ]
        )
    )
