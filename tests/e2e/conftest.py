"""One node and one daemon for the session, restored before every test."""

import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.cluster import CONFIGURATION, GPUS, MODEL, NAMESPACE, Cluster
from tests.e2e.joined import Joined, credentials, joined
from tests.e2e.rig.crio import crio, provide_crio
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import kubernetes
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.node import Node, running_node
from tests.e2e.rig.pod_daemon import PodDaemon
from tests.e2e.rig.traces import traces

HERE = Path(__file__).parent
LONGEST_TEST_S = 300

_nodes: list[Node] = []
"""The session's node, for the report of a failed test."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here, before pytest selects by mark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(LONGEST_TEST_S))
    items.sort(
        key=lambda own_item: not _runs_in_pod(own_item)
    )  # one installation serves all of them


def _runs_in_pod(item: pytest.Item) -> bool:
    """Return whether the test's closest mark about its daemon is that of the DaemonSet."""
    mark = item.get_closest_marker("daemon")
    return mark is not None and mark.args == ("pod",)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the node, as it was at that moment, to a failure."""
    report = yield
    if report.failed and _nodes:
        report.sections.append(("the node", _nodes[0].diagnose()))
    return report


@pytest.fixture(scope="session")
def node(record_testsuite_property: Callable[[str, object], None]) -> Iterator[Node]:
    """Start a Kubernetes node with the namespace of the tests."""
    commit = subprocess.run(  # "" outside a clone
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    record_testsuite_property("kubernetes", kubernetes().version)
    record_testsuite_property("commit", commit)
    with running_node() as node:
        node.kubectl.create_namespace(NAMESPACE)
        _nodes.append(node)
        yield node
        _nodes.clear()


@pytest.fixture(scope="session")
def traces_before(node: Node) -> Mapping[str, object]:
    """Return the node as it was before the first daemon."""
    return traces(node, node.paths.home / "metagpu")


@pytest.fixture(scope="session")
def pod_daemon(node: Node, traces_before: Mapping[str, object]) -> Iterator[PodDaemon]:
    """Return the daemon as a DaemonSet of the chart, which is installed at its first start."""
    del traces_before  # read before the first daemon
    daemon = PodDaemon(node, CONFIGURATION, model=MODEL, count=GPUS)
    yield daemon
    daemon.uninstall()


@pytest.fixture(scope="session")
def daemon(node: Node, pod_daemon: PodDaemon) -> Iterator[HostDaemon]:
    """Start the metagpu daemon beside the node's kubelet."""
    pod_daemon.uninstall()
    daemon = HostDaemon(node, CONFIGURATION, model=MODEL, count=GPUS)
    daemon.prepare()
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(
    params=["containerd", pytest.param("cri-o", marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def each_runtime(request: pytest.FixtureRequest, node: Node, daemon: HostDaemon) -> Iterator[None]:
    """Run the node's pods by each container runtime; the first test with CRI-O may build it."""
    if request.param == "containerd":
        yield
        return
    try:
        provide_crio()
    except RigError as error:
        pytest.skip(f"CRI-O was not tried: {error}")
    cluster = Cluster(node, daemon)
    cluster.clear()
    with crio(node):
        yield
        cluster.clear()


@pytest.fixture
def cluster(node: Node, request: pytest.FixtureRequest) -> Cluster:
    """Return node and daemon without pods, with everything running and every share offered.

    The daemon is the DaemonSet's pod in tests with that mark, and else a process of the host. The
    mark may name the features that it has at the API server.
    """
    name = "pod_daemon" if _runs_in_pod(request.node) else "daemon"
    cluster = Cluster(node, request.getfixturevalue(name))
    mark = request.node.get_closest_marker("daemon")
    features = mark.kwargs.get("features") if mark else None
    cluster.repair(*(() if features is None else cluster.daemon.features(*features)))
    return cluster


@pytest.fixture(scope="session")
def account(node: Node) -> tuple[str, ...]:
    """Create the daemon's account with the rights of deploy/rbac.yaml; return its options."""
    return credentials(node)


@pytest.fixture
def member(node: Node, daemon: HostDaemon, account: tuple[str, ...]) -> Iterator[Joined]:
    """Start the daemon with the API server; restore it afterwards."""
    with joined(Cluster(node, daemon), account) as member:
        yield member
