"""Control daemons of MIG devices: leftovers of an agent that was killed."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.backends.common.mps_daemon.control import SHARED_MEMORY
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mig.mps_daemons import MigDevice, MpsDaemons
from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.programs import DaemonProcess, DaemonSpec
from metagpu.core.model.snapshot import KubeletWord
from metagpu.host.daemons import HostDaemons
from tests.rigs.build import gpu
from tests.rigs.daemons import DAEMONS, stand_in
from tests.rigs.waiting import until

if TYPE_CHECKING:
    from metagpu.core.contracts.backend import GpuContext

DEVICE = MigDevice("1g.5gb@0", "MIG-0", 7)


class Observer:
    """Notes nothing."""

    def daemon_changed(self, device: MigDevice, problem: str) -> None:
        """Note nothing."""


async def no_processes() -> Sequence[GpuProcess]:
    """Return no process: a GPU is asked where its control daemon is slow to answer."""
    return []


def of_gpu(folder: Path, group: TaskGroup) -> MpsDaemons:
    """Return the control daemons of a GPU without leases."""
    state = SimpleNamespace(
        leases={}, kubelet=KubeletWord(mig_devices_of_other_plugins=frozenset())
    )
    context = SimpleNamespace(
        daemons=DAEMONS,
        gpu=gpu(0),
        state=state,
        hands_over=True,
        stopping_processes=anyio.sleep_forever,
        processes=no_processes,
    )
    return MpsDaemons(
        cast("GpuContext", context),
        str(folder),
        MpsDaemonTiming(deadline=30.0),
        Observer(),
        group,
        shared_memory=SHARED_MEMORY,
    )


async def test_no_daemon_starts_in_a_folder_that_is_about_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that gets an instance whose leftovers are removed waits for their end."""
    removing, removed = anyio.Event(), anyio.Event()

    async def unmount(_: HostDaemons, daemon: DaemonSpec) -> None:
        del daemon
        removing.set()
        await removed.wait()

    async with stand_in(tmp_path, DEVICE.uuid) as live_stand_in, anyio.create_task_group() as group:
        await to_thread.run_sync(live_stand_in.folders.write_gpu, gpu(0).id)
        with monkeypatch.context() as patched:
            patched.setattr(HostDaemons, "unmount", unmount)
            daemons = of_gpu(tmp_path, group)
            daemons.follow([DEVICE], [])
            await removing.wait()
            before = dict(daemons._daemons)
            daemons.follow([DEVICE], [DEVICE])
            assert daemons._daemons == before
            removed.set()
            await live_stand_in.answers()
        group.cancel_scope.cancel()


async def test_a_leftover_of_an_instance_that_is_removed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance may be removed while the daemon that an earlier agent left there is met."""
    find, finding, found = HostDaemons.find, anyio.Event(), anyio.Event()

    async def find_slowly(daemons: HostDaemons, daemon: DaemonSpec) -> DaemonProcess | None:
        process = await find(daemons, daemon)
        if not finding.is_set():
            finding.set()
            await found.wait()
        return process

    async with stand_in(tmp_path, DEVICE.uuid) as live_stand_in, anyio.create_task_group() as group:
        await to_thread.run_sync(live_stand_in.folders.write_gpu, gpu(0).id)
        await DAEMONS.start(live_stand_in.daemon)
        await live_stand_in.answers()
        with monkeypatch.context() as patched:
            patched.setattr(HostDaemons, "find", find_slowly)
            daemons = of_gpu(tmp_path, group)
            daemons.follow([DEVICE], [])
            await finding.wait()
            async with anyio.create_task_group() as stopping:
                stopping.start_soon(daemons.stop, DEVICE.slot)
                await anyio.wait_all_tasks_blocked()
                found.set()
            assert await live_stand_in.process() is None
            assert not daemons._daemons
        group.cancel_scope.cancel()


async def test_servers_end_on_the_instances_that_are_named(tmp_path: Path) -> None:
    """An idle server is a process on its instance; those of other instances go on."""
    async with stand_in(tmp_path, DEVICE.uuid) as live_stand_in, anyio.create_task_group() as group:
        daemons = of_gpu(tmp_path, group)
        daemons.follow([DEVICE], [DEVICE])
        await live_stand_in.answers()
        with live_stand_in.client():
            await live_stand_in.servers()
        daemons.end_idle_servers(["2g.10gb@0"])
        assert not daemons._daemons[DEVICE.uuid].querying

        async def have_ended() -> bool:
            daemons.end_idle_servers([DEVICE.slot])
            return not await live_stand_in.control.servers()

        await until(have_ended, 30)
        group.cancel_scope.cancel()
