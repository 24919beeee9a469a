"""The pods of the daemons, among pods that carry their label: pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.kubectl.errors import SeveralNamespaces

Object = Mapping[str, Any]

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
    """Return one daemon of each node: the ready one where an exchange has two.

    Raises:
        MetagpuError: several namespaces have daemons.
    """
    found: dict[str, AgentPod] = {}
    namespaces = set()
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or pod["metadata"].get("deletionTimestamp") or not _is_daemon(pod):
            continue
        conditions = (pod.get("status") or {}).get("conditions") or ()
        agent = AgentPod(
            node,
            pod["metadata"]["namespace"],
            pod["metadata"]["name"],
            _status_port(pod),
            any(it["type"] == "Ready" and it["status"] == "True" for it in conditions),
        )
        namespaces.add(agent.namespace)
        if node not in found or agent.ready:
            found[node] = agent
    if len(namespaces) > 1:
        names = ", ".join(sorted(namespaces))
        raise SeveralNamespaces(
            f"the namespaces {names} have daemons of metagpu each; name the one to trust by "
            "--agent-namespace"
        )
    return sorted(found.values(), key=lambda it: it.node)


def _is_daemon(pod: Object) -> bool:
    """Return whether a pod is of a DaemonSet and has the kubelet's folder of its node.

    Labels, accounts and ports of a pod are its author's choice. That folder is not: Pod Security
    refuses it to tenants, and a pod that has it can do all on its node that a daemon can.
    """
    owners = pod["metadata"].get("ownerReferences") or ()
    volumes = pod["spec"].get("volumes") or ()
    paths = [(it.get("hostPath") or {}).get("path", "") for it in volumes]
    return any(it.get("controller") and it.get("kind") == "DaemonSet" for it in owners) and any(
        it.rstrip("/") == KUBELET_FOLDER for it in paths
    )


def _status_port(pod: Object) -> int:
    for container in pod["spec"].get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == PORT:
                return int(port["containerPort"])
    return 0
