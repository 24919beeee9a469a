"""A node for the tests of `plugins/dra`: the driver, its shares, claims, and a kubelet's calls.

The API server is a dictionary; the sockets are real.
"""

import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
from grpclib.exceptions import StreamTerminatedError

from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.devices.devices import devices_of, pool_name
from metagpu.core.errors import ClusterError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.resource_claims import ReadSharing
from metagpu.core.model.shares import Lease, ResourceClaimRef, ShareId
from metagpu.core.state.facts import GpusFound
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.driver import DraDriver, RegistrationTiming
from metagpu.plugins.kubelet.granting import no_cdi
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.pb import pluginregistration
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from tests.rigs.cdi import check_spec

DRIVER = "gpu.metagpu.io"
NODE = "node-1"
CONFIG = """
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends:
      - {backend: fraction, sharesPerGpu: 100}
      - {backend: whole}
      - {backend: timeslice, replicas: 4}
"""
_SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"
_REGISTRATION = "/pluginregistration.Registration/"


@dataclass
class KubeletCalls:
    """The calls of a kubelet to the driver, over its sockets below the kubelet's folder."""

    root: Path
    driver: str = field(default=DRIVER, kw_only=True)

    def write_checkpoint(self, prepared: Mapping[ResourceClaimRef, list[v1.Device]]) -> None:
        """Write the kubelet's checkpoint of prepared claims, as the kubelet does."""
        claims = [
            {
                "ClaimUID": ref.uid,
                "ClaimName": ref.name,
                "Namespace": ref.namespace,
                "PodUIDs": {"p": {}},
                "DriverState": {
                    self.driver: {
                        "Devices": [
                            {
                                "PoolName": device.pool_name,
                                "DeviceName": device.device_name,
                                "ShareID": device.share_id,
                                "RequestNames": device.request_names,
                                "CDIDeviceIDs": device.cdi_device_ids,
                            }
                            for device in devices
                        ]
                    }
                },
            }
            for ref, devices in prepared.items()
        ]
        data = json.dumps({"kind": "DRACheckpoint", "ClaimInfoStateList": claims})
        text = json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())})
        (self.root / "dra_manager_state").write_text(text)

    @property
    def registration(self) -> Path:
        """The registration socket."""
        return self.root / "plugins_registry" / f"{self.driver}-reg.sock"

    async def get_info(self) -> pluginregistration.PluginInfo:
        """Ask the driver who it is, as the kubelet does."""
        answer = await call_raw(self.registration, f"{_REGISTRATION}GetInfo", b"", 30)
        return pluginregistration.PluginInfo.parse(answer)

    async def notify(self, *, registered: bool, error: str = "") -> None:
        """Report the outcome of the registration, as the kubelet does."""
        said = pluginregistration.RegistrationStatus(plugin_registered=registered, error=error)
        await call_raw(
            self.registration, f"{_REGISTRATION}NotifyRegistrationStatus", bytes(said), 30
        )

    async def prepare(self, *refs: ResourceClaimRef) -> dict[str, v1.NodePrepareResourceResponse]:
        """Call NodePrepareResources; return the answers by uid."""
        request = v1.NodePrepareResourcesRequest(claims=_claims(refs))
        answer = await self._call("NodePrepareResources", bytes(request))
        return v1.NodePrepareResourcesResponse.parse(answer).claims

    async def unprepare(self, *refs: ResourceClaimRef) -> dict[str, str]:
        """Call NodeUnprepareResources; return the errors by uid."""
        request = v1.NodeUnprepareResourcesRequest(claims=_claims(refs))
        answer = await self._call("NodeUnprepareResources", bytes(request))
        found = v1.NodeUnprepareResourcesResponse.parse(answer).claims
        return {uid: response.error for uid, response in found.items()}

    async def _call(self, method: str, request: bytes) -> bytes:
        endpoint = self.root / "plugins" / self.driver / "dra.sock"
        return await call_raw(endpoint, f"{_SERVICE}{method}", request, 30)

    async def wait_registration(self) -> None:
        """Wait until the driver answers on its registration socket."""
        with anyio.fail_after(30):
            while True:
                try:
                    await self.get_info()
                except (OSError, StreamTerminatedError):
                    await anyio.sleep(0.01)
                else:
                    return


@dataclass
class DraNode(KubeletCalls):
    """The driver of one node, and what surrounds it."""

    registry: Registry = field(default_factory=Registry)
    claims: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    annotated: list[str] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    denied: bool = False
    monitored: set[GpuId] = field(default_factory=set)
    read_sharing: ReadSharing | None = None
    reads: int = 0
    unanswered: int = 0
    """Requests of pods and claims that the API server will not answer."""
    answering: anyio.Event | None = None
    """When the API server answers requests for claims; at once without it."""
    delay: int = 0
    """Turns of the event loop that its answer takes, and the check of CDI names."""

    def __post_init__(self) -> None:
        self.dra = self.new_dra()

    def new_dra(self) -> DraDriver:
        """Build a driver as a daemon does that starts."""
        return DraDriver(
            registry=self.registry,
            driver=DRIVER,
            node=NODE,
            kubelet_root=self.root,
            cdi_dir=self.root / "cdi",
            backend=lambda resource: self.layout.backends[resource],
            ensure_cdi_names=self.ensure_cdi_names,
            ensure_monitored=self.ensure_monitored,
            read_claim=self.read_claim,
            apply_status=self.apply_status,
            annotate_pod=self.annotate_pod,
            read_pending=self.read_pending,
            read_sharing=self.read_sharing,
            timing=RegistrationTiming(poll=0.02),
        )

    def offer(self, gpus: list[Gpu], config: str = CONFIG) -> None:
        """Offer the layout of a configuration on GPUs."""
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        self.layout = build_layout(parse(config, "test", installed_backends()), gpus, Injection())
        self.registry.apply(self.layout.offer_fact)

    async def read_claim(self, ref: ResourceClaimRef) -> Mapping[str, Any]:
        """Read a claim, as the API server would."""
        self.reads += 1
        if self.answering is not None:
            await self.answering.wait()
        await self._wait()
        self._check_answers()
        found = self.claims.get((ref.namespace, ref.name))
        if found is None:
            raise ClusterError(f"the API server answers 404: {ref.name} not found", status=404)
        return found

    async def apply_status(
        self, ref: ResourceClaimRef, status: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Apply the status of a claim, as the API server would."""
        claim = self.claims[ref.namespace, ref.name]
        claim["status"] |= status
        return claim

    async def ensure_cdi_names(self, names: frozenset[str]) -> None:
        """Take any names for known, after a while."""
        await no_cdi(names)
        await self._wait()

    async def _wait(self) -> None:
        await turns(self.delay)

    async def ensure_monitored(self, gpus: frozenset[GpuId]) -> None:
        """Note GPUs that containers look at; none forgets all."""
        self.monitored = self.monitored | gpus if gpus else set()

    async def read_pending(self) -> list[dict[str, Any]]:
        """Read the pods that wait on the node, as the API server would."""
        self._check_answers()
        return self.pending

    def _check_answers(self) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise ClusterError("the API server is away")

    async def annotate_pod(self, namespace: str, pod: str, key: str, value: str) -> None:
        """Set an annotation of a pod, as the API server would; a kubelet sees it at once."""
        assert value
        self.annotated.append(f"{namespace}/{pod}: {key}")
        if self.denied:
            raise ClusterError("the API server does not allow it")

    def result(self, gpu: Gpu, kind: str, request: str = "gpu", **more: Any) -> dict[str, Any]:  # noqa: ANN401
        """Build a result of an allocation: the device of a type on a GPU."""
        state = self.registry.snapshot.gpus[gpu.id]
        device = next(other for other in devices_of(state) if other.type == kind)
        found = {"request": request, "driver": DRIVER, "pool": pool_name(NODE)}
        return {**found, "device": device.name, **more}

    def fraction(self, gpu: Gpu, shares: int, request: str = "gpu") -> dict[str, Any]:
        """Build a result of some shares of a GPU."""
        consumed = {"shares": str(shares)}
        return self.result(gpu, "fraction", request, consumedCapacity=consumed, shareID="s-1")

    def allocate(
        self,
        name: str,
        *results: dict[str, Any],
        uid: int = 0,
        config: Sequence[dict[str, Any]] = (),
    ) -> ResourceClaimRef:
        """Make an allocated claim; return what the kubelet says of it."""
        devices = {"results": list(results), "config": list(config)}
        ref = ResourceClaimRef("default", name, str(UUID(int=uid or len(self.claims) + 1)))
        self.claims[ref.namespace, ref.name] = {
            "metadata": {"uid": ref.uid},
            "status": {
                "allocation": {"devices": devices},
                "reservedFor": [{"resource": "pods", "name": f"pod-of-{name}", "uid": "p"}],
            },
        }
        return ref

    def leased(self, ref: ResourceClaimRef) -> list[ShareId]:
        """Return the shares that a claim holds."""
        return [lease.share.id for lease in self.leases(ref)]

    def leases(self, ref: ResourceClaimRef) -> list[Lease]:
        """Return the leases of a claim."""
        return [
            lease
            for state in self.registry.snapshot.gpus.values()
            for lease in state.leases.values()
            if lease.resource_claim == ref
        ]

    def edits(self, ref: ResourceClaimRef) -> dict[str, dict[str, Any]]:
        """Read the edits of a claim's CDI names."""
        text = (self.root / "cdi" / f"metagpu.io-claim-{ref.uid}.json").read_text()
        spec = check_spec(text)
        return {
            f"{spec['kind']}={device['name']}": device["containerEdits"]
            for device in spec["devices"]
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the driver while the block lasts."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.dra.run)
            await self.wait_registration()
            yield
            group.cancel_scope.cancel()


async def turns(count: int = 50) -> None:
    """Run all tasks for some turns of the loop; by default, for what follows from a change."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def _claims(refs: tuple[ResourceClaimRef, ...]) -> list[v1.Claim]:
    return [v1.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in refs]


def variable(edits: Mapping[str, Any], name: str) -> str:
    """Return a variable of a container's edits."""
    env: list[str] = edits["env"]
    return dict(text.split("=", 1) for text in env)[name]
