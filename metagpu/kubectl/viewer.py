"""Questions to the API server, and through it to the daemon of each node."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import msgspec

from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.reports.reading import ReportPart, decode_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.kubectl.errors import NotInstalled, SeveralNamespaces
from metagpu.plugins.cluster.settings import AUDIENCE, VIEWER

Object = Mapping[str, Any]

JSON: Final = "application/json"
SELECTOR: Final = "app.kubernetes.io/name=metagpu"
"""The label of the daemons' pods. Every user of a namespace may write it to a pod."""
PORT: Final = "status-api"
"""The name of the containers' port."""
KUBELET_FOLDER: Final = "/var/lib/kubelet/device-plugins"
"""The folder that every daemon mounts from its node: a constant of the kubelet's API."""


class AgentPod(msgspec.Struct, frozen=True):
    """The pod of a daemon; `port` is that of its status, 0 without one."""

    node: str
    namespace: str
    name: str
    port: int
    ready: bool


def choose_agents(pods: Iterable[Object]) -> Sequence[AgentPod]:
    """Return one daemon of each node: the older ready one where an exchange has two.

    The other one waits for the node, and serves no status.

    Raises:
        MetagpuError: several namespaces have daemons.
    """
    found: dict[str, AgentPod] = {}
    namespaces = set()
    for pod in sorted(
        pods, key=lambda candidate: str(candidate["metadata"].get("creationTimestamp", ""))
    ):
        node = pod["spec"].get("nodeName")
        if not node or not _is_daemon(pod):
            continue
        conditions = (pod.get("status") or {}).get("conditions") or ()
        agent = AgentPod(
            node,
            pod["metadata"]["namespace"],
            pod["metadata"]["name"],
            _status_port(pod),
            any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in conditions
            ),
        )
        if pod["metadata"].get("deletionTimestamp") and not agent.ready:
            continue
        namespaces.add(agent.namespace)
        if node not in found or (agent.ready and not found[node].ready):
            found[node] = agent
    if len(namespaces) > 1:
        names = ", ".join(sorted(namespaces))
        raise SeveralNamespaces(
            f"the namespaces {names} have daemons of metagpu each; name the one to trust by "
            "--agent-namespace"
        )
    return sorted(found.values(), key=lambda pod: pod.node)


def _is_daemon(pod: Object) -> bool:
    """Return whether a pod is of a DaemonSet and has the kubelet's folder of its node.

    Labels, accounts and ports of a pod are its author's choice. That folder is not: Pod Security
    refuses it to tenants, and a pod that has it can do all on its node that a daemon can.
    """
    owners = pod["metadata"].get("ownerReferences") or ()
    volumes = pod["spec"].get("volumes") or ()
    paths = [(volume.get("hostPath") or {}).get("path", "") for volume in volumes]
    return any(
        owner.get("controller") and owner.get("kind") == "DaemonSet" for owner in owners
    ) and any(path.rstrip("/") == KUBELET_FOLDER for path in paths)


def _status_port(pod: Object) -> int:
    for container in pod["spec"].get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == PORT:
                return int(port["containerPort"])
    return 0


if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

AT_ONCE: Final = 100
"""Questions to nodes at a time, as many as the client has connections."""
_TOKEN_LIFETIME: Final = 600
_TOKEN_RENEWAL: Final = 450.0
"""Seconds after which a token is replaced; both by the clock of this machine."""
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_LEAST: Final = 5.0
"""Seconds at least for a question in the background, which goes on during looks alone."""
_SHOW_AFTER: Final = 0.4
"""Seconds before progress is shown."""


R = TypeVar("R", bound=ReportPart)


class Question(msgspec.Struct, Generic[R], frozen=True):
    """A question to daemons: the path of a report, and its schema."""

    path: str
    kind: type[R]


STATUS: Final = Question("api/v1/status", StatusReport)
USAGE: Final = Question("api/v1/usage", UsageReport)


class NodeAnswer(msgspec.Struct, Generic[R], frozen=True):
    """The report of a node's daemon, or why there is none."""

    node: str
    report: R | None = None
    problem: str = ""


class ClusterViewer:
    """Asks the API server and the daemons behind it, with the rights of a user.

    Args:
        agent_namespace: where the daemons' pods are; empty looks in all namespaces.
        deadline: seconds for each node's answer.
        progress: is called with the number of answers, and of nodes.
    """

    def __init__(
        self,
        client: "KubeClient",
        agent_namespace: str = "",
        deadline: float = 5.0,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._client = client
        self._agent_namespace = agent_namespace
        self.deadline = deadline
        self._progress = progress
        self._tokens: dict[str, tuple[str, float]] = {}
        self._renewing = anyio.Lock()
        self._limit = anyio.Semaphore(AT_ONCE)

    async def items(self, path: str, **query: str) -> Sequence[Object]:
        """List objects; the answer may be that of the API server's cache.

        Raises:
            ClusterError: the API server refuses, or does not answer.
        """
        answer = await self._client.call("GET", path, query={"resourceVersion": "0", **query})
        return answer.get("items") or ()

    async def get(self, path: str) -> Object | None:
        """Read one object, `None` where there is none.

        Raises:
            ClusterError: the API server refuses, or does not answer.
        """
        try:
            return await self._client.call("GET", path)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """Read a text: the log of a pod, or what the API server passes on from a Service.

        Raises:
            ClusterError: the API server or the Service refuses, or does not answer.
        """
        return await self._client.read("GET", path, query=query)

    async def write(
        self, method: str, path: str, body: Object | None = None, content: str = JSON
    ) -> None:
        """Create, change or delete an object.

        Raises:
            ClusterError: the API server refuses, or does not answer.
        """
        given = None if body is None else dict(body)
        async with self._limit:
            await self._client.call(method, path, body=given, content=content)

    async def annotate_node(self, node: str, key: str, value: str | None) -> None:
        """Set an annotation of a Node, or remove it.

        Raises:
            ClusterError: the API server refuses, or does not answer.
        """
        body = {"metadata": {"annotations": {key: value}}}
        content = "application/merge-patch+json"
        await self._client.call("PATCH", f"/api/v1/nodes/{node}", body=body, content=content)

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Ask for the end of a Pod, within its PodDisruptionBudgets.

        Raises:
            ClusterError: the API server refuses, or does not answer; 429 where a budget refuses.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        await self._client.call("POST", f"{path}/eviction", body=body)

    async def agents(self) -> Sequence[AgentPod]:
        """Find the daemon of each node, by the name of the node.

        Raises:
            MetagpuError: there is none, several namespaces have some, or the user may not list
                pods.
        """
        where = f"/namespaces/{self._agent_namespace}" if self._agent_namespace else ""
        try:
            pods = await self.items(f"/api/v1{where}/pods", labelSelector=SELECTOR)
        except ClusterError as error:
            if error.status == _FORBIDDEN and not where:
                problem = f"{error.message}; name the namespace of metagpu by --agent-namespace"
                raise ClusterError(problem, message=problem, status=_FORBIDDEN) from error
            raise
        found = choose_agents(pods)
        if not found:
            place = f"in the namespace {self._agent_namespace}" if where else "in this cluster"
            raise NotInstalled(
                f"metagpu is not installed {place}: no DaemonSet pod with the kubelet's folder has "
                f"the label {SELECTOR}"
            )
        return found

    async def ask(
        self, question: Question[R], agents: Iterable[AgentPod], deadline: float | None = None
    ) -> Sequence[NodeAnswer[R]]:
        """Ask daemons in parallel for a report; return the answers by the node's name.

        A `deadline` in seconds for each answer stands in place of the viewer's.

        Raises:
            ClusterError: the API server does not answer.
        """
        asked = list(agents)
        async with self._renewing:
            problems = {
                namespace: await self._renew_token(namespace)
                for namespace in {pod.namespace for pod in asked}
            }
        answers: list[NodeAnswer[R]] = []

        async def one(agent: AgentPod) -> None:
            if problem := problems[agent.namespace]:
                answers.append(NodeAnswer(agent.node, problem=problem))
            else:
                async with self._limit:
                    answers.append(await self._ask_node(question, agent, deadline or self.deadline))
            self._progress(len(answers), len(asked))

        async with anyio.create_task_group() as group:
            for agent in asked:
                group.start_soon(one, agent)
        return sorted(answers, key=lambda answer: answer.node)

    async def _ask_node(
        self, question: Question[R], agent: AgentPod, deadline: float
    ) -> NodeAnswer[R]:
        if not agent.port:
            problem = f"pod {agent.name} serves no status; give its daemon --status-api"
            return NodeAnswer(agent.node, problem=problem)
        pod = f"/api/v1/namespaces/{agent.namespace}/pods/{agent.name}"
        proxy = f"{pod}:{agent.port}/proxy/{question.path}"
        headers = {"Metagpu-Token": self._tokens[agent.namespace][0]}
        try:
            with anyio.fail_after(deadline):
                body = await self._client.read("GET", proxy, headers=headers)
        except TimeoutError:
            return NodeAnswer(agent.node, problem=f"no answer within {deadline:g} s")
        except ClusterError as error:
            return NodeAnswer(agent.node, problem=error.message or str(error))
        try:
            return NodeAnswer(agent.node, decode_report(body, question.kind))
        except msgspec.DecodeError as error:
            return NodeAnswer(agent.node, problem=f"no report of a daemon: {error}")

    async def _renew_token(self, namespace: str) -> str:
        """Get a viewer's token; return why there is none, empty where there is one."""
        known = self._tokens.get(namespace)
        if known is not None and time.monotonic() - known[1] < _TOKEN_RENEWAL:
            return ""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{VIEWER}/token"
        spec = {"audiences": [AUDIENCE], "expirationSeconds": _TOKEN_LIFETIME}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            answer = await self._client.call("POST", path, body=body)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                fix = "set statusApi.port in metagpu's chart, or apply deploy/viewers.yaml"
                return f"{error.message}: {fix}"
            if error.status == _FORBIDDEN:
                fix = f"ask for the roles metagpu-viewer, of the cluster and of {namespace}"
                return f"{error.message}: {fix}"
            raise
        self._tokens[namespace] = answer["status"]["token"], time.monotonic()
        return ""


async def in_parallel(*calls: Callable[[], Awaitable[Any]]) -> Sequence[Any]:
    """Return the results of calls that run at once; an error ends them all.

    Raises:
        MetagpuError: the first error among those of the calls.
    """
    results: list[Any] = [None] * len(calls)

    async def one(place: int) -> None:
        results[place] = await calls[place]()

    try:
        async with anyio.create_task_group() as group:
            for place in range(len(calls)):
                group.start_soon(one, place)
    except BaseExceptionGroup as errors:
        ours = [exception for exception in errors.exceptions if isinstance(exception, MetagpuError)]
        raise (ours[0] if ours else errors) from None
    return results


class Progress:
    """A line on a terminal's stderr: how many nodes of the first round answered."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._began = time.monotonic()
        self._shown = 0

    def __call__(self, done: int, of: int) -> None:
        """Show the number of answers; remove the line once all have come."""
        if not self._on:
            return
        self._on = done < of
        if not self._shown and time.monotonic() - self._began < _SHOW_AFTER:
            return
        text = f"asked {done} of {of} nodes" if self._on else ""
        end = "" if text else "\r"
        print(f"\r{text:{self._shown}}", end=end, file=sys.stderr, flush=True)  # noqa: T201
        self._shown = max(self._shown, len(text))


class RepeatedQuestions:
    """Asks for the usage of nodes again and again, silent ones in the background.

    The first look waits for all nodes. All looks are of one event loop; it may rest between them.
    """

    def __init__(self, viewer: ClusterViewer) -> None:
        self._viewer = viewer
        self._silent: dict[str, NodeAnswer[UsageReport]] = {}
        self._questions: dict[str, asyncio.Task[NodeAnswer[UsageReport]]] = {}

    async def ask(self, agents: Iterable[AgentPod]) -> Sequence[NodeAnswer[UsageReport]]:
        """Return the answers by the node's name: of silent nodes, the last.

        Raises:
            ClusterError: the API server does not answer.
        """
        by_node = {agent.node: agent for agent in agents}
        self._silent = {node: answer for node, answer in self._silent.items() if node in by_node}
        for node in self._questions.keys() - by_node.keys():
            self._questions.pop(node).cancel()
        for node in self._silent.keys() - self._questions.keys():
            self._questions[node] = asyncio.create_task(self._ask_late(by_node[node]))

        others = [pod for node, pod in by_node.items() if node not in self._silent]
        answers = list(await self._viewer.ask(USAGE, others))
        for node, last in self._silent.items():
            done = self._questions[node].done()
            answers.append(self._questions.pop(node).result() if done else last)
        self._silent = {answer.node: answer for answer in answers if answer.report is None}
        return sorted(answers, key=lambda answer: answer.node)

    async def _ask_late(self, agent: AgentPod) -> NodeAnswer[UsageReport]:
        try:
            deadline = max(self._viewer.deadline, _LEAST)
            [answer] = await self._viewer.ask(USAGE, [agent], deadline)
        except MetagpuError as error:
            return NodeAnswer(agent.node, problem=str(error))
        return answer
