"""Control daemons of MIG devices: leftovers of an agent that was killed."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio import to_thread

from metagpu.backends.common.mps_daemon.client_limits import SHARED_MEMORY
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mig.mps_daemons import MigDevice, MpsDaemons
from metagpu.core.contracts.daemons import DaemonProcess, DaemonSpec
from metagpu.host.daemons import HostDaemons
from tests.rigs.build import gpu
from tests.rigs.daemons import DAEMONS, stand_in

if TYPE_CHECKING:
    from metagpu.core.contracts.gpu_context import GpuContext

DEVICE = MigDevice("1g.5gb@0", "MIG-0", 7)


class Observer:
    """Notes nothing."""

    def daemon_changed(self, device: MigDevice, problem: str) -> None:
        """Note nothing."""


async def test_no_daemon_starts_in_a_folder_that_is_about_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that gets an instance whose leftovers are removed waits for their end."""
    removing, removed, early = anyio.Event(), anyio.Event(), list[str]()
    start = HostDaemons.start

    async def unmount(_: HostDaemons, daemon: DaemonSpec) -> None:
        del daemon
        removing.set()
        await removed.wait()

    async def start_noted(daemons: HostDaemons, daemon: DaemonSpec) -> DaemonProcess:
        early.extend(() if removed.is_set() else ("started in the folder",))
        return await start(daemons, daemon)

    state = SimpleNamespace(leases={}, mig_devices_of_other_plugins=frozenset())
    context = SimpleNamespace(daemons=DAEMONS, gpu=gpu(0), state=state, hands_over=True)
    async with stand_in(tmp_path, DEVICE.uuid) as it, anyio.create_task_group() as group:
        await to_thread.run_sync(it.folders.write_gpu, gpu(0).id)
        with monkeypatch.context() as patched:
            patched.setattr(HostDaemons, "unmount", unmount)
            patched.setattr(HostDaemons, "start", start_noted)
            daemons = MpsDaemons(
                cast("GpuContext", context),
                str(tmp_path),
                MpsDaemonTiming(),
                Observer(),
                group,
                shared_memory=SHARED_MEMORY,
            )
            daemons.follow([DEVICE], [])
            await removing.wait()
            daemons.follow([DEVICE], [DEVICE])
            await anyio.sleep(0.2)  # a start would begin at once
            removed.set()
            await it.answers()
        group.cancel_scope.cancel()
    assert not early
