"""Builders of values for tests; everything that a test does not name is ordinary."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any
from uuid import UUID

from metagpu.core.model.gpu import MIB, Connection, Gpu, GpuId, Topology
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import Fact, SharesOffered
from metagpu.core.state.reduce import reduce


def gpu(
    index: int,
    *,
    memory_mib: int = 40960,
    name: str = "NVIDIA A100-SXM4-40GB",
    numa_node: int | None = None,
    minor: int | None = -1,
) -> Gpu:
    """Return a GPU, an A100 by default; uuid and device node follow from the index."""
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
    """Return the topology in which `connect` gives the connection of every two GPUs."""
    return Topology({frozenset((a.id, b.id)): connect(a, b) for a, b in combinations(gpus, 2)})


def share(
    of: Gpu,
    number: int,
    *,
    backend: str = "fraction",
    slots: Iterable[str] | None = None,
    resource: str = "cnvrg.io/metagpu",
    memory_mib: int = 4096,
) -> Share:
    """Return a share of a GPU; its slot is its own unless `slots` names others."""
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
    """Return the fact that these shares, and the resources they name, are on offer."""
    return SharesOffered(tuple(dict.fromkeys(share.resource for share in shares)), shares)


def snapshot_after(*facts: Fact, since: Snapshot | None = None) -> Snapshot:
    """Return the snapshot after some facts."""
    snapshot = since or Snapshot()
    for fact in facts:
        snapshot, _ = reduce(snapshot, fact)
    return snapshot


def one_pool(backend: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a configuration with all GPUs in one pool of one backend, as text.

    Args:
        backend: the backend's name.
        options: the other keys of the backend's entry, as the configuration spells them.
    """
    entry = json.dumps({"backend": backend, **(options or {})})  # JSON is YAML
    return f"version: metagpu/v1\npools:\n  - name: all\n    backends:\n      - {entry}\n"
