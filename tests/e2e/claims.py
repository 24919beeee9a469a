"""A node whose GPUs are offered by DRA, and ResourceClaims on it: actions and checks."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import yaml

from metagpu.core.devices.devices import gpu_of_device
from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster, Holding
from tests.e2e.fake_node import (
    DRIVER,
    Allocation,
    allocations_of,
    capacity,
    dra_objects,
    exactly,
)
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.device_files import make_mig_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

PAGE = REPOSITORY / "docs" / "dra.md"
CLAIMS = REPOSITORY / "deploy" / "claims"
KINDS = "resourceclaimtemplates,resourceclaims"
ADMIN_ACCESS = "resource.kubernetes.io/admin-access=true"
"""The label of namespaces in which claims may look at devices of others."""
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
SETTLED_S = 90.0
SLICES_S = 20.0
PAUSE_S = 0.05
MIG_GPU = 5
"""The GPU of the page's node with MIG devices, by index."""
GPUS = (
    f"{{model: a100-40gb, count: {MIG_GPU}}}",
    "{model: a100-40gb, mig: true, provisioning: {duration: 300ms}}",
)


def page_documents() -> dict[str, list[Document]]:
    """Return the manifests of the page by section and file, ready for the node of the tests."""
    found = {
        file.name: [ready(document) for document in yaml.safe_load_all(file.read_text())]
        for file in CLAIMS.glob("*.yaml")
    }
    for section in re.split(r"^###? ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        for block in re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            found[section.splitlines()[0]] = [
                ready(document) for document in yaml.safe_load_all(block)
            ]
    return found


def page_configuration() -> str:
    """Return the page's first configuration, for GPUs that recover within seconds."""
    text, *_ = re.findall(
        r"^```yaml\n(version: metagpu/v1\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return f"{text}health: {{quietPeriod: 1s}}\n"


def ready(document: Document) -> Document:
    """Return a manifest in the tests' namespace, with the tests' image."""
    if document.get("kind") == "Pod":
        for container in document["spec"]["containers"]:
            container |= {"image": BUSYBOX_IMAGE, "command": IDLE_COMMAND}
        document["spec"] |= {"hostNetwork": True, "enableServiceLinks": False}
    return {**document, "metadata": {**document.get("metadata", {}), "namespace": NAMESPACE}}


def shares(amount: int, name: str = "gpu", **more: object) -> Document:
    """Return a request of shares of one GPU."""
    return exactly(name, "fraction.metagpu.io", 1, capacity=capacity(shares=amount), **more)


def resource_claim(name: str, *requests: Document, **more: object) -> Document:
    """Return a ResourceClaim with these requests, and further fields of its devices."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": list(requests), **more}},
    }


def pod(name: str, claim: str, **containers: str) -> Document:
    """Return a pod that idles with a ResourceClaim.

    CONTAINERS are names, each with the request whose devices it gets; without any, one container
    gets all.
    """
    wanted = {key: {"name": "gpu", "request": text} for key, text in containers.items()}
    return ready(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
                "containers": [
                    {"name": key, "resources": {"claims": [document]}}
                    for key, document in (wanted or {"main": {"name": "gpu"}}).items()
                ],
            },
        }
    )


class ClaimsNode:
    """A node with the configuration of the page: actions and checks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node, self.daemon, self.kubectl = cluster.node, cluster.daemon, cluster.kubectl
        self.cdi = cluster.node.paths.cdi
        self.driver_state = cluster.node.paths.home / "claims-driver.json"
        """The file in which MIG devices outlive the daemon, and not a reboot."""

    def start(self, *documents: Document) -> None:
        """Create objects, and wait until every pod runs."""
        self.kubectl.apply(*documents)
        self.cluster.await_running()

    def clear(self) -> None:
        """Delete all pods and ResourceClaims, and wait until nothing is held or prepared."""
        self.cluster.clear()
        self.kubectl("delete", KINDS, "--all", f"--namespace={NAMESPACE}", "--wait=false")
        wait_for("all leases to end", lambda: not self.leases(), within_s=SETTLED_S)
        wait_for("all ResourceClaims to go", lambda: not self.claims(), within_s=SETTLED_S)
        assert self.files() == []

    def claims(self) -> dict[str, Document]:
        """Return the ResourceClaims, by the pod that they were made for, or by their name."""
        found = {}
        for document in self.kubectl.list("resourceclaims", NAMESPACE):
            owners = document["metadata"].get(
                "ownerReferences", [{"name": document["metadata"]["name"]}]
            )
            found[owners[0]["name"]] = document
        return found

    def allocation(self, name: str) -> tuple[Allocation, ...]:
        """Return the devices of a ResourceClaim, named as `claims` does."""
        return allocations_of(self.claims()[name])

    def leases(self) -> dict[str, int]:
        """Return the number of leased shares of each holder, by resource and GPU."""
        return {
            f"{lease['holder']} {lease['resource']} {lease['gpu']}": lease["shares"]
            for lease in self.daemon.status()["leases"]
        }

    def settled_leases(self) -> dict[str, int]:
        """Wait until the kubelet has told the holders of all leases; return the leases."""

        def known() -> dict[str, int]:
            leases = self.leases()
            if any(name.startswith("None ") for name in leases):
                raise RigError(f"the leases are {leases}")
            return leases

        return wait_for("the holders of all leases", known, within_s=SETTLED_S)

    def holders(self, resource: str) -> set[str]:
        """Return the pods and containers that hold shares of a resource."""
        return {
            name.partition("/")[2]
            for lease in self.daemon.status()["leases"]
            if lease["resource"] == resource
            for name in (lease["holder"] or "", *lease.get("sharers", ()))
        }

    def leased(self, gpu: int | None = None) -> int:
        """Return the number of leased shares, of one GPU or of all."""
        leases = self.daemon.status()["leases"]
        return sum(lease["shares"] for lease in leases if gpu in (None, lease["gpu"]))

    def inspect(self, pod: str, container: str = "") -> Holding:
        """Return the environment and /dev of a running container."""
        return self.cluster.inspect_container(pod, container)

    def unhealthy(self, pod: str) -> list[str]:
        """Return what the kubelet says of each device of a pod's claims that is unhealthy."""
        return [
            resource.get("message", "")
            for container in self.kubectl.get("pod", pod, NAMESPACE)["status"]["containerStatuses"]
            for claim in container.get("allocatedResourcesStatus", ())
            for resource in claim.get("resources", ())
            if resource["health"] == "Unhealthy"
        ]

    def files(self) -> list[str]:
        """Return the names of the CDI files of prepared ResourceClaims."""
        return sorted(path.name for path in self.cdi.glob("metagpu.io-claim-*.json"))

    def index_of(self, allocation: Allocation) -> int:
        """Return the index of the GPU of an allocated device."""
        gpus = {gpu["uuid"].lower(): gpu["index"] for gpu in self.daemon.status()["gpus"]}
        (index,) = [at for gpu, at in gpus.items() if allocation.device.startswith(gpu)]
        return int(index)

    def instances(self) -> list[Document]:
        """Return the MIG instances of the driver."""
        found: list[Document] = self.daemon.simulated_gpus()[MIG_GPU]["instances"]
        return found

    def registrations(self) -> int:
        """Return how often the kubelet has registered the driver."""
        return self.daemon.log.count("dra driver registered")

    def logged(self, event: str, **fields: object) -> list[float]:
        """Return when the daemon logged an event with these fields, in seconds since the epoch."""
        lines = self.daemon.log.splitlines(keepends=True)
        found = (
            json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")
        )
        return [
            datetime.fromisoformat(document["timestamp"]).timestamp()
            for document in found
            if document["event"] == event and fields.items() <= document.items()
        ]

    def await_registered(self, before: int = 0) -> None:
        """Wait until the kubelet has registered the driver more often than BEFORE."""
        wait_for(
            "the driver to be registered",
            lambda: self.registrations() > before and self._registered(),
            within_s=SLICES_S,
            pause_s=PAUSE_S,
        )

    def _registered(self) -> bool:
        dra = self.daemon.status()["dra"]  # none until the daemon has its configuration
        return dra is not None and dra["registered"] is True

    def slices(self) -> dict[str, Document]:
        """Return all ResourceSlices, by name."""
        found = json.loads(self.kubectl("get", "resourceslices", "-o", "json"))["items"]
        return {
            document["metadata"]["name"]: document
            for document in found
            if document["spec"]["driver"] == DRIVER
        }

    def taints(self, gpu: int) -> dict[str, set[str]]:
        """Return the keys of the taints of each device of a GPU that can be held."""
        uuid = self.daemon.status()["gpus"][gpu]["uuid"].lower()
        return {
            device["name"]: {taint["key"] for taint in device.get("taints", ())}
            for piece in self.slices().values()
            for device in piece["spec"].get("devices", ())
            if device["name"].startswith(uuid) and not device["name"].endswith("-monitor")
        }

    def await_slices(self, within_s: float = SLICES_S) -> dict[str, Document]:
        """Wait until the pools of all GPUs are complete, of one generation; return the slices."""

        def complete() -> dict[str, Document]:
            found = self.slices()
            pools = dict[str, list[Document]]()
            for document in found.values():
                pools.setdefault(document["spec"]["pool"]["name"], []).append(
                    document["spec"]["pool"]
                )
            wrong = {
                name: parts
                for name, parts in pools.items()
                if len({part["generation"] for part in parts}) > 1
                or {part["resourceSliceCount"] for part in parts} != {len(parts)}
            }
            gpus = {
                gpu_of_device(device["name"])
                for entry in found.values()
                for device in entry["spec"].get("devices", ())
            }
            if wrong or len(gpus) != MIG_GPU + 1 or len(pools) != 2:
                raise RigError(f"{len(gpus)} GPUs in {len(pools)} pools; not complete: {wrong}")
            return found

        return wait_for("complete pools", complete, within_s=within_s, pause_s=PAUSE_S)

    def roots(self) -> dict[int, str]:
        """Return the PCIe root of each GPU, by its index, as the ResourceSlices have it."""
        gpus = {gpu["uuid"].lower(): gpu["index"] for gpu in self.daemon.status()["gpus"]}
        return {
            gpus[device["name"]]: device["attributes"][PCIE_ROOT]["string"]
            for piece in self.slices().values()
            for device in piece["spec"].get("devices", ())
            if device["name"] in gpus
        }

    def events(self, name: str, reason: str = "FailedPrepareDynamicResources") -> str:
        """Return the messages of a pod's Events."""
        return self.cluster.event_messages(name, reason)

    def phase(self, name: str) -> str:
        """Return the phase of a pod."""
        return str(self.kubectl.get("pod", name, NAMESPACE)["status"]["phase"])


@contextmanager
def claims_node(cluster: Cluster, options: tuple[str, ...]) -> Iterator[ClaimsNode]:
    """Run the daemon with the configuration of the page until the block ends; restore it."""
    daemon, home = cluster.daemon, cluster.node.paths.home
    cluster.clear()
    daemon.stop()
    node, node_file = ClaimsNode(cluster), home / "claims-node.yaml"
    state_file = json.dumps(str(node.driver_state))
    node_file.write_text(f"gpus: [{', '.join(GPUS)}]\nstateFile: {state_file}\n")
    make_mig_device_files(daemon.device_root, [MIG_GPU])
    daemon.configure(page_configuration())
    cluster.kubectl("label", "--overwrite", "namespace", NAMESPACE, ADMIN_ACCESS)
    try:
        with dra_objects(cluster.kubectl):
            before = node.registrations()  # the log may be that of an earlier module too
            daemon.start(*options, "--simulate", str(node_file))
            node.await_registered(before)
            node.await_slices()
            yield node
            node.clear()
            daemon.stop()
    finally:
        daemon.stop()
        daemon.configure()
        node.driver_state.unlink(missing_ok=True)
        for file in node.cdi.glob("metagpu.io-*.json"):
            file.unlink()  # an uninstallation of later tests leaves nothing
        shutil.rmtree(daemon.device_root / "proc")
        shutil.rmtree(daemon.device_root / "dev" / "nvidia-caps")


def driver_file(cluster: Cluster) -> Path:
    """Return the file in which MIG devices outlive the daemon, and not a reboot."""
    return cluster.node.paths.home / "driver.json"


@contextmanager
def node_of_both_apis(
    cluster: Cluster, account: tuple[str, ...], configuration: str, gpus: str, *mig: int
) -> Iterator[MigNode]:
    """Run the daemon with pools of ResourceClaims until the block ends, and leave none of them.

    Args:
        cluster: the node.
        account: the options of the daemon's account.
        configuration: the daemon's configuration.
        gpus: the GPUs, as in a node file.
        mig: those with MIG devices.
    """
    daemon = cluster.daemon
    cluster.clear()
    make_mig_device_files(daemon.device_root, mig)
    # The account's options have GPUs too, and the last ones count.
    options, driver = (*account, *daemon.simulate("")), driver_file(cluster)
    try:
        with (
            dra_objects(cluster.kubectl),
            mig_node(cluster, configuration, gpus, *options, driver=driver) as live_mig_node,
        ):
            await_registered(cluster)
            yield live_mig_node
            leave_nothing(cluster)
    finally:
        shutil.rmtree(daemon.device_root / "proc")
        shutil.rmtree(daemon.device_root / "dev" / "nvidia-caps")


def leave_nothing(cluster: Cluster) -> None:
    """Delete pods and claims while a daemon runs, after a failed test too.

    Without one the kubelet keeps a pod with a claim, and no later test could begin.
    """
    if not cluster.daemon.alive:
        with suppress(RigError):
            cluster.daemon.start_again()
    cluster.clear()
    cluster.kubectl("delete", "resourceclaims", "--all", "--all-namespaces")


def await_registered(cluster: Cluster) -> None:
    """Wait until the kubelet has the driver."""
    wait_for(
        "the driver to be registered",
        lambda: (cluster.daemon.status()["dra"] or {}).get("registered") is True,
        within_s=SETTLED_S,
    )
