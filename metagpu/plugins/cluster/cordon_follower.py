"""Cordons by annotations of the Node, for operators without a way onto the node."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.errors import MetagpuError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.status import find_gpu
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned
from metagpu.core.state.registry import Registry
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
