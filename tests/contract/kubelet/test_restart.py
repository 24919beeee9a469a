"""The kubelet contract: restarts (kubelet.md §2)."""

import stat

from tests.contract.kubelet.rig import CHECKPOINT, Kubelet, container, init, plugin_of


async def test_a_start_deletes_sockets_and_keeps_holders(kubelet: Kubelet, gpu: str) -> None:
    """Sockets in subfolders and the checkpoint stay; running pods have their devices.

    Until the plugin is back the resource counts 0 and pods fail. A running pod with a finished init
    container that had a device is ended too: its phase is that of its containers' exits, without
    a reason. After that, Allocate is not repeated.
    """
    plugin = plugin_of(gpu, "a b c d")
    inner = plugin_of(f"{gpu[:50]}-in", "x")
    async with kubelet.serving(plugin, "restarted.sock"), kubelet.serving(inner, "contract/s.sock"):
        held = kubelet.pod("holder", container("main", 1, gpu))
        reused = kubelet.pod("reuser", container("main", 0, gpu), init=[init("before", 1, gpu)])
        await kubelet.run(held)
        await kubelet.run(reused)
        await kubelet.reports(gpu, 4, 4)
        [holds, _] = plugin.allocations
        await kubelet.stop()
        assert stat.S_ISSOCK(kubelet.socket.stat().st_mode)
        await plugin.cancelled.wait()
        before = kubelet.socket.stat().st_ctime_ns
        await kubelet.start()
        names = {file.name for file in kubelet.directory.iterdir()}
        assert {"kubelet.sock", CHECKPOINT} <= names
        assert "restarted.sock" not in names
        assert (kubelet.directory / "contract" / "s.sock").exists()
        assert kubelet.socket.stat().st_ctime_ns > before
        await kubelet.reports(gpu, 0, 0)
        assert await kubelet.phase("reuser", "Failed", "Succeeded") == "Succeeded"
        ended = await kubelet.get("reuser")
        assert ended is not None
        assert not ended["status"].get("reason")
        assert await kubelet.listed(gpu) == {"holder": {"main": set(holds)}}
        assert await kubelet.allocatable(gpu) == set()
        reason, message = await kubelet.fail(kubelet.pod("early", container("main", 1, gpu)))
        assert reason == "UnexpectedAdmissionError"
        assert "no healthy devices present" in message
    async with kubelet.serving(plugin):
        await kubelet.reports(gpu, 4, 4)
        assert await kubelet.phase("holder", "Running", "Failed") == "Running"
        await kubelet.run(kubelet.pod("later", container("main", 3, gpu)))
        assert len(plugin.allocations) == 3
        assert set(plugin.allocations[-1]) == set("abcd") - set(holds)


async def test_a_pod_deleted_while_the_kubelet_is_down_frees_its_device(
    kubelet: Kubelet, gpu: str
) -> None:
    """The restarted kubelet ends the pod, and the next pod has the device."""
    async with kubelet.serving(plugin_of(gpu, "a")):
        await kubelet.run(kubelet.pod("old", container("main", 1, gpu)))
        await kubelet.stop()
        await kubelet.delete("old")
        await kubelet.start()
    async with kubelet.serving(plugin_of(gpu, "a"), "back.sock"):
        await kubelet.phase("old", "gone")
        assert await kubelet.holders(gpu) == {"main": {"a"}}
        await kubelet.run(kubelet.pod("new", container("new", 1, gpu)))
        assert await kubelet.holders(gpu) == {"new": {"a"}}
