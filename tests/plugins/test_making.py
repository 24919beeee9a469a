"""Shares that stand for something that has to be made: Allocate waits for it, and for no longer."""

from collections.abc import Callable
from pathlib import Path

import anyio
import grpclib
import pytest

from metagpu.backends.mig import MigBackend
from metagpu.core.errors import NotNamed
from metagpu.core.facts import (
    BackendResumed,
    BackendSuspended,
    GpuKept,
    InstanceFaulted,
    StockTold,
)
from metagpu.core.model import Failure, Lease, Made, ShareId, Stock
from metagpu.plugins.making import hindrance
from metagpu.sim.kubelet import AdmissionError, ContainerStartError
from tests.backends.mig.gpus import mig_gpu
from tests.plugins.rig import Node, allocate, endpoint_of, node, pod

GPU = mig_gpu()
WHOLE = "nvidia.com/mig-7g.40gb"
SHARE = ShareId(f"{GPU.id}::7g.40gb@0")
CONFIG = "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, profiles: [7g.40gb]}]}]"
BY_CDI = f"deviceListStrategy: cdi-cri\n{CONFIG}"


async def asking(it: Node) -> Lease:
    """Wait until a container waits for its share; give the lease."""
    with anyio.fail_after(30):
        async for lease in it.registry.watch(lambda now: now.gpus[GPU.id].leases.get(SHARE)):
            if lease is not None:
                return lease
    raise AssertionError


def tell(it: Node, stock: Stock) -> None:
    """Tell what was made."""
    it.registry.apply(StockTold(GPU.id, "mig", stock, at=1))


async def test_an_allocation_waits_for_what_is_made(tmp_path: Path) -> None:
    """The answer names what was made after the question, and the lease is counted from then on."""
    async with node(tmp_path, GPU, config=CONFIG) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        told: list[str] = []

        async def admit() -> None:
            options = await it.kubelet.admit(pod("train", 1, WHOLE))
            told.append(options["main"].envs["NVIDIA_VISIBLE_DEVICES"])

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            claimed = await asking(it)
            await anyio.wait_all_tasks_blocked()
            assert not told
            tell(it, Stock({SHARE: Made("MIG-x", 0, 0)}))

        assert told == ["MIG-x"]
        assert (await asking(it)).since > claimed.since


@pytest.mark.parametrize(
    "stock",
    [
        lambda lease: Stock(failed={SHARE: Failure("the driver says no", lease.since)}),
        lambda _: Stock(),
    ],
    ids=["it failed", "nothing came"],
)
async def test_a_share_that_is_not_made_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock: Callable[[Lease], Stock]
) -> None:
    """The pod is told why, and the share is free for the next."""
    monkeypatch.setattr(MigBackend, "patience", 1.0)
    message = f"{WHOLE}: {SHARE} could not be made: (the driver says no|that took longer than 1 s)"

    async with node(tmp_path, GPU, config=CONFIG) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)

        async def admit() -> None:
            with pytest.raises(AdmissionError, match=message):
                await it.kubelet.admit(pod("train", 1, WHOLE))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            tell(it, stock(await asking(it)))

        assert not it.registry.snapshot.gpus[GPU.id].leases


async def test_a_share_that_is_paused_is_refused_with_the_reason(tmp_path: Path) -> None:
    """It is Unhealthy while its backend says so; a kubelet that has not heard reads why."""
    async with node(tmp_path, GPU, config=CONFIG) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        made = {SHARE: Made("MIG-x", 0, 0, idle=True)}
        tell(it, Stock(made, paused={SHARE: "instance 7g.40gb@0: MPS hangs"}))
        await it.until(1, 0, WHOLE)
        async with endpoint_of(it) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, [SHARE])
        assert refused.value.message == (
            f"{WHOLE}: GPU {GPU} gives no new shares: instance 7g.40gb@0: MPS hangs"
        )

        tell(it, Stock(made))
        await it.until(1, 1, WHOLE)


async def test_an_older_failure_is_not_this_ones(tmp_path: Path) -> None:
    """Who asks after somebody whose share failed waits for its own."""
    async with node(tmp_path, GPU, config=CONFIG) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        tell(it, Stock(failed={SHARE: Failure("before", 1.0)}))

        async with anyio.create_task_group() as group:
            group.start_soon(it.kubelet.admit, pod("train", 1, WHOLE))
            await asking(it)
            tell(it, Stock({SHARE: Made("MIG-x", 0, 0)}))

        assert it.registry.snapshot.gpus[GPU.id].leases


async def test_a_name_that_cannot_be_given_is_no_grant(tmp_path: Path) -> None:
    """A pod whose CDI name no file has is told so, and its share is free for the next."""
    asked: list[frozenset[str]] = []

    async def describe(names: frozenset[str]) -> None:
        asked.append(names)
        raise NotNamed("MIG-x", "the disk is full")

    config = "deviceListStrategy: cdi-cri\n" + CONFIG.replace(
        "profiles", "create: allocate, profiles"
    )
    async with node(tmp_path, GPU, config=config, describe=describe) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)

        async def admit() -> None:
            with pytest.raises(AdmissionError, match="CDI has no MIG-x: the disk is full"):
                await it.kubelet.admit(pod("train", 1, WHOLE))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await asking(it)
            tell(it, Stock({SHARE: Made("MIG-x", 0, 0)}))

        assert asked == [frozenset({"MIG-x"})]
        assert not it.registry.snapshot.gpus[GPU.id].leases


async def test_a_start_on_a_gpu_out_of_service_says_why(tmp_path: Path) -> None:
    """What has not been made will not be now: the container waits, with the GPU's reason."""
    async with node(tmp_path, GPU, config=BY_CDI) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        train = pod("train", 1, WHOLE)
        await it.kubelet.admit(train)
        it.fault(0, "XID 79")
        with pytest.raises(ContainerStartError, match=r"GPU 0 .* is unhealthy: XID 79"):
            await it.kubelet.start_container(train, "main")

        tell(it, Stock({SHARE: Made("MIG-x", 0, 0)}))
        assert (await it.kubelet.start_container(train, "main")).cdi_devices


async def test_a_start_on_a_suspended_gpu_says_why_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody makes an instance there: the container's start does not wait for one."""
    monkeypatch.setattr(MigBackend, "patience", 3600.0)
    async with node(tmp_path, GPU, config=BY_CDI) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        train = pod("train", 1, WHOLE)
        await it.kubelet.admit(train)
        reset = "MIG mode waits for a reset: run `nvidia-smi --gpu-reset -i 0`"
        it.registry.apply(BackendSuspended(GPU.id, "mig", reset, at=2, reset=True))
        with pytest.raises(ContainerStartError) as refused:
            await it.kubelet.start_container(train, "main")
        assert f"{WHOLE}: {SHARE} could not be made: {reset}" in str(refused.value)

        it.registry.apply(BackendResumed(GPU.id, "mig", at=3))
        tell(it, Stock({SHARE: Made("MIG-x", 0, 0)}))
        assert (await it.kubelet.start_container(train, "main")).cdi_devices


async def test_a_start_is_told_of_a_gpu_that_is_suspended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits already hears it too; a GPU that is just being made ready is waited for."""
    monkeypatch.setattr(MigBackend, "patience", 3600.0)
    async with node(tmp_path, GPU, config=BY_CDI) as it, it.kubelet.running():
        await it.until(1, 1, WHOLE)
        train, refused = pod("train", 1, WHOLE), list[str]()
        await it.kubelet.admit(train)
        it.registry.apply(GpuKept(GPU.id, "mig", readies=True, cleans=True, at=2))
        [share] = it.layout.shares
        assert hindrance(share, it.registry.snapshot) == ""

        async def start() -> None:
            with pytest.raises(ContainerStartError) as error:
                await it.kubelet.start_container(train, "main")
            refused.append(str(error.value))

        async with anyio.create_task_group() as group:
            group.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            assert not refused
            it.registry.apply(BackendSuspended(GPU.id, "mig", "MIG mode is off", at=3))
        assert f"{SHARE} could not be made: MIG mode is off" in refused[0]


async def test_a_broken_instance_is_refused_in_words(tmp_path: Path) -> None:
    """Whoever asks for it nevertheless reads which instance it is, why, and until when."""
    async with node(tmp_path, GPU, config=CONFIG) as it, it.kubelet.running():
        tell(it, Stock({SHARE: Made("MIG-x", 0, 0, idle=True)}))
        it.registry.apply(InstanceFaulted(GPU.id, "MIG-x", "XID 94", at=2))
        await it.until(1, 0, WHOLE)

        async with endpoint_of(it) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, [SHARE])
        assert refused.value.message == (
            f"{WHOLE}: MIG instance 7g.40gb@0 of GPU {GPU} is unhealthy: XID 94; it is made anew "
            "once nobody holds or uses it"
        )
        assert not it.registry.snapshot.gpus[GPU.id].leases
