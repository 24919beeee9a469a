"""ResourceClaims with `adminAccess`: they see GPUs in any state, and hold nothing of them."""

import json
from pathlib import Path
from socket import gethostname
from typing import Any
from uuid import UUID

import anyio
import pytest

from metagpu.core.devices.devices import devices_of, monitor_device, pool_name
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.state.facts import GpuFaulted
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from tests.agent.test_resource_claims import CLAIMS, MIG, NVIDIA, ClaimScene, at_work
from tests.plugins.dra.rig import DRIVER
from tests.rigs.cdi import host
from tests.rigs.mig import a_node, hurry, placements, until


def look(
    scene: ClaimScene, *results: dict[str, Any], parameters: object = None, driver: str = DRIVER
) -> ResourceClaimRef:
    """Add a claim that looks at all GPUs, by any device of each; RESULTS are others of it."""
    admin = [
        {
            "request": "look",
            "driver": driver,
            "pool": pool_name(gethostname()),
            "device": devices_of(state)[-1].name,
            "adminAccess": True,
        }
        for gpu, state in scene.scene.agent.registry.snapshot.gpus.items()
    ]
    opaque = {"driver": driver, "parameters": parameters}
    config = [{"source": "FromClaim", "opaque": opaque}] if parameters else []
    number = len(scene.server.store.objects) + 1
    ref = ResourceClaimRef("monitoring", f"look-{number}", str(UUID(int=number)))
    devices = {"results": [*admin, *results], "config": config}
    content = {"metadata": {"uid": ref.uid}, "status": {"allocation": {"devices": devices}}}
    scene.server.store.put(("resourceclaims", ref.namespace, ref.name), content)
    return ref


def names(answer: v1.NodePrepareResourceResponse, request: str = "look") -> list[str]:
    """Return the CDI names of a request."""
    assert not answer.error
    return [
        name
        for device in answer.devices
        if list(device.request_names) == [request]
        for name in device.cdi_device_ids
    ]


async def test_claims_that_look_hold_nothing(tmp_path: Path) -> None:
    """Several see held, cordoned and faulty GPUs; nobody is kept away; restarts keep them."""
    async with at_work(tmp_path) as running:
        held = running.allocate("fraction", shares=10)
        await running.prepared(held)
        gpus = [running.scene.state(number).gpu.id for number in (0, 1)]
        await running.scene.agent.commands["cordon"]({"gpu": "1", "reason": "fan"})
        running.scene.agent.registry.apply(GpuFaulted(gpus[0], "XID 79", at=1))
        first, second = look(running), look(running)
        answers = await running.prepare(first, second)
        assert names(answers[first.uid]) == [f"metagpu.io/monitor={gpu}" for gpu in gpus]
        assert running.nodes(names(answers[second.uid])) == ["nvidiactl", "nvidia0", "nvidia1"]
        spec = json.loads((tmp_path / "cdi/metagpu.io-monitor.json").read_text())
        assert spec["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
        assert (await running.prepare(first))[first.uid] == answers[first.uid]
        await running.unprepare(held)
        snapshot = running.scene.agent.registry.snapshot
        assert not any(state.leases for state in snapshot.gpus.values())
        status = await running.scene.status()
        assert isinstance(status, dict)
        assert status["dra"]["monitored"] == sorted(gpus)
        assert await running.unprepare(second) == {second.uid: ""}
        running.write_checkpoint({first: answers[first.uid].devices})

    for path in (tmp_path / "cdi").iterdir():
        path.unlink()  # as at a reboot
    async with at_work(tmp_path) as scene:
        await until(lambda: scene.resolves(names(answers[first.uid])))
        assert (await scene.prepare(first))[first.uid].devices == answers[first.uid].devices
        await scene.prepared(scene.allocate("fraction", shares=10))
        assert await scene.unprepare(first) == {first.uid: ""}
        assert scene.scene.agent.registry.snapshot.gpus[gpus[0]].leases


async def test_one_claim_cannot_look_and_hold(tmp_path: Path) -> None:
    """A container with both would compute on all GPUs that it looks at; the text has a way out."""
    async with at_work(tmp_path) as scene:
        gpu = scene.scene.state(0).gpu.id
        part = {
            "request": "part",
            "driver": DRIVER,
            "pool": pool_name(gethostname()),
            "device": f"{gpu.lower()}-fraction",
            "consumedCapacity": {"shares": "3"},
        }
        claim = look(scene, part)
        error = (await scene.prepare(claim))[claim.uid].error
        assert "look asks for adminAccess and part does not" in error
        assert "make two claims, for pods of their own" in error
        assert not scene.scene.state(0).leases


async def test_the_specification_ends_with_the_last_claim_that_looks(tmp_path: Path) -> None:
    """Unprepared, or forgotten by the kubelet; before, the file is the same for all of them."""
    file = tmp_path / "cdi/metagpu.io-monitor.json"
    async with at_work(tmp_path) as running:
        first, second, lost = look(running), look(running), look(running)
        await running.prepare(first, second)
        await running.unprepare(first)
        assert file.exists()
        await running.unprepare(second)
        assert not file.exists()
        answer = (await running.prepare(lost))[lost.uid]
        assert running.resolves(names(answer))
        running.write_checkpoint({lost: answer.devices})

    async with at_work(tmp_path) as scene:
        assert scene.resolves(names(answer))
        driver = scene.scene.agent.resource_claims._serving
        assert driver is not None
        assert driver.preparer.states.prepared
        scene.write_checkpoint({})

    async with at_work(tmp_path):
        assert not file.exists()


async def test_a_mig_device_stands_for_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No instance is made; the container may ask about those of others."""
    hurry(monkeypatch)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    host(tmp_path)
    (tmp_path / "dev/nvidia-caps/nvidia-cap2").touch()
    async with at_work(tmp_path, MIG, node) as scene:
        claim = look(scene)
        answer = (await scene.prepare(claim))[claim.uid]
        assert scene.nodes(names(answer)) == ["nvidiactl", "nvidia0", "nvidia-cap2"]
        assert placements(node) == []


async def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    """Parameters for sharing, a GPU of another node, one without a device node."""
    sharing = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
    text = f"{CLAIMS}dra: {{driver: {NVIDIA}}}\n"
    async with at_work(tmp_path, text, driver=NVIDIA) as running:
        claim = look(running, parameters=sharing, driver=NVIDIA)
        refusal = (await running.prepare(claim))[claim.uid].error
        assert "opaque parameters for look with adminAccess" in refusal

    async with at_work(tmp_path, CLAIMS) as scene:
        claim = look(scene)
        key = "resourceclaims", claim.namespace, claim.name
        results = scene.server.store.objects[key]["status"]["allocation"]["devices"]["results"]
        results[1]["device"] = monitor_device(scene.scene.state(1).gpu.id).name
        results[1]["adminAccess"] = False
        assert "set `adminAccess: true`" in (await scene.prepare(claim))[claim.uid].error
        results[1]["adminAccess"] = True
        results[0]["device"] = monitor_device(GpuId(f"GPU-{UUID(int=7)}")).name
        assert "has no such GPU" in (await scene.prepare(claim))[claim.uid].error
        await anyio.Path(tmp_path, "dev/nvidia1").unlink()
        claim = look(scene)
        refusal = (await scene.prepare(claim))[claim.uid].error
        assert f"CDI has no {scene.scene.state(1).gpu.id}: it has no device node" in refusal
