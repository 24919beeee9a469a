"""The removal of everything that metagpu left on this node, while no daemon runs.

Each part that leaves something knows how to find and to remove it (`Leftover`). They come in an
order: what uses a thing goes before the thing.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread

from metagpu.agent.agent import Agent
from metagpu.agent.exchange import STANDBY_FILE
from metagpu.agent.fault_note_file import FILE_NAME as FAULTS
from metagpu.agent.paths import AgentPaths
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.contracts.capabilities import LeavesOnNode
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover, Removal, Result, settle
from metagpu.core.errors import ClusterError, DriverError, KubeletError, describe_error
from metagpu.core.grants import cdi
from metagpu.core.grants.injection import CLIENT_NAME, POD_SOCKET_NAME
from metagpu.core.model.shares import Holder
from metagpu.core.runtime.files import replace_text
from metagpu.host import node_leftovers as on_host
from metagpu.host.containers import DEFAULT_ROOT, find_pods
from metagpu.host.programs import run_command
from metagpu.host.service import service_files
from metagpu.plugins.cluster import leftovers as at_api_server
from metagpu.plugins.control.client import SOCKET_NAME
from metagpu.plugins.control.socket import LOCK_NAME, lock_of
from metagpu.plugins.kubelet.checkpoint import read_allocated_ids, read_registered_resources
from metagpu.plugins.kubelet.folder_lock import FolderLock
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from metagpu.plugins.kubelet.pod_list import read_leases

_POLL: Final = 0.2
_RUN_FILES: Final = (*("mps", SOCKET_NAME, FAULTS, "faults.new", STANDBY_FILE, "lib", LOCK_NAME),)
"""A control daemon that stays keeps them all: `mps` is not empty then."""
_GPU: Final = "GPU-"
"""The prefix of our shares' ids."""
_NEW_SOCKET: Final = f"{POD_SOCKET_NAME}.new"
"""Left by a relay that was killed as it began to listen."""
_POD_FILES: Final = (
    *(POD_SOCKET_NAME, _NEW_SOCKET, CLIENT_NAME, f".{CLIENT_NAME}.new"),
    *(cdi.HOOK_NAME, f".{cdi.HOOK_NAME}.new"),
)


def _find_start_hook(file: Path) -> Iterator[Leftover]:
    """Find the hook that no daemon answers any more; a damaged specification keeps it."""
    try:
        if cdi.HOOK_NAME in (text := file.read_text()):
            remove = partial(replace_text, file, cdi.without_start_hook(text))
            yield on_host.leftover("start hook", file, remove)
    except Exception as error:  # noqa: BLE001 - a damaged file may have any shape
        reason = f"the specification cannot be read: {describe_error(error)}"
        yield on_host.leftover("start hook", file, file.unlink, reason)


class Report:
    """The result of each leftover, and notes on what could not be read."""

    def __init__(self) -> None:
        self.removals: list[Removal] = []
        self.notes: list[str] = []

    @property
    def complete(self) -> bool:
        """True if nothing stays."""
        return all(removal.result is not Result.STAYS for removal in self.removals)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {"leftovers": [removal.to_dict() for removal in self.removals], "notes": self.notes}


@dataclass
class Uninstall:
    """Finds the leftovers of this node, and removes them.

    Attributes:
        agent: knows configuration and GPUs; it serves nothing, and writes into no folder.
        paths: those of the daemon that is gone.
        root: of the system that has the service's files.
        program: the program in these files.
        wanted: whether to remove; else all is only listed.
        force: whether to remove also what pods use.
        cgroups: the folder of all cgroups, which has those of pods.
        pods_deadline: seconds for the kubelet to say which pods hold shares.
    """

    agent: Agent
    paths: AgentPaths
    root: Path
    program: Path
    wanted: bool = False
    force: bool = False
    cgroups: Path = DEFAULT_ROOT
    pods_deadline: float = 10.0

    async def run(self) -> Report:
        """Remove, or list, everything.

        Raises:
            AnotherDaemon: a daemon runs on this node.
            KubeletError: there is no kubelet's folder, and something is to be removed.
            ConfigError: the configuration is not valid, or does not fit the GPUs.
        """
        folder = self.paths.kubelet_dir
        if self.wanted and not await anyio.Path(folder).is_dir():
            raise KubeletError(
                f"nothing is removed: there is no {folder}; run this on the node, or in a pod that "
                "mounts what the DaemonSet does, or name the kubelet's folder with --kubelet-dir"
            )
        report = Report()
        lock = FolderLock(folder, period=1.0)
        async with AsyncExitStack() as stack:
            await to_thread.run_sync(stack.enter_context, lock_of(self.paths.run_dir))
            await stack.enter_async_context(lock.held())
            async with self._node(report) as node:
                for kind in installed_backends().values():
                    if issubclass(kind, LeavesOnNode):
                        await self._settle(await kind.find_leftovers(node), report)
            await self._settle(await to_thread.run_sync(self._in_folders, node), report)
            await self._at_api_server(report)
            # The lock's file comes last: no daemon starts before.
            await self._settle(await to_thread.run_sync(self._service_and_run_folder), report)
        return report

    async def _settle(self, found: Iterable[Leftover], report: Report) -> None:
        for each in found:
            report.removals.append(await settle(each, wanted=self.wanted, force=self.force))

    @asynccontextmanager
    async def _node(self, report: Report) -> AsyncIterator[AbandonedNode]:
        """Read GPUs and pods; keep the driver open while the block lasts."""
        agent = self.agent
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(agent.driver.session())
                await agent.survey()
            except DriverError as error:
                reason = f"the GPUs cannot be read, and stay as they are: {error}"
                report.removals.append(Removal("gpus", "NVML", Result.STAYS, reason))
            holders = await self._learn_holders(report)
            snapshot = agent.registry.snapshot
            assignments = [
                (assignment.gpu, assignment.backend)
                for assignment in agent.layout.backend_assignments
            ]
            run_dir, daemons = self.paths.run_dir.absolute(), agent.context.daemons
            yield AbandonedNode(run_dir, daemons, agent.driver, snapshot, assignments, holders)

    async def _learn_holders(self, report: Report) -> Collection[Holder] | None:
        """Return the containers with shares, `None` if the kubelet does not say in time."""
        reason = ""
        with anyio.move_on_after(self.pods_deadline):
            while True:
                try:
                    if (holders := await self._ask_kubelet()) is not None:
                        return holders
                    reason = "it does not list all pods that run"
                except Exception as error:  # noqa: BLE001 - gRPC fails in many ways
                    reason = describe_error(error)
                await anyio.sleep(_POLL)
        report.notes.append(f"the kubelet does not say which pods hold shares: {reason}")
        return None

    async def _ask_kubelet(self) -> Collection[Holder] | None:
        answer = await read_leases(self.paths.pod_resources, anyio.current_time())
        allocated = await to_thread.run_sync(read_allocated_ids, self.paths.kubelet_dir)
        if allocated is None and await anyio.Path(self.paths.kubelet_dir, CHECKPOINT_FILE).exists():
            return None  # it cannot be read, and no list names the shares of init containers
        pods = allocated.pods if allocated else {}
        # The checkpoint names the shares of ended pods too.
        unlisted = {uid for uid, ids in pods.items() if ids - answer.holders.keys()}
        if await to_thread.run_sync(find_pods, self.cgroups, unlisted):
            return None
        await self.agent.resource_claims.read_leases()
        self.agent.registry.apply(answer)
        # The registry knows no lease of a GPU that cannot be read.
        held = {holder for share, holder in answer.holders.items() if share.startswith(_GPU)}
        return held.union(*answer.of_claims.values())

    def _in_folders(self, node: AbandonedNode) -> Sequence[Leftover]:
        pod_dir, cdi_dir = self.paths.pod_dir, self.paths.cdi_dir
        found = [*on_host.find_sockets(self.paths.kubelet_dir)]
        driver, root = self.agent.config.root.dra.driver, self.paths.kubelet_root
        found += on_host.find_dead_socket(root / "plugins_registry" / f"{driver}-reg.sock")
        found += on_host.find_dead_socket(root / "plugins" / driver / "dra.sock")
        if cdi_dir is not None:
            own = cdi_dir / cdi.FILE_NAME, cdi_dir / cdi.MONITOR_FILE
            if node.used_by and not self.force and own[0].exists():
                found += _find_start_hook(own[0])
            for file in (*own, *cdi_dir.glob(cdi.CLAIM_FILES)):
                found += on_host.find_file("CDI specification", file, node.used_by)
        if pod_dir is not None:
            found += on_host.find_folder(
                "pod folder", pod_dir, _POD_FILES, node.used_by, with_parent=True
            )
        return found

    def _service_and_run_folder(self) -> Sequence[Leftover]:
        files = service_files(self.program, self.root, mps=True)
        return [
            *on_host.find_service(files, self.root),
            *on_host.find_folder("run folder", self.paths.run_dir, _RUN_FILES),
        ]

    async def _at_api_server(self, report: Report) -> None:
        settings = self.agent.cluster_settings
        if settings is None:
            report.notes.append(
                "the API server was not asked for labels, conditions, taint and amounts of the "
                "Node: give --node-name and --kubeconfig"
            )
            return
        registered = await to_thread.run_sync(read_registered_resources, self.paths.kubelet_dir)
        resources = self.agent.registry.snapshot.offers.keys()
        try:
            async with at_api_server.connected(settings, run_command, settings.timing) as client:
                found = await at_api_server.find_at_api_server(
                    client, settings, resources, registered
                )
                await self._settle(found, report)
        except ClusterError as error:
            reason = f"labels and conditions of the Node are not known: {error}"
            report.removals.append(Removal("node", f"Node {settings.node}", Result.STAYS, reason))
