"""Nodes as their daemon labels them and the kubelet counts them, and pods in HAMi's terms."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from metagpu.core.state.facts import GpusFound
from metagpu.plugins.cluster.gpu_labels import LabelSettings, node_labels
from metagpu.translation.values import NodeOffer, Translation
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import STRATEGIES, after, layout_of

PROFILES: Final = {
    "a30": "[1g.6gb, 2g.12gb, 4g.24gb]",
    "a100-pcie-40gb": "[1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]",
    "a100-40gb": "[1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]",
    "a100-80gb": "[1g.10gb, 2g.20gb, 3g.40gb, 7g.80gb]",
}
"""The profiles of HAMi's knownMigGeometries, as seed 004 has them."""


def node(
    name: str, model: str, backends: str = "fraction", *, gpus: int = 2, more: str = ""
) -> NodeOffer:
    """Return an idle node of some GPUs with one backend; `mig` offers HAMi's profiles."""
    if backends == "mig":
        more = f"profiles: {PROFILES[model]}{more}"
    text = (
        "version: metagpu/v1\npools:\n  - name: all\n"
        f"    backends: [{{backend: {backends}, {more}}}]\n"
    )
    found = tuple(
        replace(mig_gpu(index, model), mig_enabled=backends == "mig") for index in range(gpus)
    )
    layout = layout_of(*found, text=text)
    snapshot = after(GpusFound(found, at=0), layout.offer_fact)
    allocatable = {}
    for resource, offer in snapshot.offers.items():
        allocatable[str(resource)] = len(offer.shares)
        if backends == "mig":  # the kubelet counts those that can be there at once
            profile = resource.removeprefix("nvidia.com/mig-")
            most = next(
                mig_profile.max_instances
                for mig_profile in found[0].mig_profiles
                if mig_profile.name == profile
            )
            allocatable[str(resource)] = most * gpus
    return NodeOffer(name, node_labels(snapshot, LabelSettings(STRATEGIES)), allocatable)


def pod(
    *amounts: Mapping[str, object], annotations: Mapping[str, str] | None = None, **spec: object
) -> dict[str, Any]:
    """Return a pod; each container has the amounts of one argument as limits."""
    containers = [
        {"name": f"c{n}", "image": "ubuntu:20.04", "resources": {"limits": dict(each)}}
        for n, each in enumerate(amounts)
    ]
    metadata = {"name": "gpu-pod1", **({"annotations": dict(annotations)} if annotations else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": containers, **spec},
    }


def applied(pod: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Apply a JSON Patch of `add` and `remove`, as RFC 6902 has them."""
    patched: Any = copy.deepcopy(dict(pod))
    for operation in operations:
        *way, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        at = patched
        for key in way:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if operation["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            assert last == "-"
            at.append(copy.deepcopy(operation["value"]))
        else:
            at[last] = copy.deepcopy(operation["value"])
    assert isinstance(patched, dict)
    return patched


def limits(pod: Mapping[str, Any], outcome: Translation, index: int = 0) -> Mapping[str, str]:
    """Return the limits of a container after a translation that had to succeed."""
    assert outcome.impossible is None
    found = applied(pod, outcome.operations)["spec"]["containers"][index]["resources"]["limits"]
    assert isinstance(found, dict)
    return found


def required(pod: Mapping[str, Any], outcome: Translation) -> list[Mapping[str, Any]]:
    """Return the expressions of each term of the required node affinity, in one list."""
    affinity = applied(pod, outcome.operations)["spec"].get("affinity") or {}
    terms = (affinity.get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", {}
    )
    return [
        expression
        for term in terms.get("nodeSelectorTerms", ())
        for expression in term.get("matchExpressions", ())
    ]
