"""`uninstall`: the end of metagpu in a cluster, and of what it left on its nodes.

The DaemonSet gets a node selector that no node has, which ends its daemons and keeps its pods'
template. A pod of that template runs `metagpu uninstall` on each node, with the rights and folders
that the daemon had there. The same command goes on after an interruption.
"""

import argparse
import asyncio
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final

import anyio
import msgspec

from metagpu.cli.live import print_text
from metagpu.core.contracts.leftovers import Result
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.display.options import encode
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.host.programs import run_command
from metagpu.kubectl.errors import NotInstalled, SeveralNamespaces
from metagpu.kubectl.node_commands import ask_consent, delays, print_error
from metagpu.kubectl.viewer import KUBELET_FOLDER, SELECTOR, STATUS, ClusterViewer, in_parallel
from metagpu.translation.affinity import NodeSelection, required_terms

Object = Mapping[str, Any]

UNINSTALL: Final = "metagpu.io/uninstall"
"""The label of the pods that clean a node, and the node selector that ends the daemons."""
_LABELS: Final = {
    "METAGPU_PROFILE": "metagpu.io/config",
    "METAGPU_MIG_CONFIG": "nvidia.com/mig.config",
}
"""The labels of a Node that the daemon follows, by the variable that says the same."""
_OF_DAEMONS: Final = (
    "ports",
    "args",
    "lifecycle",
    "readinessProbe",
    "livenessProbe",
    "startupProbe",
)
"""The parts of a container that a pod that ends does not have."""
_OF_MANY_NODES: Final = ("affinity", "nodeSelector", "initContainers", "topologySpreadConstraints")
_ENDED: Final = ("Succeeded", "Failed")
_NOT_FOUND: Final = 404
_EXISTS: Final = 409
_LONGEST_NAME: Final = 253
_MERGE: Final = "application/merge-patch+json"
_RELEASE: Final = "meta.helm.sh/release-name"
_HELM_DEADLINE: Final = 300.0
_AMOUNTS: Final = "amounts"
"""The kind of a leftover that the kubelet writes, and nobody removes before it forgets them."""


class NodeEnd(msgspec.Struct):
    """The end of metagpu on one node.

    Attributes:
        result: planned, removed, stays, or failed.
        problem: why the node could not be cleaned.
        pods: those that held shares before; `None` if the node's daemon does not say.
        leftovers: what was found, each with its result, as `metagpu uninstall -o json` has it.
    """

    node: str
    result: str = "planned"
    problem: str = ""
    pods: list[str] | None = None
    leftovers: list[Object] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def staying(self) -> Sequence[Object]:
        """The leftovers that stay on the node."""
        return [
            left
            for left in self.leftovers
            if left["result"] == Result.STAYS and left["kind"] != _AMOUNTS
        ]

    def describe(self) -> str:
        """Return a sentence for people."""
        if self.problem:
            return f"{self.node}: {self.problem}"
        removed = sum(left["result"] == Result.REMOVED for left in self.leftovers)
        text = f"{self.node}: removed {removed} {'thing' if removed == 1 else 'things'}"
        count = len(self.staying)
        return text + (f"; {count} {'stays' if count == 1 else 'stay'}" if count else "")


def uninstall(args: argparse.Namespace, runner: asyncio.Runner, viewer: ClusterViewer) -> int:
    """End metagpu with the consent of the user; return 1 if something stays.

    Raises:
        MetagpuError: metagpu is not installed, or the user may not.
    """
    job = ClusterUninstall(args, viewer)
    runner.run(job.look())
    if args.dry_run:
        return job.show("dry run: this would " + job.plan)
    if not args.yes and (refusal := ask_consent(job.plan, "nothing is removed")) is not None:
        return refusal
    runner.run(job.end_daemons())
    runner.run(job.clean_nodes())
    if job.is_clean:
        runner.run(job.remove_releases())
    return job.show()


class ClusterUninstall:
    """The uninstallation of one installation."""

    def __init__(self, args: argparse.Namespace, viewer: ClusterViewer) -> None:
        self._args = args
        self._viewer = viewer
        self._nodes: dict[str, tuple[NodeEnd, Object]] = {}
        """By the node's name: its end, and the pod that cleans it."""
        self._daemon_sets: Sequence[Object] = ()
        self._next = ""

    @property
    def plan(self) -> str:
        """The plan in words, after "this would"."""
        count = len(self._nodes)
        nodes = "1 node" if count == 1 else f"{count} nodes"
        text = f"end metagpu ({', '.join(map(_title, self._daemon_sets))}) on {nodes}"
        known = [end.pods for end, _ in self._nodes.values() if end.pods is not None]
        if (holding := sum(map(bool, known))) and not self._args.force:
            text += f"; on {holding} of them pods hold shares, and what they use stays"
        if unknown := count - len(known):
            text += f"; on {unknown} of them it is unknown which pods hold shares"
        return text

    @property
    def is_clean(self) -> bool:
        """True if nothing stays on any node."""
        return all(end.result == "removed" for end, _ in self._nodes.values())

    async def look(self) -> None:
        """Find the DaemonSets, their nodes, and the pods with shares.

        Raises:
            MetagpuError: there is none, several namespaces have some, or the user may not.
        """
        namespace = self._args.agent_namespace
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"/apis/apps/v1{where}/daemonsets"
        found = await self._viewer.items(path, labelSelector=SELECTOR)
        self._daemon_sets = [each for each in found if _is_metagpu(each)]
        if not self._daemon_sets:
            raise NotInstalled(
                f"no DaemonSet with the label {SELECTOR} mounts {KUBELET_FOLDER}: metagpu is not "
                "installed in this cluster; on the host of a service run `metagpu uninstall`"
            )
        if len(namespaces := {each["metadata"]["namespace"] for each in self._daemon_sets}) > 1:
            names = ", ".join(sorted(namespaces))
            raise SeveralNamespaces(f"{names} have metagpu each; name one by --agent-namespace")
        nodes = await self._viewer.items("/api/v1/nodes")
        for daemon_set in self._daemon_sets:
            for node in _nodes_of(daemon_set, nodes):
                pod = cleaning_pod(daemon_set, node, force=self._args.force)
                name = node["metadata"]["name"]
                self._nodes.setdefault(name, (NodeEnd(name), pod))
        await self._look_for_holders()

    async def _look_for_holders(self) -> None:
        try:
            answers = await self._viewer.ask(STATUS, await self._viewer.agents())
        except MetagpuError:  # the daemons have ended already, or are no business of the user
            return
        for answer in answers:
            if answer.report is not None and answer.node in self._nodes:
                end, _ = self._nodes[answer.node]
                holders = {each for lease in answer.report.leases for each in lease.holders}
                end.pods = sorted({holder.partition(" ")[0] for holder in holders})

    async def end_daemons(self) -> None:
        """End the daemons, and wait until they have ended.

        Raises:
            ClusterError: the user may not, or the API server does not answer.
        """
        body = {"spec": {"template": {"spec": {"nodeSelector": {UNINSTALL: "true"}}}}}
        for daemon_set in self._daemon_sets:
            await self._viewer.write("PATCH", _path(daemon_set), body, _MERGE)
        pauses, left = delays(), await self._nodes_with_daemons()
        with anyio.move_on_after(self._args.whole_timeout):
            while left:
                await anyio.sleep(pauses.next())
                left = await self._nodes_with_daemons()
        for name in left & self._nodes.keys():
            end, _ = self._nodes[name]
            end.result = "failed"
            end.problem = f"its daemon has not ended within {self._args.whole_timeout:g} s"

    async def _nodes_with_daemons(self) -> set[str]:
        owners = {each["metadata"]["uid"] for each in self._daemon_sets}
        pods = await self._viewer.items(self._pods, labelSelector=SELECTOR, resourceVersion="")
        return {
            pod["spec"].get("nodeName", "")
            for pod in pods
            if any(
                owner.get("uid") in owners for owner in pod["metadata"].get("ownerReferences", ())
            )
        }

    async def clean_nodes(self) -> None:
        """Run a pod on each node, and take its report; print each node that has ended.

        Raises:
            ClusterError: the user may not, or the API server does not answer.
        """
        due = {pod["metadata"]["name"]: end for end, pod in self._nodes.values() if not end.problem}
        missing = [pod for end, pod in self._nodes.values() if not end.problem]
        pauses, phases, blocked = delays(), dict[str, Object](), set[str]()
        with anyio.move_on_after(self._args.whole_timeout):
            while due:
                made = await in_parallel(*(partial(self._create, pod) for pod in missing))
                missing = [pod for pod, done in zip(missing, made, strict=True) if not done]
                blocked = {pod["metadata"]["name"] for pod in missing}
                query = {"labelSelector": UNINSTALL, "resourceVersion": ""}
                pods = await self._viewer.items(self._pods, **query)
                phases = {pod["metadata"]["name"]: pod.get("status") or {} for pod in pods}
                for name in [name for name in due if name not in blocked]:
                    if (status := phases.get(name, {})).get("phase") in _ENDED:
                        await self._take_report(due.pop(name), name, status)
                await anyio.sleep(pauses.next() if due else 0)
        for name, end in due.items():
            end.result = "failed"
            end.problem = _why_not(phases.get(name, {}), self._args.whole_timeout)
            if name in blocked:
                end.problem = "the pod of an earlier run has not ended"
            await self._delete(f"{self._pods}/{name}")

    async def _create(self, pod: Object) -> bool:
        """Return false where an interrupted command has left a pod; delete that one."""
        try:
            await self._viewer.write("POST", self._pods, pod)
        except ClusterError as error:
            if error.status != _EXISTS:
                raise
            await self._delete(f"{self._pods}/{pod['metadata']['name']}")
            return False
        return True

    async def _take_report(self, end: NodeEnd, pod: str, status: Object) -> None:
        try:
            log = (await self._viewer.read(f"{self._pods}/{pod}/log")).decode(errors="replace")
        except ClusterError as error:  # its kubelet has rejected or evicted the pod
            log = error.message or str(error)
        report = read_report(log)
        if report is None or "leftovers" not in report:
            said = (report or {}).get("error") or log.strip().rpartition("\n")[2] or "no output"
            end.result = "failed"
            end.problem = status.get("message") or f"`metagpu uninstall` failed: {said}"
        else:
            end.leftovers, end.notes = report["leftovers"], report["notes"]
            end.result = "stays" if end.staying else "removed"
        await self._delete(f"{self._pods}/{pod}")
        if self._args.output == "table":
            print_text(f"{end.describe()}\n")

    async def remove_releases(self) -> None:
        """Remove the objects of the installation by helm, where helm has installed them."""
        releases, steps = dict[str, list[str]](), list[str]()
        context = ["--kube-context", self._args.context] if self._args.context else []
        for each in self._daemon_sets:
            metadata = each["metadata"]
            if release := (metadata.get("annotations") or {}).get(_RELEASE):
                where = ["--namespace", metadata["namespace"], *context]
                releases[release] = ["helm", "uninstall", release, *where]
            else:
                steps.append(f"delete the manifest that made {_title(each)}")
        for command in releases.values():
            if not await self._run_helm(command):
                steps.append(" ".join(command))
        self._next = "; ".join(steps)

    async def _run_helm(self, command: Sequence[str]) -> bool:
        """Return whether helm is here, and has done what the command says."""
        config = {"KUBECONFIG": str(self._args.kubeconfig)} if self._args.kubeconfig else {}
        try:
            done = await run_command(command, env={**os.environ, **config}, deadline=_HELM_DEADLINE)
        except FileNotFoundError:  # helm is elsewhere
            return False
        except OSError as error:
            print_error(f"helm: {error}")
            return False
        if done.status:
            print_error(done.stderr.decode(errors="replace").strip())
        return not done.status

    def show(self, plan: str = "") -> int:
        """Print the result; return the exit status."""
        ends = [end for end, _ in self._nodes.values()]
        if self._args.output != "table":
            plain = {
                "daemonSets": [_title(each) for each in self._daemon_sets],
                "nodes": [msgspec.structs.asdict(end) for end in ends],
                "next": self._next,
            }
            print_text(encode(plain, self._args.output))
        else:
            print_text(render(list(self._drawn(ends, plan)), stdout_terminal()))
        return 0 if plan or self.is_clean else 1

    def _drawn(self, ends: Sequence[NodeEnd], plan: str) -> Iterator[TextTable | Cell]:
        if plan:
            table = TextTable(("NODE", "PODS WITH SHARES"), folded=frozenset(("PODS WITH SHARES",)))
            for end in ends:
                pods = "unknown" if end.pods is None else ", ".join(end.pods) or "-"
                table.add(end.node, pods)
            yield from (table, Cell(plan))
            return
        stays = TextTable(("NODE", "STAYS", "WHERE", "WHY"), folded=frozenset(("WHERE", "WHY")))
        for end in ends:
            for left in end.staying:
                stays.add(end.node, left["kind"], left["where"], left["reason"] or "-")
        if stays.rows:
            yield stays
        yield from (Cell(f"{end.node}: {note}") for end in ends for note in end.notes)
        yield from (Cell(end.describe(), "bold red") for end in ends if end.problem)
        if not self.is_clean:
            again = "run this command again"
            later = f"metagpu has ended; {again} once these reasons are gone, or with --force"
            yield Cell(later if stays.rows else f"{again} to go on")
        elif self._next:
            yield Cell(
                f"every node is clean; the objects of the installation are left: {self._next}"
            )
        else:
            yield Cell("metagpu is removed")

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._daemon_sets[0]['metadata']['namespace']}/pods"

    async def _delete(self, path: str) -> None:
        try:
            await self._viewer.write("DELETE", path)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise


def cleaning_pod(daemon_set: Object, node: Object, *, force: bool = False) -> Object:
    """Return the pod that cleans a node, with what the daemon's pod had there."""
    metadata, template = daemon_set["metadata"], daemon_set["spec"]["template"]
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    spec = {key: value for key, value in template["spec"].items() if key not in _OF_MANY_NODES}
    daemon = next(filter(_mounts_kubelet, spec["containers"]), spec["containers"][0])
    container = {key: value for key, value in daemon.items() if key not in _OF_DAEMONS}
    given = list(container.get("env") or ())
    known = {variable["name"] for variable in given}
    for variable, label in _LABELS.items():
        if label in labels and variable not in known:
            given.append({"name": variable, "value": labels[label]})
    command = ["metagpu", "uninstall", "--yes", "--output=json", *(["--force"] if force else ())]
    title = f"{metadata['name']}-uninstall-{name}"
    if len(title) > _LONGEST_NAME:
        title = f"{metadata['name'][:100]}-uninstall-{sha256(name.encode()).hexdigest()[:16]}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": title,
            "namespace": metadata["namespace"],
            "labels": {UNINSTALL: metadata["name"]},
        },
        "spec": {
            **copy.deepcopy(spec),
            "nodeName": name,
            "restartPolicy": "Never",
            "tolerations": [{"operator": "Exists"}],
            "containers": [{**container, "command": command, "env": given}],
        },
    }


def read_report(log: str) -> Object | None:
    """Return what `metagpu uninstall -o json` has printed, among lines of a log."""
    decoder = json.JSONDecoder()
    found: Object | None = None
    for place in (at for at in range(len(log)) if log.startswith("{", at)):
        if place and log[place - 1] != "\n":
            continue
        try:
            value: Object = decoder.raw_decode(log, place)[0]
        except ValueError:
            continue
        if "leftovers" in value:
            return value
        found = value if "error" in value else found
    return found


def _is_metagpu(daemon_set: Object) -> bool:
    volumes = daemon_set["spec"]["template"]["spec"].get("volumes") or ()
    paths = [str((volume.get("hostPath") or {}).get("path", "")) for volume in volumes]
    return any(path.rstrip("/") == KUBELET_FOLDER for path in paths)


def _mounts_kubelet(container: Object) -> bool:
    mounts = container.get("volumeMounts") or ()
    return any(str(mount["mountPath"]).rstrip("/") == KUBELET_FOLDER for mount in mounts)


def _nodes_of(daemon_set: Object, nodes: Sequence[Object]) -> Iterator[Object]:
    """Yield the Nodes that the DaemonSet has daemons on, by its labels alone.

    A taint may be newer than a daemon, and its node has something left all the same.
    """
    spec = daemon_set["spec"]["template"]["spec"]
    selector = {**(spec.get("nodeSelector") or {})}
    selector.pop(UNINSTALL, None)  # of an earlier run
    selection = NodeSelection(selector, required_terms(spec))
    for node in nodes:
        if not selection.missing(node["metadata"]["name"], node["metadata"].get("labels") or {}):
            yield node


def _why_not(status: Object, seconds: float) -> str:
    """Return why a pod has not ended in time, by its own state."""
    waits = [
        ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
        for container in status.get("containerStatuses") or ()
        if (waiting := (container.get("state") or {}).get("waiting"))
    ]
    state = "; ".join([status.get("phase") or "never seen", *waits])
    return f"the pod that cleans it has not ended within {seconds:g} s ({state})"


def _path(daemon_set: Object) -> str:
    metadata = daemon_set["metadata"]
    return f"/apis/apps/v1/namespaces/{metadata['namespace']}/daemonsets/{metadata['name']}"


def _title(daemon_set: Object) -> str:
    return f"{daemon_set['metadata']['namespace']}/{daemon_set['metadata']['name']}"
