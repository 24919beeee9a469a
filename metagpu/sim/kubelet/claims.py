"""The DRA manager of the simulated kubelet: drivers and prepared claims.

Drivers are found by their sockets, as the real kubelet finds them. Claims are in the checkpoint
before their drivers are called; a kubelet that has started calls them again for the next pod of a
claim. Not simulated: ResourceSlices that are
deleted 30 s after their driver's end, and the health stream.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.runtime.files import file_identity, replace_text
from metagpu.plugins.dra.checkpoint import CHECKPOINT_FILE
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.pb import pluginregistration, v1
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1 as dra

_REGISTRATION: Final = "/pluginregistration.Registration/"
_SERVICE: Final = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"
_VERSION: Final = "v1.DRAPlugin"
_ANSWER: Final = 1.0
_DEADLINE: Final = 45.0
"""Seconds of a call to prepare claims."""
_POLL: Final = 0.1
"""Seconds between two scans for sockets; a real kubelet is notified."""


class ClaimPrepareError(Exception):
    """Raised for claims that cannot be prepared or released, with the kubelet's text."""


class ClaimUse(msgspec.Struct, frozen=True):
    """One claim of a container; `request` names a part of it, empty for all."""

    claim: ResourceClaimRef
    request: str = ""


class PodClaims(msgspec.Struct, frozen=True):
    """The claims of a pod.

    Attributes:
        drivers: the drivers of the devices of each claim.
        containers: the claims that each container uses.
    """

    uid: str
    drivers: Mapping[ResourceClaimRef, Sequence[str]] = {}
    containers: Mapping[str, Sequence[ClaimUse]] = {}


class _PreparedClaim(msgspec.Struct):
    """A claim in the checkpoint: its pods, and the devices that each driver answered."""

    ref: ResourceClaimRef
    pods: set[str]
    drivers: dict[str, list[dict[str, Any]]]


class ClaimManager:
    """Prepares and releases claims by the drivers of a node.

    Args:
        root: the kubelet's folder.
    """

    def __init__(self, root: Path) -> None:
        self._registry = root / "plugins_registry"
        self._checkpoint = root / CHECKPOINT_FILE
        self._endpoints: dict[Path, tuple[str, str, object]] = {}
        self._prepared: dict[str, _PreparedClaim] = {}
        self._pods: dict[str, PodClaims] = {}
        self._settled: set[str] = set()
        self._locks: dict[str, anyio.Lock] = {}
        self._saving = anyio.Lock()
        self._read_checkpoint()

    # ---- drivers ---------------------------------------------------------------------------

    def forget_drivers(self) -> None:
        """Forget drivers and finished calls, as a kubelet that starts does."""
        self._endpoints.clear()
        self._settled.clear()

    async def run(self) -> None:
        """Register the drivers whose sockets are there, until cancelled."""
        while True:
            for socket in await to_thread.run_sync(self._sockets):
                identity = file_identity(socket)
                if (
                    identity is not None
                    and self._endpoints.get(socket, ("", "", None))[2] != identity
                ):
                    with suppress(OSError, GRPCError, StreamTerminatedError):
                        await self._register(socket, identity)
            await anyio.sleep(_POLL)

    def _sockets(self) -> Sequence[Path]:
        found = sorted(
            file for file in self._registry.glob("*.sock") if not file.name.startswith(".")
        )
        for gone in self._endpoints.keys() - set(found):
            del self._endpoints[gone]
        return found

    async def _register(self, socket: Path, identity: object) -> None:
        answer = await call_raw(socket, f"{_REGISTRATION}GetInfo", b"", _ANSWER)
        info = pluginregistration.PluginInfo.parse(answer)
        problem = ""
        if info.type != "DRAPlugin" or _VERSION not in info.supported_versions:
            problem = f"RegisterPlugin error -- no DRA plugin of {_VERSION}: {info.name}"
        else:
            self._endpoints[socket] = (info.name, info.endpoint, identity)
        said = pluginregistration.RegistrationStatus(plugin_registered=not problem, error=problem)
        await call_raw(socket, f"{_REGISTRATION}NotifyRegistrationStatus", bytes(said), 5.0)

    def _endpoint(self, driver: str) -> Path:
        for name, endpoint, _ in self._endpoints.values():
            if name == driver:
                return Path(endpoint)
        raise ClaimPrepareError(f"DRA driver {driver} is not registered")

    # ---- claims ----------------------------------------------------------------------------

    def track(self, pod: PodClaims) -> None:
        """Note the claims of a pod whose containers run already."""
        self._pods[pod.uid] = pod

    async def prepare(self, pod: PodClaims) -> None:
        """Prepare the claims of a pod that this process of the kubelet has not prepared.

        The devices of a second answer are added to those of the first, as the kubelet adds them.

        Raises:
            ClaimPrepareError: a driver refuses, or is not there.
        """
        self._pods[pod.uid] = pod
        for ref, drivers in pod.drivers.items():
            known = self._prepared.setdefault(
                ref.uid, _PreparedClaim(ref, set(), {driver: [] for driver in drivers})
            )
            known.pods.add(pod.uid)
        await self._save()
        for ref in pod.drivers:
            async with self._locks.setdefault(ref.uid, anyio.Lock()):
                if (claim := self._prepared.get(ref.uid)) is None:
                    raise ClaimPrepareError(f"claim {ref.name}: its last pod ended meanwhile")
                if ref.uid not in self._settled:
                    for driver, devices in claim.drivers.items():
                        devices.extend(await self._prepare_by(driver, ref))
                    self._settled.add(ref.uid)
                    await self._save()

    async def _prepare_by(self, driver: str, ref: ResourceClaimRef) -> list[dict[str, Any]]:
        request = dra.NodePrepareResourcesRequest(claims=[_claim(ref)])
        answer = await self._call(driver, "NodePrepareResources", bytes(request))
        found = dra.NodePrepareResourcesResponse.parse(answer).claims.get(ref.uid)
        problem = "NodePrepareResources skipped 1 ResourceClaims" if found is None else found.error
        if found is None or problem:
            raise ClaimPrepareError(
                "Failed to prepare dynamic resources: prepare dynamic resources: "
                f"NodePrepareResources failed for ResourceClaim {ref.name}: {problem}"
            )
        return [_device(device) for device in found.devices]

    async def release(self, uid: str) -> None:
        """Release the claims that no other pod uses.

        Raises:
            ClaimPrepareError: a driver refuses, or is not there: the pod cannot end.
        """
        for claim in [
            prepared_claim
            for prepared_claim in self._prepared.values()
            if uid in prepared_claim.pods
        ]:
            async with self._locks.setdefault(claim.ref.uid, anyio.Lock()):
                if claim.pods == {uid}:
                    await self._unprepare(claim)
                    del self._prepared[claim.ref.uid]
                    self._settled.discard(claim.ref.uid)
                claim.pods.discard(uid)
                await self._save()
        self._pods.pop(uid, None)

    async def _unprepare(self, claim: _PreparedClaim) -> None:
        for driver in claim.drivers:
            request = dra.NodeUnprepareResourcesRequest(claims=[_claim(claim.ref)])
            answer = await self._call(driver, "NodeUnprepareResources", bytes(request))
            found = dra.NodeUnprepareResourcesResponse.parse(answer).claims.get(claim.ref.uid)
            if found is None or found.error:
                raise ClaimPrepareError(found.error if found else "the claim was skipped")

    async def _call(self, driver: str, method: str, request: bytes) -> bytes:
        endpoint = self._endpoint(driver)
        try:
            return await call_raw(endpoint, f"{_SERVICE}{method}", request, _DEADLINE)
        except (OSError, GRPCError, StreamTerminatedError) as error:
            raise ClaimPrepareError(f"{method}: {error}") from error

    def is_prepared(self, uid: str) -> bool:
        """Return whether a claim is prepared."""
        claim = self._prepared.get(uid)
        return claim is not None and any(claim.drivers.values())

    def dynamic_resources(self, uid: str, container: str) -> list[v1.DynamicResource]:
        """Return what PodResources lists of a container's claims."""
        pod = self._pods.get(uid)
        found = []
        for use in pod.containers.get(container, ()) if pod is not None else ():
            prepared = self._prepared.get(use.claim.uid)
            parts = [
                _listed(driver, device)
                for driver, devices in (prepared.drivers.items() if prepared else ())
                for device in devices
                if not use.request
                or not device["RequestNames"]
                or use.request in device["RequestNames"]
            ]
            if parts:
                ref = use.claim
                found.append(
                    v1.DynamicResource(
                        claim_name=ref.name, claim_namespace=ref.namespace, claim_resources=parts
                    )
                )
        return found

    # ---- the checkpoint -----------------------------------------------------------------------

    def _read_checkpoint(self) -> None:
        try:
            data = json.loads(json.loads(self._checkpoint.read_text(encoding="utf-8"))["Data"])
        except (OSError, ValueError, KeyError):
            return
        for entry in data.get("ClaimInfoStateList") or ():
            ref = ResourceClaimRef(entry["Namespace"], entry["ClaimName"], entry["ClaimUID"])
            drivers = {name: state["Devices"] for name, state in entry["DriverState"].items()}
            self._prepared[ref.uid] = _PreparedClaim(ref, set(entry["PodUIDs"]), drivers)

    async def _save(self) -> None:
        async with self._saving:  # claims of several pods change at once
            claims = [
                {
                    "ClaimUID": claim.ref.uid,
                    "ClaimName": claim.ref.name,
                    "Namespace": claim.ref.namespace,
                    "PodUIDs": {uid: {} for uid in sorted(claim.pods)},
                    "DriverState": {
                        name: {"Devices": found} for name, found in claim.drivers.items()
                    },
                }
                for claim in self._prepared.values()
            ]
            kind = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1"}
            data = json.dumps({**kind, "ClaimInfoStateList": claims})
            text = json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())})
            await to_thread.run_sync(replace_text, self._checkpoint, text)


def _claim(ref: ResourceClaimRef) -> dra.Claim:
    return dra.Claim(namespace=ref.namespace, uid=ref.uid, name=ref.name)


def _device(device: dra.Device) -> dict[str, Any]:
    return {
        "PoolName": device.pool_name,
        "DeviceName": device.device_name,
        "ShareID": device.share_id,
        "RequestNames": list(device.request_names),
        "CDIDeviceIDs": list(device.cdi_device_ids),
    }


def _listed(driver: str, document: Mapping[str, Any]) -> v1.ClaimResource:
    return v1.ClaimResource(
        cdi_devices=[v1.CdiDevice(name=name) for name in document["CDIDeviceIDs"]],
        driver_name=driver,
        pool_name=document["PoolName"],
        device_name=document["DeviceName"],
        share_id=document["ShareID"],
    )
