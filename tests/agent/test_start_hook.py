"""The hook of the CDI specification, as a runtime starts it before a container's first process."""

import json
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio import to_thread

from metagpu.core.config.memory import LIMIT_PREFIX
from metagpu.core.contracts.host import Container
from metagpu.core.errors import NoDaemon
from metagpu.core.grants import cdi
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.control.client import SOCKET_NAME, send_request
from metagpu.plugins.control.socket import control_server
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimContainer, SimKubelet, SimPod
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import find_model
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.cdi import check_spec
from tests.rigs.host import running
from tests.rigs.mgctl import require_built
from tests.rigs.privileges import require_mounts
from tests.rigs.waiting import becomes

ALICE: Final = Holder("team", "alice", "main")
SIDECAR: Final = Holder("team", "alice", "sidecar")
LIMIT_OF_25: Final = (10085 + 512) * MIB
CONFIG: Final = """
version: metagpu/v1
deviceListStrategy: cdi-cri
pools:
  - name: all
    memoryEnforcement: {policy: kill}
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""
OTHER: Final = "cnvrg.io/other"
TWO_POOLS: Final = """
version: metagpu/v1
deviceListStrategy: cdi-cri
startHook: fail
pools:
  - name: first
    gpus: {index: 0}
    memoryEnforcement: {policy: kill}
    backends: [{backend: fraction, sharesPerGpu: 100}]
  - name: second
    gpus: {index: 1}
    memoryEnforcement: {policy: kill}
    backends: [{backend: fraction, sharesPerGpu: 100, resource: cnvrg.io/other}]
"""
IGNORE: Final = CONFIG + "startHook: ignore\n"
FAIL: Final = CONFIG + "startHook: fail\n"


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Skip all where the program is not built from this source."""
    require_built()


class Runtime:
    """A container runtime: makes a container's cgroup, and runs the hooks of its devices."""

    def __init__(self, folder: Path, machine: SimHost) -> None:
        self.machine = machine
        self._spec = folder / "cdi" / cdi.FILE_NAME

    def hooks(self) -> list[Mapping[str, object]]:
        """Return the hooks of every container with a device."""
        found: list[Mapping[str, object]] = check_spec(self._spec.read_text())[
            "containerEdits"
        ].get("hooks", [])
        return found

    def create(self, pid: int, holder: Holder, real: int | None = None) -> Container:
        """Move a process into a container's cgroup; its log has a folder, and no link yet."""
        uid = container_of(ALICE).pod_uid
        container = self.machine.add_container_process(pid, holder, real=real, uid=uid)
        for link in self.machine.logs.iterdir():
            link.unlink()
        pod = f"{holder.namespace}_{holder.pod}_{container.pod_uid}"
        (self.machine.pods / pod / holder.container).mkdir(exist_ok=True)
        return container

    async def run_hook(self, state: Mapping[str, object]) -> tuple[int, str]:
        """Run our hook with a container's state; return its exit status and its error output."""
        [hook] = self.hooks()
        assert hook["hookName"] == "createRuntime"
        program, arguments = hook["path"], hook["args"]
        assert isinstance(program, str)
        assert isinstance(arguments, list)
        command = ["bash", "-c", 'exec -a "$@"', "bash", arguments[0], program, *arguments[1:]]
        # The OCI's libraries print one line, others print several.
        text = json.dumps(state, indent=1).encode()
        done = await anyio.run_process(command, input=text, check=False, env={})
        return done.returncode, done.stderr.decode()


def state_of(pid: int, container: Container, holder: Holder) -> dict[str, object]:
    """Return the state of a container as runc gives it, with containerd's annotations."""
    annotations = {
        "io.kubernetes.cri.sandbox-uid": container.pod_uid,
        "io.kubernetes.cri.sandbox-namespace": holder.namespace,
        "io.kubernetes.cri.sandbox-name": holder.pod,
        "io.kubernetes.cri.container-name": holder.container,
    }
    return {
        "ociVersion": "1.2.0",
        "id": container.id,
        "status": "creating",
        "pid": pid,
        "bundle": "/run/b",
        "annotations": annotations,
    }


@asynccontextmanager
async def node(
    tmp_path: Path,
    config: str = IGNORE,
    driver: str = "615.71.09",
    kubelet: SimKubelet | None = None,
    *,
    count: int = 1,
    timing: KubeletTiming | None = None,
    cluster_settings: ClusterSettings | None = None,
) -> AsyncIterator[tuple[Scene, Runtime]]:
    """Run an agent with A100s and a runtime that knows CDI, while the block lasts."""
    gpus = SimNode(driver)
    for _ in range(count):
        gpus.add_gpu(find_model("a100-40gb"))
    machine = SimHost(tmp_path)
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    async with (
        agent_at_work(
            tmp_path,
            gpus,
            config,
            kubelet=kubelet,
            host=machine.host,
            pod_dir=tmp_path / "pod",
            cdi_dir=tmp_path / "cdi",
            kubelet_timing=timing,
            cluster_settings=cluster_settings,
        ) as scene,
        control_server(tmp_path, scene.agent.commands),
    ):
        await scene.until(100, 100)
        yield scene, Runtime(tmp_path, machine)


async def admit(scene: Scene, *containers: SimContainer) -> None:
    """Admit alice's pod; nothing waits until its holders are known."""
    await scene.kubelet.admit(
        SimPod("alice", "team", uid=container_of(ALICE).pod_uid, containers=containers)
    )


async def test_a_container_has_its_limit_and_its_name_before_its_first_process(
    tmp_path: Path,
) -> None:
    """The driver has the limit when the hook returns, and the first process has its name."""
    async with node(tmp_path) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        gpu = scene.node.gpu(0)
        assert gpu.memory_limits == {}
        assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")
        assert list(gpu.memory_limits.values()) == [LIMIT_OF_25]

        scene.node.start_process(gpu, SimProcess(first.pid, 5000 * MIB))
        [shown] = (await scene.usage())["containers"]
        assert (shown["pod"], shown["container"]) == ("alice", "main")
        assert shown["gpus"][0]["guard"] == "driver"
        assert [process["pid"] for process in shown["gpus"][0]["processes"]] == [first.pid]


async def test_many_containers_start_at_once(tmp_path: Path) -> None:
    """Of 40 containers that start at the same time, each has its limit when its hook returns."""
    names = [f"main-{number}" for number in range(40)]
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        await admit(scene, *(SimContainer(name, {METAGPU: 2}) for name in names))
        limits = scene.node.gpu(0).memory_limits
        seen: list[bool] = []

        async def start(number: int) -> None:
            holder = Holder("team", "alice", names[number])
            pid = 1_000_000 + number
            container = container_of(holder, uid=container_of(ALICE).pod_uid)
            result = await runtime.run_hook(state_of(pid, container, holder))
            seen.append(result == (0, "") and Path(runtime.machine.cgroup_of(pid)) in limits)

        for number, name in enumerate(names):
            holder = Holder("team", "alice", name)
            runtime.create(1_000_000 + number, holder, real=first.pid)
        async with anyio.create_task_group() as group:
            for number in range(len(names)):
                group.start_soon(start, number)
    assert seen == [True] * len(names)


async def test_the_link_of_the_kubelet_counts_more_than_the_runtimes_name(tmp_path: Path) -> None:
    """A pod whose annotations name another of its containers has that name until the link."""
    async with node(tmp_path) as (scene, runtime), running() as first:
        await admit(
            scene, SimContainer("main", {METAGPU: 50}), SimContainer("sidecar", {METAGPU: 25})
        )
        machine = runtime.machine
        (machine.pods / f"team_alice_{container_of(ALICE).pod_uid}" / "main").mkdir(parents=True)
        container = runtime.create(first.pid, SIDECAR)
        await runtime.run_hook(state_of(first.pid, container, ALICE))
        assert await machine.host.holders([container]) == {container: ALICE}

        machine.name(SIDECAR, container)
        await becomes(lambda: list(scene.node.gpu(0).memory_limits.values()) == [LIMIT_OF_25])
        assert await machine.host.holders([container]) == {container: SIDECAR}


async def test_a_container_without_a_certain_name_has_its_pods_and_no_limit(
    tmp_path: Path,
) -> None:
    """A container that its runtime does not name counts for its pod, and fails with `fail`."""
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        unnamed = state_of(first.pid, container, ALICE) | {"annotations": {}}
        status, error = await runtime.run_hook(unnamed)
        assert (status, "is not certain" in error) == (1, True)
        assert await runtime.machine.host.holders([container]) == {
            container: Holder("team", "alice", "")
        }
        assert scene.node.gpu(0).memory_limits == {}


async def test_a_cgroup_root_of_several_levels_is_searched(tmp_path: Path) -> None:
    """A container below a `cgroupRoot` has its limit; one whose cgroup is hidden does not start."""
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container, cgroups = runtime.create(first.pid, ALICE), runtime.machine.cgroups
        shutil.rmtree(cgroups / "kubepods.slice")
        path = f"site/gpu.pods/kubepods/burstable/pod{container.pod_uid}/{container.id}"
        runtime.machine.add_process(first.pid, f"0::/{path}\n")
        (cgroups / path).rename(tmp_path / "hidden")
        status, error = await runtime.run_hook(state_of(first.pid, container, ALICE))
        assert (status, "is not visible" in error) == (1, True)

        (tmp_path / "hidden").rename(cgroups / path)
        assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")
        assert scene.node.gpu(0).memory_limits == {cgroups / path: LIMIT_OF_25}


async def test_a_container_of_two_resources_waits_for_both(tmp_path: Path) -> None:
    """A container has both of its limits, also if the daemon has seen one of its resources alone.

    The kubelet asks for each resource by itself, and the second answer may take seconds.
    """
    slow = KubeletTiming(settle=1.0, contended_period=60.0)
    async with (
        node(tmp_path, TWO_POOLS, count=2, timing=slow) as (scene, runtime),
        running() as first,
    ):
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        await scene.wait_snapshot(lambda now: any(gpu.allocated for gpu in now.gpus.values()))
        await admit(scene, SimContainer("main", {METAGPU: 25, OTHER: 25}))
        container = runtime.create(first.pid, ALICE)
        assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")
        assert [list(gpu.memory_limits.values()) for gpu in scene.node.gpus] == [[LIMIT_OF_25]] * 2


async def test_a_state_of_megabytes_is_read(tmp_path: Path) -> None:
    """CRI-O gives a pod's annotations twice, the second time as JSON in JSON."""
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        state = state_of(first.pid, container, ALICE)
        annotations = {"note": "\x01" * (256 << 10)}
        copies = {"io.kubernetes.cri.copy": json.dumps(annotations)}
        state["annotations"] = {**annotations, **copies, **state["annotations"]}  # type: ignore[dict-item]
        assert len(json.dumps(state)) > 3 << 20
        assert await runtime.run_hook(state) == (0, "")
        assert list(scene.node.gpu(0).memory_limits.values()) == [LIMIT_OF_25]


async def test_the_process_of_another_container_is_refused(tmp_path: Path) -> None:
    """A pid that another container has by now gives that container neither name nor limit."""
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        other = Container("f" * 64, container.pod_uid)
        status, error = await runtime.run_hook(state_of(first.pid, other, ALICE))
        assert (status, "is not in the cgroup of" in error) == (1, True)
        assert scene.node.gpu(0).memory_limits == {}


@pytest.mark.parametrize(("config", "expected"), [(IGNORE, 0), (FAIL, 1)])
async def test_a_limit_that_cannot_be_set_fails_a_start_by_choice_only(
    tmp_path: Path, config: str, expected: int
) -> None:
    """Without root, the error reaches the runtime, which fails the container with `fail`."""
    async with node(tmp_path, config) as (scene, runtime), running() as first:
        scene.node.root = False
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        status, error = await runtime.run_hook(state_of(first.pid, container, ALICE))
        assert (status, "the driver set no memory limit" in error) == (expected, True)


async def test_a_daemon_that_has_just_started_sets_the_limit_first(tmp_path: Path) -> None:
    """A container that restarts while a daemon starts waits until the daemon knows its shares."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running(), running() as first:
        async with node(tmp_path, kubelet=kubelet) as (scene, runtime):
            await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        state = {"state": state_of(first.pid, container, ALICE)}
        gpus, host = scene.node, runtime.machine.host
        async with agent_at_work(tmp_path, gpus, IGNORE, host=host, kubelet=kubelet) as following:
            answer = await following.agent.commands["container-starting"](state)
    assert answer == {"container": str(ALICE), "driverLimits": 1}


async def test_a_container_of_unknown_shares_waits_for_them(tmp_path: Path) -> None:
    """A hook that is faster than the kubelet's list waits for the shares, to its deadline."""
    async with node(tmp_path, FAIL) as (_, runtime), running() as first:
        container = runtime.create(first.pid, ALICE)
        status, error = await runtime.run_hook(state_of(first.pid, container, ALICE))
        assert (status, "was not set within 8 s" in error) == (1, True)


ALLOWS: Final = FAIL.replace("kill}", "kill, allowAnnotations: [limit]}")


async def test_a_container_of_an_unreported_pod_waits_for_its_annotations(tmp_path: Path) -> None:
    """With `fail` no container starts without its limit, which its pod may change.

    The API server has not reported the pod: the hook waits, to its deadline.
    """
    server = SimApiServer()
    server.add_node("gpu-1")
    uid = container_of(ALICE).pod_uid
    server.add_pod("team", "alice", "gpu-1", {f"{LIMIT_PREFIX}{METAGPU}": "50"}, uid=uid)
    async with server.running():
        kubeconfig = server.kubeconfig(tmp_path)
    settings = ClusterSettings("gpu-1", kubeconfig, features=frozenset({Feature.PODS}))
    async with (
        node(tmp_path, ALLOWS, cluster_settings=settings) as (scene, runtime),
        running() as first,
    ):
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container, limits = runtime.create(first.pid, ALICE), scene.node.gpu(0).memory_limits
        status, error = await runtime.run_hook(state_of(first.pid, container, ALICE))
        assert (status, "has not reported the pod" in error, limits) == (1, True, {})

        async with server.running():
            assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")
            assert list(limits.values()) == [(2 * 10085 + 512) * MIB]


@pytest.mark.parametrize(
    ("config", "driver"),
    [(FAIL, "580.65.06"), (FAIL.replace("kill", "warn"), "615.71.09")],
)
async def test_a_container_without_a_limit_starts(tmp_path: Path, config: str, driver: str) -> None:
    """A driver without limits, or a pool that wants none, prevents no start with `fail`."""
    async with node(tmp_path, config, driver) as (scene, runtime), running() as first:
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")
        assert await runtime.machine.host.holders([container]) == {container: ALICE}
        assert scene.node.gpu(0).memory_limits == {}


async def test_a_configuration_without_the_hook_has_none(tmp_path: Path) -> None:
    """By default the runtime starts nothing of ours."""
    async with node(tmp_path, CONFIG) as (_, runtime):
        assert runtime.hooks() == []


async def test_an_earlier_mgctl_leaves_the_hook_alone(tmp_path: Path) -> None:
    """A daemon before the hook replaces `mgctl`, and then the specification; both may be used."""
    async with node(tmp_path, FAIL) as (scene, runtime), running() as first:
        (tmp_path / "pod" / "mgctl").write_bytes(b"an earlier one")
        await admit(scene, SimContainer("main", {METAGPU: 25}))
        container = runtime.create(first.pid, ALICE)
        assert await runtime.run_hook(state_of(first.pid, container, ALICE)) == (0, "")


async def test_a_folder_that_runs_no_programs_has_no_hook(tmp_path: Path) -> None:
    """Containers start without the hook where the folder of `mgctl` is mounted `noexec`."""
    require_mounts("a folder is mounted")
    pod = tmp_path / "pod"
    pod.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", str(pod))
    await anyio.run_process(mount)
    try:
        async with node(tmp_path, FAIL) as (_, runtime):
            assert runtime.hooks() == []
    finally:
        await anyio.run_process(("umount", str(pod)))


@pytest.mark.parametrize(("config", "expected"), [(IGNORE, 0), (FAIL, 1)])
async def test_without_a_daemon_containers_start_unless_the_configuration_forbids(
    tmp_path: Path, config: str, expected: int
) -> None:
    """The hook of a daemon that has ended lets containers start; with `fail` it does not."""
    async with node(tmp_path, config) as (_, runtime):
        pass
    with pytest.raises(NoDaemon):
        await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
    status, error = await runtime.run_hook({"id": "a", "pid": 1})
    assert (status, error.startswith("metagpu-hook: ")) == (expected, True)


@pytest.mark.parametrize(("config", "expected"), [(IGNORE, 0), (FAIL, 1)])
async def test_a_silent_daemon_does_not_keep_containers_waiting(
    tmp_path: Path, config: str, expected: int
) -> None:
    """A daemon that accepts and never answers costs seconds, and then counts as none."""
    async with node(tmp_path, config) as (_, runtime):
        pass
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        status, error = await runtime.run_hook({"id": "a", "pid": 1})
    assert (status, "did not answer in time" in error) == (expected, True)


async def test_a_failing_hook_asks_again_while_the_daemon_is_exchanged(tmp_path: Path) -> None:
    """With `fail`, a start in the moment between two daemons waits for the second one."""
    async with node(tmp_path, FAIL.replace("kill", "warn")) as (_, runtime), running() as first:
        container = runtime.create(first.pid, ALICE)
    results: list[tuple[int, str]] = []

    async def start() -> None:
        results.append(await runtime.run_hook(state_of(first.pid, container, ALICE)))

    async with anyio.create_task_group() as group:
        path = tmp_path / SOCKET_NAME
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(path))
            dying.listen()
            group.start_soon(start)
            connection, _ = await to_thread.run_sync(dying.accept)
            connection.close()
        path.unlink()
        with socket.socket(socket.AF_UNIX) as following:
            following.bind(str(path))
            following.listen()
            connection, _ = await to_thread.run_sync(following.accept)
            with connection, connection.makefile("rb") as file:
                asked = json.loads(await to_thread.run_sync(file.readline))
                connection.sendall(b'{"ok":{}}\n')
    assert results == [(0, "")]
    assert (asked["command"], asked["state"]["id"]) == ("container-starting", container.id)
