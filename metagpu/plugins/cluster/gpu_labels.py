"""Labels of the node about its GPUs, from the snapshot and the configuration.

Names and values are those of GPU Feature Discovery, so that its node selectors keep working; facts
without a name there have labels under `metagpu.io/`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import asdict

from metagpu.core.availability.exact import free_parts, largest_request
from metagpu.core.config.config import MigStrategy
from metagpu.core.contracts.capabilities import SharingStrategy
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.mig import MigProfile, is_mig, is_mps_share, profile_of, slot_of
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot, Versions

NVIDIA_PREFIX: Final = "nvidia.com/"
METAGPU_PREFIX: Final = "metagpu.io/"
_GPU: Final = ResourceName("nvidia.com/gpu")
_UNKNOWN: Final = "unknown"
_MODES: Final = {0x0300: "graphics", 0x0302: "compute"}
"""By the PCI class: a VGA controller, and a 3D controller."""
_FAMILIES: Final = (
    ((3, 0), "kepler"),
    ((5, 0), "maxwell"),
    ((6, 0), "pascal"),
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


class LabelSettings(msgspec.Struct, frozen=True):
    """Facts that the labels depend on beside the snapshot.

    Attributes:
        strategies: the sharing strategy of each backend, by the backend's name.
        mig_strategy: NVIDIA's strategy that the configuration names; without one, the offer
            decides.
        machine: the name of the machine's model, empty where it is unknown.
    """

    strategies: Mapping[str, SharingStrategy]
    mig_strategy: MigStrategy | None = None
    machine: str = ""

    def strategy_of(self, share: Share) -> SharingStrategy:
        """Return how containers share what they get with a share."""
        return self.strategies.get(share.backend, SharingStrategy.NONE)


def node_labels(snapshot: Snapshot, settings: LabelSettings) -> Mapping[str, str]:
    """Return all labels of the node; none while no shares are offered."""
    gpus = [state for state in snapshot.gpus.values() if not state.gpu.is_display_card]
    if not gpus or not snapshot.offers:
        return {}

    labels = {
        **_of_gpus(gpus, settings),
        **_of_node([state.gpu for state in gpus], snapshot, settings),
        **_of_versions(snapshot.versions),
        **_of_resources(snapshot),
        **mig_labels(snapshot, settings.mig_strategy),
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


def _of_gpus(states: Sequence[GpuState], settings: LabelSettings) -> Mapping[str, str]:
    """Return the labels of one product of the node.

    Where GPUs differ, that is the last product of a GPU that is not in MIG mode. GPU Feature
    Discovery writes the labels of one product over those of another; most often the last one stays.
    """
    whole = [state.gpu for state in states if not state.gpu.mig_enabled]
    product = list(dict.fromkeys(gpu.name for gpu in whole or [state.gpu for state in states]))[-1]
    named = [state for state in states if state.gpu.name == product]
    gpu = named[-1].gpu
    replicas, strategy = _sharing(named, settings)
    shared = any(
        share.resource == _GPU and settings.strategy_of(share) is not SharingStrategy.NONE
        for state in named
        for share in state.shares
    )
    labels = {
        f"{_GPU}.product": sanitize(product) + ("-SHARED" if shared else ""),
        f"{_GPU}.count": str(len(named)),
        f"{_GPU}.replicas": str(replicas),
        f"{_GPU}.sharing-strategy": str(strategy),
        **_of_architecture(gpu),
    }
    if gpu.memory is not None:
        labels[f"{_GPU}.memory"] = str(gpu.memory // MIB)
    return labels


def _of_architecture(gpu: Gpu) -> Mapping[str, str]:
    labels = {f"{_GPU}.family": family(gpu.compute_capability)}
    if gpu.compute_capability is not None:
        major, minor = gpu.compute_capability
        labels |= {f"{_GPU}.compute.major": str(major), f"{_GPU}.compute.minor": str(minor)}
    return labels


def _of_node(gpus: Sequence[Gpu], snapshot: Snapshot, settings: LabelSettings) -> Mapping[str, str]:
    """Return the labels that all GPUs of the node have together."""
    connections = snapshot.topology.connections.values()
    numa_nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    modes = {_MODES.get(gpu.pci_class or 0, _UNKNOWN) for gpu in gpus}
    cliques = {gpu.clique for gpu in gpus if gpu.clique}
    by_mps = any(
        settings.strategy_of(share) is SharingStrategy.MPS or is_mps_share(share.id)
        for share in _shares(snapshot)
    )
    labels = {
        f"{NVIDIA_PREFIX}mig.capable": _bool_text(any(gpu.mig_enabled is not None for gpu in gpus)),
        f"{NVIDIA_PREFIX}mps.capable": _bool_text(by_mps),
        f"{_GPU}.mode": modes.pop() if len(modes) == 1 else _UNKNOWN,
        f"{METAGPU_PREFIX}gpu.nvlink": _bool_text(any(each.nvlinks for each in connections)),
        f"{METAGPU_PREFIX}gpu.nvswitch": _bool_text(any(each.switched for each in connections)),
    }
    if settings.machine:
        labels[f"{_GPU}.machine"] = sanitize(settings.machine)
    if len(cliques) == 1:
        labels[f"{_GPU}.clique"] = cliques.pop()
    if any(gpu.virtual is not None for gpu in gpus):
        labels[f"{NVIDIA_PREFIX}vgpu.present"] = _bool_text(any(gpu.virtual for gpu in gpus))
    if any(gpu.ecc is not None for gpu in gpus):
        labels[f"{METAGPU_PREFIX}gpu.ecc"] = _bool_text(all(gpu.ecc for gpu in gpus))
    if numa_nodes:
        labels[f"{METAGPU_PREFIX}gpu.numa-nodes"] = str(len(numa_nodes))
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
            smallest = min(0 if share.replica else share.memory for share in offer.shares.values())
            if smallest >= MIB:
                labels[f"{name}.memory"] = str(smallest // MIB)
    return labels


def _prefix_of(resource: ResourceName) -> str:
    return f"{METAGPU_PREFIX}{resource.replace('/', '_')}"


def _sharing(states: Iterable[GpuState], settings: LabelSettings) -> tuple[int, SharingStrategy]:
    """Return `replicas` and `sharing-strategy` of the whole GPUs of one product.

    The replicas are 0 where pods cannot get more of these GPUs than MIG instances.
    """
    shares = [share for state in states for share in state.shares]
    counted = Counter(
        (share.gpu, share.resource, strategy)
        for share in shares
        if (strategy := settings.strategy_of(share)) is not SharingStrategy.NONE
        and not is_mig(share.id)
    )
    if counted:
        return max((count, strategy) for (_, _, strategy), count in counted.items())
    has_mig = any(is_mig(share.id) for share in shares) or all(
        state.gpu.mig_enabled for state in states
    )
    only_mig = has_mig and all(is_mig(share.id) for share in shares)
    return int(not only_mig), SharingStrategy.NONE


def _bool_text(value: bool) -> str:  # noqa: FBT001 - a conversion of one value
    return "true" if value else "false"


_LIMIT: Final = 63
_PATTERN: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def sanitize(product: str) -> str:
    """Convert a product's name to a label value, as GPU Feature Discovery does."""
    return "-".join(re.sub(r"[^A-Za-z0-9\-_. ]", "", product).split())


def is_valid(name: str, value: str) -> bool:
    """Return whether Kubernetes accepts a label; its value may be empty."""
    texts = name.partition("/")[2], value or "empty"
    return all(len(text) <= _LIMIT and _PATTERN.fullmatch(text) for text in texts)


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


def mig_labels(snapshot: Snapshot, configured: MigStrategy | None) -> Mapping[str, str]:
    """Return the labels of MIG instances; under `single` they replace the GPUs'.

    NVIDIA's strategy `single` means: instances of one profile stand for all GPUs of the node, under
    the GPUs' resource name. Where GPUs in MIG mode contradict that, the labels say so.
    """
    found = list(_instances(snapshot))
    strategy = configured or _strategy_of_offer(snapshot, found)
    if strategy is None:
        return {}

    labels = {f"{NVIDIA_PREFIX}mig.strategy": str(strategy)}
    single = strategy is MigStrategy.SINGLE
    in_mig_mode = [state.gpu for state in snapshot.gpus.values() if state.gpu.mig_enabled]
    if single and in_mig_mode and not found:
        product = f"{sanitize(in_mig_mode[0].name)}-MIG-INVALID"
        labels |= {f"{_GPU}.product": product, f"{_GPU}.sharing-strategy": ""}
        labels |= {f"{_GPU}.{key}": "0" for key in ("count", "replicas", "memory")}
    for each in found:
        prefix = _GPU if single else f"nvidia.com/mig-{each.name}"
        labels |= {f"{prefix}.{key}": value for key, value in _labels_of(each).items()}
        if single:
            labels |= _of_architecture(each.gpu)
    return labels


def _strategy_of_offer(snapshot: Snapshot, found: Sequence[_Instances]) -> MigStrategy | None:
    """Return the strategy that an offer amounts to, `None` without instances."""
    if not found:
        return None
    only_mig = all(is_mig(share.id) for share in _shares(snapshot))
    single = only_mig and len(found) == 1 and found[0].resource in _SINGLE
    return MigStrategy.SINGLE if single else MigStrategy.MIXED


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
