"""Shares whose hardware has to be created: Allocate waits for the hardware until a deadline."""

from collections.abc import Callable
from pathlib import Path

import anyio
import grpclib
import pytest

from metagpu.backends.mig.backend import MigBackend
from metagpu.core.model.request_errors import CdiNameMissing
from metagpu.core.model.shares import (
    HardwareDevice,
    Lease,
    ProvisionedState,
    ProvisionFailure,
    ResourceName,
    ShareId,
)
from metagpu.core.state.facts import (
    BackendAttached,
    BackendResumed,
    BackendSuspended,
    InstanceFaulted,
    ProvisioningReported,
    SharesClaimed,
)
from metagpu.plugins.kubelet.granting import provisioning_blocker, wait_reprovisioned
from metagpu.sim.kubelet.kubelet import AdmissionError, ContainerStartError
from tests.backends.mig.gpus import mig_gpu
from tests.plugins.kubelet.rig import Node, allocate, endpoint_of, node, pod

GPU = mig_gpu()
WHOLE = "nvidia.com/mig-7g.40gb"
SHARE = ShareId(f"{GPU.id}::7g.40gb@0")
CONFIG = "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, profiles: [7g.40gb]}]}]"
BY_CDI = f"deviceListStrategy: cdi-cri\n{CONFIG}"


async def asking(live_node: Node) -> Lease:
    """Wait until a container waits for its share; return the lease."""
    with anyio.fail_after(30):
        async for lease in live_node.registry.watch(lambda now: now.gpus[GPU.id].leases.get(SHARE)):
            if lease is not None:
                return lease
    raise AssertionError


def report_provisioned(live_node: Node, provisioned_state: ProvisionedState) -> None:
    """Report a provisioned state of the GPU."""
    live_node.registry.apply(ProvisioningReported(GPU.id, "mig", provisioned_state, at=1))


async def test_an_allocation_waits_for_its_device(tmp_path: Path) -> None:
    """The answer names the device created for it, and the lease counts from the answer on."""
    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        devices: list[str] = []

        async def admit() -> None:
            options = await live_node.kubelet.admit(pod("train", 1, WHOLE))
            devices.append(options["main"].envs["NVIDIA_VISIBLE_DEVICES"])

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            claimed = await asking(live_node)
            await anyio.wait_all_tasks_blocked()
            assert not devices
            report_provisioned(live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)}))

        assert devices == ["MIG-x"]
        answered = await asking(live_node)
        assert (answered.unanswered, claimed.unanswered) == (False, True)
        assert answered.since > claimed.since


@pytest.mark.parametrize(
    "provisioned_state",
    [
        lambda lease: ProvisionedState(
            failed={SHARE: ProvisionFailure("the driver says no", lease.since)}
        ),
        lambda _: ProvisionedState(),
    ],
    ids=["it failed", "nothing came"],
)
async def test_a_share_that_is_not_provisioned_is_released(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provisioned_state: Callable[[Lease], ProvisionedState],
) -> None:
    """The pod gets the reason, and the share is free for the next pod."""
    monkeypatch.setattr(MigBackend, "provision_timeout", 1.0)
    message = (
        f"{WHOLE}: {SHARE} could not be created: (the driver says no|that took longer than 1 s)"
    )

    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)

        async def admit() -> None:
            with pytest.raises(AdmissionError, match=message):
                await live_node.kubelet.admit(pod("train", 1, WHOLE))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            report_provisioned(live_node, provisioned_state(await asking(live_node)))

        assert not live_node.registry.snapshot.gpus[GPU.id].leases


async def test_a_share_that_is_paused_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A paused share is Unhealthy, and refused with its backend's reason."""
    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        made = {SHARE: HardwareDevice("MIG-x", 0, 0, idle=True)}
        report_provisioned(
            live_node, ProvisionedState(made, paused={SHARE: "instance 7g.40gb@0: MPS hangs"})
        )
        await live_node.until(1, 0, WHOLE)
        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, [SHARE])
        assert refused.value.message == (
            f"{WHOLE}: GPU {GPU} gives no new shares: instance 7g.40gb@0: MPS hangs"
        )

        report_provisioned(live_node, ProvisionedState(made))
        await live_node.until(1, 1, WHOLE)


async def test_an_older_failure_does_not_count(tmp_path: Path) -> None:
    """A pod that asks after another pod's failure waits for its own device."""
    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        report_provisioned(
            live_node, ProvisionedState(failed={SHARE: ProvisionFailure("before", 1.0)})
        )

        async with anyio.create_task_group() as group:
            group.start_soon(live_node.kubelet.admit, pod("train", 1, WHOLE))
            await asking(live_node)
            report_provisioned(live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)}))

        assert live_node.registry.snapshot.gpus[GPU.id].leases


async def test_a_name_that_cannot_be_given_is_no_grant(tmp_path: Path) -> None:
    """A pod whose CDI name is in no file is refused, and its share is free for the next pod."""
    asked: list[frozenset[str]] = []

    async def describe(names: frozenset[str]) -> None:
        asked.append(names)
        raise CdiNameMissing("MIG-x", "the disk is full")

    config = "deviceListStrategy: cdi-cri\n" + CONFIG.replace(
        "profiles", "create: allocate, profiles"
    )
    async with (
        node(tmp_path, GPU, config=config, ensure_cdi_names=describe) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.until(1, 1, WHOLE)

        async def admit() -> None:
            with pytest.raises(AdmissionError, match="CDI has no MIG-x: the disk is full"):
                await live_node.kubelet.admit(pod("train", 1, WHOLE))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await asking(live_node)
            report_provisioned(live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)}))

        assert asked == [frozenset({"MIG-x"})]
        assert not live_node.registry.snapshot.gpus[GPU.id].leases


async def test_a_start_on_a_gpu_out_of_service_fails_with_the_reason(tmp_path: Path) -> None:
    """A container's start on a GPU out of service fails with the GPU's reason."""
    async with node(tmp_path, GPU, config=BY_CDI) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        train = pod("train", 1, WHOLE)
        await live_node.kubelet.admit(train)
        live_node.fault(0, "XID 79")
        with pytest.raises(ContainerStartError, match=r"GPU 0 .* is unhealthy: XID 79"):
            await live_node.kubelet.start_container(train, "main")

        report_provisioned(live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)}))
        assert (await live_node.kubelet.start_container(train, "main")).cdi_devices


async def test_a_container_that_starts_again_gets_a_new_device(tmp_path: Path) -> None:
    """A device that is gone at a later start is created again for the share that is held."""
    async with node(tmp_path, GPU, config=BY_CDI) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        live_node.registry.apply(SharesClaimed(live_node.layout.shares, at=1))

        async def provision() -> None:
            async for lease in live_node.registry.watch(lambda now: now.gpus[GPU.id].leases[SHARE]):
                if lease.provisioned_at_start:
                    made = ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)})
                    report_provisioned(live_node, made)
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(provision)
            with anyio.fail_after(30):
                registry, shares = live_node.registry, live_node.layout.shares
                now = await wait_reprovisioned(registry, shares, 3600.0, anyio.current_time)
        assert now.gpus[GPU.id].provisioned["mig"].devices[SHARE].device == "MIG-x"


async def test_a_start_on_a_suspended_gpu_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's start on a suspended GPU does not wait, as no instance is created."""
    monkeypatch.setattr(MigBackend, "provision_timeout", 3600.0)
    async with node(tmp_path, GPU, config=BY_CDI) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        train = pod("train", 1, WHOLE)
        await live_node.kubelet.admit(train)
        reset = "MIG mode waits for a reset: run `nvidia-smi --gpu-reset -i 0`"
        live_node.registry.apply(BackendSuspended(GPU.id, "mig", reset, at=2, until_reset=True))
        with pytest.raises(ContainerStartError) as refused:
            await live_node.kubelet.start_container(train, "main")
        assert f"{WHOLE}: {SHARE} could not be created: {reset}" in str(refused.value)

        live_node.registry.apply(BackendResumed(GPU.id, "mig", at=3))
        report_provisioned(live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0)}))
        assert (await live_node.kubelet.start_container(train, "main")).cdi_devices


async def test_a_start_fails_on_a_gpu_that_is_suspended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting start fails when its GPU is suspended; it waits for a GPU in setup."""
    monkeypatch.setattr(MigBackend, "provision_timeout", 3600.0)
    async with node(tmp_path, GPU, config=BY_CDI) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        train, refused = pod("train", 1, WHOLE), list[str]()
        await live_node.kubelet.admit(train)
        live_node.registry.apply(
            BackendAttached(GPU.id, "mig", needs_setup=True, needs_cleanup=True, at=2)
        )
        [share] = live_node.layout.shares
        assert provisioning_blocker(share, live_node.registry.snapshot) == ""

        async def start() -> None:
            with pytest.raises(ContainerStartError) as error:
                await live_node.kubelet.start_container(train, "main")
            refused.append(str(error.value))

        async with anyio.create_task_group() as group:
            group.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            assert not refused
            live_node.registry.apply(BackendSuspended(GPU.id, "mig", "MIG mode is off", at=3))
        assert f"{SHARE} could not be created: MIG mode is off" in refused[0]


async def test_a_faulty_instance_is_refused_with_its_reason(tmp_path: Path) -> None:
    """The refusal names the faulty instance, the reason, and the end of the refusal."""
    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        report_provisioned(
            live_node, ProvisionedState({SHARE: HardwareDevice("MIG-x", 0, 0, idle=True)})
        )
        live_node.registry.apply(InstanceFaulted(GPU.id, "MIG-x", "XID 94", at=2))
        await live_node.until(1, 0, WHOLE)

        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, [SHARE])
        assert refused.value.message == (
            f"{WHOLE}: MIG instance 7g.40gb@0 of GPU {GPU} is unhealthy: XID 94; it is created "
            "again once no container holds it and no process uses it"
        )
        assert not live_node.registry.snapshot.gpus[GPU.id].leases


async def test_a_failed_request_for_a_leased_share_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share that had a lease keeps it, and its lease can end: nobody waits for it any more."""
    monkeypatch.setattr(MigBackend, "provision_timeout", 0.1)
    async with node(tmp_path, GPU, config=CONFIG) as live_node, live_node.kubelet.running():
        await live_node.until(1, 1, WHOLE)
        share = live_node.registry.snapshot.offers[ResourceName(WHOLE)].shares[SHARE]
        live_node.registry.apply(SharesClaimed((share,), at=0))

        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError, match="could not be created"):
                await allocate(stub, [SHARE])

        assert not live_node.registry.snapshot.gpus[GPU.id].leases[SHARE].unanswered
