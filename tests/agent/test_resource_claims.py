"""ResourceClaims on the whole agent: configuration, API server, kubelet's calls, status."""

import json
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from uuid import UUID

import anyio
import pytest

from metagpu.core.devices.devices import devices_of, pool_name
from metagpu.core.model.gpu import MIB
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import Holder, ResourceClaimRef
from metagpu.core.state.facts import LeasesObserved
from metagpu.core.usage.timing import UsageTiming
from metagpu.host.daemons import HostDaemons
from metagpu.host.linux import LinuxHost
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.dra import preparer
from metagpu.plugins.dra.checkpoint import ClaimCheckpoint, read_checkpoint
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.device_manager import DeviceManagerState
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.testing.node import RecordedPrograms
from tests.agent.test_mps import control_of
from tests.plugins.dra.rig import DRIVER, KubeletCalls
from tests.rigs.agent import METAGPU, QUICK, QUICK_USAGE, Scene, agent_at_work
from tests.rigs.cdi import CdiRefusedError, host, resolve_nodes
from tests.rigs.host import running
from tests.rigs.mig import a_node, hurry, placements, until
from tests.rigs.mig import pod as mig_pod

CLAIMS = QUICK.replace("    backends:", "    api: dra\n    backends:")
MANY = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    api: dra
    backends: [{backend: mps}, {backend: whole}, {backend: timeslice, replicas: 4}]
"""
NVIDIA = "gpu.nvidia.com"
MIG = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: mig
    api: dra
    backends: [{backend: mig, profiles: [2g.10gb, 7g.40gb], keepWarm: 100ms}]
"""

BOTH_APIS = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: limits
    gpus: {index: 0}
    backends: [{backend: mig, profiles: [2g.10gb]}]
  - name: claims
    gpus: {index: 1}
    api: dra
    backends: [{backend: mig, profiles: [2g.10gb], resource: example.com/mig-2g}]
"""


@dataclass
class ClaimScene(KubeletCalls):
    """A running agent, an API server with claims, and a kubelet that prepares them."""

    scene: Scene
    server: SimApiServer

    def allocate(
        self, device: str, *, parameters: object = None, **consumed: int
    ) -> ResourceClaimRef:
        """Add a ResourceClaim that the scheduler allocated a device whose name ends so."""
        names = (
            other.name
            for state in self.scene.agent.registry.snapshot.gpus.values()
            for other in devices_of(state)
        )
        name = next(other for other in names if other.endswith(device))
        result = {
            "request": "gpu",
            "driver": self.driver,
            "pool": pool_name(gethostname()),
            "device": name,
            "consumedCapacity": {key: str(value) for key, value in consumed.items()},
        }
        opaque = {"driver": self.driver, "parameters": parameters}
        config = [] if parameters is None else [{"source": "FromClaim", "opaque": opaque}]
        number = len(self.server.store.objects) + 1
        ref = ResourceClaimRef("default", f"claim-{number}", str(UUID(int=number)))
        content = {
            "metadata": {"uid": ref.uid},
            "status": {"allocation": {"devices": {"results": [result], "config": config}}},
        }
        self.server.store.put(("resourceclaims", ref.namespace, ref.name), content)
        return ref

    async def prepared(self, ref: ResourceClaimRef) -> list[str]:
        """Prepare a claim that can be; return its CDI names."""
        answer = (await self.prepare(ref))[ref.uid]
        assert not answer.error
        return list(answer.devices[0].cdi_device_ids)

    def nodes(self, names: list[str]) -> list[str]:
        """Return the device nodes that a runtime finds by CDI names."""
        return [Path(path).name for path in resolve_nodes(self.root / "cdi", *names)]

    def resolves(self, names: list[str]) -> bool:
        """Return whether a container with these CDI names could start."""
        with suppress(CdiRefusedError):
            return bool(self.nodes(names))
        return False

    def variables(self, ref: ResourceClaimRef) -> dict[str, str]:
        """Return the variables of a claim's container."""
        spec = json.loads((self.root / "cdi" / f"metagpu.io-claim-{ref.uid}.json").read_text())
        [device] = spec["devices"]
        return dict(value.split("=", 1) for value in device["containerEdits"]["env"])


@asynccontextmanager
async def at_work(
    tmp_path: Path,
    config: str = CLAIMS,
    node: SimNode | None = None,
    *,
    driver: str = DRIVER,
    programs: RecordedPrograms | None = None,
    server: SimApiServer | None = None,
    features: frozenset[Feature] = frozenset({Feature.PODS}),
    usage_timing: UsageTiming = QUICK_USAGE,
    processes: LinuxHost | None = None,
) -> AsyncIterator[ClaimScene]:
    """Run an agent with an API server; no control daemon of MPS is left behind."""
    if not (tmp_path / "dev").exists():
        host(tmp_path, gpus=2)
    server = server or SimApiServer()
    server.add_node(gethostname())
    async with server.running():
        settings = ClusterSettings(gethostname(), server.kubeconfig(tmp_path), features=features)
        async with agent_at_work(
            tmp_path,
            node or build_node("a100-40gb:2"),
            config,
            cluster_settings=settings,
            programs=programs,
            cdi_dir=tmp_path / "cdi",
            usage_timing=usage_timing,
            host=processes,
        ) as scene:
            claim_scene = ClaimScene(tmp_path, scene, server, driver=driver)
            try:
                if config != QUICK:
                    await claim_scene.wait_registration()
                yield claim_scene
            finally:
                with anyio.CancelScope(shield=True):
                    for gpu in scene.node.gpus if "mps" in config else ():
                        await control_of(scene, gpu.id).gone()


@pytest.mark.parametrize("reload", [False, True])
async def test_a_claim_is_prepared_by_the_whole_agent(tmp_path: Path, *, reload: bool) -> None:
    """CDI names resolve; the lease is one like any other, until it is unprepared."""
    async with at_work(tmp_path, QUICK if reload else CLAIMS) as claim_scene:
        scene, agent = claim_scene.scene, claim_scene.scene.agent
        if reload:
            await scene.until(20, 20)
            await anyio.Path(scene.config_file).write_text(CLAIMS)
            await agent.reload()
            await claim_scene.wait_registration()
        await scene.kubelet.wait_for(lambda: not scene.kubelet.allocatable().get(METAGPU))
        claim = claim_scene.allocate("fraction", shares=5)
        names = await claim_scene.prepared(claim)
        assert claim_scene.nodes(names) == ["nvidiactl", "nvidia-uvm", "nvidia0"]

        holder = Holder("default", "pod", "main")
        both = holder, Holder("default", "other", "main")
        held = {(claim.uid, share): both for share in scene.state(0).leases}
        agent.registry.apply(LeasesObserved({}, anyio.current_time(), of_claims=held))
        status = await scene.status()
        assert isinstance(status, dict)
        assert status["dra"]["claims"] == 1
        [lease] = status["leases"]
        assert (lease["shares"], lease["holder"]) == (5, "default/pod (main)")
        assert lease["resourceClaim"] == f"default/{claim.name}"
        assert lease["sharers"] == ["default/other (main)"]

        await anyio.Path(scene.config_file).write_text(QUICK)
        await agent.reload()
        await scene.wait_snapshot(lambda now: not now.offers_of(Api.DRA))
        assert await claim_scene.unprepare(claim) == {claim.uid: ""}
        assert not scene.state(0).leases
    assert [path.name async for path in anyio.Path(tmp_path, "cdi").glob("*claim*")] == []


async def test_an_init_container_is_held_to_the_shares_of_its_claim(tmp_path: Path) -> None:
    """The kubelet lists no init container: the Pod says which claim is the container's."""
    machine, prepare = SimHost(tmp_path), Holder("default", "alice", "prepare")
    kill = "  - name: all\n    memoryEnforcement: {policy: kill, period: 20ms, grace: 20ms}"
    async with (
        at_work(tmp_path, CLAIMS.replace("  - name: all", kill), processes=machine.host) as claims,
        running() as modest,
        running() as greedy,
    ):
        claim = claims.allocate("fraction", shares=1)
        await claims.prepared(claim)
        init = {"name": "prepare", "resources": {"claims": [{"name": "gpu"}]}}
        spec = {
            "nodeName": gethostname(),
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim.name}],
            "initContainers": [init],
            "containers": [{"name": "main"}],
        }
        pod = {"metadata": {"uid": container_of(prepare).pod_uid}, "spec": spec, "status": {}}
        claims.server.store.put(("pods", "default", "alice"), pod)
        for process, memory in ((modest, 300 * MIB), (greedy, 20000 * MIB)):
            machine.add_container_process(process.pid, prepare)
            claims.scene.node.start_process(
                claims.scene.node.gpu(0), SimProcess(process.pid, memory)
            )

        assert await greedy.wait() == -signal.SIGTERM
        assert modest.returncode is None


async def test_nothing_is_offered_before_the_claims_of_before_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool may have another API after a restart: the kubelet would give them to pods."""
    several = QUICK.replace("10}]", "10}, {backend: timeslice, replicas: 4}]")
    by_claims = several.replace("    backends:", "    api: dra\n    backends:")
    async with at_work(tmp_path, by_claims) as scene:
        claim = scene.allocate("fraction", shares=5)
        answer = (await scene.prepare(claim))[claim.uid]
        held = {str(share) for share in scene.scene.state(0).leases}
        scene.write_checkpoint({claim: answer.devices})
    checkpoint = tmp_path / "dra_manager_state"
    text, reads, lists = checkpoint.read_text(), list[str](), list[set[str]]()
    checkpoint.write_text(text[:-9])
    replace = DeviceManagerState.replace_devices

    def readable_later(root: Path, driver: str) -> ClaimCheckpoint | None:
        reads.append(driver)
        if len(reads) == 3:
            checkpoint.write_text(text)
        return read_checkpoint(root, driver)

    def note(state: DeviceManagerState, resource: str, devices: Iterable[v1beta1.Device]) -> None:
        lists.append({device.id for device in devices if device.health == "Healthy"})
        replace(state, resource, devices)

    monkeypatch.setattr("metagpu.plugins.dra.checkpoint.read_checkpoint", readable_later)
    monkeypatch.setattr(DeviceManagerState, "replace_devices", note)
    async with at_work(tmp_path, several) as scene:
        await until(lambda: any(len(group) > 10 for group in lists))
        assert {str(share) for share in scene.scene.state(0).leases} == held
        assert not any(held & healthy for healthy in lists)
        assert (await scene.prepare(claim))[claim.uid] == answer


async def test_nothing_is_held_twice_when_a_pool_changes_its_api(tmp_path: Path) -> None:
    """Claims get what pods by limits leave, and the kubelet's list lacks what claims hold."""
    async with at_work(tmp_path, QUICK) as claim_scene:
        scene, kubelet = claim_scene.scene, claim_scene.scene.kubelet
        await scene.until(20, 20)
        await kubelet.admit(SimPod.single("by-limits", {METAGPU: 3}))
        await scene.wait_holders()
        index = next(i for i in (0, 1) if scene.state(i).leases)
        gpu = scene.state(index).gpu.id.lower()
        held = set(scene.state(index).leases)

        await anyio.Path(scene.config_file).write_text(CLAIMS)
        await scene.agent.reload()
        await claim_scene.wait_registration()
        too_large, rest = (
            claim_scene.allocate(f"{gpu}-fraction", shares=count) for count in (8, 7)
        )
        assert "free" in (await claim_scene.prepare(too_large))[too_large.uid].error
        await claim_scene.prepared(rest)
        leases = scene.state(index).leases
        assert {share for share, lease in leases.items() if lease.resource_claim} == (
            leases.keys() - held
        )
        assert len(leases) == 10

        await anyio.Path(scene.config_file).write_text(QUICK)
        await scene.agent.reload()
        await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == 20 - 7)
        await claim_scene.unprepare(rest)
        await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == 20)


async def test_instances_are_created_by_limits_on_one_gpu_and_by_claims_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has pools of both APIs: a pod with limits and one with a claim have an instance."""
    hurry(monkeypatch)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true, count: 2}")
    async with at_work(tmp_path, BOTH_APIS, node) as scene:
        await scene.scene.kubelet.wait_for(
            lambda: scene.scene.kubelet.allocatable().get("nvidia.com/mig-2g.10gb", 0) > 0
        )
        await scene.scene.kubelet.admit(mig_pod("by-limits"))
        claim = scene.allocate("mig-2g10gb-4")
        names = await scene.prepared(claim)

        assert len(placements(node, 0)) == 1
        assert placements(node, 1) == ["2g.10gb@4"]
        assert scene.resolves(names)
        assert "example.com/mig-2g" not in scene.scene.kubelet.allocatable()
        [by_limits], [by_claim] = (scene.scene.state(index).leases.values() for index in (0, 1))
        assert (by_limits.resource_claim, by_claim.resource_claim) == (None, claim)


async def test_slices_come_once_the_kubelet_has_the_driver(tmp_path: Path) -> None:
    """A pod that is bound before has to wait for a minute."""
    async with at_work(tmp_path) as scene:

        def written() -> list[str]:
            return [key[2] for key in scene.server.store.objects if key[0] == "resourceslices"]

        await scene.prepared(scene.allocate("fraction", shares=1))
        assert written() == []
        await scene.notify(registered=True)
        await until(lambda: len(written()) > 0)


async def test_slices_end_when_a_restart_changes_the_api_and_claims_are_held(
    tmp_path: Path,
) -> None:
    """The kubelet deletes none while it has the driver, and the driver serves what is held."""
    server = SimApiServer()

    def written() -> list[str]:
        return [key[2] for key in server.store.objects if key[0] == "resourceslices"]

    async with at_work(tmp_path, server=server) as scene:
        await scene.notify(registered=True)
        await until(lambda: len(written()) > 0)
        claim = scene.allocate("fraction", shares=1)
        answer = (await scene.prepare(claim))[claim.uid]
    scene.write_checkpoint({claim: answer.devices})
    async with at_work(tmp_path, QUICK, server=server) as scene:
        await scene.wait_registration()
        await scene.notify(registered=True)
        await until(lambda: not written())
        assert await scene.unprepare(claim) == {claim.uid: ""}


async def test_a_claim_that_only_its_file_names_is_held_from_the_start(tmp_path: Path) -> None:
    """The kubelet has not written the answer, as another driver of the pod is slow."""
    async with at_work(tmp_path) as scene:
        claim = scene.allocate("fraction", shares=5)
        names = await scene.prepared(claim)
        held = scene.scene.state(0).leases.keys()
    scene.write_checkpoint({claim: []})
    async with at_work(tmp_path, QUICK) as scene:
        await scene.scene.kubelet.wait_for(
            lambda: scene.scene.kubelet.allocatable().get(METAGPU) == 20 - 5
        )
        assert scene.scene.state(0).leases.keys() == held
        assert scene.resolves(names)
        await scene.wait_registration()
        await scene.unprepare(claim)
        await scene.scene.until(20, 20)


async def test_a_gpu_that_is_being_cleaned_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler gives a GPU away as soon as its last claim is unprepared."""
    asked, emptied = anyio.Event(), HostDaemons.empty

    async def empty(daemons: HostDaemons, folder: Path) -> None:
        await asked.wait()
        await emptied(daemons, folder)

    async with at_work(tmp_path, MANY) as scene:
        await scene.scene.wait_snapshot(lambda now: not any(s.suspended for s in now.gpus.values()))
        part = scene.allocate("mps", shares=30)
        names = await scene.prepared(part)
        assert scene.nodes(names)[-1] == "nvidia0"
        assert scene.variables(part)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"

        gpu = scene.scene.state(0).gpu.id.lower()
        whole, slices = scene.allocate(gpu), scene.allocate(f"{gpu}-timeslice", slices=2)
        refused = (await scene.prepare(whole))[whole.uid].error
        assert "is in use by mps" in refused
        monkeypatch.setattr(HostDaemons, "empty", empty)
        await scene.unprepare(part)
        assert scene.scene.state(0).cleanup.since
        async with anyio.create_task_group() as group:
            group.start_soon(scene.prepared, whole)
            await anyio.wait_all_tasks_blocked()
            asked.set()
        await scene.unprepare(whole)
        await scene.prepared(slices)
        assert len(scene.scene.state(0).leases) == 2


async def test_nvidias_parameters_work_under_nvidias_name(tmp_path: Path) -> None:
    """A whole GPU is shared by MPS, or by time-slices of a length, as the claim says."""
    text = MANY.replace("replicas: 4", "replicas: 4, timeSlice: default")
    programs = RecordedPrograms()
    made = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
    limits = {"defaultActiveThreadPercentage": 50}
    by_mps = {**made, "sharing": {"strategy": "MPS", "mpsConfig": limits}}
    length = {"interval": "Long"}
    by_time = {**made, "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": length}}
    async with at_work(
        tmp_path,
        f"{text}dra: {{driver: {NVIDIA}}}\n",
        driver=NVIDIA,
        programs=programs,
    ) as scene:
        await scene.scene.wait_snapshot(lambda now: not any(s.suspended for s in now.gpus.values()))
        first, second = (scene.scene.state(number).gpu.id.lower() for number in (0, 1))
        shared = scene.allocate(first, parameters=by_mps)
        names = await scene.prepared(shared)
        assert scene.nodes(names)[-1] == "nvidia0"
        assert scene.variables(shared)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert {lease.share.backend for lease in scene.scene.state(0).leases.values()} == {"mps"}

        sliced = scene.allocate(second, parameters=by_time)
        await scene.prepared(sliced)
        await until(lambda: programs.calls[-1].endswith("--set-timeslice 3"))
        await scene.unprepare(sliced)
        await until(lambda: programs.calls[-1].endswith("--set-timeslice 0"))
        await scene.unprepare(shared)


async def test_a_mig_instance_is_made_at_prepare_and_again_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is where the scheduler placed it; a name resolves also once it is made again."""
    hurry(monkeypatch)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    async with at_work(tmp_path, MIG, node) as scene:
        claim = scene.allocate("mig-2g10gb-4")
        names = await scene.prepared(claim)
        assert placements(node) == ["2g.10gb@4"]
        assert len(scene.nodes(names)) == 5  # two of the instance
        other = scene.allocate("mig-7g40gb-0")
        assert (await scene.prepare(other))[other.uid].error
        answer = (await scene.prepare(claim))[claim.uid]

    rebooted = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    scene.write_checkpoint({claim: answer.devices})
    for path in (tmp_path / "cdi").iterdir():
        path.unlink()
    async with at_work(tmp_path, MIG, rebooted) as scene:
        await scene.scene.wait_snapshot(
            lambda now: any(s.provisioned["mig"].devices for s in now.gpus.values())
        )
        assert placements(rebooted) == ["2g.10gb@4"]
        await until(lambda: scene.resolves(names))
        await scene.unprepare(claim)
        await until(lambda: not placements(rebooted))


async def test_an_instance_that_takes_longer_than_a_call_is_the_next_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease stays; the pod is annotated once the instance exists, and no second one is made."""
    hurry(monkeypatch)
    monkeypatch.setattr(preparer, "LONGEST", 1.0)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    provisioning = node.gpus[0].mig.provisioning
    provisioning.duration = 60.0
    async with at_work(tmp_path, MIG, node) as scene:
        claim = scene.allocate("mig-2g10gb-4")
        stored = scene.server.store.objects["resourceclaims", claim.namespace, claim.name]
        stored["status"]["reservedFor"] = [{"resource": "pods", "name": "slow", "uid": "p"}]
        assert "took longer" in (await scene.prepare(claim))[claim.uid].error
        [lease] = scene.scene.state(0).leases.values()
        assert lease.resource_claim == claim
        assert placements(node) == []
        with node.changed:
            provisioning.duration = 0
            node.changed.notify_all()
        await until(lambda: any(one.target.endswith("/pods/slow") for one in scene.server.requests))
        await scene.prepared(claim)
        assert placements(node) == ["2g.10gb@4"]
        assert provisioning.requested == 1
