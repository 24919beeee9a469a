"""What the node tells of its GPUs, as labels: a pure function of what is known.

Names and values are those of GPU Feature Discovery, so that node selectors written for it go on
working; what it has no name for stands under `metagpu.io/`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from metagpu.core.gpu import MIB, Gpu
from metagpu.core.model import ResourceName
from metagpu.core.snapshot import Snapshot, Versions
from metagpu.plugins.cluster.label_form import legal, sanitised
from metagpu.plugins.cluster.mig_labels import mig_labels

NVIDIA: Final = "nvidia.com/"
OURS: Final = "metagpu.io/"
_WHOLE: Final = ResourceName("nvidia.com/gpu")
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
_STRATEGIES: Final = {"timeslice": "time-slicing", "mps": "mps"}


def labels(snapshot: Snapshot) -> Mapping[str, str]:
    """Give all labels that are true of the node; none while nothing is on offer.

    Where GPUs differ, the product most of them are speaks for all, the first of equals.
    """
    gpus = [state.gpu for state in snapshot.gpus.values()]
    if not gpus or not snapshot.offers:
        return {}

    counted = Counter(gpu.name for gpu in gpus)
    speaker = max(gpus, key=lambda gpu: (counted[gpu.name], -gpu.index))
    told = {
        **_of_gpus(gpus, speaker, snapshot),
        **_of_versions(snapshot.versions),
        **_of_resources(snapshot),
        **mig_labels(snapshot),
    }
    return {name: value for name, value in told.items() if legal(name, value)}


def family(capability: tuple[int, int] | None) -> str:
    """Name the architecture of a compute capability."""
    if capability is None:
        return "undefined"
    known = [name for first, name in _FAMILIES if capability >= first]
    return known[-1] if known else "undefined"


def _of_gpus(gpus: list[Gpu], speaker: Gpu, snapshot: Snapshot) -> Mapping[str, str]:
    replicas, strategy = _sharing(snapshot)
    shared = strategy != "none" and _shared_under_its_name(snapshot)
    nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    links = [c.nvlinks for c in snapshot.topology.connections.values() if c.nvlinks]
    told = {
        f"{NVIDIA}gpu.product": sanitised(speaker.name) + ("-SHARED" if shared else ""),
        f"{NVIDIA}gpu.count": str(len(gpus)),
        f"{NVIDIA}gpu.replicas": str(replicas),
        f"{NVIDIA}gpu.sharing-strategy": strategy,
        f"{NVIDIA}gpu.memory": str(speaker.memory // MIB),
        f"{NVIDIA}gpu.family": family(speaker.compute_capability),
        f"{NVIDIA}mig.capable": _truth(all(gpu.mig_enabled is not None for gpu in gpus)),
        f"{OURS}gpu.nvlink": _truth(bool(links)),
        f"{OURS}gpu.nvswitch": _truth(
            any(each.switched for each in snapshot.topology.connections.values())
        ),
    }
    if speaker.compute_capability is not None:
        major, minor = speaker.compute_capability
        told[f"{NVIDIA}gpu.compute.major"] = str(major)
        told[f"{NVIDIA}gpu.compute.minor"] = str(minor)
    if any(gpu.ecc is not None for gpu in gpus):
        told[f"{OURS}gpu.ecc"] = _truth(all(gpu.ecc for gpu in gpus))
    if nodes:
        told[f"{OURS}gpu.numa-nodes"] = str(len(nodes))
    return told


def _of_versions(versions: Versions) -> Mapping[str, str]:
    """Name the driver's and CUDA's versions, under the present names and the older ones."""
    told: dict[str, str] = {}

    if versions.driver:
        driver = f"{NVIDIA}cuda.driver-version."
        parts = (*versions.driver.split("."), "", "")[:3]
        told |= {f"{driver}full": versions.driver}
        told |= dict(zip((f"{driver}{n}" for n in ("major", "minor", "revision")), parts))  # noqa: B905 - both have three
        told |= dict(zip((f"{NVIDIA}cuda.driver.{n}" for n in ("major", "minor", "rev")), parts))  # noqa: B905 - likewise
    if versions.cuda is not None:
        major, minor = map(str, versions.cuda)
        runtime = f"{NVIDIA}cuda.runtime-version."
        told |= {f"{runtime}major": major, f"{runtime}minor": minor}
        told |= {f"{runtime}full": f"{major}.{minor}"}
        told |= {f"{NVIDIA}cuda.runtime.major": major, f"{NVIDIA}cuda.runtime.minor": minor}
    return told


def _of_resources(snapshot: Snapshot) -> Mapping[str, str]:
    """Say of every resource who cuts it, and into how many shares the GPU with most of them."""
    told: dict[str, str] = {}

    for resource, offer in snapshot.offers.items():
        name = f"{OURS}{resource.replace('/', '_')}"
        backends = sorted({share.backend for share in offer.shares.values()})
        if backends:
            told[f"{name}.backend"] = "_".join(backends)
            told[f"{name}.replicas"] = str(max(map(len, offer.by_gpu.values())))
    return told


def _sharing(snapshot: Snapshot) -> tuple[int, str]:
    """Give what GPU Feature Discovery calls replicas and sharing strategy."""
    found = [
        (max(map(len, offer.by_gpu.values())), _STRATEGIES[backend])
        for offer in snapshot.offers.values()
        for backend in {share.backend for share in offer.shares.values()}
        if backend in _STRATEGIES
    ]
    return max(found, default=(1, "none"))


def _shared_under_its_name(snapshot: Snapshot) -> bool:
    offer = snapshot.offers.get(_WHOLE)
    return offer is not None and any(
        share.backend in _STRATEGIES for share in offer.shares.values()
    )


def _truth(said: bool) -> str:  # noqa: FBT001 - it is what is said
    return "true" if said else "false"
