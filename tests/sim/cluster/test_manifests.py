"""Manifests at a simulated cluster, with a device plugin of its own in place of metagpu."""

from pathlib import Path
from typing import Any

import pytest

from metagpu.sim.apiserver.rest import APPLIED
from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.machine.gpu import SimError
from tests.sim.cluster.test_single_node import cluster_of, four, phases
from tests.sim.kubelet.rig import GPU


def workload(kind: str, name: str = "w", seconds: str = "infinity", **spec: object) -> Any:  # noqa: ANN401 - an object
    """Return a workload whose pods ask for one device each."""
    container = {"name": "c", "command": ["sleep", seconds], "resources": {"limits": {GPU: 1}}}
    template = {"metadata": {"labels": {"app": "w"}}, "spec": {"containers": [container]}}
    return {"kind": kind, "metadata": {"name": name}, "spec": {"template": template, **spec}}


async def apply(cluster: SingleNodeCluster, *documents: Any) -> set[str]:  # noqa: ANN401 - objects
    """Apply objects; return what became of them."""
    outcomes, _ = await cluster.manifests.apply(documents, "default")
    return set(outcomes.values())


async def test_a_deployment_has_as_many_pods_as_it_says(tmp_path: Path) -> None:
    """One that is gone is made again; more or fewer replicas, or another template, are had too."""
    async with cluster_of(tmp_path, four()) as cluster:
        assert await apply(cluster, workload("Deployment", replicas=2)) == {"created"}
        first, second = phases(cluster)
        assert first.startswith("w-")
        assert await cluster.end_pod(first, "default")
        await cluster.api.until(lambda: len(phases(cluster)) == 2)
        assert second in phases(cluster)
        assert first not in phases(cluster)

        assert await apply(cluster, workload("Deployment", replicas=3)) == {"configured"}
        assert len(phases(cluster)) == 3
        assert await apply(cluster, workload("Deployment", replicas=1)) == {"configured"}
        await cluster.api.until(lambda: len(phases(cluster)) == 1)
        [kept] = phases(cluster)

        changed = workload("Deployment", seconds="9999", replicas=2)
        assert await apply(cluster, changed) == {"configured"}
        await cluster.api.until(lambda: list(phases(cluster).values()) == ["Running"] * 2)
        assert kept not in phases(cluster)
        assert await apply(cluster, changed) == {"unchanged"}
        assert await cluster.manifests.delete([changed], "default")
        assert not phases(cluster)


async def test_the_pods_of_a_stateful_set_come_one_after_another(tmp_path: Path) -> None:
    """The next waits until the one before it runs; in parallel all come at once."""
    async with cluster_of(tmp_path, four()) as cluster:
        await apply(cluster, workload("StatefulSet", replicas=6))
        await cluster.api.until(lambda: "w-4" in phases(cluster))
        expected = {f"w-{number}": "Running" for number in range(4)} | {"w-4": "Pending"}
        await cluster.api.until(lambda: phases(cluster) == expected)
        parallel = workload("StatefulSet", "p", replicas=2, podManagementPolicy="Parallel")
        await apply(cluster, parallel)
        assert phases(cluster) == expected | {"p-0": "Pending", "p-1": "Pending"}


async def test_a_job_ends_with_its_completions(tmp_path: Path) -> None:
    """Pods of a Job come so many at once, each index once; a suspended one has none."""
    async with cluster_of(tmp_path, four()) as cluster:
        job = workload("Job", seconds="0", completions=3, parallelism=2, completionMode="Indexed")
        await apply(cluster, job)
        await cluster.api.until(lambda: list(phases(cluster).values()) == ["Succeeded"] * 3)
        assert {phase.rpartition("-")[0] for phase in phases(cluster)} == {"w-0", "w-1", "w-2"}
        await apply(cluster, workload("Job", "s", suspend=True))
        assert len(phases(cluster)) == 3


async def test_a_namespace_goes_with_what_is_in_it(tmp_path: Path) -> None:
    """Pods, and workloads with theirs, end; those of other namespaces stay."""
    async with cluster_of(tmp_path, four()) as cluster:
        space = {"kind": "Namespace", "metadata": {"name": "team"}}
        await cluster.manifests.apply([space, workload("DaemonSet")], "team")
        await apply(cluster, workload("ReplicaSet"))
        assert len(phases(cluster)) == 2
        assert await cluster.manifests.delete([space], "default")
        assert len(phases(cluster)) == 1
        with pytest.raises(SimError, match="none of these objects exists"):
            await cluster.manifests.delete([space], "default")


async def test_null_is_absent(tmp_path: Path) -> None:
    """Workloads, claims and pods have the defaults of Kubernetes for it."""
    async with cluster_of(tmp_path, four()) as cluster:
        for kind in ("Deployment", "StatefulSet"):
            await apply(cluster, workload(kind, kind.lower(), replicas=None))
        await apply(cluster, workload("Job", "job", parallelism=None, backoffLimit=None))
        await cluster.api.until(lambda: list(phases(cluster).values()) == ["Running"] * 3)
        request = {"deviceClassName": "c", "selectors": None, "tolerations": None}
        parameters = [{"opaque": {"driver": "d", "parameters": {"a": None}}}]
        devices = {"requests": [{"name": "r", "exactly": request}], "config": parameters}
        claim = {"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {"devices": devices}}
        assert await apply(cluster, claim) == {"created"}
        assert await apply(cluster, claim) == {"unchanged"}
        kept = cluster.api.store.objects["resourceclaims", "default", "c"]["spec"]["devices"]
        assert kept["requests"] == [{"name": "r", "exactly": {"deviceClassName": "c"}}]
        assert kept["config"] == parameters  # a driver's own form


async def test_the_completion_mode_of_a_job_stays(tmp_path: Path) -> None:
    """Kubernetes refuses the change too; nothing else of the file is applied."""
    async with cluster_of(tmp_path, four()) as cluster:
        await apply(cluster, workload("Job"))
        changed = workload("Job", completions=2, completionMode="Indexed")
        with pytest.raises(SimError, match="job w exists with another completionMode; end it"):
            await apply(cluster, workload("Deployment"), changed)
        assert len(phases(cluster)) == 1
        same = workload("Job", parallelism=2, completions=2, completionMode="NonIndexed")
        assert await apply(cluster, same) == {"configured"}


@pytest.mark.parametrize(
    "broken", [{"spec": {"replicas": "x"}}, {"metadata": {"ownerReferences": [3]}}]
)
async def test_a_broken_workload_costs_itself_alone(tmp_path: Path, broken: Any) -> None:  # noqa: ANN401 - an object
    """A patch is not checked: the other workloads have their pods, and the cluster runs."""
    async with cluster_of(tmp_path, four()) as cluster:
        await apply(cluster, workload("ReplicaSet", "a"), workload("ReplicaSet", "b"))
        key = ("replicasets", "default", "a")
        cluster.api.store.merge(key, broken, status=False, manager="kubectl")
        [old] = [name for name in phases(cluster) if name.startswith("b-")]
        assert await cluster.end_pod(old, "default")
        await cluster.api.until(lambda: len(phases(cluster)) == 2)
        assert old not in phases(cluster)


async def test_a_workload_leaves_the_pod_of_another(tmp_path: Path) -> None:
    """A StatefulSet waits until the pod of the name is gone."""
    async with cluster_of(tmp_path, four()) as cluster:
        spec = {"containers": [{"name": "other"}]}
        pod = {"kind": "Pod", "metadata": {"name": "w-0"}, "spec": spec}
        await apply(cluster, pod)
        [uid] = [each.uid for each in cluster.pods()]
        await apply(cluster, workload("StatefulSet"))
        [found] = cluster.api.pods()
        assert found["spec"] == {**spec, "nodeName": "sim"}
        await cluster.end_pod("w-0", "default")
        await cluster.api.until(lambda: [each.uid for each in cluster.pods()] not in ([], [uid]))


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
async def test_labels_and_annotations_change(tmp_path: Path, kind: str) -> None:
    """As by kubectl: what is no longer said goes, what others wrote stays, and the pod runs on."""
    async with cluster_of(tmp_path, four()) as cluster:
        document = workload("Deployment")
        if kind == "Pod":
            document = {**document, "kind": kind, "spec": document["spec"]["template"]["spec"]}
        said = {"name": "w", "labels": {"a": "1", "b": "1"}, "annotations": {"n": "1"}}
        assert await apply(cluster, {**document, "metadata": said}) == {"created"}
        before, key = cluster.pods(), (f"{kind.lower()}s", "default", "w")
        patch = {"metadata": {"annotations": {"other": "1"}}}
        cluster.api.store.merge(key, patch, status=False, manager="other")
        assert await apply(cluster, {**document, "metadata": said}) == {"unchanged"}
        said = {"name": "w", "labels": {"a": "2"}, "annotations": {"n": "2"}}
        assert await apply(cluster, {**document, "metadata": said}) == {"configured"}
        metadata = cluster.api.store.objects[key]["metadata"]
        assert metadata["labels"] == {"a": "2"}
        assert metadata["annotations"].pop(APPLIED)
        assert metadata["annotations"] == {"n": "2", "other": "1"}
        [(now, then)] = zip(cluster.pods(), before, strict=True)
        assert (now.uid, now.phase, now.devices) == (then.uid, then.phase, then.devices)


async def test_a_class_of_the_chart_becomes_the_users(tmp_path: Path) -> None:
    """The class that a user applies stays, though it keeps the label of the chart."""
    async with cluster_of(tmp_path, four()) as cluster:
        key = ("deviceclasses", "", "gpu.metagpu.io")
        await cluster.api.until(lambda: key in cluster.api.store.objects)
        own = {"kind": "DeviceClass", "metadata": {"name": key[2]}, "spec": {"selectors": []}}
        assert await apply(cluster, own) == {"configured"}
        cluster.claims.keep()
        assert cluster.api.store.objects[key]["spec"] == own["spec"]
