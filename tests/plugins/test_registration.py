"""How a resource gets, and stays, registered: cases 1 to 11 and 60 to 64 of the contract."""

import os
import socket
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from grpclib.server import Server

from metagpu.core.backend import Backend
from metagpu.core.errors import ConfigError
from metagpu.core.model import ResourceName
from metagpu.core.registry import Registry
from metagpu.plugins import endpoint, registrar, wire
from metagpu.plugins.kubelet_directory import KubeletDirectory, check
from metagpu.plugins.pb import v1beta1
from metagpu.plugins.service import Service
from metagpu.sim.kubelet import Container, Pod, SimKubelet
from tests.heard import heard
from tests.plugins.rig import (
    FOUR_RESOURCES,
    METAGPU,
    RESOURCES,
    Node,
    drop_list,
    gpu,
    node,
    pod,
    simulated_kubelet,
)
from tests.sim.kubelet_rig import dials
from tests.waiting import skip


class History:
    """Everything the kubelet counted, at each change."""

    def __init__(self, kubelet: SimKubelet, resource: str = METAGPU) -> None:
        self._kubelet, self._resource = kubelet, resource
        self.streams: list[int] = []
        self.allocatable: list[int] = []

    async def record(self) -> None:
        """Look at each change, for ever."""

        def look() -> bool:
            self.streams.append(self._kubelet.open_streams[self._resource])
            self.allocatable.append(self._kubelet.allocatable().get(self._resource, 0))
            return False

        await self._kubelet.wait_for(look, within=float("inf"))


async def registered(it: Node, times: int) -> None:
    """Wait until the kubelet has registered us so often and has all shares."""
    await it.kubelet.wait_for(
        lambda: (
            it.kubelet.registrations[METAGPU] == it.kubelet.lists[METAGPU] == times
            and it.counts() == (20, 20)
        )
    )


async def test_registers_and_lists_once(tmp_path: Path) -> None:
    """A served socket is registered once, with one list on one stream (case 1)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        assert it.kubelet.registrations[METAGPU] == 1
        assert it.kubelet.open_streams[METAGPU] == 1
        assert it.kubelet.lists[METAGPU] == 1


async def test_refusal_is_not_hammered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that refuses our version is asked once, then left in peace (case 2)."""
    monkeypatch.setattr(wire, "VERSION", "v1alpha")

    async with node(tmp_path) as it, it.kubelet.running():
        await it.kubelet.wait_for(lambda: bool(it.kubelet.refusals))
        await anyio.wait_all_tasks_blocked()

        [refusal] = it.kubelet.refusals
        assert refusal.startswith('requested API version "v1alpha" is not supported by kubelet.')
        assert it.counts() == (0, 0)


async def test_nothing_to_wipe_before_the_kubelet_answers(tmp_path: Path) -> None:
    """Our socket comes into being when a kubelet listens, so that its start wipes none (case 4)."""
    async with node(tmp_path) as it:
        await anyio.wait_all_tasks_blocked()

        assert it.sockets() == []

        async with it.kubelet.running():
            await it.until(20, 20)

            assert it.kubelet.refusals == []


async def test_failing_options_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing options leave the resource absent, and the next try registers it (case 5)."""
    monkeypatch.setattr(endpoint, "REFUSED_PAUSE", (0.01, 0.01))
    failures = [RuntimeError("not yet")]
    options = Service._options

    async def first_fails(self: Service, request: bytes) -> bytes:
        if failures:
            raise failures.pop()
        return await options(self, request)

    monkeypatch.setattr(Service, "_options", first_fails)

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        [refusal] = it.kubelet.refusals
        assert refusal.startswith("failed to get device plugin options")
        assert "not yet" in refusal
        assert it.kubelet.registrations[METAGPU] == 1


async def test_new_daemon_replaces_the_old(tmp_path: Path) -> None:
    """After a restart of the daemon its devices are the only ones: no orphans (case 6)."""
    async with SimKubelet(tmp_path / "device-plugins").running() as kubelet:
        for gpus, expected in (((gpu(0), gpu(1)), 20), ((gpu(0), gpu(1)), 20), ((gpu(1),), 10)):
            async with node(tmp_path, *gpus, make_directory=False, kubelet=kubelet) as it:
                await it.until(expected, expected)


async def test_old_stream_ends_before_the_next_registration(tmp_path: Path) -> None:
    """However a registration is lost, the kubelet never has two streams of ours (case 8)."""
    async with node(tmp_path) as it, it.kubelet.running(), anyio.create_task_group() as group:
        history = History(it.kubelet)
        group.start_soon(history.record)
        await it.until(20, 20)

        for registrations in (2, 3, 4):
            [socket] = it.sockets()
            socket.unlink()
            await registered(it, registrations)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()

    assert max(history.streams) == 1
    assert history.allocatable[-1] == 20


async def test_reload_of_the_same_says_nothing(tmp_path: Path) -> None:
    """Two reloads that change nothing leave one stream, and not one message on it (case 9)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        it.offer()
        it.offer()
        await anyio.wait_all_tasks_blocked()

        assert it.kubelet.open_streams[METAGPU] == 1
        assert it.kubelet.lists[METAGPU] == 1
        assert it.kubelet.registrations[METAGPU] == 1


async def test_closed_list_is_registered_again(tmp_path: Path) -> None:
    """A list that the kubelet gives up is what makes us register again (cases 10, 17)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        drop_list(it)
        await it.until(20, 0)
        await it.until(20, 20)

        assert it.kubelet.registrations[METAGPU] == 2
        assert it.kubelet.open_streams[METAGPU] == 1


async def test_many_resources_register_together(tmp_path: Path) -> None:
    """Two hundred resources are all registered, each once (case 11)."""
    pools = "".join(
        f"  - {{name: p{n}, gpus: {{index: {n}}}, backends: [{{backend: fraction,"
        f" resource: example.com/r{n}, sharesPerGpu: 1}}]}}\n"
        for n in range(200)
    )
    gpus = [gpu(n) for n in range(200)]

    config = f"version: metagpu/v1\npools:\n{pools}"

    async with node(tmp_path, *gpus, config=config) as it, it.kubelet.running():
        await it.kubelet.wait_for(
            lambda: sum(it.kubelet.allocatable().values()) == 200,
        )

        assert set(it.kubelet.registrations.values()) == {1}


async def test_kubelet_restart_wipes_and_we_return(tmp_path: Path) -> None:
    """After a kubelet's restart, which wipes our sockets, all resources are back (case 60)."""
    gpus = [gpu(n) for n in range(4)]

    async with node(tmp_path, *gpus, config=FOUR_RESOURCES) as it, it.kubelet.running():
        for resource in RESOURCES:
            await it.until(100, 100, resource)
        before = it.sockets()

        await it.kubelet.restart()
        for resource in RESOURCES:
            await it.until(100, 100, resource)

        assert not set(before) & set(it.sockets())
        assert [it.kubelet.registrations[resource] for resource in RESOURCES] == [2, 2, 2, 2]


async def test_restarts_one_after_another(tmp_path: Path) -> None:
    """Twenty restarts in a row each end with one stream and all shares."""
    async with node(tmp_path) as it, it.kubelet.running():
        for _ in range(20):
            await it.kubelet.restart()
            await it.until(20, 20)

        assert it.kubelet.open_streams[METAGPU] == 1
        assert it.kubelet.refusals == []


async def test_inode_is_not_trusted(tmp_path: Path) -> None:
    """A kubelet socket that is new is noticed even when its file has the old inode (case 60)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        socket = it.kubelet.socket
        born = socket.stat().st_mtime_ns
        os.utime(socket, ns=(born + 1, born + 1))
        (it.directory / "anything.sock").touch()

        await it.kubelet.wait_for(lambda: it.kubelet.registrations[METAGPU] == 2)
        await it.until(20, 20)


async def test_dead_socket_is_waited_for(tmp_path: Path) -> None:
    """A kubelet that left its socket behind is waited for without a refusal (case 61)."""
    async with node(tmp_path) as it:
        async with it.kubelet.running():
            await it.until(20, 20)

        assert it.kubelet.socket.exists()

        async with it.kubelet.running():
            await it.until(20, 20)

            assert it.kubelet.refusals == []


async def test_absent_kubelet_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever named a wrong folder reads so, once, however often it is looked at (case 61)."""
    monkeypatch.setattr(registrar, "PATIENCE", 0.0)
    monkeypatch.setattr(registrar, "PAUSE", (0.001, 0.001))

    with heard(registrar) as told:
        async with node(tmp_path) as it:
            while not told:
                await checkpoint()
            async with it.kubelet.running():
                await it.until(20, 20)
            while len(told) < 3:
                await checkpoint()
            async with it.kubelet.running():
                await it.until(20, 20)

    assert [(entry["event"], entry.get("why")) for entry in told] == [
        ("no kubelet takes registrations; waiting for one", "No such file or directory"),
        ("the kubelet takes registrations", None),
        ("no kubelet takes registrations; waiting for one", "Connection refused"),
        ("the kubelet takes registrations", None),
    ]
    assert told[0]["socket"] == str(it.kubelet.socket)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file", "{folder} is no folder; name the kubelet's device-plugins folder"),
        ("x" * 120, "leaves no room for a socket's path; allowed: 78 at most"),
    ],
)
def test_a_folder_that_no_kubelet_can_have_is_refused(
    tmp_path: Path, folder: str, message: str
) -> None:
    """What can never become the kubelet's folder ends the start instead of a wait for ever."""
    (tmp_path / "file").touch()
    path = tmp_path / folder

    with pytest.raises(ConfigError) as caught:
        check(path)
    assert str(caught.value).startswith(f"--kubelet-dir: {path} ")
    assert str(caught.value).endswith(message.format(folder=path))


def test_a_folder_that_may_come_is_taken(tmp_path: Path) -> None:
    """A folder that is not there yet, and the longest there may be, are waited for."""
    check(tmp_path / "later")
    check(Path("/" + "x" * 77))


async def test_folder_may_appear_later(tmp_path: Path) -> None:
    """A daemon that started before the kubelet's folder existed registers later (case 62)."""
    async with node(tmp_path, make_directory=False) as it:
        await anyio.wait_all_tasks_blocked()

        async with it.kubelet.running():
            await it.until(20, 20)


async def test_folder_may_be_made_anew(tmp_path: Path) -> None:
    """A folder that is removed and made again is followed (case 62)."""
    async with node(tmp_path) as it:
        async with it.kubelet.running():
            await it.until(20, 20)
        it.directory.rename(tmp_path / "old")

        async with it.kubelet.running():
            await it.until(20, 20)


async def test_finished_init_container_survives(tmp_path: Path) -> None:
    """A pod whose finished init container held shares outlives a kubelet restart (case 63)."""
    held = Pod(
        "train",
        containers=(Container("main", {METAGPU: 5}),),
        init_containers=(Container("fetch", {METAGPU: 2}),),
    )

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        await it.kubelet.admit(held)
        await it.kubelet.start_container(held, "fetch")
        it.kubelet.stop_container(held, "fetch")
        await it.kubelet.start_container(held, "main")
        before = it.kubelet.devices(held)

        await it.kubelet.restart()
        await it.until(20, 20)

        assert await it.kubelet.readmit() == {}
        assert it.kubelet.devices(held) == before


async def test_resource_taken_back_leaves_no_ghost(tmp_path: Path) -> None:
    """A resource taken away counts 0 at once, its stream ends, others hear nothing (case 64)."""
    gpus = [gpu(n) for n in range(4)]

    async with node(tmp_path, *gpus, config=FOUR_RESOURCES) as it, it.kubelet.running():
        await it.kubelet.wait_for(lambda: all(it.kubelet.lists[r] == 1 for r in RESOURCES))
        gone, *kept = RESOURCES
        lists = [it.kubelet.lists[resource] for resource in kept]

        it.offer(FOUR_RESOURCES.replace(gone, "example.com/other"))
        await it.until(0, 0, gone)
        await it.until(100, 100, "example.com/other")

        assert it.kubelet.open_streams[gone] == 0
        assert [it.kubelet.lists[resource] for resource in kept] == lists


async def test_sockets_are_for_root_alone(tmp_path: Path) -> None:
    """Nobody but root may open our socket, and it is gone when we are."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        [socket] = it.sockets()

        assert socket.stat().st_mode & 0o777 == 0o600

    assert it.sockets() == []


async def test_registers_nowhere_else(tmp_path: Path) -> None:
    """One door only: nothing of ours stands in plugins_registry (case 7)."""
    registry = tmp_path / "plugins_registry"
    registry.mkdir()

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        assert list(registry.iterdir()) == []


async def test_pod_of_another_resource_does_not_concern_us(tmp_path: Path) -> None:
    """A pod that gets its GPUs elsewhere, as by DRA, causes no call to us (case 38)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        await it.kubelet.admit(pod("other", 1, "example.com/of-another"))
        await it.kubelet.admit(pod("none", 0))
        calls = it.record.of(ResourceName(METAGPU)).calls
        before = sum(sum(each.outcomes.values()) for each in calls.values())
        await it.kubelet.admit(pod("ours", 1))

        assert before == 0
        assert sum(sum(each.outcomes.values()) for each in calls.values()) > 0


class Registrar(v1beta1.RegistrationBase):
    """A kubelet that only takes registrations, and notes them."""

    def __init__(self) -> None:
        self.registered = anyio.Event()

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Take one."""
        del message
        self.registered.set()
        return v1beta1.Empty()


async def test_bound_but_not_listening_is_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that has bound its socket and listens a moment later costs no second of waiting."""
    pauses: list[float] = []
    replaced = KubeletDirectory.replaced

    async def noting(
        self: KubeletDirectory, kubelet: tuple[int, int, int] | None, within: float
    ) -> None:
        if kubelet is not None:
            pauses.append(within)
        await replaced(self, kubelet, within)

    monkeypatch.setattr(KubeletDirectory, "replaced", noting)
    async with node(tmp_path) as it:
        registrar = Registrar()
        server = Server([registrar])

        with socket.socket(socket.AF_UNIX) as listener, anyio.fail_after(30):
            listener.bind(str(it.directory / "kubelet.sock"))
            while len(pauses) < 5:
                await checkpoint()
            await server.start(sock=listener)
            await registrar.registered.wait()
            server.close()

    # The Go peer's back-off after a refused connection is a second.
    assert sum(pauses[:5]) < 0.1


async def test_socket_wiped_before_the_dial_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket gone before the kubelet dials costs one refusal; the next one serves (case 4)."""
    monkeypatch.setattr(endpoint, "REFUSED_PAUSE", (0.01, 0.01))
    wiped: list[Path] = []
    register = endpoint.Endpoint._register

    async def wipe_first(self: endpoint.Endpoint, line: registrar.Line, path: Path) -> None:
        if not wiped:
            wiped.append(path)
            await anyio.Path(path).unlink()
        await register(self, line, path)

    monkeypatch.setattr(endpoint.Endpoint, "_register", wipe_first)
    kubelet = simulated_kubelet(tmp_path)

    async with node(tmp_path, kubelet=kubelet) as it, kubelet.running():
        await dials(kubelet)
        skip(10)
        await it.until(20, 20)

        [refusal] = kubelet.refusals
        assert refusal.startswith("failed to dial device plugin")
        assert kubelet.registrations[METAGPU] == 1


async def test_kubelet_that_closes_each_list_is_not_hammered(tmp_path: Path) -> None:
    """Rounds that end at once follow each other ever more slowly."""
    rests: list[float] = []

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        for registrations in range(2, 7):
            began = anyio.current_time()
            drop_list(it)
            await registered(it, registrations)
            rests.append(anyio.current_time() - began)

        # 0, 0.05, 0.1, 0.2, 0.4 seconds at least
        assert rests[4] > 0.3


async def test_socket_that_cannot_be_bound_is_told_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no socket can be made the daemon says where and why, and tries ever more slowly."""
    folder = tmp_path / ("long" * 30)
    monkeypatch.setattr(endpoint, "BAD_PAUSE", 60.0)
    told: list[str] = []
    warning = endpoint.log.warning

    def say(event: str, **about: object) -> object:
        told.append(f"{event}: {about}")
        return warning(event, **about)

    directory = KubeletDirectory(folder)
    registry = Registry()
    kubelets = registrar.Registrar(directory)
    service = Service(ResourceName(METAGPU), registry, never)
    lonely = endpoint.Endpoint(service, directory, kubelets)
    monkeypatch.setattr(lonely._log, "warning", say, raising=False)

    assert not await lonely._round(registrar.Line(kubelets), None)
    assert "AF_UNIX path too long" in told[0]
    assert str(folder) in told[0]


def never(resource: ResourceName) -> Backend:
    """There is no backend here."""
    raise AssertionError(resource)
