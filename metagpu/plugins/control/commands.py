"""Operator commands of a running daemon: cordon, uncordon, acknowledge."""

import time
from collections.abc import Mapping
from typing import Any

import structlog

from metagpu.core.errors import NotCordoned
from metagpu.core.health.watch import HealthWatch
from metagpu.core.model.gpu import GpuId
from metagpu.core.reports.status import find_gpu
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned
from metagpu.core.state.registry import Registry
from metagpu.plugins.control.socket import CommandHandler

log = structlog.get_logger()


class OperatorCommands:
    """The commands of an operator; `gpu` in a request names the GPU.

    A command that fails raises a `MetagpuError` with the reason.
    """

    def __init__(self, registry: Registry, health: HealthWatch) -> None:
        self._registry = registry
        self._health = health

    @property
    def by_name(self) -> Mapping[str, CommandHandler]:
        """The handlers of the commands, by name."""
        return {
            "acknowledge": self.acknowledge,
            "cordon": self.cordon,
            "uncordon": self.uncordon,
        }

    async def acknowledge(self, request: Mapping[str, Any]) -> object:
        """Take a GPU, or one MIG device, back into service."""
        name = str(request.get("gpu", ""))
        for state in self._registry.snapshot.gpus.values():
            if name in state.mig_faults:
                await self._health.acknowledge(state.gpu.id, name)
                return f"MIG device {name} of GPU {state.gpu} is back in service"

        gpu = self._find(request)
        await self._health.acknowledge(gpu)
        return f"GPU {self._title(gpu)} is back in service"

    async def cordon(self, request: Mapping[str, Any]) -> object:
        """Stop grants of new shares of a GPU; the request may have a `reason`."""
        gpu = self._find(request)
        reason = " ".join(str(request.get("reason", "")).split()) or "no reason was given"
        self._registry.apply(GpuCordoned(gpu, reason, time.time()))
        log.warning("gpu cordoned", gpu=gpu, reason=reason)

        held = len(self._registry.snapshot.gpus[gpu].leases)
        shares = "1 share is" if held == 1 else f"{held} shares are"
        return f"GPU {self._title(gpu)} is cordoned; {shares} still in use"

    async def uncordon(self, request: Mapping[str, Any]) -> object:
        """Allow grants of a GPU's shares again."""
        gpu = self._find(request)
        if not self._registry.apply(GpuUncordoned(gpu, time.time())):
            other = self._registry.snapshot.gpus[gpu].cordon
            by = f" by an operator, but because {other.reason}" if other else ""
            raise NotCordoned(f"GPU {self._title(gpu)} is not cordoned{by}")
        log.info("gpu uncordoned", gpu=gpu)
        return f"GPU {self._title(gpu)} gives new shares again"

    def _find(self, request: Mapping[str, Any]) -> GpuId:
        return find_gpu(self._registry.snapshot, str(request.get("gpu", "")))

    def _title(self, gpu: GpuId) -> str:
        return str(self._registry.snapshot.gpus[gpu].gpu)
