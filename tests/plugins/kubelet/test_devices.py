"""The kubelet's counts: cases 12 to 20, 26 and 27 of the contract, and the Go peer's faults."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.plugins.kubelet import messages as wire
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from tests.plugins.kubelet.rig import (
    CONFIG,
    FOUR_RESOURCES,
    METAGPU,
    RESOURCES,
    endpoint_of,
    gpu,
    node,
    pod,
    simulated_kubelet,
)

ONE_SHARE = CONFIG.replace("10", "1")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


async def test_one_gpu_fails_and_recovers(tmp_path: Path) -> None:
    """One share: 1/1, then 0 of 1, then 1/1 (case 12)."""
    async with node(tmp_path, gpu(0), config=ONE_SHARE) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1)
        live_node.fault(0)
        await live_node.until(1, 0)
        live_node.recover(0)
        await live_node.until(1, 1)


async def test_four_gpus_fail_and_recover(tmp_path: Path) -> None:
    """Four shares: 4/4, 3, 4, 2, 3, 4 of 4 (case 13)."""
    gpus = [gpu(n) for n in range(4)]

    async with node(tmp_path, *gpus, config=ONE_SHARE) as live_node, live_node.kubelet.running():
        await live_node.until(4, 4)
        live_node.fault(0)
        await live_node.until(4, 3)
        live_node.recover(0)
        await live_node.until(4, 4)
        live_node.fault(1)
        live_node.fault(2)
        await live_node.until(4, 2)
        live_node.recover(1)
        await live_node.until(4, 3)
        live_node.recover(2)
        await live_node.until(4, 4)


async def test_fault_takes_every_share_of_its_gpu_and_no_other(tmp_path: Path) -> None:
    """A fatal XID takes all shares of the GPU, held ones too; a running pod stays (case 14)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        running = pod("train", 5)
        await live_node.kubelet.admit(running)
        held = live_node.kubelet.devices(running)

        live_node.fault(0)
        await live_node.until(20, 10)

        assert live_node.kubelet.devices(running) == held

        await live_node.kubelet.delete(running)

        assert live_node.counts() == (20, 10)


async def test_health_by_id(tmp_path: Path) -> None:
    """The list names every share, the broken GPU's as Unhealthy, none twice (cases 15, 27)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.fault(1)
        await live_node.until(20, 10)

        async with endpoint_of(live_node) as stub:
            async for answer in stub.list_and_watch(v1beta1.Empty()):
                devices = {device.id: device.health for device in answer.devices}
                break

        assert len(answer.devices) == len(devices) == 20
        assert {i for i, health in devices.items() if health == "Unhealthy"} == {
            share.id for share in live_node.registry.snapshot.gpus[gpu(1).id].shares
        }


async def test_vanished_gpu_stays_listed(tmp_path: Path) -> None:
    """A GPU that NVML lists no more keeps its ids, as a pod may hold them (case 15)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.find(gpu(0))
        live_node.offer()
        live_node.fault(1, "NVML does not list it any more")

        await live_node.until(20, 10)


async def test_resources_have_numbers_of_their_own(tmp_path: Path) -> None:
    """A fault changes the counts of its GPU's resource; other lists send nothing (case 16)."""
    gpus = [gpu(n) for n in range(4)]

    async with (
        node(tmp_path, *gpus, config=FOUR_RESOURCES) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.kubelet.wait_for(
            lambda: all(live_node.kubelet.lists[r] == 1 for r in RESOURCES)
        )
        live_node.fault(2)
        await live_node.until(100, 0, RESOURCES[2])
        await anyio.wait_all_tasks_blocked()

        assert [live_node.counts(resource) for resource in RESOURCES] == [
            (100, 100),
            (100, 100),
            (100, 0),
            (100, 100),
        ]
        assert [live_node.kubelet.lists[resource] for resource in RESOURCES] == [1, 1, 2, 1]


async def test_list_that_fails_at_once_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet does not retry a list that fails at once, so we register again (case 17)."""
    failures = [RuntimeError("out of luck")]
    send = DevicePluginService._send_lists

    async def first_fails(self: DevicePluginService, stream: object) -> None:
        if failures:
            raise failures.pop()
        await send(self, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(DevicePluginService, "_send_lists", first_fails)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        assert live_node.kubelet.registrations[METAGPU] == 2


async def test_stopped_daemon_counts_nothing(tmp_path: Path) -> None:
    """Without the daemon nothing is allocatable; after 5 minutes capacity is 0 (cases 18 to 20)."""
    clock = Clock()

    async with simulated_kubelet(tmp_path, clock=clock).running() as kubelet:
        async with node(tmp_path, kubelet=kubelet) as live_node:
            await live_node.until(20, 20)
        await live_node.until(20, 0)
        clock.now += 299
        await kubelet.tick()

        assert live_node.counts() == (20, 0)

        clock.now += 2
        await kubelet.tick()

        assert live_node.counts() == (0, 0)

        async with node(tmp_path, kubelet=kubelet) as live_node:
            await live_node.until(20, 20)


async def test_gpu_may_come_later(tmp_path: Path) -> None:
    """No GPU is 0/0; a later GPU is offered on the same registration (case 26)."""
    async with node(tmp_path, gpu(0), config=CONFIG.replace("all", "none", 1)) as live_node:
        live_node.layout = build_layout(
            parse(CONFIG, "test", installed_backends()), (), Injection()
        )
        live_node.registry.apply(live_node.layout.offer_fact)

        async with live_node.kubelet.running():
            await live_node.kubelet.wait_for(lambda: live_node.kubelet.lists[METAGPU] == 1)

            assert live_node.counts() == (0, 0)

            live_node.offer()
            await live_node.until(10, 10)

            assert live_node.kubelet.registrations[METAGPU] == 1


async def test_large_node_is_one_message(tmp_path: Path) -> None:
    """Sixteen GPUs of 1000 shares reach the kubelet in one list (case 27)."""
    gpus = [gpu(n, numa_node=n // 8) for n in range(16)]
    config = CONFIG.replace("10", "1000")

    async with node(tmp_path, *gpus, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(16000, 16000)
        live_node.fault(3)
        await live_node.until(16000, 15000)

        assert live_node.kubelet.lists[METAGPU] == 2


def test_list_over_the_limit_is_refused_at_load() -> None:
    """A configuration whose list exceeds 4 MiB is refused with the number (case 27)."""
    config = parse(CONFIG.replace("10", "69000"), "big.yaml", installed_backends())

    with pytest.raises(ConfigError, match=r"big.yaml: .* 69000 shares, \d+ bytes"):
        wire.check_list_size(build_layout(config, [gpu(0)], Injection()), config.file)


async def test_abandoned_list_swallows_nothing(tmp_path: Path) -> None:
    """A list that another caller opened and left costs the kubelet no update."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with endpoint_of(live_node) as stub:
            async for _ in stub.list_and_watch(v1beta1.Empty()):
                break

        for _ in range(3):
            live_node.fault(0)
            await live_node.until(20, 10)
            live_node.recover(0)
            await live_node.until(20, 20)


async def test_every_open_list_gets_a_fault(tmp_path: Path) -> None:
    """Each of several open lists gets the fault."""
    received: list[int] = []

    async def listen(stub: v1beta1.DevicePluginStub) -> None:
        async for answer in stub.list_and_watch(v1beta1.Empty()):
            unhealthy = sum(device.health == "Unhealthy" for device in answer.devices)
            received.append(unhealthy)
            if unhealthy:
                return

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with (
            endpoint_of(live_node) as one,
            endpoint_of(live_node) as two,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listen, one)
            group.start_soon(listen, two)
            while received != [0, 0]:
                await anyio.lowlevel.checkpoint()
            live_node.fault(0)
        await live_node.until(20, 10)

    assert received == [0, 0, 10, 10]


async def test_burst_is_one_message(tmp_path: Path) -> None:
    """Faults of one turn of the event loop reach the kubelet as one list."""
    gpus = [gpu(n) for n in range(8)]

    async with node(tmp_path, *gpus) as live_node, live_node.kubelet.running():
        await live_node.until(80, 80)
        for index in range(8):
            live_node.fault(index)
        await live_node.until(80, 0)

        assert live_node.kubelet.lists[METAGPU] == 2
