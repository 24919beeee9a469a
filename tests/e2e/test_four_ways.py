"""Four backends on one node: fractions beside a pool whose idle GPUs serve three others."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster, idle_pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

pytestmark = pytest.mark.daemon("pod", features=())

SHARED, MPS, WHOLE = "nvidia.com/gpu.shared", "nvidia.com/gpu.mps", "nvidia.com/gpu"
EACH = {SHARED: 4, MPS: 100, WHOLE: 1}
"""Shares of one GPU of the second pool, by resource."""
NAMES = {SHARED: "timeslice", MPS: "mps", WHOLE: "whole"}
"""The backend of each."""

# The node's other GPUs are in no pool: it is a node of four.
FOUR_WAYS = """\
version: metagpu/v1
health:
  quietPeriod: 1s
pools:
  - name: fractions
    gpus: {{index: 0-{last}}}
    backends:
      - {{backend: fraction, resource: {fraction}, sharesPerGpu: 100}}
  - name: shared
    gpus: {{index: {first}-3}}
    backends:
      - {{backend: timeslice, resource: {shared}, replicas: 4}}
      - {{backend: mps, resource: {mps}}}
      - {{backend: whole, resource: {whole}}}
"""

MAY_LOSE = 0.01
"""The part of the pods that may lose a race; of few pods it is one."""
SETTLED_S = 60.0

LOST_RACE = re.compile(
    # The scheduler uses a number that is a second old. Then the kubelet has our list and refuses
    # by itself, with the first two texts, or calls Allocate, and we name the GPU's owner.
    r"requested number of devices unavailable for nvidia\.com/gpu"
    r"|no healthy devices present; cannot allocate unhealthy devices nvidia\.com/gpu"
    r"|is in use by (timeslice|mps|whole)"
    r"|is being cleaned after its last lease by mps"
)


def configuration(shared_gpus: int) -> str:
    """Return the configuration of four GPUs, the last of them in the shared pool."""
    first = 4 - shared_gpus
    return FOUR_WAYS.format(
        first=first, last=first - 1, fraction=RESOURCE, shared=SHARED, mps=MPS, whole=WHOLE
    )


@pytest.fixture
def node_of_four(cluster: Cluster) -> Iterator[Cluster]:
    """Offer two GPUs as fractions and two in the shared pool; restore the node afterwards."""
    offer(cluster, shared_gpus=2)
    yield cluster
    cluster.kubectl("delete", "pods", "--all", f"--namespace={NAMESPACE}", "--grace-period=1")
    cluster.daemon.configure()


@pytest.fixture
def node_with_turns(cluster: Cluster) -> Iterator[Cluster]:
    """Offer the same on a Node that metagpu writes: backends take turns with idle GPUs."""
    cluster.daemon.configure(configuration(shared_gpus=2))
    cluster.await_amounts(200, 200)
    await_what_owners_leave(cluster)
    yield cluster
    cluster.kubectl("delete", "pods", "--all", f"--namespace={NAMESPACE}", "--grace-period=1")
    cluster.daemon.configure()


def offer(cluster: Cluster, *, shared_gpus: int) -> None:
    """Configure the node, and wait until every resource is there."""
    cluster.daemon.configure(configuration(shared_gpus))
    await_offer(cluster, {None: shared_gpus})
    cluster.await_amounts(100 * (4 - shared_gpus), 100 * (4 - shared_gpus))


def await_offer(cluster: Cluster, owners: dict[str | None, int]) -> None:
    """Wait until the node has the amounts that these owners, owner -> GPUs, leave."""
    all_of_it = sum(owners.values())
    for resource, each in EACH.items():
        open_to_it = owners.get(None, 0) + owners.get(NAMES[resource], 0)
        cluster.await_amounts(each * all_of_it, each * open_to_it, resource)


def await_what_owners_leave(cluster: Cluster) -> None:
    """Wait until the node counts what owners leave, and no idle GPU twice."""

    def probe() -> bool:
        status = cluster.daemon.status()
        owners = Counter(gpu["owner"] for gpu in status["gpus"] if gpu["pool"] == "shared")
        held_back = {resource: status["offers"][resource]["heldBack"] for resource in EACH}
        seen = {resource: cluster.node.resource(resource) for resource in EACH}
        idle = {
            NAMES[resource]: ((allocatable or 0) + held_back[resource]) / EACH[resource]
            - owners[NAMES[resource]]
            for resource, (_, allocatable) in seen.items()
        }
        whole = all(seen[resource][0] == each * owners.total() for resource, each in EACH.items())
        if not whole or min(idle.values()) < 0 or sum(idle.values()) > owners[None]:
            raise RigError(f"the node has {seen}, owners are {owners}")
        return True

    wait_for("the node's amounts to follow the owners", probe, within_s=SETTLED_S)


def shared_gpus_of(cluster: Cluster) -> list[Document]:
    """Return the daemon's status of the GPUs of the shared pool."""
    return [gpu for gpu in cluster.daemon.status()["gpus"] if gpu["pool"] == "shared"]


def test_four_ways_at_once(node_of_four: Cluster) -> None:
    """Pods of all four resources run at once, each on a GPU of its own with its variables.

    Three GPUs are in the shared pool here: with two, one of three backends would have to wait.
    """
    offer(node_of_four, shared_gpus=3)

    node_of_four.start(
        idle_pod("half", 50),
        idle_pod("slice", 1, SHARED),
        idle_pod("quarter", 25, MPS),
        idle_pod("one", 1, WHOLE),
    )

    holdings = {n: node_of_four.inspect_container(n) for n in ("half", "slice", "quarter", "one")}
    gpus = {name: holding.visible_gpus for name, holding in holdings.items()}
    assert len({gpu for (gpu,) in gpus.values()}) == 4
    assert holdings["half"].environment["METAGPU_MAX_MEM"] == "20480"
    assert holdings["quarter"].environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert "CUDA_MPS_PIPE_DIRECTORY" in holdings["quarter"].environment
    for name in ("half", "slice", "one"):
        assert not [key for key in holdings[name].environment if key.startswith("CUDA_MPS")]
    await_offer(node_of_four, {"timeslice": 1, "mps": 1, "whole": 1})


def test_an_idle_gpu_changes_its_owner(node_of_four: Cluster) -> None:
    """An MPS pod claims a GPU, its end frees it, a whole-GPU pod takes it; amounts follow."""
    node_of_four.start(idle_pod("first", 30, MPS))
    await_offer(node_of_four, {"mps": 1, None: 1})
    (mine,) = node_of_four.inspect_container("first").visible_gpus

    node_of_four.start(idle_pod("second", 1, WHOLE))
    await_offer(node_of_four, {"mps": 1, "whole": 1})
    node_of_four.kubectl.apply(idle_pod("third", 1, WHOLE))
    wait_for(
        "the scheduler to name the lacking resource",
        lambda: f"Insufficient {WHOLE}" in node_of_four.event_messages("third", "FailedScheduling"),
        within_s=30,
    )

    node_of_four.delete("first")
    node_of_four.await_running()
    assert node_of_four.inspect_container("third").visible_gpus == (mine,)
    await_offer(node_of_four, {"whole": 2})

    node_of_four.delete("second", "third")
    await_offer(node_of_four, {None: 2})


@pytest.mark.daemon("pod", features=("allocatable", "pods"))
@pytest.mark.parametrize(
    "arrivals", [40, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_pods_come_and_go(
    node_with_turns: Cluster, arrivals: int, record_property: Callable[[str, object], None]
) -> None:
    """One of a hundred pods is refused at most, and no GPU is idle while a pod could have it."""
    cluster, chance = node_with_turns, random.Random(3)  # noqa: S311 - the same pods every time
    arrived, lost = 0, Counter[str]()

    while arrived < arrivals:
        batch = [random_pod(chance, arrived + number) for number in range(chance.randint(3, 8))]
        arrived += len(batch)
        cluster.kubectl.apply(*batch)
        pods = await_settled(cluster)

        gone = [name for name, document in pods.items() if failure(document)]
        for name in gone:
            why = failure(pods[name])
            assert LOST_RACE.search(why), why
            lost[re.sub(r"[^a-z ]+", " ", why)[:80]] += 1
        assert_one_owner_each(cluster.daemon.status())
        await_what_owners_leave(cluster)

        keep = chance.sample(sorted(set(pods) - set(gone)), k=min(2, len(pods) - len(gone)))
        cluster.delete(*sorted(set(pods) - set(keep)))

    record_property("arrived", arrived)
    record_property("lost a race", dict(lost))
    print(f"{arrived} pods came, {lost.total()} lost a race: {dict(lost)}")
    assert lost.total() <= max(1, MAY_LOSE * arrived)

    cluster.kubectl("delete", "pods", "--all", f"--namespace={NAMESPACE}", "--grace-period=1")
    cluster.await_amounts(200, 200)
    await_what_owners_leave(cluster)


def random_pod(chance: random.Random, number: int) -> Document:
    """Return a random pod."""
    resource, shares = chance.choice(
        [
            (
                RESOURCE,
                25,
            ),  # equal sizes: free shares are in one piece then, as the scheduler assumes
            (SHARED, 1),
            (SHARED, 1),
            (MPS, chance.choice([25, 50])),
            (WHOLE, 1),
        ]
    )
    return idle_pod(f"pod-{number}", shares, resource)


def await_settled(cluster: Cluster) -> dict[str, Document]:
    """Wait until each pod runs, has failed, or cannot have a GPU; return the pods by name.

    A pod that waits for its turn while a GPU is idle has not settled.
    """

    def probe() -> dict[str, Document]:
        pods = {
            entry["metadata"]["name"]: entry for entry in cluster.kubectl.list("pods", NAMESPACE)
        }
        idle = [gpu["index"] for gpu in shared_gpus_of(cluster) if gpu["owner"] is None]
        for name, document in pods.items():
            if not (settled(document) or failure(document)):
                raise RigError(f"{name} is {document['status']['phase']}")
            if idle and is_unschedulable(document) and requested(document) in EACH:
                raise RigError(f"{name} waits, and the GPUs {idle} are idle")
        return pods

    return wait_for("every pod to settle", probe, within_s=SETTLED_S)


def requested(document: Document) -> str:
    """Return the resource that a pod requests."""
    (container,) = document["spec"]["containers"]
    return str(next(iter(container["resources"]["limits"])))


def is_unschedulable(document: Document) -> bool:
    """Return whether the scheduler has no place for a pod."""
    conditions = {
        condition["type"]: condition for condition in document["status"].get("conditions", ())
    }
    return bool(conditions.get("PodScheduled", {}).get("reason") == "Unschedulable")


def settled(document: Document) -> bool:
    """Return whether a pod runs or is unschedulable."""
    conditions = {
        condition["type"]: condition for condition in document["status"].get("conditions", ())
    }
    ready = conditions.get("Ready", {}).get("status") == "True"
    return ready or is_unschedulable(document)


def failure(document: Document) -> str:
    """Return why a pod was not admitted, empty if it was."""
    status = document["status"]
    return str(status.get("message")) if status["phase"] == "Failed" else ""


def assert_one_owner_each(status: Document) -> None:
    """Assert that no GPU has leases of two resources."""
    kinds: dict[str, set[str]] = {}
    for lease in status["leases"]:
        kinds.setdefault(lease["gpu"], set()).add(lease["resource"])
    assert all(len(resources) == 1 for resources in kinds.values()), kinds
