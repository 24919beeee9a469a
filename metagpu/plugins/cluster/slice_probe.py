"""Dry runs of ResourceSlices: which fields the API server still drops."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from metagpu.core.availability.reasons import CORDONED
from metagpu.core.devices.comparison import dropped_fields, sent_fields
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.resource_slices import SLICES

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

_NEEDED: Final = frozenset(("sharedCounters", "consumesCounters", "allowMultipleAllocations"))
"""Fields without which the scheduler would allocate devices that exclude each other."""
_PROBE: Final = "-probe"
"""The end of the names of slices that are sent by a dry run, and never stored."""


def has_needed(paths: Iterable[str]) -> bool:
    """Return whether one of the fields is needed wherever fractions are published."""
    return any(path.rpartition(".")[2] in _NEEDED for path in paths)


async def find_still_dropped(
    client: "KubeClient", slices: Iterable[KubeObject], dropped: Sequence[str]
) -> tuple[str, ...]:
    """Return which dropped fields the API server still drops; all, if a needed one is.

    As few slices are sent as have all of these fields. A field that no slice has is still dropped:
    a cluster without taints shows so only while a device has one.

    Raises:
        ClusterError: the API server does not answer, or a webhook supports no dry run.
    """
    sent, found = set[str](), set[str]()
    for it in slices:
        probe = _probe_of(it)
        fields = {
            path
            for path in sent_fields(probe["spec"]) - sent
            if path in dropped or has_needed((path,))
        }
        if not fields:
            continue
        answer = await client.call("POST", SLICES, query={"dryRun": "All"}, body=probe)
        sent |= fields
        found.update(dropped_fields(probe["spec"], answer["spec"]))
        if has_needed(found):
            return tuple(dropped)
    return tuple(path for path in dropped if path in found or path not in sent)


def _probe_of(wanted: KubeObject) -> KubeObject:
    """Return a slice for a dry run: one more device has a taint, since often none has."""
    metadata, spec = dict(wanted["metadata"]), dict(wanted["spec"])
    metadata["name"] += _PROBE
    if devices := spec.get("devices"):
        taint = {"key": CORDONED, "effect": "NoSchedule"}
        spec["devices"] = [*devices[:-1], {**devices[-1], "taints": [taint]}]
    return {**wanted, "metadata": metadata, "spec": spec}
