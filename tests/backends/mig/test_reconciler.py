"""The reconciler on a simulated node: after any sequence of acts no instance leaks."""

import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.inventory import MigTiming
from metagpu.backends.mig.mps_daemons import MpsDaemons
from metagpu.core.availability.reasons import availability_of
from metagpu.core.grants.injection import Injection
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.core.model.shares import Holder, Share, ShareId
from metagpu.core.state.facts import GpusFound, LeasesObserved
from metagpu.nvml import mig
from metagpu.sim.machine.foreign_instances import create_instance
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.mig_state import SimProvisioning
from tests.rigs.gpu_context import BackendRig, run_backends
from tests.rigs.mig import mig_pool, on_demand_pool

PID: Final = 4242


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten delays that are seconds on a real node."""
    timing = MigTiming(scan=0.02, poll=0.02, grace=0.02, busy=0.01, longest_busy=0.02, stagger=0.01)
    monkeypatch.setattr(MigBackend, "timing", timing)
    monkeypatch.setattr(
        MigBackend, "mps_timing", MpsDaemonTiming(period=0.1, retry=0.02, deadline=20.0)
    )


class Node:
    """A GPU, its pods and its failures; each method is what a node may do next."""

    def __init__(self, care: BackendRig) -> None:
        self.care = care
        self.held = list[Share]()
        self.gpu = care.node.gpus[0]

    def ask(self, pick: int) -> None:
        """Admit a container with a free share."""
        state = self.care.state()
        free = [
            share
            for share in state.shares
            if share.id not in state.leases and share.id not in availability_of(state).unlisted
        ]
        if free:
            self.held.append(free[pick % len(free)])
            self.care.claim(self.held[-1])

    def give_back(self, pick: int) -> None:
        """End a pod."""
        if self.held:
            self.care.release(self.held.pop(pick % len(self.held)))

    def run(self, pick: int) -> None:
        """Start a program on any existing instance."""
        with self.care.node.changed:
            there = [(instance.number, c.number) for instance, c in self.gpu.mig.compute_instances]
        if there:
            where = there[pick % len(there)]
            self.care.node.start_process(self.gpu, SimProcess(PID, None, *where))

    def end(self, _: int) -> None:
        """End all programs."""
        with self.care.node.changed:
            self.gpu.processes.clear()

    def fail(self, pick: int) -> None:
        """Fail the next creations and removals of instances; NVML may do them all the same."""
        self.gpu.mig.provisioning = SimProvisioning(
            failures=pick % 2,
            compute_failures=pick % 3,
            removal_failures=pick % 5,
            done=pick % 7 < 3,
        )

    def be_busy(self, _: int) -> None:
        """Report the driver as busy for a moment."""
        self.gpu.mig.provisioning = SimProvisioning(in_use_until=anyio.current_time() + 0.03)

    def reset(self, _: int) -> None:
        """Reset the GPU: all instances are gone."""
        self.care.node.reset_gpu(self.gpu)

    def present(self) -> set[str]:
        """Return the existing instances, as share ids do."""
        with self.care.node.changed:
            return {
                f"{self.gpu.model.profile_name(instance.profile)}@{instance.start}"
                for instance in self.gpu.mig.instances.values()
            }


ACTS: Final = (
    "ask",
    "ask",
    "ask",
    "give_back",
    "give_back",
    "run",
    "end",
    "fail",
    "be_busy",
    "reset",
)


_acts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 30)), max_size=14)


@settings(max_examples=25)
@given(_acts)
def test_no_sequence_leaks(acts: Sequence[tuple[str, int]]) -> None:
    """After all pods and programs ended no instance is left, and everything is on offer."""
    anyio.run(_all_of, acts, on_demand_pool("keepWarm: 0s, deadline: 1s"), set())


@settings(max_examples=15)
@given(_acts)
def test_a_layout_is_there_whatever_happened(acts: Sequence[tuple[str, int]]) -> None:
    """After all pods and programs ended exactly the layout is there and on offer."""
    layout = {"3g.20gb@4", "2g.10gb@2", "1g.5gb@0", "1g.5gb@1"}
    anyio.run(_all_of, acts, mig_pool("layout: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 2}"), layout)


@pytest.mark.long
@settings(max_examples=4)
@given(_acts)
def test_control_daemons_are_where_instances_are(acts: Sequence[tuple[str, int]]) -> None:
    """After all ended each instance has one control daemon that answers, and no other is left."""
    layout = {"3g.20gb@4", "1g.5gb@2", "1g.5gb@3"}
    options = "layout: {3g.20gb: 1, 1g.5gb: 2}, mps: {replicas: {1g.5gb: 2, 3g.20gb: 3}}"
    with tempfile.TemporaryDirectory(prefix="mg", dir="/tmp") as folder:
        anyio.run(_all_of, acts, mig_pool(options), layout, folder)
        assert not _running(folder)


async def test_an_instance_is_reported_as_going_before_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is given an instance while it is destroyed."""
    named, destroy = list[bool](), mig.destroy_instance
    async with _with_idle_instance("keepWarm: 0s") as (care, share):

        def destroy_visibly(handle: object, number: int) -> None:
            named.append(share.id in care.state().provisioned["mig"].devices)
            destroy(handle, number)

        monkeypatch.setattr(mig, "destroy_instance", destroy_visibly)
        care.node.gpus[0].processes.clear()
        await _until(lambda: named)

    assert named == [False]


async def test_a_scan_that_fails_changes_nothing() -> None:
    """An error of NVML between two scans leaves what was known: pods get instances meanwhile."""
    async with _with_idle_instance("keepWarm: 1h") as (care, share):
        care.node.gpus[0].processes.clear()
        await _until(lambda: care.state().provisioned["mig"].devices[share.id].idle)
        before = care.state()
        with capture_logs() as logs:
            care.node.gpus[0].failure = pynvml.NVML_ERROR_UNKNOWN
            await _until(lambda: logs)
            await anyio.sleep(0.1)  # several scans
            assert care.state() == before
            care.claim(share)
            care.node.gpus[0].failure = None
            care.release(share)
            await _until(lambda: care.state().provisioned["mig"].devices[share.id].idle)
    assert {line["event"] for line in logs} == {"mig instance scan failed"}
    # A failure amid a scan comes from another call of NVML than that of the next scan.
    assert len(logs) == len({line["error"] for line in logs})


@pytest.mark.parametrize("call", ["create_instance", "destroy_instance"])
async def test_what_others_create_in_an_outage_stays(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A call of ours that failed as the driver began to fail claims nothing in its slot."""
    async with run_backends(
        on_demand_pool("keepWarm: 0s"), gpu_models="a100-40gb:1", mig_enabled=True
    ) as care:
        care.registry.apply(LeasesObserved({}, at=0))
        await _until(lambda: "mig" not in care.state().suspended)
        node, share, call_nvml = Node(care), care.share("mig"), getattr(mig, call)

        def begin_to_fail(*args: object) -> object:
            node.gpu.failure = pynvml.NVML_ERROR_UNKNOWN
            return call_nvml(*args)

        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(mig, call, begin_to_fail)
            care.claim(share)
            await _until(lambda: node.gpu.failure or care.state().provisioned["mig"].devices)
            care.release(share)
            await _until(lambda: "mig instance scan failed" in [line["event"] for line in logs])

        node.reset(0)
        uuid = _create_as_administrator(node, share)
        care.registry.apply(LeasesObserved({ShareId(uuid): Holder("ns", "theirs", "main")}, at=1))
        node.gpu.failure = None
        reason = f"instance {slot_of(share.id)} was not created by metagpu"
        await _until(lambda: reason in care.state().provisioned["mig"].blocked.values())
        await anyio.sleep(0.2)  # several scans
        assert node.present()


async def test_an_instance_that_took_the_number_of_ours_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A removal destroys the instance that was idle, and none that came after the last scan."""
    stop = MpsDaemons.stop
    async with _with_idle_instance("keepWarm: 0s") as (care, share):
        node = Node(care)

        async def replace_instance(daemons: MpsDaemons, slot: str) -> None:
            monkeypatch.setattr(MpsDaemons, "stop", stop)
            number = next(iter(node.gpu.mig.instances))
            node.reset(0)
            _create_as_administrator(node, share)
            assert next(iter(node.gpu.mig.instances)) == number
            await stop(daemons, slot)

        monkeypatch.setattr(MpsDaemons, "stop", replace_instance)
        node.end(0)
        await _until(lambda: MpsDaemons.stop is stop)
        await anyio.sleep(0.2)  # several scans
        assert node.present()


@pytest.mark.parametrize("amid", [False, True], ids=["before a creation", "amid its tries"])
async def test_a_profile_that_goes_fails_its_creation_alone(*, amid: bool) -> None:
    """The GPU's backend goes on, and the next pod has its instance when the profile is back."""
    async with run_backends(
        on_demand_pool("keepWarm: 0s, deadline: 1s"), gpu_models="a100-40gb:1", mig_enabled=True
    ) as care:
        care.registry.apply(LeasesObserved({}, at=0))
        await _until(lambda: "mig" not in care.state().suspended)
        node, share, gpu = Node(care), care.share("mig"), care.state().gpu
        others = tuple(i for i in gpu.mig_profiles if i.name != profile_of(share.id))
        with capture_logs() as logs:
            if amid:
                node.gpu.mig.provisioning = SimProvisioning(in_use_until=math.inf)
                care.claim(share)
                await _until(lambda: care.state().provisioned["mig"].pending)
            care.registry.apply(GpusFound((replace(gpu, mig_profiles=others),), at=1))
            if not amid:
                care.claim(share)
            await _until(lambda: share.id in care.state().provisioned["mig"].failed)
            care.release(share)
            care.registry.apply(GpusFound((gpu,), at=2))
            node.gpu.mig.provisioning = SimProvisioning()
            care.claim(share)
            await _until(lambda: share.id in care.state().provisioned["mig"].devices)

    assert {line["event"] for line in logs} == {
        "mig instance creation failed",
        "mig instance created",
    }


async def test_a_layout_outlives_a_profile_that_is_away() -> None:
    """Instances of the other profiles are made meanwhile, and the last one when it is back."""
    async with run_backends(
        mig_pool("layout: {3g.20gb: 1, 1g.5gb: 1}"), gpu_models="a100-40gb:1", mig_enabled=True
    ) as care:
        care.registry.apply(LeasesObserved({}, at=0))
        node, gpu = Node(care), care.state().gpu
        await _until(lambda: len(node.present()) == 2)
        others = tuple(i for i in gpu.mig_profiles if i.name != "1g.5gb")
        care.registry.apply(GpusFound((replace(gpu, mig_profiles=others),), at=1))
        with capture_logs() as logs:
            node.reset(0)
            await _until(lambda: "mig instance creation failed" in [i["event"] for i in logs])
            await _until(lambda: len(node.present()) == 1)
            care.registry.apply(GpusFound((gpu,), at=2))
            await _until(lambda: len(node.present()) == 2)

    assert "backend failed" not in {line["event"] for line in logs}


async def test_the_next_pod_gets_the_instance_of_the_last_one_at_once() -> None:
    """A lease that began after the last scan, too, leaves its instance to the next container."""
    async with _with_idle_instance("keepWarm: 1h") as (care, share):
        care.node.gpus[0].processes.clear()
        await _until(lambda: care.state().provisioned["mig"].devices[share.id].idle)
        care.claim(share)
        await _until(lambda: not care.state().provisioned["mig"].devices[share.id].idle)
        care.release(share)
        assert share.id not in availability_of(care.state()).unlisted


async def test_a_daemon_that_stops_leaves_what_was_just_granted() -> None:
    """An idle instance stays if a container gets it in the moment in which the daemon ends."""
    async with _with_idle_instance("keepWarm: 1h") as (care, share):
        care.node.gpus[0].processes.clear()
        await _until(lambda: care.state().provisioned["mig"].devices[share.id].idle)
        care.claim(share)

    assert Node(care).present()


@asynccontextmanager
async def _with_idle_instance(options: str) -> AsyncIterator[tuple[BackendRig, Share]]:
    """Run a GPU with an instance whose lease has ended and whose process runs on."""
    async with run_backends(
        on_demand_pool(options), gpu_models="a100-40gb:1", mig_enabled=True
    ) as care:
        care.registry.apply(LeasesObserved({}, at=0))
        await _until(lambda: "mig" not in care.state().suspended)
        share = care.share("mig")
        care.claim(share)
        await _until(lambda: share.id in care.state().provisioned["mig"].devices)
        Node(care).run(0)
        care.release(share)
        yield care, share


def _create_as_administrator(node: Node, share: Share) -> str:
    """Create an instance in the slot of a share; return its uuid."""
    number = create_instance(node.care.node, node.gpu, slot_of(share.id))
    with node.care.node.changed:
        [made] = node.gpu.mig.instances[number].compute_instances.values()
    return made.uuid


def _running(folder: str) -> set[str]:
    """Return the devices with a control daemon; a daemon writes and removes its pid file."""
    return {file.parts[-3] for file in Path(folder).glob("mps/*/pipe/*.pid")}


async def _all_of(
    acts: Sequence[tuple[str, int]], text: str, at_last: set[str], folder: str = "/nowhere"
) -> None:
    injection = Injection(run_dir=folder)
    async with run_backends(
        text, gpu_models="a100-40gb:1", mig_enabled=True, injection=injection
    ) as care:
        node = Node(care)
        care.registry.apply(LeasesObserved({}, at=0))
        await _until(lambda: "mig" not in care.state().suspended)

        for act, pick in acts:
            getattr(node, act)(pick)
            await anyio.sleep(0.005)

        for share in node.held:
            care.release(share)
        node.end(0)
        node.gpu.mig.provisioning = SimProvisioning()
        await _until(
            lambda: node.present() == at_last and not availability_of(care.state()).unlisted
        )
        if folder != "/nowhere":
            devices = {made.device for made in care.state().provisioned["mig"].devices.values()}
            await _until(lambda: _running(folder) == devices)


async def _until(is_so: object) -> None:
    assert callable(is_so)
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - the node tells nobody
            await anyio.sleep(0.005)
