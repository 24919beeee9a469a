"""Restarts, crashes and reboots of the simulated kubelet (§2; cases 50-60, 63)."""

import asyncio
import json
import stat
from pathlib import Path

import anyio
import pytest
from grpclib.client import Channel

from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.kubelet import AdmissionError, KubeletDownError, SimKubelet
from metagpu.sim.kubelet.transport import AbortableServer
from tests.sim.kubelet.rig import GPU, Clock, FakePlugin, device, devices, pod

CHECKPOINT = "kubelet_internal_checkpoint"


def names(directory: Path) -> set[str]:
    """List the names in a directory."""
    return {path.name for path in directory.iterdir()}


async def test_a_start_wipes_sockets_and_nothing_else(tmp_path: Path) -> None:
    """Directories, files and the checkpoint stay; symlinks to sockets go (§2)."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "file.sock").write_text("a regular file")
    for name in ("old.sock", "sub/deep.sock"):
        door = AbortableServer([FakePlugin(GPU, [])])
        await door.open(tmp_path / name)
        await door.abort()
    (tmp_path / "link").symlink_to(tmp_path / "sub" / "deep.sock")
    async with SimKubelet(tmp_path).running():
        assert names(tmp_path) == {"sub", "file.sock", "kubelet.sock"}
        assert names(tmp_path / "sub") == {"deep.sock"}


async def test_a_dead_kubelet_leaves_a_socket_that_refuses(tmp_path: Path) -> None:
    """The stream is cancelled without a goodbye and the file stays (§2, case 61)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.crash()
        await plugin.cancelled.wait()
        assert stat.S_ISSOCK(kubelet.socket.stat().st_mode)
        with pytest.raises(ConnectionRefusedError):
            await plugin.register(kubelet)
        with pytest.raises(KubeletDownError):
            await kubelet.admit(pod("p", ("main", 1)))


async def test_a_death_during_admission_fails_no_pod(tmp_path: Path) -> None:
    """The pod is neither admitted nor Failed: the next kubelet decides."""
    plugin = FakePlugin(GPU, devices("a"))
    asked = anyio.Event()

    async def hang() -> None:
        asked.set()
        await anyio.sleep_forever()

    plugin.before_answer = hang
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        admission = asyncio.create_task(kubelet.admit(pod("p", ("main", 1))))
        await asked.wait()
        await kubelet.crash()
        with pytest.raises(KubeletDownError):
            await admission
        assert (kubelet.failed, kubelet.pods) == ({}, ())


async def test_a_second_object_reads_the_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is all that a process leaves to the next."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    async with SimKubelet(tmp_path).running() as kubelet:
        assert kubelet.capacity() == {GPU: 0}
        assert kubelet.devices(pod("p")) == {"main": {GPU: {"a"}}}


async def test_a_stopped_endpoint_of_the_checkpoint_expires_too(tmp_path: Path) -> None:
    """The grace period begins with the restart (§2)."""
    clock = Clock()
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path, clock=clock).running() as kubelet, plugin.registered(kubelet):
        await kubelet.restart()
        clock.now += 301
        await kubelet.tick()
        with pytest.raises(AdmissionError, match="OutOf"):
            await kubelet.admit(pod("p", ("main", 1)))


async def test_a_container_that_does_not_run_needs_the_plugin(tmp_path: Path) -> None:
    """After a reboot the pod is lost unless the plugin is back first (case 56)."""
    plugin = FakePlugin(GPU, devices("a"))
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(one)
            await kubelet.start_container(one, "main")
        await kubelet.restart(reboot=True)
        lost = await kubelet.readmit()
        assert kubelet.pods == ()
    assert lost[one.uid].reason == "UnexpectedAdmissionError"
    assert "no healthy devices present" in lost[one.uid].message


async def test_after_a_reboot_a_quick_plugin_saves_the_pod(tmp_path: Path) -> None:
    """The pod keeps its device without a second Allocate (cases 52, 63)."""
    plugin = FakePlugin(GPU, devices("a b"))
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(one)
            held = kubelet.devices(one)
        await kubelet.restart(reboot=True)
        async with plugin.registered(kubelet):
            assert await kubelet.readmit() == {}
            assert kubelet.devices(one) == held
            assert len(plugin.allocations) == 1


async def test_a_pod_is_lost_when_its_device_came_back_unhealthy(tmp_path: Path) -> None:
    """The third error hits the pod, so ids stay stable over reboots (case 31)."""
    plugin = FakePlugin(GPU, devices("a"))
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(one)
        await kubelet.restart()
        plugin.listed = [device("a", health="Unhealthy"), device("b")]
        async with plugin.registered(kubelet):
            lost = await kubelet.readmit()
    assert "previously allocated devices are no longer healthy" in lost[one.uid].message


async def test_a_new_pod_waits_for_the_old_ones(tmp_path: Path) -> None:
    """The first admission after a restart readmits the running pods first."""
    plugin = FakePlugin(GPU, devices("a b"))
    old = pod("old", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(old)
        await kubelet.restart()
        with pytest.raises(AdmissionError):
            await kubelet.admit(pod("new", ("main", 1)))
        assert old.uid in kubelet.failed


async def test_prestart_is_skipped_before_the_plugin_is_back(tmp_path: Path) -> None:
    """PreStartContainer is no safety barrier (§1.5)."""

    async def never() -> None:
        raise AssertionError

    plugin = FakePlugin(GPU, devices("a"), pre_start=never)
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(one)
        await kubelet.restart()
        assert (await kubelet.start_container(one, "main")).envs["GPU"] == "a"
    assert plugin.pre_started == []


async def test_the_checkpoint_has_the_kubelets_form(tmp_path: Path) -> None:
    """The file has ids per NUMA node, base64 answers and healthy ids (§2)."""
    plugin = FakePlugin(GPU, [device("a", 0, 1), device("b", health="Unhealthy")])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    data = json.loads((tmp_path / CHECKPOINT).read_text())["Data"]
    (entry,) = data["PodDeviceEntries"]
    assert entry.pop("AllocResp")
    assert entry == {
        "PodUID": "uid-p",
        "ContainerName": "main",
        "ResourceName": GPU,
        "DeviceIDs": {"0": ["a"], "1": ["a"]},
    }
    assert data["RegisteredDevices"] == {GPU: ["a"]}


@pytest.mark.parametrize("damage", ["", "{}", '{"Data": {}, "Checksum": 1}', "[]", "\x00"])
async def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """The devices of running pods can then be given out twice (§2)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    (tmp_path / CHECKPOINT).write_text(damage)
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("other", ("main", 1)))
        assert plugin.allocations == [["a"], ["a"]]


async def test_without_a_checkpoint_the_last_report_stays(tmp_path: Path) -> None:
    """The node's numbers stay stale until a plugin registers, if a file is left (§2)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.crash()
        (tmp_path / CHECKPOINT).rename(tmp_path / "left-over")
        await kubelet.restart()
        assert kubelet.capacity() == {GPU: 1}


async def test_in_an_empty_directory_the_node_is_new(tmp_path: Path) -> None:
    """The capacity is reset (case 59)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.crash()
        (tmp_path / CHECKPOINT).unlink()
        await kubelet.restart()
        assert kubelet.capacity() == {GPU: 0}


async def test_a_kubelet_makes_its_directory(tmp_path: Path) -> None:
    """Nothing has to exist at the kubelet's start (case 62)."""
    directory = tmp_path / "lib" / "device-plugins"
    async with SimKubelet(directory).running() as kubelet:
        assert kubelet.socket == directory / "kubelet.sock"


async def test_a_death_while_a_plugin_registers_is_no_trouble(tmp_path: Path) -> None:
    """The plugin's call ends with the connection, and nothing hangs."""
    plugin = FakePlugin(GPU, devices("a"))
    plugin.endpoint = "nobody.sock"
    kubelet = SimKubelet(tmp_path)
    async with kubelet.running(), Channel(path=str(kubelet.socket)) as channel:
        stub = v1beta1.RegistrationStub(channel)
        request = v1beta1.RegisterRequest(
            version="v1beta1", endpoint="nobody.sock", resource_name=GPU
        )
        with pytest.raises(TimeoutError):
            await stub.register(request, timeout=0.01)
        await kubelet.crash()


async def test_a_kubelet_without_its_checkpoint_forgets_who_holds_what(tmp_path: Path) -> None:
    """Running pods stay, without devices."""
    plugin, held = FakePlugin(GPU, devices("a")), pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(held)
            await kubelet.start_container(held, "main")
        await kubelet.restart(forget=True)
        async with FakePlugin(GPU, devices("a")).registered(kubelet):
            assert kubelet.devices(held) == {}
            assert await kubelet.readmit() == {}
            assert kubelet.pods == (held,)
