"""`drain-gpu`: the cordon of a GPU, then the eviction of the pods that hold it."""

import argparse
import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec
from msgspec.structs import replace

from metagpu.cli.live import print_text
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.display.table import render, stdout_terminal
from metagpu.kubectl.errors import DrainFailed, NoAnswer, report_of
from metagpu.kubectl.node_commands import (
    ask_consent,
    cordon_gpu,
    delays,
    find_gpu,
    node_of,
    print_error,
)
from metagpu.kubectl.tables import draw_items, read_rows
from metagpu.kubectl.viewer import STATUS, USAGE, AgentPod, ClusterViewer, NodeAnswer

Object = Mapping[str, Any]
PodName = tuple[str, str]
"""Namespace and name."""
UNNAMED: Final[PodName] = ("", "a pod that is being admitted")
"""The holder of shares that the kubelet has not named yet."""

_HOLDER: Final = re.compile(r"([^/]+)/(\S+) \((.*)\)")
"""A holder in the daemon's status: `namespace/pod (container)`."""
_MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a pod by which the kubelet shows a static pod."""
_ENDED: Final = ("Succeeded", "Failed")


class Holding(msgspec.Struct, frozen=True):
    """Shares of one GPU that a container holds, alone or by a shared ResourceClaim."""

    pod: PodName
    container: str
    shares: int


class DrainedPod(msgspec.Struct, frozen=True):
    """A pod on a GPU that is drained.

    Attributes:
        uid: empty where the API server knows the pod no more.
        controller: as `ReplicaSet/web-1`, empty for none.
        stays: why it is not evicted, empty for a pod that is.
        ends: whether it is deleted already, and needs no eviction.
    """

    name: PodName
    uid: str = ""
    controller: str = ""
    stays: str = ""
    ends: bool = False

    @property
    def title(self) -> str:
        """Return namespace and name, as people write them."""
        return "/".join(part for part in self.name if part)

    @property
    def is_evicted(self) -> bool:
        """Return whether the drain evicts it."""
        return not (self.stays or self.ends)


def holdings_of(status: StatusReport, gpu: str) -> Sequence[Holding]:
    """Return who holds shares of a GPU, by its uuid, in the status of its daemon.

    A share of a ResourceClaim has several holders; a holder's shares of all resources are summed.
    """
    found: dict[tuple[PodName, str], int] = {}
    for lease in status.leases:
        if lease.uuid == gpu:
            for text in lease.holders or [""]:
                holder = _parse(text)
                found[holder] = found.get(holder, 0) + lease.shares
    return [Holding(pod, container, count) for (pod, container), count in sorted(found.items())]


def judge_pod(name: PodName, pod: Object | None, node: str, *, force: bool) -> DrainedPod:
    """Return what a drain does with a pod, which is `None` where it has gone.

    Args:
        name: namespace and name.
        pod: the object of the API server. A pod of another node has the name of one that has gone:
            StatefulSets give names again.
        node: the node of the GPU.
        force: evict it too if it is a DaemonSet's, or has no controller.
    """
    if pod is None or pod["spec"].get("nodeName") != node:
        return DrainedPod(name, ends=True)
    metadata = pod["metadata"]
    owners = [
        reference
        for reference in metadata.get("ownerReferences") or ()
        if reference.get("controller")
    ]
    kind = str(owners[0]["kind"]) if owners else ""
    controller = f"{kind}/{owners[0]['name']}" if owners else ""
    ends = bool(metadata.get("deletionTimestamp"))
    stays = ""
    if not _asks_for_devices(pod["spec"]):
        stays = "it requests no device: the report of its node is wrong"
    elif _MIRROR in (metadata.get("annotations") or {}):
        stays = "a static pod, which only its node ends"
    elif not force and kind == "DaemonSet":
        stays = "of a DaemonSet; --force evicts it"
    elif not force and not owners:
        stays = "no controller makes it again; --force evicts it"
    return DrainedPod(name, str(metadata["uid"]), controller, "" if ends else stays, ends)


def is_running(pod: Object | None, uid: str) -> bool:
    """Return whether a pod has this uid, and has not ended."""
    if pod is None or pod["metadata"]["uid"] != uid:
        return False
    return (pod.get("status") or {}).get("phase") not in _ENDED


def rows_of(
    holdings: Iterable[Holding],
    pods: Mapping[PodName, DrainedPod],
    answer: NodeAnswer[UsageReport],
    gpu: str,
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table; memory is from the node's usage, where it answered."""
    used = {
        ((row["namespace"], row["pod"]), row["container"]): row
        for row in read_rows("pods", [answer])[0]
        if row["uuid"] == gpu
    }
    rows = []
    for holding in holdings:
        pod, memory = pods[holding.pod], used.get((holding.pod, holding.container), {})
        rows.append(
            {
                "namespace": holding.pod[0],
                "pod": holding.pod[1],
                "container": holding.container,
                "shares": holding.shares,
                "usedMiB": memory.get("usedMiB"),
                "shareMiB": memory.get("shareMiB"),
                "controller": pod.controller or "none",
                "drain": f"stays: {pod.stays}" if pod.stays else "ends" if pod.ends else "evicted",
            }
        )
    return rows


def _asks_for_devices(spec: Object) -> bool:
    """Return whether a pod requests an extended resource, or has a ResourceClaim."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return bool(spec.get("resourceClaims")) or any(
        "/" in name for limit in limits for name in limit
    )


def _parse(text: str | None) -> tuple[PodName, str]:
    parts = _HOLDER.fullmatch(text or "")
    return ((parts[1], parts[2]), parts[3]) if parts else (UNNAMED, "")


_UNREACHABLE: Final = 0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_TOO_MANY: Final = 429
_RETRIED: Final = frozenset((_UNREACHABLE, _CONFLICT, _TOO_MANY))
"""Answers to an eviction that may be others a moment later: budgets, limits of requests, races."""
_INTERRUPTED: Final = 130
"""The exit status of shells after Ctrl-C."""


def drain_gpu(args: argparse.Namespace, runner: asyncio.Runner, viewer: ClusterViewer) -> int:
    """Drain a GPU with the consent of the user; return the exit status.

    The user is asked between two coroutines: Ctrl-C ends no question inside of one.

    Raises:
        MetagpuError: there is no such GPU, the user may not, or pods are on the GPU at the end.
    """
    with report_of(node_of(args.gpu)):
        return _drain(args, runner, GpuDrain(args, viewer, *runner.run(find_gpu(args.gpu, viewer))))


def _drain(args: argparse.Namespace, runner: asyncio.Runner, drain: "GpuDrain") -> int:
    runner.run(drain.look())
    print_text(runner.run(drain.draw(drain.pods)))
    if args.dry_run:
        print_text(f"dry run: this would {drain.plan(drain.pods)}\n")
        return 0
    refusal = _ask(args, drain, drain.pods)
    if refusal is not None:
        return refusal
    try:
        runner.run(drain.cordon())
        if late := runner.run(drain.look()):
            print_text(runner.run(drain.draw(late)))
            refusal = _ask(args, drain, late)
            if refusal is not None:
                return refusal
        runner.run(drain.evict())
    except KeyboardInterrupt:
        print_error(
            f"interrupted: {drain.title} stays cordoned; the same command goes on, and "
            f"`kubectl metagpu uncordon {args.gpu}` ends the cordon"
        )
        return _INTERRUPTED
    done = f"`kubectl metagpu uncordon {args.gpu}` gives its shares again"
    print_text(f"{drain.title} is drained: nobody holds it; {done}\n")
    return 0


def _ask(args: argparse.Namespace, drain: "GpuDrain", names: Iterable[PodName]) -> int | None:
    """Ask whether pods may be evicted; return `None` for yes, else the exit status."""
    if args.yes or not any(drain.pods[name].is_evicted for name in names):
        return None
    return ask_consent(drain.plan(names), "no pod is evicted")


class GpuDrain:
    """The drain of one GPU.

    Attributes:
        pods: what happens to each pod that has held shares since the first look.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        viewer: ClusterViewer,
        agent: AgentPod,
        gpu: GpuReport,
    ) -> None:
        self.title = f"GPU {gpu.index} of {agent.node}"
        self.pods: dict[PodName, DrainedPod] = {}
        self._args = args
        self._viewer = viewer
        self._agent = agent
        self._gpu = gpu
        self._holdings: Sequence[Holding] = ()
        self._printed: set[str] = set()

    def plan(self, names: Iterable[PodName]) -> str:
        """Return what happens to the GPU and to some pods, after "this would"."""
        count = sum(self.pods[name].is_evicted for name in names)
        return f"cordon {self.title} and evict {count} {'pod' if count == 1 else 'pods'}"

    async def draw(self, names: Iterable[PodName]) -> str:
        """Draw the containers of some pods as a table, with the memory that they use.

        Raises:
            ClusterError: the API server does not answer.
        """
        chosen = set(names)
        held = [holding for holding in self._holdings if holding.pod in chosen]
        if not held:
            return f"nobody holds {self.title}\n"
        [usage] = await self._viewer.ask(USAGE, [self._agent])
        rows = rows_of(held, self.pods, usage, self._gpu.uuid)
        return render(draw_items("holders", rows), stdout_terminal())

    async def cordon(self) -> None:
        """Cordon the GPU, and wait until its daemon has done so.

        A reason that is given already stays, where the user gives none.

        Raises:
            MetagpuError: the user may not, or the daemon does not follow.
        """
        before = self._gpu.cordon.reason if self._gpu.cordon else ""
        reason = " ".join(self._args.reason.split()) or before or "it is being drained"
        await cordon_gpu(self._viewer, self._agent, self._gpu, reason, self._args.timeout)
        print_text(f"{self.title} gives no new shares: {reason}\n")

    async def look(self, *, names_alone: bool = False) -> Sequence[PodName]:
        """Read who holds shares of the GPU; return the pods that are new.

        Args:
            names_alone: do not ask whether a known name is another pod's by now.

        Raises:
            MetagpuError: the daemon does not report the GPU, or the user may not read a pod.
        """
        [answer] = await self._viewer.ask(STATUS, [self._agent])
        if answer.report is None:
            raise NoAnswer(f"{answer.node}: {answer.problem}")
        if all(gpu.uuid != self._gpu.uuid for gpu in answer.report.gpus):
            raise NoAnswer(f"{answer.node}: its daemon does not see {self.title} now")
        holdings = holdings_of(answer.report, self._gpu.uuid)
        names = {holding.pod for holding in holdings}
        if names_alone:
            for name in {holding.pod for holding in self._holdings} - names:
                if is_running(await self._read(name), self.pods[name].uid):
                    # A daemon that has just started does not know the kubelet's pods yet.
                    title = self.pods[name].title
                    raise NoAnswer(f"{answer.node}: its daemon does not name {title} now")
        self._holdings = holdings
        late = []
        for name in sorted(names):
            known = self.pods.get(name)
            if known is not None and names_alone:
                continue
            pod = await self._read(name)
            found = judge_pod(name, pod, self._agent.node, force=self._args.force)
            self.pods[name] = found
            if known is None or found.uid not in ("", known.uid):
                late.append(name)
        return late

    async def _read(self, name: PodName) -> Mapping[str, Any] | None:
        if name == UNNAMED:
            return None
        return await self._viewer.get(f"/api/v1/namespaces/{name[0]}/pods/{name[1]}")

    async def evict(self) -> None:
        """Evict each pod once, and wait until nobody holds the GPU.

        Raises:
            MetagpuError: pods hold it at the end of the time, or stay.
        """
        seconds = self._args.whole_timeout
        due = {name for name, pod in self.pods.items() if pod.is_evicted}
        pauses = delays()
        if self._is_waiting():
            print_text(f"waiting until nobody holds it, {seconds:g} s at most\n")
        with anyio.move_on_after(seconds):
            while self._is_waiting():
                for name in sorted(due):
                    if await self._is_evicted(name):
                        due.remove(name)
                await anyio.sleep(pauses.next())
                due.update(await self._look_again())
        if self._holdings:
            names = dict.fromkeys(holding.pod for holding in self._holdings)
            kept = [_kept(self.pods[name], seconds) for name in names]
            raise DrainFailed(f"{self.title} stays cordoned, and is still held: {'; '.join(kept)}")

    def _is_waiting(self) -> bool:
        """Return whether the GPU has a pod that does not stay."""
        return any(not self.pods[holding.pod].stays for holding in self._holdings)

    async def _is_evicted(self, name: PodName) -> bool:
        """Try the eviction of a pod; return whether there is no more to try."""
        pod = self.pods[name]
        try:
            await self._viewer.evict(*name, pod.uid)
        except ClusterError as error:
            reason = "; ".join(error.causes) or error.message or str(error)
            if error.status in _RETRIED:
                self._print_once(f"{pod.title} waits: {reason}")
                return False
            if error.status != _NOT_FOUND:
                self.pods[name] = replace(pod, stays=f"not evicted: {reason}")
            return True
        self._print_once(f"{pod.title} is evicted")
        return True

    async def _look_again(self) -> Iterable[PodName]:
        """Look, and print who has left; return the new pods that are evicted too."""
        before = dict.fromkeys(holding.pod for holding in self._holdings)
        try:
            late = await self.look(names_alone=True)
        except MetagpuError as error:
            self._print_once(f"no news: {error}")  # its daemon may be replaced meanwhile
            agents = {agent.node: agent for agent in await self._viewer.agents()}
            self._agent = agents.get(self._agent.node, self._agent)
            return ()
        now = {holding.pod for holding in self._holdings}
        waiting = sum(not self.pods[name].stays for name in now)
        for name in before:
            if name not in now:
                left = f"; {waiting} to go" if waiting else ""
                self._print_once(f"{self.pods[name].title} has left {self.title}{left}")
        if self._args.yes:
            return [name for name in late if self.pods[name].is_evicted]
        for name in late:
            if self.pods[name].is_evicted:
                came = "it came meanwhile; the same command evicts it"
                self.pods[name] = replace(self.pods[name], stays=came)
        return ()

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print_text(f"{text}\n")


def _kept(pod: DrainedPod, seconds: float) -> str:
    return f"{pod.title} ({pod.stays or f'after {seconds:g} s'})"
