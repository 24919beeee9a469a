"""The DRA driver of the agent; its modules are loaded only where a pool has it."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu.agent.context import NodeContext
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.paths import CDI_DIR
from metagpu.core.errors import ClusterError
from metagpu.core.grants.cdi import CLAIM_FILES
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceClaimRef, ShareId
from metagpu.core.reports.schema.daemon import DraReport
from metagpu.core.state.events import LayoutApplied
from metagpu.host.programs import run_command

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient
    from metagpu.plugins.dra.driver import DraDriver

_CLIENT: Final = "metagpu.plugins.cluster.client"
_CHECKPOINT: Final = "dra_manager_state"
_OUR_CLAIMS: Final = b"metagpu.io/claim=", b"metagpu.io/monitor="
_REGISTRATION: Final = 10.0
"""The longest wait for the kubelet before the first slice, in seconds."""
_POLL: Final = 0.05
_NO_API_SERVER: Final = (
    "a pool has `api: dra`, and ResourceClaims are read from the API server: give --node-name "
    "and --kubeconfig, or run in a pod with a service account"
)

log = structlog.get_logger()


class ResourceClaims:
    """Runs the DRA driver while a pool has it, or earlier claims are held."""

    def __init__(self, context: NodeContext, layout_manager: LayoutManager) -> None:
        self.context = context
        self.layout_manager = layout_manager
        self.settings = context.cluster_settings
        self._serving: DraDriver | None = None
        self._client: KubeClient | None = None
        self._held = False
        self._leases_read = anyio.Event()
        self._begun = anyio.Event()

    async def read_leases(self) -> None:
        """Begin the leases of prepared claims, before anything else is granted."""
        if await to_thread.run_sync(self._may_have_claims):
            checkpoint = await self._build(self._driver).checkpoint.read_leases()
            self._held = checkpoint is not None and checkpoint.has_claims_of_ours
        self._leases_read.set()

    async def run(self) -> None:
        """Serve claims while a pool has DRA, under the driver's present name."""
        with self.context.registry.events.subscribe(LayoutApplied) as events:
            while True:
                driver = self._driver if self._wanted else None
                async with anyio.create_task_group() as group:
                    if driver is not None:
                        group.start_soon(self._serve, driver)
                    else:
                        group.start_soon(self._wait_held, group.cancel_scope)
                    async for _ in events:
                        if driver != (self._driver if self._wanted else None):
                            break
                    group.cancel_scope.cancel()

    async def _wait_held(self, idle: anyio.CancelScope) -> None:
        """End the idle time once claims are known to be held: they need the driver too."""
        await self._leases_read.wait()
        if self._wanted:
            idle.cancel()

    async def wait_registered(self) -> None:
        """Wait until claims are served, and then for the kubelet to have the driver.

        A pod that is bound before waits a minute.
        """
        await self._begun.wait()
        with anyio.move_on_after(_REGISTRATION):
            while not self._is_registered:  # noqa: ASYNC110 - the kubelet says it in a call
                await anyio.sleep(_POLL)

    def report(self) -> DraReport | None:
        """Return the state of the driver, `None` where no pool has it."""
        if self._serving is None:
            return None
        problem = None if self.settings else _NO_API_SERVER
        report = self._serving.report()
        return msgspec.structs.replace(report, problem=problem or report.problem)

    def requests_of(self, uid: str) -> Mapping[ShareId, str]:
        """Return the request of each share of a claim that has several."""
        return self._serving.preparer.requests_of(uid) if self._serving is not None else {}

    @property
    def _is_registered(self) -> bool:
        return self._serving is not None and self._serving.registration.status.registered

    @property
    def _driver(self) -> str:
        return self.context.config.root.dra.driver

    @property
    def _wanted(self) -> bool:
        snapshot = self.context.registry.snapshot
        leases = (lease for state in snapshot.gpus.values() for lease in state.leases.values())
        prepared = self._serving is not None and bool(self._serving.preparer.states.prepared)
        self._held = (
            self._held or prepared or any(lease.resource_claim is not None for lease in leases)
        )
        return bool(snapshot.offers_of(Api.DRA)) or (self._held and bool(snapshot.offers))

    def _may_have_claims(self) -> bool:
        """Return whether the kubelet's checkpoint names claims of ours, or cannot be read.

        Of those whose answer it has not written there are files alone.
        """
        try:
            checkpoint = (self.context.paths.kubelet_root / _CHECKPOINT).read_bytes()
            msgspec.json.decode(checkpoint)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError):
            return True
        files = (self.context.paths.cdi_dir or CDI_DIR).glob(CLAIM_FILES)
        return any(claim in checkpoint for claim in _OUR_CLAIMS) or any(files)

    def _build(self, driver: str) -> "DraDriver":
        from metagpu.compat import nvidia_claims  # noqa: PLC0415 - behind the switch
        from metagpu.plugins.dra.driver import DraDriver  # noqa: PLC0415 - as said

        manager = self.layout_manager
        return DraDriver(
            registry=self.context.registry,
            driver=driver,
            node=self.context.node,
            kubelet_root=self.context.paths.kubelet_root,
            cdi_dir=self.context.paths.cdi_dir or CDI_DIR,
            backend=manager.backend,
            ensure_cdi_names=manager.cdi_file.ensure_names,
            ensure_monitored=manager.cdi_file.ensure_monitored,
            read_claim=self._read_claim,
            apply_status=self._apply_status,
            annotate_pod=self._annotate_pod,
            read_pending=self._read_pending,
            stats=self.context.call_stats.prepares,
            read_sharing=nvidia_claims.read_sharing if driver == nvidia_claims.DRIVER else None,
        )

    async def _serve(self, driver: str) -> None:
        if self.settings is None:
            log.error("no api server for resource claims", fix=_NO_API_SERVER)
        self._serving = self._build(driver)
        self._begun.set()
        try:
            async with AsyncExitStack() as stack:
                if (settings := self.settings) is not None:
                    # In a thread: the client's libraries take a tenth of a second, and another
                    # thread's import would make the loop wait.
                    await to_thread.run_sync(import_module, _CLIENT)
                    from metagpu.plugins.cluster.client import (  # noqa: PLC0415 - as said
                        open_client,
                    )

                    opened = open_client(settings.kubeconfig, run_command, settings.timing)
                    self._client = await stack.enter_async_context(opened)
                await self._serving.run()
        finally:
            self._serving = self._client = None

    async def _read_claim(self, claim: ResourceClaimRef) -> Mapping[str, Any]:
        if self._client is None:
            raise ClusterError(_NO_API_SERVER)
        return await self._client.call("GET", _path_of(claim))

    async def _apply_status(
        self, claim: ResourceClaimRef, status: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Apply a status: entries of others stay, and those that it lacks now are removed."""
        if self._client is None:
            raise ClusterError(_NO_API_SERVER)
        from metagpu.plugins.cluster.node_object import (  # noqa: PLC0415 - as said
            APPLY_PATCH,
            FIELD_MANAGER,
        )

        metadata = {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid}
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": metadata,
            "status": status,
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = f"{_path_of(claim)}/status"
        return await self._client.call("PATCH", path, query=query, body=body, content=APPLY_PATCH)

    async def _read_pending(self) -> Sequence[Mapping[str, Any]]:
        if self._client is None:
            raise ClusterError(_NO_API_SERVER)
        here = f"spec.nodeName={self.context.node},status.phase=Pending"
        found = await self._client.call("GET", "/api/v1/pods", query={"fieldSelector": here})
        return found.get("items") or ()

    async def _annotate_pod(self, namespace: str, pod: str, key: str, value: str) -> None:
        if self._client is not None:
            from metagpu.plugins.cluster.node_object import MERGE_PATCH  # noqa: PLC0415 - as said

            path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
            body = {"metadata": {"annotations": {key: value}}}
            await self._client.call("PATCH", path, body=body, content=MERGE_PATCH)


def _path_of(claim: ResourceClaimRef) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
