"""One process of the simulated kubelet, from its checkpoint to its kill (§2)."""

import random
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from metagpu.sim.kubelet.admission import PodAdmission
from metagpu.sim.kubelet.device_manager import DeviceManagerState
from metagpu.sim.kubelet.pod_resources import (
    Claimed,
    PodResourcesSource,
    PodResourcesV1,
    PodResourcesV1Alpha1,
)
from metagpu.sim.kubelet.pods import SimPod
from metagpu.sim.kubelet.registration import KubeletStats, RegistrationService
from metagpu.sim.kubelet.topology import TopologyPolicy
from metagpu.sim.kubelet.transport import AbortableServer

SOCKET = "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"


class KubeletSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that outlive a process; `SimKubelet` explains each."""

    directory: Path
    pod_resources: Path | None
    numa_nodes: Collection[int]
    topology_policy: TopologyPolicy
    stop_grace: float
    dial_timeout: float
    pre_start_timeout: float
    fixed_clashes: bool
    clock: Callable[[], float]
    rng: random.Random
    claimed: Claimed


@dataclass(slots=True)
class KubeletProcess:
    """The state that is lost when the process dies."""

    state: DeviceManagerState
    checkpoint: Path
    alive: bool = True
    servers: list[AbortableServer] = field(default_factory=list)
    saving: anyio.Lock = field(default_factory=anyio.Lock)
    save_requests: int = 0
    saved_requests: int = 0
    registration: RegistrationService = field(init=False)
    admission: PodAdmission = field(init=False)

    async def save(self) -> None:
        """Write the checkpoint atomically; do nothing after the process died.

        One write serves all requests made before the write began.
        """
        self.save_requests += 1
        mine = self.save_requests
        async with self.saving:
            if self.alive and self.saved_requests < mine:
                covered, text = self.save_requests, self.state.checkpoint()
                await to_thread.run_sync(_replace, self.checkpoint, text)
                self.saved_requests = covered

    async def end(self) -> None:
        """Kill the process: no answer, no farewell, files stay."""
        self.alive = False
        for door in self.servers:
            await door.abort()
        await self.registration.close_plugins()
        async with self.saving:  # a write under way must not reach into the next process
            pass


async def start_kubelet(
    settings: KubeletSettings,
    stats: KubeletStats,
    *,
    pods: Mapping[str, SimPod],
    started: Collection[tuple[str, str]],
) -> tuple[KubeletProcess, bool]:
    """Start a kubelet; also return whether its directory is that of a new node.

    `pods` is read throughout the lifetime, `started` are the containers that run by now.

    Raises:
        OSError: a socket cannot be bound.
    """
    state = DeviceManagerState(clock=settings.clock, stop_grace=settings.stop_grace)
    process = KubeletProcess(state, settings.directory / CHECKPOINT)
    text, is_new = await to_thread.run_sync(_look, settings.directory)
    state.restore(text)
    state.ready = not pods
    process.admission = PodAdmission(
        state,
        save=process.save,
        active=pods.values,
        running=started,
        rng=settings.rng,
        numa_nodes=settings.numa_nodes,
        policy=settings.topology_policy,
        pre_start_timeout=settings.pre_start_timeout,
    )
    process.registration = RegistrationService(
        state,
        settings.directory,
        stats,
        save=process.save,
        dial_timeout=settings.dial_timeout,
        fixed_clashes=settings.fixed_clashes,
    )
    try:
        await _open_doors(process, settings, pods)
    except OSError:
        await process.end()
        raise
    return process, is_new


async def _open_doors(
    process: KubeletProcess, settings: KubeletSettings, pods: Mapping[str, SimPod]
) -> None:
    if settings.pod_resources is not None:
        resources = PodResourcesSource(
            process.state,
            active=pods.values,
            free=process.admission.release_ended_pods,
            clock=settings.clock,
            claimed=settings.claimed,
        )
        lister = AbortableServer([PodResourcesV1(resources), PodResourcesV1Alpha1(resources)])
        await lister.open(settings.pod_resources)
        process.servers.append(lister)
    door = AbortableServer([process.registration])
    await door.open(settings.directory / SOCKET, wipe=settings.directory)
    process.servers.append(door)


def _look(directory: Path) -> tuple[str, bool]:
    """Read the checkpoint; also return whether the directory has nothing but sockets."""
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    try:
        text = (directory / CHECKPOINT).read_text()
    except FileNotFoundError:
        text = ""
    return text, all(_is_socket(path) for path in directory.iterdir())


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:  # a plugin took its socket away just now
        return True


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
