"""ResourceClaims with `adminAccess`: they look at GPUs, and hold nothing. Pure.

Any device of a GPU stands for the GPU: who monitors it sees all of it. The CDI name is of a kind of
its own, so that neither this daemon nor an earlier one takes it for a lease.
"""

from collections.abc import Awaitable, Callable, Iterable

from metagpu.core.devices.devices import pool_name
from metagpu.core.grants.cdi import MONITOR_KIND
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import UnknownDevice
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.dra.claim_states import PreparedClaims
from metagpu.plugins.dra.resource_claim import AllocatedDevice

EnsureMonitored = Callable[[frozenset[GpuId]], Awaitable[None]]
"""Makes GPUs for monitoring known to the container runtime; raises an error if it cannot.

Without any GPU, no claim looks at one any more.
"""

_NAME = f"{MONITOR_KIND}="


def monitor_devices(
    results: Iterable[AllocatedDevice], snapshot: Snapshot, node: str
) -> tuple[PreparedDevice, ...]:
    """Return the devices of results with `adminAccess`, of GPUs in any state.

    Raises:
        UnknownDevice: the node has no such GPU.
    """
    return tuple(_device(it, snapshot, node) for it in results)


def monitored_gpu(device: PreparedDevice) -> GpuId | None:
    """Return the GPU that a device looks at, `None` for one that holds shares."""
    names = (it.removeprefix(_NAME) for it in device.cdi_names if it.startswith(_NAME))
    return next(map(GpuId, names), None)


def monitored_gpus(devices: Iterable[PreparedDevice]) -> frozenset[GpuId]:
    """Return the GPUs that devices look at."""
    return frozenset(gpu for it in devices if (gpu := monitored_gpu(it)) is not None)


def all_monitored(claims: PreparedClaims) -> frozenset[GpuId]:
    """Return the GPUs that prepared claims look at."""
    return frozenset[GpuId]().union(*map(monitored_gpus, claims.values()))


def _device(result: AllocatedDevice, snapshot: Snapshot, node: str) -> PreparedDevice:
    found = (gpu for gpu in snapshot.gpus if pool_name(node, gpu) == result.pool)
    gpu = next(found, None)
    if gpu is None:
        reason = f"node {node} has no such GPU; delete the ResourceClaim to get another device"
        raise UnknownDevice(result.pool, result.device, reason)
    request, names = (result.main_request,), (f"{_NAME}{gpu}",)
    return PreparedDevice(request, result.pool, result.device, names, result.share_id)
