"""`metagpu uninstall` leaves nothing on a node, and takes nothing from a running pod."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.paths import AgentPaths
from metagpu.agent.uninstall import Uninstall
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.errors import MetagpuError
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import DeviceNode
from metagpu.core.model.driver_roots import RootOptions
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.state.facts import LeasesObserved
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.programs import SimPrograms, sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.agent.test_daemon import daemon
from tests.agent.test_mps import MIXED, MPS, control_of
from tests.rigs.agent import METAGPU, QUICK, agent_at_work
from tests.rigs.mgctl import require_built
from tests.rigs.mig import a_node, mig_pool, placements, pod
from tests.rigs.waiting import becomes

NODE = "gpu-1"
TAINT = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
OTHER = {"key": "other", "effect": "NoSchedule"}
_OTHER_HOOK = {"hookName": "createContainer", "path": "/n"}
WITH_HOOKS = cdi.build_spec(
    {"GPU-1": [DeviceNode("/dev/nvidia0", "/dev/nvidia0")]},
    (),
    cdi.ContainerEdits({"hooks": [_OTHER_HOOK]}),
    hook=("/pod/metagpu-hook", "/run/metagpu.sock", "fail"),
)
"""A specification with our hook, which no daemon answers any more."""
LONG = 30.0
"""Seconds for a kubelet that runs to say which pods hold shares: a machine may be busy."""


async def uninstall(
    folder: Path,
    node: SimNode,
    *,
    wanted: bool = True,
    force: bool = False,
    cluster: ClusterSettings | None = None,
    pods_deadline: float = 0.5,
) -> dict[str, str]:
    """Uninstall from a node; return the result and its reason of each thing, by its kind."""
    paths = AgentPaths(
        kubelet_root=folder,
        kubelet_dir=folder / "device-plugins",
        pod_resources=folder / "pod-resources.sock",
        run_dir=folder,
        roots=RootOptions(dev=str(folder)),
    )
    agent = Agent(
        ConfigSource((folder / "metagpu.yaml",)),
        NvmlDriver(SimLibrary(node)),
        paths,
        programs=SimPrograms(),
        daemons=sim_daemons(),
        cluster_settings=cluster,
    )
    left = replace(paths, pod_dir=folder / "pod", cdi_dir=folder / "cdi")
    root, program = folder / "root", Path("/opt/metagpu")
    job = Uninstall(agent, left, root, program, wanted, force, pods_deadline=pods_deadline)
    report = await job.run()
    return {
        removal.kind: f"{removal.result} {removal.reason}".strip() for removal in report.removals
    }


async def test_nothing_is_left_once_no_pod_has_shares(tmp_path: Path) -> None:
    """A killed daemon's sockets and files go at once; what a pod has mounted goes after it."""
    require_built()
    (tmp_path / "dp").mkdir()
    before = {*os.listdir(tmp_path)}  # noqa: PTH208 - names
    (tmp_path / "cdi").mkdir()
    specification = tmp_path / "cdi" / cdi.FILE_NAME
    specification.touch()  # an earlier configuration's
    options = ("--pod-dir", str(tmp_path / "pod"), "--cdi-dir", str(tmp_path / "cdi"))
    places = ["--kubelet-dir", str(tmp_path / "dp"), "--root", str(tmp_path / "root"), *options]

    async with daemon(tmp_path, QUICK, *options) as live_daemon:
        await live_daemon.until(20)
        held = SimPod.single("held", {METAGPU: 3})
        await live_daemon.kubelet.admit(held)
        live_daemon.process.kill()
        await live_daemon.process.wait()
        (tmp_path / "pod" / "mgctl.sock.new").touch()  # a relay that was about to listen

        async def run(*more: str) -> tuple[int, dict[str, str]]:
            config = ("--config", str(tmp_path / "metagpu.yaml"), "--simulate", "a100-40gb:2")
            sockets = ("--pod-resources", str(tmp_path / "pr.sock"), "-o", "json")
            status, text = await live_daemon.command("uninstall", *config, *places, *sockets, *more)
            found = json.loads(text)["leftovers"]
            return status, {entry["kind"]: entry["result"] for entry in found}

        mounted = {"CDI specification": "stays", "pod folder": "stays"}
        listed = await run()
        assert listed == (0, {"socket": "found", **mounted, "run folder": "found"})
        assert await run("--yes") == (1, {"socket": "removed", **mounted, "run folder": "removed"})
        assert (tmp_path / "pod" / "mgctl").exists()
        assert specification.exists()

        await live_daemon.kubelet.delete(held)
        assert await run("--yes") == (0, dict.fromkeys(mounted, "removed"))
    assert {*os.listdir(tmp_path)} - before <= {"metagpu.yaml", "pr.sock", "cdi"}  # noqa: PTH208 - names


@pytest.mark.parametrize("lost", ["driver", "gpu"])
async def test_what_pods_use_stays_without_their_gpu(tmp_path: Path, lost: str) -> None:
    """The kubelet says who holds shares, also of GPUs that cannot be read."""
    node = build_node("a100-40gb:2")
    specification = tmp_path / "cdi" / cdi.FILE_NAME
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running():
        async with agent_at_work(tmp_path, node, QUICK, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            held = SimPod.single("held", {METAGPU: 3})
            envs = (await kubelet.admit(held))["main"].envs
        if lost == "driver":
            node.unload_driver()
        else:
            [gpu] = [other for other in node.gpus if other.id == envs["NVIDIA_VISIBLE_DEVICES"]]
            node.lose_gpu(gpu)
        await anyio.Path(specification.parent).mkdir()
        await anyio.Path(specification).write_text(WITH_HOOKS)

        found = await uninstall(tmp_path, node, pods_deadline=LONG)
        assert found["start hook"] == "removed"
        kept = json.loads(await anyio.Path(specification).read_text())["containerEdits"]["hooks"]
        assert kept == [_OTHER_HOOK]
        assert "start hook" not in await uninstall(tmp_path, node, pods_deadline=LONG)
        assert found["CDI specification"] == "stays used by pod default/held; --force removes it"
        unread = found.get("gpus", "").startswith("stays the GPUs cannot be read")
        assert unread is (lost == "driver")

        await kubelet.delete(held)
        assert (await uninstall(tmp_path, node, pods_deadline=LONG))[
            "CDI specification"
        ] == "removed"
    await anyio.Path(specification).write_text(WITH_HOOKS[:-9])
    found = await uninstall(tmp_path, node)
    assert found["start hook"].startswith("stays the specification cannot be read: ")
    assert found["CDI specification"].startswith("stays the kubelet does not say")
    assert (await uninstall(tmp_path, node, force=True))["CDI specification"] == "removed"


async def test_claims_keep_what_their_pods_use(tmp_path: Path) -> None:
    """A claim's specification stays while the kubelet lists its pod; dead sockets go at once."""
    node, sockets = build_node("a100-40gb:1"), tmp_path / "plugins_registry"
    specification = tmp_path / "cdi" / "metagpu.io-claim-uid-1.json"
    sockets.mkdir()
    specification.parent.mkdir()
    specification.touch()
    (tmp_path / "metagpu.yaml").write_text(QUICK)
    listed = {("uid-1", ShareId(f"{node.gpus[0].id}::m00")): (Holder("team", "a", "main"),)}
    (tmp_path / "device-plugins").mkdir()

    async def read(*_: object) -> LeasesObserved:
        return LeasesObserved({}, 0, of_claims=listed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metagpu.agent.uninstall.read_leases", read)
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(sockets / "gpu.metagpu.io-reg.sock"))
            server.listen()
            held = await uninstall(tmp_path, node, pods_deadline=LONG)
            assert "socket" not in held
            assert held["CDI specification"].startswith("stays")
        listed.clear()
        assert (await uninstall(tmp_path, node, pods_deadline=LONG))["socket"] == "removed"
    assert not specification.exists()
    assert list(sockets.iterdir()) == []


async def test_nothing_is_removed_without_the_kubelets_folder(tmp_path: Path) -> None:
    """A container without the node's mounts would look like a clean node."""
    node = build_node("t4:1")
    (tmp_path / "metagpu.yaml").write_text(QUICK)
    assert await uninstall(tmp_path, node, wanted=False) == {}
    with pytest.raises(MetagpuError, match=r"device-plugins.* mounts .*--kubelet-dir"):
        await uninstall(tmp_path, node)


async def test_no_daemon_may_run(tmp_path: Path) -> None:
    """The command refuses while a daemon runs, and says so; everything stays."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        arguments = ("--kubelet-dir", str(tmp_path / "dp"), "--simulate", "t4", "--yes")
        status, text = await live_daemon.command(
            "uninstall", *arguments, "--root", str(tmp_path / "r")
        )
        assert status == 1
        assert "metagpu runs here" in text
        assert "systemctl disable --now metagpu" in text
        assert (await live_daemon.command("status"))[0] == 0


def mode_of(gpu: SimGpu) -> int:
    """Return the compute mode of a simulated GPU."""
    return gpu.compute_mode


async def test_control_daemons_stay_with_their_clients(tmp_path: Path) -> None:
    """One with a client goes on, with its GPU's mode; without clients it ends; both by force."""
    node = build_node("a100-40gb:2")
    async with agent_at_work(tmp_path, node, MIXED) as scene:
        await scene.until(200, 200, MPS)
        pod_of_mps = SimPod.single("pod", {MPS: 10})
        envs = (await scene.kubelet.admit(pod_of_mps))["main"].envs
        await scene.wait_holders()
        held = envs["NVIDIA_VISIBLE_DEVICES"]
        controls = {str(gpu.id): control_of(scene, gpu.id) for gpu in node.gpus}
        client = controls[held].client()
        client.__enter__()
        gpu = next(gpu for gpu in node.gpus if gpu.id == held)
        await becomes(lambda: mode_of(gpu) == ComputeMode.EXCLUSIVE_PROCESS)
    await anyio.Path(tmp_path / "metagpu.lock").touch()

    found = await uninstall(tmp_path, node)
    assert found["MPS control daemon"].startswith("stays it has clients: ")
    assert found["run folder"].startswith("stays ")
    assert found["MPS folder"] == "removed"
    assert await controls[held].process() is not None
    assert mode_of(gpu) == ComputeMode.EXCLUSIVE_PROCESS

    found = await uninstall(tmp_path, node, force=True)
    assert found == {"MPS control daemon": "removed", "run folder": "removed"}
    assert await controls[held].process() is None
    assert mode_of(gpu) == ComputeMode.DEFAULT
    client.__exit__(None, None, None)


async def test_instances_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    """Of a layout that stayed, the instance of a pod and the one with a process stay."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    config = mig_pool("layout: {1g.5gb: 3}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running():
        async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
            await scene.until(3, 3, "nvidia.com/mig-1g.5gb")
            held = pod("held", "1g.5gb")
            await scene.kubelet.admit(held)
            await scene.wait_holders()
        before = placements(node)
        assert len(before) == 3

        assert await uninstall(tmp_path, node, wanted=False, pods_deadline=LONG) != {}
        assert placements(node) == before
        await uninstall(tmp_path, node, pods_deadline=LONG)
        assert len(placements(node)) == 1

        await kubelet.delete(held)
        checkpoint = anyio.Path(kubelet.directory / CHECKPOINT_FILE)
        text = await checkpoint.read_text()
        await checkpoint.write_text(text[:-9])  # it may name an init container, as no list does
        found = await uninstall(tmp_path, node)
        assert found["MIG instance"] == "stays the kubelet does not say which pods hold shares"
        await checkpoint.write_text(text)
        assert await uninstall(tmp_path, node, pods_deadline=LONG) == {"MIG instance": "removed"}
        assert placements(node) == []


@pytest.mark.parametrize("nfd", [False, True])
async def test_the_node_object_is_as_before(tmp_path: Path, *, nfd: bool) -> None:
    """Labels, conditions, taint, amounts and NodeFeature go; what others wrote stays."""
    server = SimApiServer()
    server.add_node(NODE, {"other": "label"}, taints=[OTHER])
    before = written(server)
    server.add_node(NODE, {"other": "label"}, taints=[OTHER, TAINT])
    if nfd:
        server.install_nfd()
    node = build_node("t4:1")

    async with server.running():
        settings = ClusterSettings(NODE, server.kubeconfig(tmp_path))
        async with agent_at_work(tmp_path, node, cluster_settings=settings) as scene:
            await scene.until(10, 10)
            await server.until(lambda: {"nvidia.com/gpu.count", "GPUProblem"} <= names(server))
        server.report(NODE, {METAGPU: 0, "cpu": 2}, {METAGPU: 0, "cpu": 2})

        found = await uninstall(tmp_path, node, cluster=settings)
        assert found.pop("amounts").startswith("stays the kubelet counts it")
        expected = {"conditions", "taint", "run folder", "NodeFeature" if nfd else "labels"}
        assert {kind for kind, text in found.items() if text == "removed"} == expected

        checkpoint = tmp_path / "device-plugins" / CHECKPOINT_FILE
        await anyio.Path(checkpoint).write_text('{"Data": {"RegisteredDevices": {}}}')
        assert await uninstall(tmp_path, node, cluster=settings) == {"amounts": "removed"}
        await server.until(lambda: "nvidia.com/gpu.count" not in names(server))
        assert written(server) == {**before, "capacity": {"cpu": "2"}}

        server.failing = [("GET", "/api/v1/nodes")]
        found = await uninstall(tmp_path, node, cluster=settings)
        assert found["node"].startswith("stays labels and conditions of the Node are not known")


def written(server: SimApiServer) -> Mapping[str, Any]:
    """Return what metagpu may write of a Node, and the objects beside it."""
    node = server.node(NODE)
    return {
        "labels": node["metadata"].get("labels"),
        "taints": node["spec"].get("taints"),
        "conditions": node["status"].get("conditions") or [],
        "capacity": node["status"].get("capacity"),
        "features": server.node_features(),
    }


def names(server: SimApiServer) -> set[str]:
    """Return the names of labels and conditions."""
    node = server.node(NODE)
    conditions = {condition["type"] for condition in node["status"].get("conditions") or ()}
    return {*conditions, *node["metadata"]["labels"]}
