"""Cordons by the Node: by its annotations, and during a driver upgrade.

Annotations are for operators without a way onto the node. While the GPU operator upgrades the
driver, it sees pods by the names of NVIDIA's resources alone, so others hold the driver unseen:
they are named here. The labels are those of NVIDIA's k8s-operator-libs (`pkg/upgrade/consts.go`)
and k8s-driver-manager (`cmd/driver-manager/main.go`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.errors import MetagpuError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource, holders_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema import DriverPodReport, DriverUpgradeReport
from metagpu.core.reports.status import find_gpu
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import RecordNodeEvent
from metagpu.plugins.cluster.event_recorder import EventReason
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.settings import CORDON_PREFIX

_LONGEST_REASON: Final = 200

log = structlog.get_logger()


def cordons_by(
    annotations: Mapping[str, str], snapshot: Snapshot
) -> tuple[Mapping[GpuId, str], Mapping[str, str]]:
    """Return the GPUs that annotations cordon, with the reasons, and what is wrong."""
    cordoned, problems = dict[GpuId, str](), dict[str, str]()
    for key, text in annotations.items():
        if not key.startswith(CORDON_PREFIX):
            continue
        try:
            gpu = find_gpu(snapshot, key.removeprefix(CORDON_PREFIX))
        except MetagpuError as error:
            problems[key] = str(error)
        else:
            cordoned[gpu] = " ".join(text.split())[:_LONGEST_REASON] or "no reason was given"
    return cordoned, problems


@dataclass(eq=False)
class NodeCordonFollower:
    """Cordons the GPUs that annotations of the Node name, and no others.

    Attributes:
        decided: set once the annotations are known, and the GPUs follow them.
    """

    registry: Registry
    clock: Callable[[], float] = time.time
    decided: anyio.Event = field(default_factory=anyio.Event)
    _logged: LogOnce = field(default_factory=LogOnce)

    def follow(self, node: KubeObject | None) -> None:
        """Cordon GPUs, or end their cordons, as the Node's annotations say."""
        if node is None:
            return  # what was known last holds while the API server is away
        snapshot = self.registry.snapshot
        annotations = node["metadata"].get("annotations") or {}
        cordoned, problems = cordons_by(annotations, snapshot)
        for gpu in snapshot.gpus:
            self._set(gpu, cordoned.get(gpu))
        for key, problem in problems.items():
            if snapshot.gpus and self._logged.is_new(key, problem):
                log.warning("cordon ignored", annotation=key, error=problem)
        if snapshot.gpus:
            self.decided.set()

    def _set(self, gpu: GpuId, reason: str | None) -> None:
        now, source = self.clock(), CordonSource.NODE
        if reason is None:
            if self.registry.apply(GpuUncordoned(gpu, now, source)):
                log.info("gpu uncordoned", gpu=gpu, by="annotation")
        elif self.registry.apply(GpuCordoned(gpu, reason, now, source)):
            log.warning("gpu cordoned", gpu=gpu, reason=reason, by="annotation")


STATE_LABEL: Final = "nvidia.com/gpu-driver-upgrade-state"
"""The label by which the operator takes a node through an upgrade."""
OPERAND_LABELS: Final = "nvidia.com/gpu.deploy."
"""The labels by which the driver's container stops the operands before it loads a driver."""
PAUSED: Final = "paused-for-driver-upgrade"
"""What the values of these labels are, or end with, meanwhile."""
HELD_STATES: Final = frozenset(
    {
        "cordon-required",
        "wait-for-jobs-required",
        "pod-deletion-required",
        "drain-required",
        "node-maintenance-required",
        "post-maintenance-required",
        "pod-restart-required",
        "upgrade-failed",
    }
)
"""The states in which the old driver has to go, or is gone.

In `upgrade-required` a node waits for its turn, maybe for days. From `validation-required` on it
has the new driver, and the operator's validator may ask for a share.
"""
SEEN_PREFIXES: Final = ("nvidia.com/gpu", "nvidia.com/mig-")
"""The resource names by which the operator finds pods to evict."""
REASON: Final = "the GPU operator upgrades the driver of this node"
_NAMED: Final = 8
"""Pods that a sentence names; the status has all of them."""


def upgrade_state(labels: Mapping[str, str]) -> str:
    """Return the label and value of the upgrade under way, empty without one."""
    if (state := labels.get(STATE_LABEL, "")) in HELD_STATES:
        return f"{STATE_LABEL}={state}"
    paused = (
        f"{name}={value}"
        for name, value in sorted(labels.items())
        if name.startswith(OPERAND_LABELS) and value.endswith(PAUSED)
    )
    return next(paused, "")


def holding_pods(snapshot: Snapshot) -> Mapping[str, bool]:
    """Return the pods with shares, and whether the operator evicts each by itself."""
    found: dict[str, bool] = {}
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            # Of pods with ResourceClaims the operator sees those of NVIDIA's own driver alone.
            named = lease.share.resource.startswith(SEEN_PREFIXES)
            seen = named and lease.resource_claim is None
            for holder in holders_of(lease):
                pod = f"{holder.namespace}/{holder.pod}"
                found[pod] = found.get(pod, False) or seen
    return dict(sorted(found.items()))


def summary(state: str, pods: Mapping[str, bool]) -> str:
    """Return one sentence about an upgrade and the pods that hold the driver."""
    named = [
        f"{pod}{'' if seen else ' (the operator does not see it)'}" for pod, seen in pods.items()
    ]
    rest = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
    held = ", ".join([*named[:_NAMED], *rest])
    holders = f"these pods hold the driver: {held}" if held else "no pod holds the driver"
    return f"{REASON} ({state}), and no GPU gives new shares; {holders}"


@dataclass(eq=False)
class DriverUpgradeFollower:
    """Cordons every GPU while the Node's labels report a driver upgrade.

    Attributes:
        record_event: records Events of the node.
        decided: set once the labels are known, and the GPUs follow them.
        state: the label and value of the present upgrade, empty without one.
    """

    registry: Registry
    record_event: RecordNodeEvent
    clock: Callable[[], float] = time.time
    decided: anyio.Event = field(default_factory=anyio.Event)
    state: str = ""

    def follow(self, node: KubeObject | None) -> None:
        """Cordon the GPUs, or end their cordon, as the Node's labels say."""
        if node is None:
            return  # what was known last holds while the API server is away
        before, labels = self.state, node["metadata"].get("labels") or {}
        self.state = upgrade_state(labels)
        self._apply()
        if self.state != before:
            self._record(before)
        if self.registry.snapshot.gpus:
            self.decided.set()

    def report(self) -> DriverUpgradeReport | None:
        """Return the upgrade and the pods that hold the driver, `None` without one."""
        if not self.state:
            return None
        pods = holding_pods(self.registry.snapshot)
        named = [DriverPodReport(pod, seen) for pod, seen in pods.items()]
        return DriverUpgradeReport(self.state, named, summary(self.state, pods))

    def _apply(self) -> None:
        source = CordonSource.DRIVER_UPGRADE
        for gpu in self.registry.snapshot.gpus:
            now = self.clock()
            self.registry.apply(
                GpuCordoned(gpu, REASON, now, source)
                if self.state
                else GpuUncordoned(gpu, now, source)
            )

    def _record(self, before: str) -> None:
        if not self.state:
            log.info("driver upgrade ended", label=before)
            note = "the driver upgrade is over, and the GPUs give shares again"
            self.record_event(EventReason.DRIVER_UPGRADE_ENDED, note, "Configure")
            return
        pods = holding_pods(self.registry.snapshot)
        log.warning("driver upgrade under way", label=self.state, pods=list(pods))
        note = summary(self.state, pods)
        self.record_event(
            EventReason.DRIVER_UPGRADE_UNDER_WAY, note, "Configure", warning=bool(pods)
        )
