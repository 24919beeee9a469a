"""Labels of the node about its GPUs: a pure function of the snapshot.

Names and values are those of GPU Feature Discovery, so that its node selectors keep working; facts
without a name there have labels under `metagpu.io/`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import asdict

from metagpu.core.availability.exact import free_parts, largest_request
from metagpu.core.contracts.capabilities import SharingStrategy
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.mig import MigProfile, is_mig, is_mps_share, profile_of, slot_of
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot, Versions

NVIDIA_PREFIX: Final = "nvidia.com/"
METAGPU_PREFIX: Final = "metagpu.io/"
_GPU_RESOURCE: Final = ResourceName("nvidia.com/gpu")
_FAMILIES: Final = (
    ((7, 0), "volta"),
    ((7, 5), "turing"),
    ((8, 0), "ampere"),
    ((8, 9), "ada-lovelace"),
    ((9, 0), "hopper"),
    ((10, 0), "blackwell"),
    ((11, 0), "undefined"),
    ((12, 0), "blackwell"),
    ((13, 0), "rubin"),
    ((14, 0), "undefined"),
)
"""First compute capability of each family, as GPU Feature Discovery names them."""

Strategies: TypeAlias = Mapping[str, SharingStrategy]
"""The sharing strategy of each backend, by the backend's name."""


def node_labels(snapshot: Snapshot, strategies: Strategies) -> Mapping[str, str]:
    """Return all labels of the node; none while no shares are offered.

    Where GPUs differ, the labels describe the most frequent product, the first of equals.
    """
    gpus = [state.gpu for state in snapshot.gpus.values()]
    if not gpus or not snapshot.offers:
        return {}

    counted = Counter(gpu.name for gpu in gpus)
    representative = max(gpus, key=lambda gpu: (counted[gpu.name], -gpu.index))
    labels = {
        **_of_gpus(gpus, representative, snapshot, strategies),
        **_of_versions(snapshot.versions),
        **_of_resources(snapshot),
        **mig_labels(snapshot),
    }
    return {name: value for name, value in labels.items() if is_valid(name, value)}


def free_labels(snapshot: Snapshot) -> Mapping[str, str]:
    """Return the largest request of each resource that could be placed now."""
    labels = {
        f"{_prefix_of(resource)}.largest-request": str(
            largest_request(offer.rule.requests, free_parts(snapshot, offer))
        )
        for resource, offer in snapshot.offers.items()
    }
    return {name: value for name, value in labels.items() if is_valid(name, value)}


def family(capability: tuple[int, int] | None) -> str:
    """Return the architecture of a compute capability, such as `ampere`."""
    if capability is None:
        return "undefined"
    known = [name for first, name in _FAMILIES if capability >= first]
    return known[-1] if known else "undefined"


def _of_gpus(
    gpus: list[Gpu], representative: Gpu, snapshot: Snapshot, strategies: Strategies
) -> Mapping[str, str]:
    replicas, strategy = _sharing(snapshot, strategies)
    shared = strategy is not SharingStrategy.NONE and _shares_gpu_resource(snapshot, strategies)
    nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    links = [c.nvlinks for c in snapshot.topology.connections.values() if c.nvlinks]
    labels = {
        f"{NVIDIA_PREFIX}gpu.product": sanitize(representative.name)
        + ("-SHARED" if shared else ""),
        f"{NVIDIA_PREFIX}gpu.count": str(len(gpus)),
        f"{NVIDIA_PREFIX}gpu.replicas": str(replicas),
        f"{NVIDIA_PREFIX}gpu.sharing-strategy": str(strategy),
        f"{NVIDIA_PREFIX}gpu.family": family(representative.compute_capability),
        f"{NVIDIA_PREFIX}mig.capable": _bool_text(all(gpu.mig_enabled is not None for gpu in gpus)),
        f"{METAGPU_PREFIX}gpu.nvlink": _bool_text(bool(links)),
        f"{METAGPU_PREFIX}gpu.nvswitch": _bool_text(
            any(each.switched for each in snapshot.topology.connections.values())
        ),
    }
    if representative.memory is not None:
        labels[f"{NVIDIA_PREFIX}gpu.memory"] = str(representative.memory // MIB)
    if representative.compute_capability is not None:
        major, minor = representative.compute_capability
        labels[f"{NVIDIA_PREFIX}gpu.compute.major"] = str(major)
        labels[f"{NVIDIA_PREFIX}gpu.compute.minor"] = str(minor)
    if any(gpu.ecc is not None for gpu in gpus):
        labels[f"{METAGPU_PREFIX}gpu.ecc"] = _bool_text(all(gpu.ecc for gpu in gpus))
    if nodes:
        labels[f"{METAGPU_PREFIX}gpu.numa-nodes"] = str(len(nodes))
    return labels


def _of_versions(versions: Versions) -> Mapping[str, str]:
    """Return labels of the driver's and CUDA's versions, by current and older names."""
    labels: dict[str, str] = {}

    if versions.driver:
        major, minor, revision = (*versions.driver.split("."), "", "")[:3]
        current, older = f"{NVIDIA_PREFIX}cuda.driver-version.", f"{NVIDIA_PREFIX}cuda.driver."
        labels |= {f"{current}full": versions.driver, f"{current}major": major}
        labels |= {f"{current}minor": minor, f"{current}revision": revision}
        labels |= {f"{older}major": major, f"{older}minor": minor, f"{older}rev": revision}
    if versions.cuda is not None:
        major, minor = map(str, versions.cuda)
        runtime = f"{NVIDIA_PREFIX}cuda.runtime-version."
        labels |= {f"{runtime}major": major, f"{runtime}minor": minor}
        labels |= {f"{runtime}full": f"{major}.{minor}"}
        labels |= {
            f"{NVIDIA_PREFIX}cuda.runtime.major": major,
            f"{NVIDIA_PREFIX}cuda.runtime.minor": minor,
        }
    return labels


def _of_resources(snapshot: Snapshot) -> Mapping[str, str]:
    """Return each resource's backends, GPUs, and shares on the GPU with the most.

    `memory` is that of the smallest share, in MiB; replicas have none of their own.
    """
    labels: dict[str, str] = {}

    for resource, offer in snapshot.offers.items():
        name = _prefix_of(resource)
        backends = sorted({share.backend for share in offer.shares.values()})
        if backends:
            labels[f"{name}.backend"] = "_".join(backends)
            labels[f"{name}.replicas"] = str(max(map(len, offer.by_gpu.values())))
            labels[f"{name}.gpus"] = str(len(offer.by_gpu))
            smallest = min(0 if it.replica else it.memory for it in offer.shares.values())
            if smallest >= MIB:
                labels[f"{name}.memory"] = str(smallest // MIB)
    return labels


def _prefix_of(resource: ResourceName) -> str:
    return f"{METAGPU_PREFIX}{resource.replace('/', '_')}"


def _sharing(snapshot: Snapshot, strategies: Strategies) -> tuple[int, SharingStrategy]:
    """Return the labels `replicas` and `sharing-strategy` of GPU Feature Discovery."""
    found = [
        (max(map(len, offer.by_gpu.values())), strategy)
        for offer in snapshot.offers.values()
        for backend in {share.backend for share in offer.shares.values()}
        if (strategy := _strategy(backend, strategies)) is not SharingStrategy.NONE
    ]
    return max(found, default=(1, SharingStrategy.NONE))


def _shares_gpu_resource(snapshot: Snapshot, strategies: Strategies) -> bool:
    offer = snapshot.offers.get(_GPU_RESOURCE)
    return offer is not None and any(
        _strategy(share.backend, strategies) is not SharingStrategy.NONE
        for share in offer.shares.values()
    )


def _strategy(backend: str, strategies: Strategies) -> SharingStrategy:
    return strategies.get(backend, SharingStrategy.NONE)


def _bool_text(value: bool) -> str:  # noqa: FBT001 - a conversion of one value
    return "true" if value else "false"


_LIMIT: Final = 63
_PATTERN: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def sanitize(product: str) -> str:
    """Convert a product's name to a label value, as GPU Feature Discovery does."""
    return re.sub(r"[^A-Za-z0-9\-_. ]", "", product).strip().replace(" ", "-")


def is_valid(name: str, value: str) -> bool:
    """Return whether Kubernetes accepts a label, and its value is not empty."""
    return all(
        len(it) <= _LIMIT and _PATTERN.fullmatch(it) for it in (name.partition("/")[2], value)
    )


_GPU: Final = "nvidia.com/gpu"
_SINGLE: Final = frozenset((_GPU, f"{_GPU}.shared"))
"""Resource names of instances that stand for GPUs."""


class _Instances(msgspec.Struct, frozen=True):
    """The instances of one profile that the node can have at once.

    Attributes:
        gpu: a GPU with such instances, which represents all of them.
        resource: the resource name that pods request.
        count: the instances of a fixed layout; of instances created on demand, the most that fit
            if pods request no other profile.
        replicas: the containers that may share one instance.
        strategy: how these containers share the instance, in NVIDIA's terms.
    """

    gpu: Gpu
    profile: MigProfile
    resource: ResourceName
    count: int
    replicas: int
    strategy: SharingStrategy

    @property
    def name(self) -> str:
        """The profile's name in resource names."""
        return self.profile.name.replace("+", ".")


def mig_labels(snapshot: Snapshot) -> Mapping[str, str]:
    """Return the labels of MIG instances; under `single` they replace the GPUs'.

    NVIDIA's strategy `single` means: instances of one profile stand for all GPUs of the node, under
    the GPUs' resource name.
    """
    found = list(_instances(snapshot))
    if not found:
        return {}

    only_mig = all(is_mig(share.id) for share in _shares(snapshot))
    single = only_mig and len(found) == 1 and found[0].resource in _SINGLE
    labels = {"nvidia.com/mig.strategy": "single" if single else "mixed"}
    if only_mig and not single:
        labels[f"{_GPU}.replicas"] = "0"  # pods cannot request a whole GPU
    for each in found:
        prefix = _GPU if single else f"nvidia.com/mig-{each.name}"
        labels |= {f"{prefix}.{key}": value for key, value in _labels_of(each).items()}
    return labels


def _labels_of(each: _Instances) -> Mapping[str, str]:
    own_name = each.resource in (_GPU, f"nvidia.com/mig-{each.name}")
    shared = "-SHARED" if each.replicas > 1 and own_name else ""

    return {
        "product": f"{sanitize(each.gpu.name)}-MIG-{each.name}{shared}",
        "count": str(each.count),
        "replicas": str(each.replicas),
        "sharing-strategy": str(each.strategy),
        "memory": str(each.profile.memory // MIB),
        "multiprocessors": str(each.profile.multiprocessors),
        "slices.gi": str(each.profile.slices),
        "slices.ci": str(each.profile.slices),  # one compute instance has all of it
        **{f"engines.{kind}": str(n) for kind, n in asdict(each.profile.engines).items()},
    }


def _instances(snapshot: Snapshot) -> Iterator[_Instances]:
    slots: dict[str, dict[GpuId, Counter[str]]] = {}
    first_share: dict[str, Share] = {}

    for share in _shares(snapshot):
        if is_mig(share.id):
            profile = profile_of(share.id)
            first_share.setdefault(profile, share)
            on_gpu = slots.setdefault(profile, {}).setdefault(share.gpu, Counter())
            on_gpu[slot_of(share.id)] += 1

    for name, by_gpu in slots.items():
        known = {gpu: _profile(snapshot.gpus[gpu].gpu, name) for gpu in by_gpu}
        usable = {gpu: profile for gpu, profile in known.items() if profile is not None}
        if not usable:
            continue
        first = next(iter(usable))
        yield _Instances(
            snapshot.gpus[first].gpu,
            usable[first],
            first_share[name].resource,
            sum(min(len(by_gpu[gpu]), profile.max_instances) for gpu, profile in usable.items()),
            replicas := max(max(by_gpu[gpu].values()) for gpu in usable),
            _mig_strategy(first_share[name], replicas),
        )


def _mig_strategy(share: Share, replicas: int) -> SharingStrategy:
    if is_mps_share(share.id):
        return SharingStrategy.MPS
    return SharingStrategy.TIME_SLICING if replicas > 1 else SharingStrategy.NONE


def _profile(gpu: Gpu, name: str) -> MigProfile | None:
    return next((profile for profile in gpu.mig_profiles if profile.name == name), None)


def _shares(snapshot: Snapshot) -> Iterator[Share]:
    for offer in snapshot.offers.values():
        yield from offer.shares.values()
