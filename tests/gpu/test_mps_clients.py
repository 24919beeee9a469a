"""Clients of NVIDIA's MPS on a real GPU: what a container gets is what its program can have.

The compute mode stays as it is, as every setting of the GPU: clients find the daemon by its folder.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import (
    PROGRAM,
    SERVER_MEMORY,
    SHARED_MEMORY,
    MpsControl,
    MpsDirectories,
    control_daemon_spec,
    grant_to_client,
    usable_memory,
)
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.core.grants.grant import Grant
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from tests.gpu.conftest import Card
from tests.rigs.cuda import CudaProgram, cuda_process, cuda_program
from tests.rigs.waiting import until

pytestmark = pytest.mark.gpu

ANSWER = 30.0
UNITS = 100
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class Mps(NamedTuple):
    """A running control daemon of a GPU."""

    card: Card
    folders: MpsDirectories
    control: MpsControl

    def env(self, units: int) -> Mapping[str, str]:
        """Return the variables of a container with some units of the GPU."""
        gpu = self.card.gpu
        assert gpu.memory is not None
        usable = usable_memory(gpu.memory - (gpu.reserved or 0), SERVER_MEMORY)
        part = usable // UNITS
        unit = Share(
            id=ShareId("unit"),
            gpu=gpu.id,
            resource=ResourceName("example.com/mps"),
            backend="mps",
            number=0,
            footprint=frozenset(),
            memory=part,
        )
        return grant_to_client(Grant(), self.folders, [unit] * units, UNITS).envs

    @asynccontextmanager
    async def container(self, units: int) -> AsyncIterator[CudaProgram]:
        """Run a program that has some units, while the block lasts."""
        async with cuda_program(self.card.gpu.id, self.env(units), self.folders.shm) as program:
            yield program


@pytest.fixture
async def mps(card: Card, tmp_path: Path) -> AsyncIterator[Mps]:
    """Run the control daemon of the card, which is gone at the end."""
    if os.geteuid():
        pytest.skip("MPS's folders are mounts, which take root")
    daemons = HostDaemons(HostPrograms())
    folders = MpsDirectories(tmp_path / "mps" / card.gpu.id)
    daemon = control_daemon_spec(card.gpu.id, folders, SHARED_MEMORY)
    control = MpsControl(daemons, daemon, ANSWER)
    try:
        await daemons.programs.resolve(PROGRAM)
    except ProgramMissing as error:
        pytest.skip(f"clients of MPS were not tested: {error}")
    await to_thread.run_sync(folders.create)

    async def answers() -> bool:
        try:
            await control.probe()
        except ProgramError:
            return False
        return True

    process = await daemons.start(daemon)
    try:
        await until(answers, ANSWER)
        yield Mps(card, folders, control)
        await control.quit()
        with anyio.fail_after(ANSWER):
            await daemons.wait_ended(process)
    finally:
        if (left := await daemons.find(daemon)) is not None:
            await daemons.kill(left)
        await daemons.unmount(daemon)


async def test_a_client_has_its_part_of_the_memory_and_no_more(mps: Mps) -> None:
    """MPS refuses what would exceed the limit, and the client goes on."""
    limit = int(mps.env(10)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=")[:-1])
    async with mps.container(10) as program:
        assert int(await program.ask("memory")) <= limit
        assert await program.ask(f"take {limit // 2}") == "ok"
        assert await program.ask(f"take {limit // 2 + 1}") == OUT_OF_MEMORY
        assert await program.ask(f"take {limit // 4}") == "ok"


async def test_a_client_has_its_part_of_the_threads(mps: Mps) -> None:
    """A client counts the multiprocessors of its units."""
    async with cuda_program(mps.card.gpu.id) as alone:
        all_of_them = int(await alone.ask("threads"))
    async with mps.container(25) as program:
        assert await program.ask("spin 1") == "ok"
        seen = int(await program.ask("threads"))

    assert 0.15 * all_of_them <= seen <= 0.30 * all_of_them


async def test_clients_of_two_containers_are_listed_side_by_side(mps: Mps) -> None:
    """One server serves both containers; each has its own limit, whatever the other takes."""
    async with mps.container(30) as one, mps.container(50) as other:
        pids = {one.process.pid, other.process.pid}
        [server] = await mps.control.servers()
        assert set(await mps.control.clients(server)) == pids
        assert await other.ask("take 4096") == "ok"
        assert await one.ask("take 4096") == "ok"
        listed = {
            process.pid: process.memory
            for process in await mps.card.driver.processes(mps.card.gpu.id)
        }

    assert pids <= listed.keys()
    assert all((listed[pid] or 0) >= 4096 * MIB for pid in pids)


async def test_a_client_that_is_ended_amid_its_work_harms_no_other(mps: Mps) -> None:
    """After the control daemon's answer its process is killed; the others and new ones compute."""
    async with mps.container(30) as one, mps.container(50) as other:
        [server] = await mps.control.servers()
        async with anyio.create_task_group() as group:
            group.start_soon(one.ask, "spin 2000")
            await anyio.sleep(0.2)  # the kernel runs
            await mps.control.end_client(server, one.process.pid)
        one.process.kill()
        await one.process.wait()
        assert await other.ask("spin 10") == "ok"
        async with mps.container(20) as new:
            assert await new.ask("spin 10") == "ok"


async def test_the_fault_of_a_client_is_known_by_the_server(mps: Mps) -> None:
    """After a client's fault the server is at fault, or active again; new clients are served."""
    async with mps.container(20) as program:
        [server] = await mps.control.servers()
        assert await program.ask("fault") != "ok"
        assert (await mps.control.status(server)).upper() in {"FAULT", "ACTIVE", "INITIALIZING"}

    async def serves() -> bool:
        async with cuda_process(mps.card.gpu.id, mps.env(20), mps.folders.shm) as program:
            return await program.ask() == "ready" and await program.ask("take 64") == "ok"

    await until(serves, ANSWER)
