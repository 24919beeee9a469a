"""The containers of a simulated cluster's pods, and processes in them.

A process is a real one that waits until it is ended, and the simulated driver counts its memory and
load: the daemon finds, counts and ends it as any process of a container.
"""

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from metagpu.core.devices.devices import gpu_of_device
from metagpu.core.grants.injection import VISIBLE_DEVICES
from metagpu.core.model.shares import Holder
from metagpu.host.programs import run_child
from metagpu.sim.cluster.views import PodProcessView
from metagpu.sim.kubelet.pods import ContainerRunOptions, SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.node import SimNode

_COMMAND: Final = ("/bin/sh", "-c", "read _")
"""A process that ends by a signal, or with the daemon, which holds the other end of its input."""
_MIG_DEVICE: Final = re.compile(r"-mig-\w+-([0-9]+)$")
"""Ends the name of a MIG device in a ResourceSlice: its first memory slice."""


class VisibleDevice(NamedTuple):
    """A GPU that a container sees, or a compute instance of it."""

    gpu: SimGpu
    gi: int | None = None
    ci: int | None = None


class PodProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is to run in a container.

    Attributes:
        uid: of the pod.
        memory: in bytes, `None` where NVML does not know it.
        load: the percent of the multiprocessors that it would use alone.
    """

    uid: str
    holder: Holder
    device: VisibleDevice
    memory: int | None
    load: int


class _Running(msgspec.Struct):
    process: PodProcess
    scope: anyio.CancelScope
    ended: anyio.Event


class PodContainers:
    """The containers that run now; `machine` shows the daemon their processes."""

    def __init__(self, folder: Path, node: SimNode) -> None:
        self.machine = SimHost(folder, make=False)
        self._node = node
        self._running: dict[int, _Running] = {}
        self._group: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run processes until the block ends, which ends them."""
        await to_thread.run_sync(self.machine.make)
        async with anyio.create_task_group() as self._group:
            yield
            self._group.cancel_scope.cancel()

    def start(self, pod: SimPod) -> None:
        """Start the containers of a pod."""
        for container in pod.listed():
            holder = Holder(pod.namespace, pod.name, container.name)
            self.machine.start(holder, uid=pod.uid)

    async def end(self, uid: str) -> None:
        """End the containers of a pod, and their processes."""
        await self.end_processes(lambda process: process.uid == uid)
        self.machine.end(uid)

    async def start_process(self, process: PodProcess) -> int:
        """Start a process; return its pid.

        Raises:
            SimError: its GPU has not enough memory left, or the limit of its cgroup is lower.
        """
        if self._group is None:
            raise SimError("the simulated cluster does not run yet")
        pid: int = await self._group.start(self._run, process)
        return pid

    async def end_processes(self, chosen: Callable[[PodProcess], bool]) -> Sequence[int]:
        """End processes; return the pids of those that ran."""
        found = {pid: each for pid, each in self._running.items() if chosen(each.process)}
        for each in found.values():
            each.scope.cancel()
        for each in found.values():
            await each.ended.wait()
        return [*found]

    async def follow(self, pid: int, *, ends: bool) -> None:
        """Follow a command about a process by its pid, in a container or not."""
        shown = self.machine.proc / str(pid)
        if (running := self._running.get(pid)) is not None:
            if ends:
                running.scope.cancel()
                await running.ended.wait()
        elif ends:
            shown.unlink(missing_ok=True)
        elif not shown.is_symlink():
            shown.symlink_to(f"/proc/{pid}")

    def views(self) -> Sequence[PodProcessView]:
        """Return the processes, the oldest first."""
        indices = {gpu.id: index for index, gpu in enumerate(self._node.gpus)}
        found = []
        for pid, running in self._running.items():
            holder, (gpu, gi, ci) = running.process.holder, running.process.device
            counted = gpu.processes.get((pid, gi, ci))
            memory, load = (counted.memory, counted.sm) if counted else (0, 0)
            names = holder.namespace, holder.pod, holder.container
            found.append(PodProcessView(pid, *names, indices.get(gpu.id), memory, load))
        return found

    async def _run(self, process: PodProcess, *, task_status: TaskStatus[int]) -> None:
        reader, writer = os.pipe()
        try:
            async with run_child(_COMMAND, stdin=reader) as child:
                self._begin(child.pid, process)
                running = _Running(process, anyio.CancelScope(), anyio.Event())
                self._running[child.pid] = running
                try:
                    task_status.started(child.pid)
                    with running.scope:
                        await child.wait()
                finally:
                    self._finish(child.pid, process)
                    running.ended.set()
        finally:
            os.close(reader)
            os.close(writer)

    def _begin(self, pid: int, process: PodProcess) -> None:
        self.machine.add_container_process(pid, process.holder, uid=process.uid)
        gpu, gi, ci = process.device
        cgroup = self.machine.cgroup_of(pid)
        counted = SimProcess(pid, process.memory, gi, ci, sm=process.load, cgroup=cgroup)
        try:
            self._node.start_process(gpu, counted)
        except SimError:
            shutil.rmtree(self.machine.proc / str(pid))
            raise

    def _finish(self, pid: int, process: PodProcess) -> None:
        del self._running[pid]
        with suppress(SimError):  # gone by a reboot
            self._node.end_process(process.device.gpu, pid)
        shutil.rmtree(self.machine.proc / str(pid))


def visible_devices(
    node: SimNode, options: ContainerRunOptions, claimed: Iterable[str]
) -> Sequence[VisibleDevice]:
    """Return the devices that a container sees, in the order of the GPUs.

    Args:
        node: the node.
        options: the container's, by device plugins.
        claimed: the devices of its ResourceClaims, by their names in ResourceSlices.
    """
    names = [
        *options.envs.get(VISIBLE_DEVICES, "").split(","),
        *(Path(mount.container_path).name for mount in options.mounts),
        *(name.partition("=")[2] for name in options.cdi_devices),
    ]
    with node.changed:
        found = [device for name in names for device in _named(node, name)]
        found += [device for name in claimed for device in _claimed(node, name)]
    by_name = {(gpu.slot, gi or 0, ci or 0): VisibleDevice(gpu, gi, ci) for gpu, gi, ci in found}
    return [by_name[key] for key in sorted(by_name)]


def _named(node: SimNode, name: str) -> Iterator[VisibleDevice]:
    for index, gpu in enumerate(node.gpus):
        if name in {gpu.id, str(index)}:
            yield VisibleDevice(gpu)
        for instance, compute in gpu.mig.compute_instances:
            if compute.uuid == name:
                yield VisibleDevice(gpu, instance.number, compute.number)


def _claimed(node: SimNode, device: str) -> Iterator[VisibleDevice]:
    start = _MIG_DEVICE.search(device)
    for gpu in node.gpus:
        if gpu.id == gpu_of_device(device):
            parts = [
                VisibleDevice(gpu, instance.number, compute.number)
                for instance, compute in gpu.mig.compute_instances
                if start and instance.start == int(start[1])
            ]
            yield parts[0] if parts else VisibleDevice(gpu)
