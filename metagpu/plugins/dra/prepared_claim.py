"""A prepared ResourceClaim: its devices, their CDI names, and its file.

A container names one request of a claim, or the whole claim. Of a claim for extended resources it
names all its own requests: the scheduler makes one claim for a pod.
"""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core.devices.devices import NO_SUCH_GPU, gpu_of_device
from metagpu.core.errors import CdiError
from metagpu.core.grants import cdi
from metagpu.core.grants.cdi import MONITOR_KIND
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import joined_variables
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import UnknownDevice
from metagpu.core.model.resource_claims import KIND, ClaimDevice, parse_claim_device
from metagpu.core.model.shares import ResourceClaimRef, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.files import replace_text
from metagpu.plugins.dra.allocation import AllocatedDevice

_EXTENDED: Final = re.compile(r"(container-\d+)-request-\d+")
"""The requests that the scheduler makes for the extended resources of a container."""


def whole_claim_name(uid: str) -> str:
    """Return the CDI name, without its kind, of all requests of a claim together."""
    return f"{uid}.all"


def is_joint(requests: Iterable[str]) -> bool:
    """Return whether a container that names the claim gets several requests."""
    those = set(requests)
    return len(those) > 1 and not all(map(_EXTENDED.fullmatch, those))


def with_joint_variables(
    uid: str, grants: Mapping[str, Grant], requests: Mapping[str, str]
) -> Mapping[str, Grant]:
    """Return what containers get by each CDI name of a claim.

    Args:
        uid: of the claim.
        grants: what containers get of one request, by CDI name.
        requests: the request of each CDI name.
    """
    together = defaultdict[str, list[Grant]](list)
    for name, grant in grants.items():
        those = together[_container(requests[name])]
        if not any(
            earlier is grant for earlier in those
        ):  # the devices of a request may have one grant
            those.append(grant)
    found = {
        name: replace(grant, envs=joined_variables(together[_container(requests[name])]))
        for name, grant in grants.items()
    }
    if is_joint(requests.values()):
        everything = joined_variables(chain.from_iterable(together.values()))
        found[whole_claim_name(uid)] = Grant(everything)
    return found


def _container(request: str) -> str:
    """Return the container of an extended resource's request; else the request."""
    found = _EXTENDED.fullmatch(request)
    return found[1] if found else request


EVERY_REQUEST: Final = "*"
"""The request of the answer's last device, which no container can name.

The kubelet gives it to containers that name the whole claim, and to no others.
"""


class PreparedDevice(msgspec.Struct, frozen=True):
    """One device of a prepared claim, as the kubelet keeps it."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_names: tuple[str, ...]
    share_id: str | None = None

    @property
    def claimed(self) -> ClaimDevice | None:
        """The meaning of its CDI names, `None` if no name of ours is among them."""
        return next(filter(None, map(parse_claim_device, self.cdi_names)), None)


PreparedClaims = Mapping[ResourceClaimRef, Sequence[PreparedDevice]]
"""The devices of each prepared claim."""


def shares_by_request(devices: Sequence[PreparedDevice]) -> Mapping[ShareId, str]:
    """Return the request of each share, nothing where all are of one request."""
    named = [
        (device.requests[0], own)
        for device in devices
        if device.requests and (own := device.claimed)
    ]
    if len({request for request, _ in named}) < 2:  # noqa: PLR2004 - one alone
        return {}
    return {share: request for request, own in named for share in own.share_ids}


def whole_claim_device(uid: str, first: PreparedDevice) -> PreparedDevice:
    """Return the device of all requests together: the first one once more.

    It is the last of an answer. The kubelet shows the health of a device by its first name.
    """
    names = (first.cdi_names[0], f"{KIND}={whole_claim_name(uid)}")
    return replace(first, requests=(EVERY_REQUEST,), cdi_names=names)


EnsureMonitored = Callable[[frozenset[GpuId]], Awaitable[None]]
"""Makes GPUs for monitoring known to the container runtime; raises an error if it cannot.

Without any GPU, no claim looks at one any more.
"""

_NAME = f"{MONITOR_KIND}="


def monitor_devices(
    results: Iterable[AllocatedDevice], snapshot: Snapshot
) -> tuple[PreparedDevice, ...]:
    """Return the devices of results with `adminAccess`, of GPUs in any state.

    Any device of a GPU stands for the GPU: who monitors it sees all of it. The CDI name is of a
    kind of its own, so that no daemon takes it for a lease.

    Raises:
        UnknownDevice: the node has no such GPU.
    """
    return tuple(_device(device, snapshot) for device in results)


def monitored_gpu(device: PreparedDevice) -> GpuId | None:
    """Return the GPU that a device looks at, `None` for one that holds shares."""
    names = (name.removeprefix(_NAME) for name in device.cdi_names if name.startswith(_NAME))
    return next(map(GpuId, names), None)


def monitored_gpus(devices: Iterable[PreparedDevice]) -> frozenset[GpuId]:
    """Return the GPUs that devices look at."""
    return frozenset(gpu for device in devices if (gpu := monitored_gpu(device)) is not None)


def all_monitored(claims: PreparedClaims) -> frozenset[GpuId]:
    """Return the GPUs that prepared claims look at."""
    return frozenset[GpuId]().union(*map(monitored_gpus, claims.values()))


def _device(result: AllocatedDevice, snapshot: Snapshot) -> PreparedDevice:
    gpu = gpu_of_device(result.device)
    if gpu not in snapshot.gpus:
        raise UnknownDevice(result.pool, result.device, NO_SUCH_GPU)
    request, names = (result.main_request,), (f"{_NAME}{gpu}",)
    return PreparedDevice(request, result.pool, result.device, names, result.share_id)


_PREFIX: Final = "metagpu.io-claim-"

log = structlog.get_logger()


@dataclass(frozen=True)
class ClaimFiles:
    """The files of all claims, in the folder of CDI specifications.

    A file is written before the kubelet gets its names, and removed when the claim is unprepared.
    It stays while no daemon runs: containers restart then too.
    """

    folder: Path

    async def write(self, uid: str, devices: Mapping[str, Grant]) -> None:
        """Write the file of a claim: what containers get by each of its CDI names.

        Raises:
            CdiError: the file cannot be written; the text names it.
        """
        path, text = self._path(uid), cdi.build_claim_spec(devices)
        try:
            await to_thread.run_sync(replace_text, path, text)
        except OSError as error:
            raise CdiError(f"{path} cannot be written: {error.strerror or error}") from error

    async def read(self, uid: str) -> tuple[ClaimDevice, ...]:
        """Return the meaning of the names in a claim's file, nothing without one."""
        return await to_thread.run_sync(_read_devices, self._path(uid))

    async def exists(self, uid: str) -> bool:
        """Return whether a claim has its file."""
        return await to_thread.run_sync(self._path(uid).exists)

    async def remove(self, uid: str) -> None:
        """Remove the file of a claim, if there is one."""
        await to_thread.run_sync(_unlink, self._path(uid))

    async def remove_others(self, uids: Collection[str]) -> None:
        """Remove the files of all claims but these."""
        await to_thread.run_sync(self._remove_others, frozenset(self._path(uid) for uid in uids))

    def _remove_others(self, kept: frozenset[Path]) -> None:
        for path in self.folder.glob(f"{_PREFIX}*.json"):
            if path not in kept:
                _unlink(path)

    def _path(self, uid: str) -> Path:
        return self.folder / f"{_PREFIX}{uid}.json"


class _NamedDevice(msgspec.Struct, frozen=True):
    name: str


class _ClaimSpec(msgspec.Struct, frozen=True):
    devices: tuple[_NamedDevice, ...] = ()


def _read_devices(path: Path) -> tuple[ClaimDevice, ...]:
    try:
        named = msgspec.json.decode(path.read_bytes(), type=_ClaimSpec).devices
    except (OSError, msgspec.MsgspecError):
        return ()
    return tuple(filter(None, (parse_claim_device(f"{KIND}={each.name}") for each in named)))


def _unlink(path: Path) -> None:
    """Remove a file.

    One that stays harms nobody: no container names its devices any more.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cdi specification not removed", file=str(path), error=str(error))
