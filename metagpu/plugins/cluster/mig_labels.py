"""What the node tells of its MIG instances, as labels: names and values of GPU Feature Discovery.

They say what is on offer, not which instances are there at the moment: a selector must not lose its
nodes because a GPU is being cut (docs/decisions/0039).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import asdict

from metagpu.core.gpu import MIB, Gpu, GpuId
from metagpu.core.mig import MigProfile, by_mps, profile_of, slot_of
from metagpu.core.model import ResourceName, Share
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster.label_form import sanitised

_MIG: Final = "mig"
_GPU: Final = "nvidia.com/gpu"
_SINGLE: Final = frozenset((_GPU, f"{_GPU}.shared"))
"""What instances are called where they stand for GPUs."""


class _Instances(msgspec.Struct, frozen=True):
    """The instances of one profile that the node can have at once.

    Attributes:
        gpu: one of those that have them, and speaks for all.
        resource: what pods ask for.
        count: how many there are in a fixed layout; of those made on demand, how many there could
            be if pods asked for no others.
        replicas: how many containers may have one at once.
        strategy: how they share it, in NVIDIA's words.
    """

    gpu: Gpu
    profile: MigProfile
    resource: ResourceName
    count: int
    replicas: int
    strategy: str

    @property
    def name(self) -> str:
        """The profile, as resource names write it."""
        return self.profile.name.replace("+", ".")


def mig_labels(snapshot: Snapshot) -> Mapping[str, str]:
    """Give the labels of MIG instances; under `single` they take the place of the GPUs' own.

    NVIDIA's strategy `single` is where instances of one kind stand for all GPUs of the node, under
    their name.
    """
    found = list(_instances(snapshot))
    if not found:
        return {}

    alone = all(share.backend == _MIG for share in _shares(snapshot))
    single = alone and len(found) == 1 and found[0].resource in _SINGLE
    told = {"nvidia.com/mig.strategy": "single" if single else "mixed"}
    if alone and not single:
        told[f"{_GPU}.replicas"] = "0"  # no GPU is to be had as such
    for each in found:
        prefix = _GPU if single else f"nvidia.com/mig-{each.name}"
        told |= {f"{prefix}.{key}": value for key, value in _told(each).items()}
    return told


def _told(each: _Instances) -> Mapping[str, str]:
    own_name = each.resource in (_GPU, f"nvidia.com/mig-{each.name}")
    shared = "-SHARED" if each.replicas > 1 and own_name else ""

    return {
        "product": f"{sanitised(each.gpu.name)}-MIG-{each.name}{shared}",
        "count": str(each.count),
        "replicas": str(each.replicas),
        "sharing-strategy": each.strategy,
        "memory": str(each.profile.memory // MIB),
        "multiprocessors": str(each.profile.multiprocessors),
        "slices.gi": str(each.profile.slices),
        "slices.ci": str(each.profile.slices),  # one compute instance has all of it
        **{f"engines.{kind}": str(n) for kind, n in asdict(each.profile.engines).items()},
    }


def _instances(snapshot: Snapshot) -> Iterator[_Instances]:
    places: dict[str, dict[GpuId, Counter[str]]] = {}
    first_share: dict[str, Share] = {}

    for share in _shares(snapshot):
        if share.backend == _MIG:
            profile = profile_of(share.id)
            first_share.setdefault(profile, share)
            on_gpu = places.setdefault(profile, {}).setdefault(share.gpu, Counter())
            on_gpu[slot_of(share.id)] += 1

    for name, by_gpu in places.items():
        known = {gpu: _profile(snapshot.gpus[gpu].gpu, name) for gpu in by_gpu}
        sound = {gpu: profile for gpu, profile in known.items() if profile is not None}
        if not sound:
            continue
        first = next(iter(sound))
        yield _Instances(
            snapshot.gpus[first].gpu,
            sound[first],
            first_share[name].resource,
            sum(min(len(by_gpu[gpu]), profile.most) for gpu, profile in sound.items()),
            replicas := max(max(by_gpu[gpu].values()) for gpu in sound),
            _way(first_share[name], replicas),
        )


def _way(share: Share, replicas: int) -> str:
    if by_mps(share.id):
        return "mps"
    return "time-slicing" if replicas > 1 else "none"


def _profile(gpu: Gpu, name: str) -> MigProfile | None:
    return next((profile for profile in gpu.mig_profiles if profile.name == name), None)


def _shares(snapshot: Snapshot) -> Iterator[Share]:
    for offer in snapshot.offers.values():
        yield from offer.shares.values()
