"""The kubelet contract: registrations and device lists (kubelet.md §1.2 to §1.4)."""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from tests.contract.kubelet.rig import Kubelet, container, plugin_of
from tests.sim.kubelet.rig import device


async def test_options_come_before_the_answer_and_one_list_after_it(
    kubelet: Kubelet, gpu: str
) -> None:
    """Register is answered after the options; then the kubelet opens one list."""
    plugin = plugin_of(gpu, "a b")
    async with plugin.serving(kubelet.directory, "options.sock"):
        await plugin.register(kubelet)
        assert plugin.calls[0] == "get_device_plugin_options"
        await kubelet.has_list(plugin)
        await kubelet.reports(gpu, 2, 2)
        assert plugin.calls == ["get_device_plugin_options", "list_and_watch"]


async def test_a_refusal_is_unknown_with_its_reason(kubelet: Kubelet, gpu: str) -> None:
    """A wrong version, an invalid name and failed options have a text each, and no list."""
    plugin = plugin_of(gpu, "a")
    texts = []
    version = 'requested API version "v1alpha" is not supported by kubelet.'
    async with plugin.serving(kubelet.directory, "refused.sock"):
        for wrong in ({"version": "v1alpha"}, {"resource": "foo"}, {}):
            plugin.refusal = GRPCError(Status.INTERNAL, "not today")
            with pytest.raises(GRPCError) as caught:
                await plugin.register(kubelet, **wrong)
            assert caught.value.status is Status.UNKNOWN
            texts.append(caught.value.message)
    assert texts == [
        f'{version} Supported version is ["v1beta1"]',
        'the ResourceName "foo" is invalid',
        "failed to get device plugin options: rpc error: code = Internal desc = not today",
    ]
    assert plugin.calls == ["get_device_plugin_options"]
    assert await kubelet.amounts(gpu) == (None, None)


async def test_an_endpoint_may_be_in_a_subfolder(kubelet: Kubelet, gpu: str) -> None:
    """The kubelet joins the endpoint to its folder."""
    plugin = plugin_of(gpu, "a")
    async with kubelet.serving(plugin, "contract/p.sock"):
        await kubelet.reports(gpu, 1, 1)


async def test_each_list_replaces_the_one_before(kubelet: Kubelet, gpu: str) -> None:
    """An unhealthy device counts as capacity alone; a missing one does not count."""
    plugin = plugin_of(gpu, "a b c")
    async with kubelet.serving(plugin):
        plugin.send(device("a"), device("b"), device("c", health="Unhealthy"))
        await kubelet.reports(gpu, 3, 2)
        plugin.send(device("a"), device("c", health="healthy"))
        await kubelet.reports(gpu, 2, 1)
        plugin.send(device("c"), device("d"))
        await kubelet.reports(gpu, 2, 2)
        plugin.send()
        await kubelet.reports(gpu, 0, 0)


async def test_the_end_of_a_plugin_leaves_the_capacity(kubelet: Kubelet, gpu: str) -> None:
    """Allocatable is 0 after the end, and all is as before after a new registration."""
    plugin = plugin_of(gpu, "a b")
    async with kubelet.serving(plugin):
        await kubelet.reports(gpu, 2, 2)
    await kubelet.reports(gpu, 2, 0)
    reason, message = await kubelet.fail(kubelet.pod("early", container("main", 1, gpu)))
    assert reason == "UnexpectedAdmissionError"
    assert f"no healthy devices present; cannot allocate unhealthy devices {gpu}" in message
    async with kubelet.serving(plugin_of(gpu, "b c d"), "again.sock"):
        await kubelet.reports(gpu, 3, 3)


async def test_the_newest_registration_replaces_the_devices(kubelet: Kubelet, gpu: str) -> None:
    """The older list stays open meanwhile, and its end disconnects the newer plugin."""
    old, new = plugin_of(gpu, "a b"), plugin_of(gpu, "b c d")
    async with kubelet.serving(old, "old.sock"), kubelet.serving(new, "new.sock"):
        await kubelet.reports(gpu, 3, 3)
        assert len(old.streams) == 1
        old.hang_up()
        await new.cancelled.wait()
        await kubelet.reports(gpu, 3, 0)


async def test_a_failed_registration_hides_the_end_of_the_working_plugin(
    kubelet: Kubelet, gpu: str
) -> None:
    """The devices stay Healthy and allocatable after the list has ended."""
    good, bad = plugin_of(gpu, "a b"), plugin_of(gpu, "")
    bad.refusal = GRPCError(Status.INTERNAL, "not today")
    async with kubelet.serving(good), bad.serving(kubelet.directory, "bad.sock"):
        with pytest.raises(GRPCError):
            await bad.register(kubelet)
        good.hang_up()
        async with kubelet.serving(plugin_of(f"{gpu[:50]}-later", "x")):
            assert not good.streams
            assert await kubelet.allocatable(gpu) == {"a", "b"}
            await kubelet.run(kubelet.pod("stale", container("main", 1, gpu)))
