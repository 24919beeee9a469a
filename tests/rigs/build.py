"""Builders of configurations and layouts of the built-in backends, for tests."""

from typing import Final

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mps.backend import MpsBackend
from metagpu.backends.timeslice.backend import TimesliceBackend
from metagpu.backends.whole.backend import WholeBackend
from metagpu.core.availability.reasons import availability_of
from metagpu.core.config.config import Config, parse
from metagpu.core.contracts.backend import Backend, GpuContext
from metagpu.core.contracts.capabilities import ManagesGpu, sharing_strategy_of
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import GpusFound
from metagpu.testing.node import gpu, offer, share, topology
from metagpu.testing.node import snapshot_after as after

__all__ = [
    "BACKENDS",
    "METAGPU",
    "STRATEGIES",
    "ManagedFraction",
    "after",
    "config",
    "gpu",
    "layout_of",
    "offer",
    "offered",
    "pool",
    "refusal",
    "share",
    "topology",
    "withdrawn",
]

METAGPU: Final = ResourceName("cnvrg.io/metagpu")
BACKENDS: Final[dict[str, type[Backend]]] = {
    "fraction": FractionBackend,
    "mig": MigBackend,
    "mps": MpsBackend,
    "timeslice": TimesliceBackend,
    "whole": WholeBackend,
}


class ManagedFraction(FractionBackend, ManagesGpu):
    """Fractions that manage their GPUs, with setup and cleanup as a test sets them."""

    async def serve(self, context: GpuContext) -> None:
        """Leave the GPU as it is."""


STRATEGIES: Final = {name: sharing_strategy_of(kind) for name, kind in BACKENDS.items()}


def pool(options: str = "sharesPerGpu: 10") -> str:
    """Write a configuration of one pool of fractions; `options` are more keys of its backend."""
    return (
        "version: metagpu/v1\n"
        "pools:\n"
        "  - name: all\n"
        "    backends:\n"
        f"      - {{backend: fraction, {options}}}\n"
    )


def config(text: str = "") -> Config:
    """Read a configuration, ten fractions of every GPU by default."""
    return parse(text or pool(), "test.yaml", BACKENDS)


def layout_of(*gpus: Gpu, text: str = "", injection: Injection | None = None) -> Layout:
    """Build the layout of a configuration for some GPUs."""
    return build_layout(config(text), gpus, injection or Injection())


def offered(*gpus: Gpu, text: str = "") -> tuple[Layout, Snapshot]:
    """Return the layout of a configuration for healthy GPUs, and the snapshot after the offer."""
    layout = layout_of(*gpus, text=text)
    return layout, after(GpusFound(gpus, at=0), layout.offer_fact)


def refusal(state: GpuState, wanted: Share | None = None) -> str:
    """Return why a share of a GPU is refused, or any of those that are."""
    available = availability_of(state)
    chosen = wanted or next(other for other in state.shares if other.id in available.refused)
    return str(available.refusal(chosen) or "")


def withdrawn(state: GpuState) -> frozenset[ShareId]:
    """Return the shares that are listed Healthy and that the Node's amount leaves out."""
    available = availability_of(state)
    return available.uncounted - available.unlisted
