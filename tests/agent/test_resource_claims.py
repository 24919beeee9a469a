"""ResourceClaims on the whole agent: configuration, API server, kubelet's calls, status."""

from pathlib import Path
from socket import gethostname

import anyio
import pytest

from metagpu.core.devices.devices import devices_of, pool_name
from metagpu.core.model.shares import Holder, ResourceClaimRef
from metagpu.core.state.facts import LeasesObserved
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node
from tests.plugins.dra.rig import DRIVER, KubeletCalls
from tests.rigs.agent import QUICK, Scene, agent_at_work
from tests.rigs.cdi import host, resolve_nodes

CLAIMS = QUICK.replace("    backends:", "    fronts: [dra]\n    backends:")
UID = "11111111-2222-3333-4444-555555555555"


def allocate(server: SimApiServer, scene: Scene, shares: int) -> ResourceClaimRef:
    """Add a ResourceClaim to which the scheduler allocated shares of the first GPU."""
    state = scene.state(0)
    [device] = devices_of(state)
    result = {
        "request": "gpu",
        "driver": DRIVER,
        "pool": pool_name(gethostname(), state.gpu.id),
        "device": device.name,
        "consumedCapacity": {"shares": str(shares)},
    }
    content = {
        "metadata": {"uid": UID},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    server.store.put(("resourceclaims", "default", "half"), content)
    return ResourceClaimRef("default", "half", UID)


@pytest.mark.parametrize("reload", [False, True])
async def test_a_claim_is_prepared_by_the_whole_agent(tmp_path: Path, *, reload: bool) -> None:
    """CDI names resolve; the lease is one like any other, until it is unprepared."""
    host(tmp_path, gpus=2)
    kubelet, server, folder = KubeletCalls(tmp_path), SimApiServer(), tmp_path / "cdi"
    async with server.running():
        settings = ClusterSettings(
            gethostname(), server.kubeconfig(tmp_path), features=frozenset({Feature.PODS})
        )
        config = QUICK if reload else CLAIMS
        nodes = build_node("a100-40gb:2")
        async with agent_at_work(
            tmp_path, nodes, config, cluster_settings=settings, cdi_dir=folder
        ) as it:
            if reload:
                await it.until(20, 20)
                assert await it.agent.commands["status"]({})
                await anyio.Path(it.config_file).write_text(CLAIMS)
                await it.agent.reload()
            await kubelet.wait_registration()
            assert not it.kubelet.allocatable().get("cnvrg.io/metagpu")
            claim = allocate(server, it, 5)
            [device] = (await kubelet.prepare(claim))[UID].devices
            nodes_of = resolve_nodes(folder, *device.cdi_device_ids)
            assert [Path(path).name for path in nodes_of] == ["nvidiactl", "nvidia-uvm", "nvidia0"]

            holder = Holder("default", "pod", "main")
            held = {(UID, share): (holder,) for share in it.state(0).leases}
            registry = it.agent.registry
            registry.apply(LeasesObserved({}, anyio.current_time(), of_claims=held))
            status = await it.agent.commands["status"]({})
            assert isinstance(status, dict)
            assert status["dra"]["claims"] == 1
            [lease] = status["leases"]
            assert (lease["shares"], lease["holder"]) == (5, "default/pod (main)")
            assert lease["resourceClaim"] == "default/half"

            assert await kubelet.unprepare(claim) == {UID: ""}
            assert not it.state(0).leases
        assert [path.name async for path in anyio.Path(folder).glob("*claim*")] == []
