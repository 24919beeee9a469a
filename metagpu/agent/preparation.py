"""The look of a daemon at what it needs to serve a node. It changes nothing."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from anyio import to_thread

from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.paths import AgentPaths
from metagpu.core.config.config import Config
from metagpu.core.config.errors import ConfigError
from metagpu.core.errors import describe_error
from metagpu.core.health.watch import HealthWatch
from metagpu.core.model.gpu import GpuId
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE, KUBELET_SOCKET

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster

log = structlog.get_logger()


@dataclass
class Preparation:
    """Finds what keeps this daemon from serving the node.

    Attributes:
        cluster: the API server's side, `None` without one.
        problems: the problems of the last look, each a sentence; none if this daemon is ready.
    """

    health: HealthWatch
    config_loader: ConfigLoader
    layout_manager: LayoutManager
    cluster: "Cluster | None"
    problems: tuple[str, ...] = ("it has just started",)
    _checked: tuple[Config, tuple[GpuId, ...]] | None = None
    _misfit: str = ""

    async def look(self) -> None:
        """Find the present problems."""
        health, found = self.health, list[str]()
        if health.unusable or not health.surveyed.is_set():
            found.append(f"the driver: {health.unusable or 'the GPUs are not read yet'}")
        else:
            await self.config_loader.settle()
        if error := self.config_loader.error:
            found.append(f"the configuration: {error}")
        elif not found and (misfit := await self._find_misfit()):
            found.append(f"the configuration: {misfit}")
        if self.cluster is not None and (problem := self.cluster.preparation_problem):
            found.append(f"the API server: {problem}")
        paths = self.layout_manager.context.paths
        if problem := await to_thread.run_sync(_kubelet_problem, paths):
            found.append(f"the kubelet: {problem}")
        self.problems = tuple(found)

    async def _find_misfit(self) -> str:
        """Return why the configuration fits no GPU, as often as either of them changes."""
        manager, context = self.layout_manager, self.layout_manager.context
        checked = context.config, tuple(context.registry.snapshot.gpus)
        if checked != self._checked:
            try:
                await manager.check()
                self._misfit = ""
            except ConfigError as error:
                self._misfit = str(error)
            except Exception as error:
                log.exception("preparation failed by a fault of metagpu's own")
                self._misfit = f"metagpu failed ({type(error).__name__}: {error}); see its log"
            self._checked = checked
        return self._misfit


def _kubelet_problem(paths: AgentPaths) -> str:
    """Return why the kubelet's leases cannot be read. Blocks.

    A kubelet that is down is no problem.
    """
    checkpoint = paths.kubelet_dir / CHECKPOINT_FILE
    for path, mode in ((checkpoint, os.R_OK), (paths.pod_resources, os.R_OK | os.W_OK)):
        try:
            path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be used: {describe_error(error)}; run as root"
        if not os.access(path, mode):
            return f"{path} may not be used; run as root"
    if (paths.kubelet_dir / KUBELET_SOCKET).exists() and not paths.pod_resources.exists():
        return (
            f"there is no {paths.pod_resources}, so that no lease would end; name its --root-dir "
            "by --kubelet-root"
        )
    return ""
