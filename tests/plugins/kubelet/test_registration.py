"""Registration of resources: cases 1 to 11 and 60 to 64 of the contract."""

import os
import socket
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.backend import Backend
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import device_plugin, endpoint, fast_codec, messages
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.paths import check_kubelet_dir
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import SimContainer, SimKubelet, SimPod
from metagpu.sim.kubelet.transport import AbortableServer
from tests.plugins.kubelet.rig import (
    CONFIG,
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
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip
from tests.sim.kubelet.rig import dials


class History:
    """The kubelet's counts, at each change."""

    def __init__(self, kubelet: SimKubelet, resource: str = METAGPU) -> None:
        self._kubelet, self._resource = kubelet, resource
        self.streams: list[int] = []
        self.allocatable: list[int] = []

    async def record(self) -> None:
        """Record each change, for ever."""

        def look() -> bool:
            self.streams.append(self._kubelet.open_streams[self._resource])
            self.allocatable.append(self._kubelet.allocatable().get(self._resource, 0))
            return False

        await self._kubelet.wait_for(look, within=float("inf"))


async def registered(live_node: Node, times: int) -> None:
    """Wait until the kubelet has so many registrations and all shares."""
    await live_node.kubelet.wait_for(
        lambda: (
            live_node.kubelet.registrations[METAGPU] == live_node.kubelet.lists[METAGPU] == times
            and live_node.counts() == (20, 20)
        )
    )


async def test_registers_and_lists_once(tmp_path: Path) -> None:
    """A served socket is registered once, with one list on one stream (case 1)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        assert live_node.kubelet.registrations[METAGPU] == 1
        assert live_node.kubelet.open_streams[METAGPU] == 1
        assert live_node.kubelet.lists[METAGPU] == 1


async def test_refusal_is_not_hammered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that refuses our version is asked once, and not again (case 2)."""
    monkeypatch.setattr(messages, "VERSION", "v1alpha")
    timing = KubeletTiming(refusal_delay=60.0, longest_delay=60.0)

    async with node(tmp_path, timing=timing) as live_node, live_node.kubelet.running():
        await live_node.kubelet.wait_for(lambda: bool(live_node.kubelet.refusals))
        await anyio.wait_all_tasks_blocked()

        [refusal] = live_node.kubelet.refusals
        assert refusal.startswith('requested API version "v1alpha" is not supported by kubelet.')
        assert live_node.counts() == (0, 0)


async def test_nothing_to_wipe_before_the_kubelet_answers(tmp_path: Path) -> None:
    """Our socket is created after the kubelet listens, so that its start wipes none (case 4)."""
    async with node(tmp_path) as live_node:
        await anyio.wait_all_tasks_blocked()

        assert live_node.sockets() == []

        async with live_node.kubelet.running():
            await live_node.until(20, 20)

            assert live_node.kubelet.refusals == []


async def test_failing_options_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing options leave the resource absent, and the next attempt registers it (case 5)."""
    timing = KubeletTiming(refusal_delay=0.01, longest_delay=0.01)
    failures = [RuntimeError("not yet")]
    options = DevicePluginService._options

    async def first_fails(self: DevicePluginService, request: bytes) -> bytes:
        if failures:
            raise failures.pop()
        return await options(self, request)

    monkeypatch.setattr(DevicePluginService, "_options", first_fails)

    async with node(tmp_path, timing=timing) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        [refusal] = live_node.kubelet.refusals
        assert refusal.startswith("failed to get device plugin options")
        assert "not yet" in refusal
        assert live_node.kubelet.registrations[METAGPU] == 1


async def test_new_daemon_replaces_the_old(tmp_path: Path) -> None:
    """After a restart of the daemon its devices are the only ones: no orphans (case 6)."""
    async with SimKubelet(tmp_path / "device-plugins").running() as kubelet:
        for gpus, expected in (((gpu(0), gpu(1)), 20), ((gpu(0), gpu(1)), 20), ((gpu(1),), 10)):
            async with node(tmp_path, *gpus, make_directory=False, kubelet=kubelet) as live_node:
                await live_node.until(expected, expected)


async def test_old_stream_ends_before_the_next_registration(tmp_path: Path) -> None:
    """The kubelet never has two streams of ours, however a registration is lost (case 8)."""
    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        anyio.create_task_group() as group,
    ):
        history = History(live_node.kubelet)
        group.start_soon(history.record)
        await live_node.until(20, 20)

        for registrations in (2, 3, 4):
            [socket] = live_node.sockets()
            socket.unlink()
            await registered(live_node, registrations)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()

    assert max(history.streams) == 1
    assert history.allocatable[-1] == 20


async def test_reload_of_the_same_sends_nothing(tmp_path: Path) -> None:
    """Two reloads that change nothing leave one stream, with no message (case 9)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.offer()
        live_node.offer()
        await anyio.wait_all_tasks_blocked()

        assert live_node.kubelet.open_streams[METAGPU] == 1
        assert live_node.kubelet.lists[METAGPU] == 1
        assert live_node.kubelet.registrations[METAGPU] == 1


async def test_closed_list_is_registered_again(tmp_path: Path) -> None:
    """After the kubelet closes a list we register again (cases 10, 17)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        drop_list(live_node)
        await live_node.until(20, 0)
        await live_node.until(20, 20)

        assert live_node.kubelet.registrations[METAGPU] == 2
        assert live_node.kubelet.open_streams[METAGPU] == 1


async def test_many_resources_register_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred resources are all registered, each once (case 11)."""
    monkeypatch.setattr("metagpu.core.config.config._MAX_POOLS", 200)
    pools = "".join(
        f"  - {{name: p{n}, gpus: {{index: {n}}}, backends: [{{backend: fraction,"
        f" resource: example.com/r{n}, sharesPerGpu: 1}}]}}\n"
        for n in range(200)
    )
    gpus = [gpu(n) for n in range(200)]

    config = f"version: metagpu/v1\npools:\n{pools}"

    patient = KubeletTiming(register_deadline=1e6, list_deadline=1e6)
    async with (
        node(tmp_path, *gpus, config=config, timing=patient) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.kubelet.wait_for(
            lambda: sum(live_node.kubelet.allocatable().values()) == 200, within=120
        )

        assert set(live_node.kubelet.registrations.values()) == {1}


async def test_kubelet_restart_wipes_and_we_return(tmp_path: Path) -> None:
    """After a kubelet's restart, which wipes our sockets, all resources are back (case 60)."""
    gpus = [gpu(n) for n in range(4)]

    async with (
        node(tmp_path, *gpus, config=FOUR_RESOURCES) as live_node,
        live_node.kubelet.running(),
    ):
        for resource in RESOURCES:
            await live_node.until(100, 100, resource)
        before = live_node.sockets()

        await live_node.kubelet.restart()
        for resource in RESOURCES:
            await live_node.until(100, 100, resource)

        assert not set(before) & set(live_node.sockets())
        assert [live_node.kubelet.registrations[resource] for resource in RESOURCES] == [2, 2, 2, 2]


async def test_restarts_one_after_another(tmp_path: Path) -> None:
    """Twenty restarts in a row each end with one stream and all shares."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        for _ in range(20):
            await live_node.kubelet.restart()
            await live_node.until(20, 20)

        assert live_node.kubelet.open_streams[METAGPU] == 1
        assert live_node.kubelet.refusals == []


async def test_inode_is_not_trusted(tmp_path: Path) -> None:
    """A new kubelet socket is noticed even when its file has the old inode (case 60)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        socket = live_node.kubelet.socket
        born = socket.stat().st_mtime_ns
        os.utime(socket, ns=(born + 1, born + 1))
        (live_node.directory / "anything.sock").touch()

        await live_node.kubelet.wait_for(lambda: live_node.kubelet.registrations[METAGPU] == 2)
        await live_node.until(20, 20)


async def test_dead_socket_is_waited_for(tmp_path: Path) -> None:
    """A kubelet that left its socket behind is waited for without a refusal (case 61)."""
    async with node(tmp_path) as live_node:
        async with live_node.kubelet.running():
            await live_node.until(20, 20)

        assert live_node.kubelet.socket.exists()

        async with live_node.kubelet.running():
            await live_node.until(20, 20)

            assert live_node.kubelet.refusals == []


async def test_absent_kubelet_is_logged_once(tmp_path: Path) -> None:
    """A folder without a kubelet is logged once, however often it is checked (case 61)."""
    timing = KubeletTiming(absence=0.0, connect_delay=0.001, longest_connect_delay=0.001)

    with capture_module_logs(endpoint) as logged:
        async with node(tmp_path, timing=timing) as live_node:
            while not logged:
                await checkpoint()
            async with live_node.kubelet.running():
                await live_node.until(20, 20)
            while logged[-1]["event"] != "no kubelet takes registrations":
                await checkpoint()
            async with live_node.kubelet.running():
                await live_node.until(20, 20)

    about = [entry for entry in logged if "resource" not in entry]
    assert [(entry["event"], entry.get("error")) for entry in about] == [
        ("no kubelet takes registrations", "No such file or directory"),
        ("kubelet found", None),
        ("no kubelet takes registrations", "Connection refused"),
        ("kubelet found", None),
    ]
    assert logged[0]["socket"] == str(live_node.kubelet.socket)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file", "{folder} is not a folder; name the kubelet's device-plugins folder"),
        ("x" * 120, "leaves no room for a socket's path; allowed: 78 at most"),
    ],
)
def test_a_folder_that_no_kubelet_can_have_is_refused(
    tmp_path: Path, folder: str, message: str
) -> None:
    """A path that can never be the kubelet's folder ends the start at once."""
    (tmp_path / "file").touch()
    path = tmp_path / folder

    with pytest.raises(ConfigError) as caught:
        check_kubelet_dir(path)
    assert str(caught.value).startswith(f"--kubelet-dir: {path} ")
    assert str(caught.value).endswith(message.format(folder=path))


def test_a_folder_that_may_come_is_taken(tmp_path: Path) -> None:
    """The daemon waits for a folder that does not exist yet, and for the longest possible path."""
    check_kubelet_dir(tmp_path / "later")
    check_kubelet_dir(Path("/" + "x" * 77))


async def test_folder_may_appear_later(tmp_path: Path) -> None:
    """A daemon that starts before the kubelet's folder exists registers later (case 62)."""
    async with node(tmp_path, make_directory=False) as live_node:
        await anyio.wait_all_tasks_blocked()

        async with live_node.kubelet.running():
            await live_node.until(20, 20)


async def test_folder_may_be_created_again(tmp_path: Path) -> None:
    """A folder that is removed and made again is followed (case 62)."""
    async with node(tmp_path) as live_node:
        async with live_node.kubelet.running():
            await live_node.until(20, 20)
        live_node.directory.rename(tmp_path / "old")

        async with live_node.kubelet.running():
            await live_node.until(20, 20)


async def test_finished_init_container_survives(tmp_path: Path) -> None:
    """A pod whose finished init container held shares outlives a kubelet restart (case 63)."""
    held = SimPod(
        "train",
        containers=(SimContainer("main", {METAGPU: 5}),),
        init_containers=(SimContainer("fetch", {METAGPU: 2}),),
    )

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(held)
        await live_node.kubelet.start_container(held, "fetch")
        live_node.kubelet.stop_container(held, "fetch")
        await live_node.kubelet.start_container(held, "main")
        before = live_node.kubelet.devices(held)

        await live_node.kubelet.restart()
        await live_node.until(20, 20)

        assert await live_node.kubelet.readmit() == {}
        assert live_node.kubelet.devices(held) == before


async def test_resource_taken_back_leaves_no_ghost(tmp_path: Path) -> None:
    """A removed resource counts 0 at once, and its stream ends; others get nothing (case 64)."""
    gpus = [gpu(n) for n in range(4)]

    async with (
        node(tmp_path, *gpus, config=FOUR_RESOURCES) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.kubelet.wait_for(
            lambda: all(live_node.kubelet.lists[r] == 1 for r in RESOURCES)
        )
        gone, *kept = RESOURCES
        lists = [live_node.kubelet.lists[resource] for resource in kept]

        live_node.offer(FOUR_RESOURCES.replace(gone, "example.com/other"))
        await live_node.until(0, 0, gone)
        await live_node.until(100, 100, "example.com/other")

        await live_node.kubelet.wait_for(lambda: live_node.kubelet.open_streams[gone] == 0)
        assert [live_node.kubelet.lists[resource] for resource in kept] == lists


async def test_resource_of_dra_is_not_registered(tmp_path: Path) -> None:
    """The endpoint goes with the pool's API, and is back with it: the names are the same."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.offer(CONFIG + "    api: dra\n")
        await live_node.until(0, 0)
        await becomes(lambda: live_node.sockets() == [])

        live_node.offer()
        await live_node.until(20, 20)


async def test_sockets_are_for_root_alone(tmp_path: Path) -> None:
    """Only root may open our socket, which is removed with the daemon."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        [socket] = live_node.sockets()

        assert socket.stat().st_mode & 0o777 == 0o600

    assert live_node.sockets() == []


async def test_registers_nowhere_else(tmp_path: Path) -> None:
    """Nothing of ours is in plugins_registry (case 7)."""
    registry = tmp_path / "plugins_registry"
    registry.mkdir()

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        assert list(registry.iterdir()) == []


async def test_pod_of_another_resource_does_not_concern_us(tmp_path: Path) -> None:
    """A pod with GPUs from another source, as by DRA, causes no call to us (case 38)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(pod("other", 1, "example.com/of-another"))
        await live_node.kubelet.admit(pod("none", 0))
        calls = live_node.record.of_resource(ResourceName(METAGPU)).calls
        before = sum(sum(each.outcomes.values()) for each in calls.values())
        await live_node.kubelet.admit(pod("ours", 1))

        assert before == 0
        assert sum(sum(each.outcomes.values()) for each in calls.values()) > 0


class Registrar(v1beta1.RegistrationBase):
    """A kubelet that only takes registrations, and records them."""

    def __init__(self) -> None:
        self.registered = anyio.Event()

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Take a registration."""
        del message
        self.registered.set()
        return v1beta1.Empty()


async def test_bound_but_not_listening_is_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that listens a moment after it binds its socket costs no second of waiting."""
    pauses: list[float] = []
    replaced = KubeletDirectory.wait_kubelet_replaced

    async def noting(
        self: KubeletDirectory, kubelet: tuple[int, int, int] | None, within: float
    ) -> None:
        if kubelet is not None:
            pauses.append(within)
        await replaced(self, kubelet, within)

    monkeypatch.setattr(KubeletDirectory, "wait_kubelet_replaced", noting)
    async with node(tmp_path) as live_node:
        registrar = Registrar()
        server = AbortableServer([registrar])

        with socket.socket(socket.AF_UNIX) as listener, anyio.fail_after(30):
            listener.bind(str(live_node.directory / "kubelet.sock"))
            while len(pauses) < 5:
                await checkpoint()
            await server.start(sock=listener)
            await registrar.registered.wait()
            await server.abort()

    # The Go peer's back-off after a refused connection is a second.
    assert sum(pauses[:5]) < 0.1


async def test_kubelet_that_dies_before_it_opens_the_list(tmp_path: Path) -> None:
    """A kubelet that answers Register and dies costs no wait: the next one is met at once."""
    timing = KubeletTiming(list_deadline=1e6)

    async with node(tmp_path, timing=timing) as live_node:
        registrar = Registrar()
        server = AbortableServer([registrar])
        await server.open(live_node.kubelet.socket)
        await registrar.registered.wait()
        await anyio.wait_all_tasks_blocked()
        await server.abort()

        async with live_node.kubelet.running():
            await live_node.until(20, 20)


async def test_socket_wiped_before_the_dial_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket wiped before the kubelet dials costs one refusal; the next one serves (case 4)."""
    timing = KubeletTiming(refusal_delay=0.01, longest_delay=0.01)
    wiped: list[Path] = []
    register = endpoint.Endpoint._register

    async def wipe_first(
        self: endpoint.Endpoint, line: endpoint.RegistrationLease, path: Path
    ) -> None:
        if not wiped:
            wiped.append(path)
            await anyio.Path(path).unlink()
        await register(self, line, path)

    monkeypatch.setattr(endpoint.Endpoint, "_register", wipe_first)
    kubelet = simulated_kubelet(tmp_path)

    async with node(tmp_path, kubelet=kubelet, timing=timing) as live_node, kubelet.running():
        await dials(kubelet)
        skip(10)
        await live_node.until(20, 20)

        [refusal] = kubelet.refusals
        assert refusal.startswith("failed to dial device plugin")
        assert kubelet.registrations[METAGPU] == 1


async def test_kubelet_that_closes_each_list_is_not_hammered(tmp_path: Path) -> None:
    """Registrations that end at once follow each other with growing delays."""
    rests: list[float] = []

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        for registrations in range(2, 7):
            began = anyio.current_time()
            drop_list(live_node)
            await registered(live_node, registrations)
            rests.append(anyio.current_time() - began)

        # 0, 0.05, 0.1, 0.2, 0.4 seconds at least
        assert rests[4] > 0.3


async def test_socket_that_cannot_be_bound_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed bind is logged with path and reason, and tried again with growing delays."""
    folder = tmp_path / ("long" * 30)
    logged: list[str] = []
    warning = endpoint.log.warning

    def log_warning(event: str, **about: object) -> object:
        logged.append(f"{event}: {about}")
        return warning(event, **about)

    directory = KubeletDirectory(folder)
    registry = Registry()
    kubelets = endpoint.RegistrationClient(directory)
    service = DevicePluginService(ResourceName(METAGPU), registry, never)
    lonely = endpoint.Endpoint(service, directory, kubelets)
    monkeypatch.setattr(lonely._log, "warning", log_warning, raising=False)

    problem = await lonely._register_once(endpoint.RegistrationLease(kubelets), None)
    assert isinstance(problem, OSError)
    assert "AF_UNIX path too long" in logged[0]
    assert str(folder) in logged[0]


def never(resource: ResourceName) -> Backend:
    """Fail the test, as it has no backend."""
    raise AssertionError(resource)


async def test_list_is_encoded_before_the_kubelet_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that waits for a kubelet has its list ready: nothing is encoded when it is asked."""
    encoded: list[str] = []
    encode = fast_codec.encode_device

    def counted(share_id: str, *, healthy: bool, numa_node: int | None) -> bytes:
        encoded.append(share_id)
        return encode(share_id, healthy=healthy, numa_node=numa_node)

    monkeypatch.setattr(device_plugin, "encode_device", counted)
    async with node(tmp_path) as live_node:
        await becomes(lambda: len(encoded) == 20)
        async with live_node.kubelet.running():
            await live_node.until(20, 20)

    assert len(encoded) == 20
