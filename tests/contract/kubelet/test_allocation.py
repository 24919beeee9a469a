"""The kubelet contract: admission and allocation (kubelet.md §1.5)."""

import anyio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.plugins.kubelet.pb import v1beta1
from tests.contract.kubelet.rig import Kubelet, container, init, plugin_of
from tests.sim.kubelet.rig import device, wrapped

REFUSED = "UnexpectedAdmissionError"


def first(question: v1beta1.ContainerPreferredAllocationRequest) -> list[str]:
    """Prefer the required ids, then the first of the others."""
    required = question.must_include_deviceIDs
    others = sorted(set(question.available_deviceIDs) - set(required))
    return [*required, *others][: question.allocation_size]


async def test_each_container_has_one_allocate_in_its_order(kubelet: Kubelet, gpu: str) -> None:
    """A call has one container's ids; a container without the resource has no call."""
    plugin = plugin_of(gpu, "a b c")
    containers = (container("one", 2, gpu), container("none", None, gpu), container("two", 1, gpu))
    async with kubelet.serving(plugin):
        await kubelet.run(kubelet.pod("ordered", *containers))
        assert [len(ids) for ids in plugin.allocations] == [2, 1]
        one, two = map(set, plugin.allocations)
        assert one | two == {"a", "b", "c"}
        assert await kubelet.listed(gpu) == {"ordered": {"one": one, "none": set(), "two": two}}
        assert await kubelet.holders(gpu) == {"one": one, "two": two}
        await kubelet.reports(gpu, 3, 3)
    assert "get_preferred_allocation" not in plugin.calls


async def test_the_preference_comes_before_allocate(kubelet: Kubelet, gpu: str) -> None:
    """All free healthy ids are available, none is required, the size is the request."""
    plugin = plugin_of(gpu, "a b c d", prefer=lambda _: ["c", "b"])
    plugin.listed.append(device("e", health="Unhealthy"))
    async with kubelet.serving(plugin):
        await kubelet.run(kubelet.pod("prefers", container("main", 2, gpu)))
        await kubelet.run(kubelet.pod("second", container("main", 2, gpu)))
    assert plugin.calls[2:] == ["get_preferred_allocation", "allocate"] * 2
    asked, again = plugin.questions
    assert sorted(asked.available_deviceIDs) == ["a", "b", "c", "d"]
    assert (asked.must_include_deviceIDs, asked.allocation_size) == ([], 2)
    assert sorted(again.available_deviceIDs) == ["a", "d"]
    assert [sorted(ids) for ids in plugin.allocations] == [["b", "c"], ["a", "d"]]


async def test_a_failing_preference_fails_the_pod(kubelet: Kubelet, gpu: str) -> None:
    """The pod's message has the plugin's error, and Allocate is not called."""
    plugin = plugin_of(gpu, "a b", prefer=first)
    async with kubelet.serving(plugin):
        plugin.refusal = GRPCError(Status.UNIMPLEMENTED, "no")
        reason, message = await kubelet.fail(kubelet.pod("p", container("main", 1, gpu)))
    assert reason == REFUSED
    assert message.endswith(
        wrapped(
            "device plugin GetPreferredAllocation rpc failed with err: "
            "rpc error: code = Unimplemented desc = no"
        )
    )
    assert plugin.allocations == []


async def test_devices_of_init_containers_are_handed_on(kubelet: Kubelet, gpu: str) -> None:
    """Later containers must take them; a sidecar keeps its own, and no container shares."""
    plugin = plugin_of(gpu, "a b c d e", prefer=first)
    pod = kubelet.pod(
        "hands-on",
        container("m1", 2, gpu),
        container("m2", 2, gpu),
        init=(init("i1", 2, gpu), init("i2", 1, gpu), container("side", 1, gpu, sidecar=True)),
    )
    async with kubelet.serving(plugin):
        await kubelet.run(pod)
        i1, i2, side, m1, m2 = map(set, plugin.allocations)
        held = await kubelet.holders(gpu)
        listed = await kubelet.listed(gpu)
    assert i1 == {"a", "b"}
    assert i2 < i1
    assert side < i1
    assert m1 & i1 == i1 - side
    assert len(m1) == len(m2) == 2
    assert side | m1 | m2 == set("abcde")
    assert held == {"i1": i1, "i2": i2, "side": side, "m1": m1, "m2": m2}
    assert listed == {"hands-on": {"side": side, "m1": m1, "m2": m2}}
    # i2 and the sidecar come from reuse alone: nobody is asked.
    asked = [
        (
            set(question.available_deviceIDs),
            set(question.must_include_deviceIDs),
            question.allocation_size,
        )
        for question in plugin.questions
    ]
    assert asked == [
        (set("abcde"), set(), 2),
        (set("abcde") - side, i1 - side, 2),
        (set("abcde") - side - m1, set(), 2),
    ]


async def test_a_refused_pod_is_failed_and_its_devices_are_free(kubelet: Kubelet, gpu: str) -> None:
    """The pod shows the plugin's status code and text; the ids go to the next pod."""
    plugin = plugin_of(gpu, "a")
    async with kubelet.serving(plugin):
        plugin.refusal = GRPCError(Status.FAILED_PRECONDITION, "out of luck")
        reason, message = await kubelet.fail(kubelet.pod("unlucky", container("main", 1, gpu)))
        plugin.refusal = None
        await kubelet.run(kubelet.pod("lucky", container("main", 1, gpu)))
        assert await kubelet.listed(gpu) == {"lucky": {"main": {"a"}}}
    assert reason == REFUSED
    text = wrapped("rpc error: code = FailedPrecondition desc = out of luck")
    assert message == f"Pod was rejected: {text}"


async def test_a_pod_that_fails_at_its_second_container_frees_the_first(
    kubelet: Kubelet, gpu: str
) -> None:
    """The ids that one container of a refused pod has are free for the next pod."""
    plugin = plugin_of(gpu, "a b")
    async with kubelet.serving(plugin):
        both = kubelet.pod("too-large", container("one", 1, gpu), container("two", 2, gpu))
        reason, message = await kubelet.fail(both)
        assert (reason, len(plugin.allocations)) == (REFUSED, 1)
        assert "devices unavailable for" in message
        assert message.endswith("Requested: 2, Available: 1, which is unexpected")
        await kubelet.run(kubelet.pod("fits", container("main", 2, gpu)))


async def test_an_answer_without_a_response_leaks_the_devices(kubelet: Kubelet, gpu: str) -> None:
    """The ids stay taken while no pod ends."""
    plugin = plugin_of(gpu, "a b c")
    async with kubelet.serving(plugin):
        plugin.answers = 0
        _, message = await kubelet.fail(kubelet.pod("empty", container("main", 2, gpu)))
        assert "no containers return in allocation response" in message
        plugin.answers = 1
        _, message = await kubelet.fail(kubelet.pod("next", container("main", 2, gpu)))
        assert "Requested: 2, Available: 1" in message


async def test_a_plugin_that_ends_during_allocate_fails_the_pod(kubelet: Kubelet, gpu: str) -> None:
    """A list that ends meanwhile is an error, not a hang."""
    plugin = plugin_of(gpu, "a")

    async def hang_up() -> None:
        plugin.hang_up()
        await anyio.sleep_forever()

    plugin.before_answer = hang_up
    async with kubelet.serving(plugin):
        reason, message = await kubelet.fail(kubelet.pod("p", container("main", 1, gpu)))
    assert reason == REFUSED
    assert "code = Canceled desc = grpc: the client connection is closing" in message


async def test_a_request_of_nothing_needs_a_healthy_device(kubelet: Kubelet, gpu: str) -> None:
    """A pod that requests 0 fails without one, and has no Allocate with one."""
    plugin = plugin_of(gpu, "a")
    async with kubelet.serving(plugin):
        await kubelet.run(kubelet.pod("zero", container("main", 0, gpu)))
        assert plugin.allocations == []
        plugin.send(device("a", health="Unhealthy"))
        await kubelet.reports(gpu, 1, 0)
        reason, message = await kubelet.fail(kubelet.pod("no", container("main", 0, gpu)))
    assert reason == REFUSED
    assert "no healthy devices present" in message


async def test_a_resource_without_a_list_is_not_looked_at(kubelet: Kubelet, gpu: str) -> None:
    """A pod that asks for a name that no plugin has runs without devices."""
    await kubelet.run(kubelet.pod("without", container("main", 1, gpu)))
    assert await kubelet.listed(gpu) == {"without": {"main": set()}}
