"""What an operator orders while the daemon runs: a GPU cordoned or back in use, a fault over."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from metagpu.core import report
from metagpu.core.errors import MetagpuError
from metagpu.core.facts import GpuCordoned, GpuUncordoned
from metagpu.core.gpu import GpuId
from metagpu.core.health import HealthWatch
from metagpu.core.registry import Registry

Order = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes a request, whose `gpu` says of which GPU; gives a line that says what was done."""

log = structlog.get_logger()


class Orders:
    """Carries them out.

    Each raises a `MetagpuError` that says why it cannot.
    """

    def __init__(self, registry: Registry, health: HealthWatch) -> None:
        self._registry = registry
        self._health = health

    @property
    def by_name(self) -> Mapping[str, Order]:
        """The orders there are."""
        return {
            "acknowledge": self.acknowledge,
            "cordon": self.cordon,
            "uncordon": self.uncordon,
        }

    async def acknowledge(self, request: Mapping[str, Any]) -> object:
        """Take a GPU, or one MIG device, back into service."""
        name = str(request.get("gpu", ""))
        for state in self._registry.snapshot.gpus.values():
            if name in state.faults:
                await self._health.acknowledge(state.gpu.id, name)
                return f"MIG device {name} of GPU {state.gpu} is back in service"

        gpu = self._named(request)
        await self._health.acknowledge(gpu)
        return f"GPU {self._title(gpu)} is back in service"

    async def cordon(self, request: Mapping[str, Any]) -> object:
        """Let no new shares of a GPU be given, for a `reason`."""
        gpu = self._named(request)
        reason = " ".join(str(request.get("reason", "")).split()) or "no reason was given"
        self._registry.apply(GpuCordoned(gpu, reason, time.time()))
        log.warning("GPU cordoned", gpu=gpu, reason=reason)

        held = len(self._registry.snapshot.gpus[gpu].leases)
        return f"GPU {self._title(gpu)} gives no new shares; held of it now: {held}"

    async def uncordon(self, request: Mapping[str, Any]) -> object:
        """Let shares of a GPU be given again."""
        gpu = self._named(request)
        if not self._registry.apply(GpuUncordoned(gpu, time.time())):
            raise MetagpuError(f"GPU {self._title(gpu)} is not cordoned")
        log.info("GPU uncordoned", gpu=gpu)
        return f"GPU {self._title(gpu)} gives new shares again"

    def _named(self, request: Mapping[str, Any]) -> GpuId:
        return report.gpu_named(self._registry.snapshot, str(request.get("gpu", "")))

    def _title(self, gpu: GpuId) -> str:
        return str(self._registry.snapshot.gpus[gpu].gpu)
