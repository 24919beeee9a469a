"""`status.devices` of ResourceClaims: written after the answer, retried, reported once."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.reports.diagnosis import check_resource_claims
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.sim.apiserver.server import SimApiServer
from tests.agent.test_resource_claims import MIG, ClaimScene, at_work
from tests.plugins.dra.rig import DRIVER
from tests.rigs.mig import a_node, hurry, placements, until

NIC = {"driver": "nic.example.com", "pool": "p", "device": "nic-0", "conditions": []}
WARNING = "status of a claim's devices not written"


def patches(server: SimApiServer) -> list[str]:
    """Return the paths of all patches of claims."""
    return [
        request.target
        for request in server.requests
        if request.method == "PATCH" and "resourceclaims" in request.target
    ]


def entries(server: SimApiServer, ref: ResourceClaimRef) -> list[dict[str, Any]]:
    """Return the `status.devices` of a claim."""
    claim = server.store.objects["resourceclaims", ref.namespace, ref.name]
    return list(claim["status"].get("devices") or ())


async def written(scene: ClaimScene, ref: ResourceClaimRef) -> dict[str, Any]:
    """Wait until a claim has an entry of the driver; return it."""

    def own() -> list[dict[str, Any]]:
        return [entry for entry in entries(scene.server, ref) if entry["driver"] == DRIVER]

    await scene.server.until(own)
    return own()[0]


async def problem_of(scene: ClaimScene) -> str:
    """Return the problem that `status` names."""
    status = await scene.scene.status()
    assert isinstance(status, dict)
    return str(status["dra"]["statusProblem"] or "")


async def test_a_prepared_claim_says_what_it_has(tmp_path: Path) -> None:
    """One patch has all; entries of other drivers stay; a new daemon has nothing to write."""
    async with at_work(tmp_path) as running:
        claim = running.allocate("fraction", shares=5)
        content = running.server.store.objects["resourceclaims", claim.namespace, claim.name]
        content["status"]["devices"] = [NIC]
        answer = (await running.prepare(claim))[claim.uid]
        entry = await written(running, claim)
        assert entry["data"] == {
            "gpu": running.scene.state(0).gpu.id,
            "backend": "fraction",
            "shares": 5,
            "slots": ["m00-m04"],
            "memoryMiB": 20480,
        }
        [ready] = entry["conditions"]
        assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "True", "Prepared")
        assert entries(running.server, claim)[0] == NIC
        await running.prepare(claim)
        second = running.allocate("fraction", shares=1)
        await running.prepare(second)
        await written(running, second)
        assert len(patches(running.server)) == 2
        assert await problem_of(running) == ""
        running.write_checkpoint({claim: answer.devices})
        kept = running.server

    async with at_work(tmp_path, server=kept) as scene:
        third = scene.allocate("fraction", shares=1)
        await scene.prepare(third)
        await written(scene, third)
        assert len(patches(kept)) == 3
        assert entries(kept, claim) == [NIC, entry]


async def test_the_uuid_of_a_mig_device_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is made on demand: no ResourceSlice has its uuid."""
    hurry(monkeypatch)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    async with at_work(tmp_path, MIG, node) as scene:
        claim = scene.allocate("mig-2g10gb-4")
        await scene.prepared(claim)
        data = (await written(scene, claim))["data"]
        assert placements(node) == ["2g.10gb@4"]
        [made] = scene.scene.state(0).provisioned["mig"].devices.values()
        assert (data["migDevice"], data["slots"]) == (made.device, ["2g.10gb@4"])
        await scene.unprepare(claim)
        await until(lambda: not placements(node))


async def test_prepare_does_not_wait_for_the_status(tmp_path: Path) -> None:
    """A patch that fails is repeated; one of a claim that is unprepared is not."""
    async with at_work(tmp_path) as scene:
        scene.server.failing.append(("PATCH", "resourceclaims"))
        gone, claim = scene.allocate("fraction", shares=1), scene.allocate("fraction", shares=2)
        with capture_logs() as logs:
            await scene.prepared(gone)
            await scene.server.until(lambda: patches(scene.server))
            await scene.unprepare(gone)
            await scene.prepared(claim)
            await scene.server.until(lambda: len(patches(scene.server)) > 1)
            scene.server.failing.clear()
            assert (await written(scene, claim))["data"]["shares"] == 2
        assert not entries(scene.server, gone)
        assert [log["event"] for log in logs].count(WARNING) == 1


@pytest.mark.parametrize("synthetic", [False, True])
async def test_a_missing_right_is_reported_once(tmp_path: Path, *, synthetic: bool) -> None:
    """The log, `status` and `doctor` name the right; pods run."""
    async with at_work(tmp_path) as scene:
        if synthetic:
            scene.server.claim_status.driver_rights = False
        else:
            scene.server.denied.append(("PATCH", "resourceclaims"))
        with capture_logs() as logs:
            for shares in (1, 2):
                await scene.prepared(scene.allocate("fraction", shares=shares))
            await scene.server.until(lambda: len(patches(scene.server)) > 1)
        reported = [log for log in logs if log["event"] == WARNING]
        assert len(reported) == 1
        for right in ("resourceclaims/status", "associated-node:patch", "docs/permissions.md"):
            assert right in reported[0]["error"]
        assert await problem_of(scene) == reported[0]["error"]
        await scene.notify(registered=True)
        status = await scene.scene.status()
        status["cluster"] = None  # its ResourceSlices are another finding
        assert check_resource_claims(read_report(status, StatusReport))[:2] == (
            "warning",
            f"the status of ResourceClaims is not written: {reported[0]['error']}",
        )


async def test_a_field_that_is_dropped_is_reported(tmp_path: Path) -> None:
    """Without the feature gate the API server takes the patch, and drops all of it."""
    async with at_work(tmp_path) as scene:
        scene.server.claim_status.dropped = True
        with capture_logs() as logs:
            for shares in (1, 2):
                await scene.prepared(scene.allocate("fraction", shares=shares))
            await scene.server.until(lambda: patches(scene.server))
            await until(lambda: any("drops the status" in log["event"] for log in logs))
        assert "DRAResourceClaimDeviceStatus" in await problem_of(scene)
