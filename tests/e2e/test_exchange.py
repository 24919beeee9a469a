"""Rollouts of the DaemonSet while pods arrive, by versions that work and that do not."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Final

import pytest

from metagpu.agent.exchange import read_standby
from metagpu.host.daemon_launcher import hierarchies
from tests.e2e.cluster import (
    ALL_SHARES,
    CONFIGURATION,
    NAMESPACE,
    RESOURCE,
    Cluster,
    container,
    idle_pod,
    pod,
)
from tests.e2e.instances import REFUSED, mig_node
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_folders import RUN_DIR
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.pod_daemon import PodDaemon
from tests.e2e.rig.waiting import took, wait_for

pytestmark = pytest.mark.daemon("pod")

PER_SECOND = 5
SOON_S = 120.0
SHARES: Final = {RESOURCE: 4}
MIXED_SHARES: Final = {
    RESOURCE: 4,
    "nvidia.com/gpu.shared": 1,
    "nvidia.com/gpu.mps": 10,
    "nvidia.com/mig-1g.5gb": 1,
    "nvidia.com/gpu": 1,
}
"""The shares of an arriving pod, by resource."""
MIXED: Final = f"""\
version: metagpu/v1
health: {{quietPeriod: 1s}}
pools:
  - name: fractions
    gpus: {{index: 0-1}}
    backends: [{{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100}}]
  - {{name: slices, gpus: {{index: 2}}, backends: [{{backend: timeslice, replicas: 8}}]}}
  - {{name: mps, gpus: {{index: 3}}, backends: [{{backend: mps}}]}}
  - {{name: mig, gpus: {{index: 4}}, backends: [{{backend: mig, profiles: [1g.5gb]}}]}}
  - {{name: whole, gpus: {{index: 5-7}}, backends: [{{backend: whole}}]}}
"""
"""All backends, each on GPUs of its own."""
MIXED_AMOUNTS: Final = dict(zip(MIXED_SHARES, (200, 8, 100, 7, 3), strict=True))
MIXED_GPUS: Final = (
    "{model: a100-40gb, count: 4}, {model: a100-40gb, mig: true}, {model: a100-40gb, count: 3}"
)
MOST_ARRIVALS: Final = 40
"""Pods that arrive during one exchange: a busy kubelet would have more and more to admit."""
LIST_GAP_S: Final = 0.5
LIST_EVENT: Final = re.compile(
    r'^[EIW]\d{4} ([\d:.]+) .*"(ListAndWatch ended|State pushed)[^"]*".* resource="([^"]+)"',
    re.MULTILINE,
)
"""The time of an end or a begin of a list in the kubelet's log, and the resource."""
PERIOD = "10s"
"""The period in which a kubelet raises the Node's amounts by default; each raise lets pods in."""


def arriving(number: int, shares: Mapping[str, int] = SHARES) -> Document:
    """Return a pod with shares of one of these resources in turn that ends by itself."""
    resource = list(shares)[number % len(shares)]
    command = ["sh", "-c", 'test -n "$NVIDIA_VISIBLE_DEVICES"']
    main = container("main", shares[resource], command, resource)
    return pod(f"arriving-{number}", main, restartPolicy="Never")


@contextmanager
def arrivals(
    cluster: Cluster,
    count: int,
    shares: Mapping[str, int] = SHARES,
    *,
    first: int = 0,
    over: threading.Event | None = None,
) -> Iterator[list[Document]]:
    """Create pods at five a second, in a thread, until all are made or it is over.

    The block yields those made so far, and waits for the thread.
    """
    made: list[Document] = []

    def create() -> None:
        while len(made) < count and not (over and over.is_set()):
            began = time.monotonic()
            numbers = range(first + len(made), first + len(made) + PER_SECOND)
            made.extend(arriving(number, shares) for number in numbers)
            cluster.kubectl.apply(*made[-PER_SECOND:])
            time.sleep(max(0.0, began + 1 - time.monotonic()))

    thread = threading.Thread(target=create)
    thread.start()
    try:
        yield made
    finally:
        thread.join()


def phases(cluster: Cluster) -> dict[str, str]:
    """Return phase and reason of every arriving pod, by name."""
    found = {each["metadata"]["name"]: each for each in cluster.kubectl.list("pods", NAMESPACE)}
    return {
        name: " ".join(filter(None, (each["status"]["phase"], each["status"].get("reason"))))
        for name, each in found.items()
        if name.startswith("arriving-")
    }


@pytest.fixture
def ready(cluster: Cluster) -> PodDaemon:
    """Return the daemon once its pod is ready: a rollout deletes at once one that is not yet."""
    assert isinstance(cluster.daemon, PodDaemon)
    cluster.daemon.await_rolled_out()
    return cluster.daemon


@pytest.mark.long
def test_few_pods_are_refused_over_exchanges(cluster: Cluster, ready: PodDaemon) -> None:
    """Pods that arrive during exchanges succeed, but for some that are bound in the last moment."""
    held = cluster.run("holds", 50)
    before = cluster.incarnations()

    with cluster.node.configured_kubelet({"nodeStatusUpdateFrequency": PERIOD}):
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        exchange_under_load(cluster, ready, 3, SHARES)
        assert cluster.incarnations() == before
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        assert cluster.inspect_container("holds") == held


@pytest.mark.long
@pytest.mark.timeout(900)
def test_few_pods_of_any_backend_are_refused_over_rollouts(
    cluster: Cluster, ready: PodDaemon
) -> None:
    """Ten rollouts refuse few pods of any backend, and those that hold shares run on."""
    driver = RUN_DIR / "simulation" / "driver.json"
    with (
        cluster.node.configured_kubelet({"nodeStatusUpdateFrequency": PERIOD}),
        mig_node(cluster, MIXED, MIXED_GPUS, driver=driver),
    ):
        for resource, amount in MIXED_AMOUNTS.items():
            cluster.await_amounts(amount, amount, resource)
        cluster.start(
            *(idle_pod(f"holds-{i}", n, name) for i, (name, n) in enumerate(MIXED_SHARES.items()))
        )
        before = cluster.incarnations()
        wait_for("all leases", lambda: len(held_leases(cluster)) == len(before), within_s=SOON_S)
        leases = held_leases(cluster)

        log = cluster.node.kubelet.log
        known = log.stat().st_size
        exchange_under_load(cluster, ready, 10, MIXED_SHARES)
        gaps = sorted(list_gaps(log.read_bytes()[known:].decode(errors="replace")))
        print(f"{len(gaps)} lists were away for {gaps[0]:.2f} to {gaps[-1]:.2f} s")
        assert len(gaps) == 10 * len(MIXED_SHARES)
        took("a new list", gaps[-1], at_most=LIST_GAP_S)
        assert cluster.incarnations() == before
        assert held_leases(cluster) == leases
        for resource, amount in MIXED_AMOUNTS.items():
            cluster.await_amounts(amount, amount, resource)


def exchange_under_load(
    cluster: Cluster, daemon: PodDaemon, count: int, shares: Mapping[str, int]
) -> None:
    """Exchange the daemon so often, each time while pods arrive, and assert that few are refused.

    They arrive from the moment on at which the next daemon is ready for the node.
    """
    made = refused = 0
    for done in range(1, count + 1):
        daemon.await_rolled_out()
        keep_control_daemons()
        daemon.change("rollout", "restart")
        wait_for(
            "the next daemon to be ready",
            lambda: (standby := read_standby(daemon.run_folder)) is not None and standby.ready,
            within_s=SOON_S,
            pause_s=0.05,
        )
        over = threading.Event()
        with arrivals(cluster, MOST_ARRIVALS, shares, first=made, over=over) as pods:
            daemon.await_rolled_out()
            over.set()
        made += len(pods)
        refused = await_ended(cluster, made, exchanges=done)
    print(f"{made} pods over {count} exchanges: {refused} refused")


def keep_control_daemons() -> None:
    """Take the stand-ins of MPS control daemons out of their container's cgroups.

    metagpu starts NVIDIA's in cgroups of the host, and no end of its container ends them.
    """
    for file in RUN_DIR.glob("mps/*/pid"):
        for hierarchy, _ in hierarchies():
            (hierarchy / "cgroup.procs").write_text(file.read_text())


def held_leases(cluster: Cluster) -> set[tuple[str, ...]]:
    """Return what the pods hold that stay: resource, GPU and holder."""
    return {
        (lease["resource"], lease["uuid"], lease["holder"])
        for lease in cluster.daemon.status()["leases"]
        if "/holds-" in (lease["holder"] or "")
    }


def list_gaps(log: str) -> Iterator[float]:
    """Yield, from a kubelet's log, the seconds between the end of a list and the next one."""
    ended: dict[str, datetime] = {}
    for text, event, resource in LIST_EVENT.findall(log):
        at = datetime.strptime(text, "%H:%M:%S.%f")  # noqa: DTZ007 - a difference alone is read
        if event.startswith("ListAndWatch"):
            ended[resource] = at
        elif (since := ended.pop(resource, None)) is not None:
            yield (at - since).total_seconds() % 86400


WRONG = """\
version: metagpu/v1
pools: [{name: all, backends: [{backend: fracton}]}]
"""
MISFIT = """\
version: metagpu/v1
pools: [{name: all, backends: [{backend: mig, profiles: [9g.99gb]}]}]
"""
NEWER = CONFIGURATION + "keyOfAnotherVersion: true\n"
CONFIGURATIONS = {"configuration": WRONG, "profile": MISFIT}
CHANGES = {
    "configuration": ("rollout", "restart"),
    "profile": ("rollout", "restart"),
    "image": ("set", "image", "metagpu=docker.io/library/metagpu:none"),
    "driver": ("set", "env", "METAGPU_SIMULATE-"),
}
"""Changes of the DaemonSet, some of them after one of its configuration, that do not work."""


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "configuration" else pytest.param(kind, marks=pytest.mark.long)
        for kind in CHANGES
    ],
)
def test_what_does_not_work_leaves_the_old_daemon_serving(
    cluster: Cluster, ready: PodDaemon, kind: str
) -> None:
    """The rollout stops at a pod that is not ready, and no pod fails before or after its end."""
    before = ready.pid
    try:
        if kind in CONFIGURATIONS:
            ready.configure(CONFIGURATIONS[kind])
        ready.change(*CHANGES[kind])
        assert_old_one_serves(cluster, ready)
        if kind in CONFIGURATIONS:
            assert ready.status()["standby"]["problems"][0].startswith("the configuration: ")
    finally:
        if kind in CONFIGURATIONS:
            ready.configure()
        else:
            ready.change("rollout", "undo")
    ready.await_rolled_out()
    assert (ready.pid == before) == (kind not in CONFIGURATIONS)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)


@pytest.mark.long
def test_a_rollback_to_a_file_with_an_unknown_key_leaves_the_daemon_serving(
    cluster: Cluster, ready: PodDaemon
) -> None:
    """The earlier revision has a file of another version: its pod never becomes ready."""
    ready.configure(former=CONFIGURATION)
    ready.change("set", "env", "METAGPU_DEFAULT_PROFILE=former")
    ready.await_rolled_out()
    ready.change("rollout", "undo")
    ready.await_rolled_out()
    before = ready.pid
    try:
        ready.configure(former=NEWER)
        ready.change("rollout", "undo")
        assert_old_one_serves(cluster, ready)
        assert "keyOfAnotherVersion" in ready.status()["standby"]["problems"][0]
    finally:
        ready.change("rollout", "undo")
        ready.configure()
    ready.await_rolled_out()
    assert ready.pid == before
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)


def assert_old_one_serves(cluster: Cluster, daemon: PodDaemon) -> None:
    """Assert that pods get shares while a pod of the DaemonSet is not ready."""
    wait_for("a pod that is not ready", lambda: bool(daemon.waiting()), within_s=SOON_S)
    with arrivals(cluster, 25):
        pass
    await_ended(cluster, 25)
    assert len(daemon.waiting()) == 1
    assert cluster.node.resource(RESOURCE)[0] == ALL_SHARES


MOST_REFUSED: Final = 1
"""Pods that one exchange may refuse: one that was bound by the amount before the withdrawal, and
that the kubelet compares with the amount after it; one for which the kubelet raised the amounts in
the last moment, or that a busy machine admits too late. A plain restart refuses five times as many
at this pace."""


def await_ended(cluster: Cluster, count: int, *, exchanges: int = 0) -> int:
    """Wait until all arriving pods have ended; return how many were refused, if these are few."""

    def all_ended() -> bool:
        seen = phases(cluster)
        left = {name: phase for name, phase in seen.items() if phase in ("Pending", "Running")}
        if left or len(seen) < count:
            raise RigError(f"{len(seen)} of {count} pods were made, and these did not end: {left}")
        return True

    wait_for("all pods to end", all_ended, within_s=max(SOON_S, 2.0 * count))
    failed = {name: text for name, text in phases(cluster).items() if text != "Succeeded"}
    for name in failed:
        print(name, cluster.kubectl.get("pod", name, NAMESPACE)["status"].get("message"))
    assert all(text.removeprefix("Failed ").startswith(REFUSED) for text in failed.values()), failed
    assert len(failed) <= exchanges * MOST_REFUSED, failed
    return len(failed)
