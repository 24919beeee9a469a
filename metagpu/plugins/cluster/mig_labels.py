"""Labels of the node's MIG instances, as GPU Feature Discovery writes them.

The labels describe the offered instances, not those that exist at the moment: a selector must not
lose its nodes while metagpu partitions a GPU (docs/decisions/0039).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import asdict

from metagpu.core.contracts.capabilities import SharingStrategy
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.mig import MigProfile, is_mig, is_mps_share, profile_of, slot_of
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.cluster.label_syntax import sanitize

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
            _strategy(first_share[name], replicas),
        )


def _strategy(share: Share, replicas: int) -> SharingStrategy:
    if is_mps_share(share.id):
        return SharingStrategy.MPS
    return SharingStrategy.TIME_SLICING if replicas > 1 else SharingStrategy.NONE


def _profile(gpu: Gpu, name: str) -> MigProfile | None:
    return next((profile for profile in gpu.mig_profiles if profile.name == name), None)


def _shares(snapshot: Snapshot) -> Iterator[Share]:
    for offer in snapshot.offers.values():
        yield from offer.shares.values()
