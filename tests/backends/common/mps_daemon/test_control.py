"""The client of a control daemon: a wrong answer is an error with its text."""

import os
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, cast

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace
from structlog.testing import capture_logs

from metagpu.backends.common.mps_daemon import supervisor as mps_supervisor
from metagpu.backends.common.mps_daemon.control import (
    SHARED_MEMORY,
    MpsControl,
    MpsDirectories,
    check_number,
    control_daemon_spec,
    grant_to_client,
    leftover_devices,
    limit_clients,
    max_clients_of,
)
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.common.mps_daemon.supervisor import DaemonSupervisor, find_control_daemons
from metagpu.core.contracts.driver import ComputeMode, GpuProcess
from metagpu.core.contracts.leftovers import AbandonedNode
from metagpu.core.contracts.programs import DaemonProcess, Daemons, DaemonSpec
from metagpu.core.errors import ProgramError
from metagpu.core.grants.grant import Grant, Mount
from metagpu.core.grants.injection import Injection
from metagpu.core.model.resource_claims import MpsLimits
from metagpu.core.model.shares import Holder
from metagpu.host.daemons import HostDaemons
from tests.core.two_gpus import ALICE, LEASED, TOLD
from tests.rigs.build import gpu
from tests.rigs.daemons import DAEMONS, serving, stand_in
from tests.rigs.waiting import becomes, skip, until

GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIG = "MIG-00000000-0000-0000-0000-000000000000"
PATIENT = MpsDaemonTiming(deadline=30.0)
"""A busy machine is late with an answer."""


@pytest.mark.parametrize("device", [GPU, MIG])
def test_a_control_daemon_is_of_one_device(device: str) -> None:
    """A control daemon sees one device, runs in the foreground, and has its own folders."""
    home = Path("/run/metagpu/mps") / device
    daemon = control_daemon_spec(device, MpsDirectories(home), SHARED_MEMORY)

    assert (daemon.program, daemon.arguments) == ("nvidia-cuda-mps-control", ("-f",))
    assert daemon.env == {
        "CUDA_VISIBLE_DEVICES": device,
        "CUDA_MPS_PIPE_DIRECTORY": f"{home}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{home}/log",
    }
    assert daemon.mounts == {Path("/dev/shm"): home / "shm"}  # noqa: S108 - MPS's own place


def test_the_first_compute_mode_is_kept_until_it_is_restored(tmp_path: Path) -> None:
    """Later ones are metagpu's own; after the restoration an administrator may choose another."""
    directories = MpsDirectories.for_device(str(tmp_path), "GPU-0")
    directories.create()
    assert directories.read_compute_mode() is None
    for first in ("PROHIBITED", "DEFAULT"):
        directories.save_compute_mode(first)
        directories.save_compute_mode("EXCLUSIVE_PROCESS")
        assert directories.read_compute_mode() == first
        directories.discard_compute_mode()
    directories.discard_compute_mode()


def test_the_devices_of_a_gpu_are_found_by_their_folders(tmp_path: Path) -> None:
    """A MIG device's name does not contain its GPU: the folder does."""
    for device, gpu_id in (("MIG-a", "GPU-0"), ("MIG-b", "GPU-1"), ("MIG-c", "GPU-0")):
        directories = MpsDirectories.for_device(str(tmp_path), device)
        directories.create()
        directories.write_gpu(gpu_id)
    assert sorted(leftover_devices(str(tmp_path), "GPU-0")) == ["MIG-a", "MIG-c"]


def test_its_sockets_have_a_path_that_linux_takes() -> None:
    """A unix socket's path has at most 107 bytes, which allows a longer run directory."""
    folders = MpsDirectories(Path("/run/metagpu/mps") / GPU)

    assert len(str(folders.pipes / "control_privileged")) <= 85


async def test_clients_are_listed_by_server(tmp_path: Path) -> None:
    """The first client starts a server; each is listed by its process."""
    async with serving(tmp_path) as live_stand_in:
        with live_stand_in.client(), live_stand_in.client():
            [server] = await live_stand_in.control.servers()
            assert len(await live_stand_in.control.clients(server)) == 2
            assert await live_stand_in.control.status(server) == "ACTIVE"


@pytest.mark.parametrize("question", ["probe", "servers"])
async def test_nonsense_is_no_answer(tmp_path: Path, question: str) -> None:
    """The error of a wrong answer has the command and the answer."""
    async with serving(tmp_path) as live_stand_in:
        live_stand_in.steer("garbage")
        with pytest.raises(
            ProgramError, match=r"unexpected answer to get_\w+: '\?\\x07 not what you asked"
        ):
            await getattr(live_stand_in.control, question)()


async def test_a_long_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that answers in the daemon's place cannot name servers without end."""
    async with stand_in(tmp_path) as live_stand_in:

        async def send_command(*_: object, **__: object) -> str:
            return "1\n" * 5000

        monkeypatch.setattr(HostDaemons, "send_command", send_command)
        with pytest.raises(ProgramError, match="unexpected answer to get_server_list"):
            await live_stand_in.control.servers()


async def test_silence_has_a_deadline(tmp_path: Path) -> None:
    """A hanging control daemon costs a second here, and the error has the command."""
    async with serving(tmp_path) as live_stand_in:
        live_stand_in.steer("hang")
        with pytest.raises(ProgramError) as caught:
            await MpsControl(DAEMONS, live_stand_in.daemon, deadline=1.0).probe()

    assert str(caught.value).endswith(
        "<<< get_default_active_thread_percentage` did not end within 1 s"
    )


async def test_a_crash_is_no_answer(tmp_path: Path) -> None:
    """The sockets and the number of a crashed daemon are taken for no other one."""
    async with serving(tmp_path) as live_stand_in:
        live_stand_in.steer("crash")
        with pytest.raises(ProgramError, match="no answer to get_default"):
            await live_stand_in.control.probe()
        with pytest.raises(ProgramError, match="Cannot find MPS control daemon process"):
            await live_stand_in.control.probe()

        assert (live_stand_in.folders.pipes / "control").is_socket()
        assert await live_stand_in.process() is None


class LosesOne:
    """Daemons whose first command is lost, as NVIDIA's daemon loses one of two at once."""

    def __init__(self, answer: str) -> None:
        self._answers = ["", answer]

    async def send_command(self, *_: object) -> str:
        """Return the next answer."""
        return self._answers.pop(0)


async def test_a_lost_list_is_no_empty_one(tmp_path: Path) -> None:
    """A list of servers without an answer is asked for once more."""
    async with stand_in(tmp_path) as live_stand_in:
        control = MpsControl(cast("Daemons", LosesOne("77")), live_stand_in.daemon, deadline=1.0)
        assert await control.servers() == [77]


class Host:
    """A GPU without leases."""

    daemons = DAEMONS
    leased = False
    suspended = ""

    def suspend(self, reason: str) -> None:
        """Note the reason."""
        self.suspended = reason

    def resume(self) -> None:
        """Note nothing."""

    async def processes(self) -> list[GpuProcess]:
        """List no process."""
        return []

    async def stopping_processes(self) -> list[int]:
        """Wait for ever."""
        await anyio.sleep_forever()
        return []


async def test_a_client_that_cannot_be_ended_leaves_time_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet is about to kill all clients: an error delays no other, and none is tried again.

    Pods that end later are a new list.
    """
    asked, ready, looks, lists = list[int](), anyio.Event(), 0, 0

    async def stopping(_: Host) -> list[int]:
        nonlocal looks
        await ready.wait()
        looks += 1
        return [1, 2, 3]

    async def list_clients(_: MpsControl) -> dict[int, int]:
        nonlocal lists
        lists += 1
        return {1: 9, 2: 9, 3: 9}

    async def fail(_: MpsControl, _server: int, client: int) -> None:
        asked.append(client)
        raise ProgramError("no")

    monkeypatch.setattr(MpsControl, "servers_by_client", list_clients)
    monkeypatch.setattr(MpsControl, "end_client", fail)
    monkeypatch.setattr(Host, "stopping_processes", stopping)
    timing = replace(PATIENT, retry=600.0)
    async with serving(tmp_path) as live_stand_in:
        supervisor = DaemonSupervisor(
            Host(), live_stand_in.device, live_stand_in.folders, timing, name="0"
        )
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.run)
            await supervisor.checked.wait()
            ready.set()
            await becomes(lambda: asked)
            skip(timing.retry)
            await becomes(lambda: looks > 1)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    assert sorted(asked) == [1, 2, 3]
    assert lists == 1


async def test_what_clients_left_goes_once_nothing_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle servers are shut down and /dev/shm is emptied; what stays suspends the GPU."""

    async def fail(_: HostDaemons, folder: Path) -> None:
        raise ProgramError(f"{folder} is busy")

    async with serving(tmp_path) as live_stand_in:
        host, left = Host(), live_stand_in.folders.shm / "left"
        supervisor = DaemonSupervisor(
            host, live_stand_in.device, live_stand_in.folders, PATIENT, name="0"
        )
        assert await supervisor.end_idle_servers() == ""  # no daemon is found yet
        await supervisor.find()
        with live_stand_in.client():
            await live_stand_in.servers()
            assert await supervisor.end_idle_servers() == f"MPS clients {os.getpid()}"
            assert not await supervisor.is_unused()
        await until(supervisor.is_unused)
        assert await supervisor.end_idle_servers() == ""
        assert await live_stand_in.control.servers() == []

        await anyio.Path(left).touch()
        host.leased = True
        await supervisor.empty_shared_memory()
        assert await anyio.Path(left).exists()
        host.leased = False
        with monkeypatch.context() as patched:
            patched.setattr(HostDaemons, "empty", fail)
            with capture_logs() as logs:
                for _ in range(2):
                    with pytest.raises(ProgramError):
                        await supervisor.empty_shared_memory()
                    assert [line["event"] for line in logs] == ["mps shared memory not emptied"]
        assert host.suspended.startswith("what its containers left stays: ")
        await supervisor.empty_shared_memory()
        assert not await anyio.Path(left).exists()


async def test_the_daemon_of_a_device_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    """The process and the folders go."""
    async with serving(tmp_path) as live_stand_in:
        supervisor = DaemonSupervisor(
            Host(), live_stand_in.device, live_stand_in.folders, PATIENT, name="0"
        )
        process = await live_stand_in.process()
        assert process is not None
        await supervisor.remove()
        with anyio.fail_after(30):
            await DAEMONS.wait_ended(process)
        assert not await anyio.Path(live_stand_in.folders.home).exists()


async def test_a_start_that_is_cut_short_leaves_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor whose run is cancelled while its daemon starts quits that daemon."""
    start, started = HostDaemons.start, anyio.Event()

    async with stand_in(tmp_path) as live_stand_in:

        async def start_slowly(daemons: HostDaemons, daemon: DaemonSpec) -> DaemonProcess:
            process = await start(daemons, daemon)
            await live_stand_in.answers()
            started.set()
            await anyio.sleep(0.05)
            return process

        monkeypatch.setattr(HostDaemons, "start", start_slowly)
        supervisor = DaemonSupervisor(
            Host(), live_stand_in.device, live_stand_in.folders, PATIENT, name="0"
        )
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.run)
            await started.wait()
            group.cancel_scope.cancel()
        await supervisor.release()
        assert await live_stand_in.process() is None


async def test_a_daemon_that_was_not_looked_for_is_quit(tmp_path: Path) -> None:
    """A supervisor that is cancelled before it has found an earlier daemon quits that daemon."""
    async with serving(tmp_path) as live_stand_in:
        supervisor = DaemonSupervisor(
            Host(), live_stand_in.device, live_stand_in.folders, PATIENT, name="0"
        )
        await supervisor.release()
        assert await live_stand_in.process() is None


PIPES = f"/run/metagpu/mps/{gpu(0).id}/pipe"
PROGRAM = "/usr/local/bin/mgctl"


def test_no_mount_of_a_client_is_below_a_read_only_one() -> None:
    """With the default folders a container starts, and mgctl in it finds its socket."""
    injection = Injection(pod_dir="/var/lib/metagpu/pod", mgctl_path=PROGRAM)
    directories = MpsDirectories.for_device(injection.run_dir, gpu(0).id)

    grant = grant_to_client(injection.grant([gpu(0)]), directories, (), 100)

    paths = {PurePosixPath(mount.container_path): mount for mount in grant.mounts}
    assert not [path for path in paths for above in path.parents if above in paths]
    assert paths[PurePosixPath(PIPES)] == Mount(PIPES, PIPES, read_only=False)
    assert paths[PurePosixPath(PROGRAM)].host_path == "/var/lib/metagpu/pod/mgctl"
    assert grant.envs["METAGPU_SOCKET"] == "/var/lib/metagpu/pod/mgctl.sock"


def test_a_client_of_another_run_directory_has_the_usual_folder() -> None:
    """Nothing moves where nothing is in the way."""
    injection = Injection(pod_dir="/pod", run_dir="/somewhere")
    directories = MpsDirectories.for_device(injection.run_dir, gpu(0).id)

    grant = grant_to_client(injection.grant([gpu(0)]), directories, (), 100)

    assert Mount("/run/metagpu", "/pod") in grant.mounts
    assert "METAGPU_SOCKET" not in grant.envs


@pytest.mark.parametrize(
    ("capability", "configured", "clients"),
    [(None, None, 48), ((6, 1), None, 16), ((7, 0), None, 48), ((9, 0), 60, 60)],
)
def test_a_gpu_serves_the_clients_of_its_architecture(
    capability: tuple[int, int] | None, configured: int | None, clients: int
) -> None:
    """Before Volta they are 16, then 48; a pool may say what a newer CUDA allows."""
    assert max_clients_of(replace(gpu(0), compute_capability=capability), configured) == clients


@pytest.mark.parametrize(("value", "is_refused"), [(None, 0), (0, 1), (1, 0), (60, 0), (61, 1)])
def test_a_number_of_a_pool_has_bounds(value: int | None, is_refused: int) -> None:
    """Both bounds are allowed, and named in the refusal of what is beyond."""
    wrong = pytest.raises(ValueError, match=f"^maxClients is {value}; allowed: 1 to 60$")
    with wrong if is_refused else nullcontext():
        check_number("maxClients", value, 60)


@pytest.mark.parametrize(
    ("limits", "envs"),
    [
        (MpsLimits(), {}),
        (MpsLimits(threads=0), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "0"}),
        (MpsLimits(memory_mib=512), {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M"}),
    ],
)
def test_a_claim_limits_what_it_names(limits: MpsLimits, envs: dict[str, str]) -> None:
    """Limits that the parameters of a claim leave out are not set."""
    assert limit_clients(Grant(), limits) == Grant(envs=envs)


@pytest.mark.parametrize(
    ("client", "leased", "holders", "stays"),
    [
        (True, False, (), "it has clients"),
        (False, True, (ALICE,), "used by pod team/alice"),
        (False, True, None, "the kubelet does not say"),
        (False, False, None, "the kubelet does not say"),
        (False, False, (ALICE,), ""),
    ],
)
async def test_a_daemon_that_nobody_uses_is_left_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holders: tuple[Holder, ...] | None,
    stays: str,
    *,
    client: bool,
    leased: bool,
) -> None:
    """An uninstallation removes daemon and folders, and restores the compute mode of the GPU."""
    monkeypatch.setattr(mps_supervisor, "MpsDaemonTiming", lambda: PATIENT)
    modes = list[tuple[str, ComputeMode]]()

    class Driver:
        async def set_compute_mode(self, gpu: str, mode: ComputeMode) -> None:
            modes.append((gpu, mode))

    snapshot, driver = LEASED if leased else TOLD, cast("Any", Driver())
    node = AbandonedNode(tmp_path, DAEMONS, driver, snapshot, (), holders)
    async with serving(tmp_path, GPU) as live_stand_in:
        await to_thread.run_sync(live_stand_in.folders.save_compute_mode, "PROHIBITED")
        with live_stand_in.client() if client else nullcontext():
            if client:
                await live_stand_in.servers()
            [found] = await find_control_daemons(node)
        assert found.stays.startswith(stays) if stays else not found.stays
        if not stays:
            await found.remove()
            assert modes == [(GPU, ComputeMode.PROHIBITED)]
            assert await find_control_daemons(node) == []
