"""Builders of values for tests: what a test does not name is ordinary and the same everywhere."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final
from uuid import UUID

from metagpu.backends.fraction import FractionBackend
from metagpu.backends.mig import MigBackend
from metagpu.backends.mps import MpsBackend
from metagpu.backends.timeslice import TimesliceBackend
from metagpu.backends.whole import WholeBackend
from metagpu.core.backend import Backend
from metagpu.core.config import Config, parse
from metagpu.core.facts import Fact, GpusFound, SharesOffered
from metagpu.core.gpu import MIB, Connection, Gpu, GpuId, Topology
from metagpu.core.injection import Injection
from metagpu.core.layout import Layout, lay_out
from metagpu.core.model import ResourceName, Share, ShareId
from metagpu.core.reduce import reduce
from metagpu.core.snapshot import Snapshot

METAGPU: Final = ResourceName("cnvrg.io/metagpu")
BACKENDS: Final[Mapping[str, type[Backend]]] = {
    "fraction": FractionBackend,
    "mig": MigBackend,
    "mps": MpsBackend,
    "timeslice": TimesliceBackend,
    "whole": WholeBackend,
}


def gpu(
    index: int,
    *,
    memory_mib: int = 40960,
    name: str = "NVIDIA A100-SXM4-40GB",
    numa_node: int | None = None,
    minor: int | None = -1,
) -> Gpu:
    """Make a GPU, an A100 by default; its uuid and its device node follow from the index."""
    return Gpu(
        id=GpuId(f"GPU-{UUID(int=index)}"),
        index=index,
        name=name,
        memory=memory_mib * MIB,
        minor=index if minor == -1 else minor,
        pci_bus_id=f"0000:{index:02x}:00.0",
        numa_node=numa_node,
    )


def topology(gpus: Sequence[Gpu], connect: Callable[[Gpu, Gpu], Connection]) -> Topology:
    """Connect every two of some GPUs as a function says."""
    return Topology({frozenset((a.id, b.id)): connect(a, b) for a, b in combinations(gpus, 2)})


def share(
    of: Gpu,
    number: int,
    *,
    backend: str = "fraction",
    slots: Iterable[str] | None = None,
    resource: str = METAGPU,
    memory_mib: int = 4096,
) -> Share:
    """Make a share; its slot is its own unless `slots` names others."""
    slot = f"{backend[:1]}{number:02d}"
    return Share(
        id=ShareId(f"{of.id}::{slot}"),
        gpu=of.id,
        resource=ResourceName(resource),
        backend=backend,
        number=number,
        footprint=frozenset([slot] if slots is None else slots),
        memory=memory_mib * MIB,
    )


def offer(*shares: Share) -> SharesOffered:
    """Make the fact that these shares, and the resources they name, are on offer."""
    return SharesOffered(tuple(dict.fromkeys(share.resource for share in shares)), shares)


def after(*facts: Fact, since: Snapshot | None = None) -> Snapshot:
    """Give what is known after some facts."""
    snapshot = since or Snapshot()
    for fact in facts:
        snapshot, _ = reduce(snapshot, fact)
    return snapshot


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


def laid_out(*gpus: Gpu, text: str = "", injection: Injection | None = None) -> Layout:
    """Lay a configuration over GPUs."""
    return lay_out(config(text), gpus, injection or Injection())


def offered(*gpus: Gpu, text: str = "") -> tuple[Layout, Snapshot]:
    """Lay a configuration over GPUs that are found and sound; give what is known then."""
    layout = laid_out(*gpus, text=text)
    return layout, after(GpusFound(gpus, at=0), layout.offered)
