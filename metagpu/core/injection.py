"""How a container gets to see a real GPU: the part of a grant that every backend shares."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from metagpu.core import cdi
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.grant import DeviceNode, Grant, Mount
from metagpu.core.model import Made, Share, by_gpu
from metagpu.core.snapshot import Snapshot

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
MEMORY: Final = "METAGPU_MEMORY_MIB"
"""How much of each GPU's, or MIG device's, memory the container should keep to:
`GPU-<uuid>=<MiB>,...`."""
CONTROL_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
"""Device nodes that every CUDA program opens beside the GPU's own."""

POD_FOLDER: Final = "/run/metagpu"
"""Where containers find `mgctl` and the socket it calls."""
CLIENT_NAME: Final = "mgctl"

_VOLUME_MOUNTS: Final = "/var/run/nvidia-container-devices"
"""Where NVIDIA's container runtime looks for GPUs that are named by mounts."""
_NO_DEVICES: Final = "void"
"""Tells NVIDIA's container runtime to add nothing: CDI does it."""


class DeviceListStrategy(StrEnum):
    """The ways of telling the container runtime which GPU a container sees (NVIDIA's words)."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_CRI = "cdi-cri"
    CDI_ANNOTATIONS = "cdi-annotations"


CDI_STRATEGIES: Final = frozenset({DeviceListStrategy.CDI_CRI, DeviceListStrategy.CDI_ANNOTATIONS})


class Injection(msgspec.Struct, frozen=True):
    """The node's way of giving GPUs to containers.

    Attributes:
        strategies: one or several; where CDI is one of them, CDI alone adds the device nodes.
        pass_device_specs: also name the device nodes to the kubelet, so that the container's
            device rules outlive a `systemctl daemon-reload`.
        cdi_kind: vendor and class of the CDI names: ours, or `nvidia.com/gpu` where NVIDIA's
            toolkit writes the specification.
        dev_root: where `/dev` of the host stands, empty for the root.
        present: device nodes that exist; others are never named, a container would not start.
        capabilities: the numbers of the device nodes below /dev/nvidia-caps that open a MIG
            instance, by the driver's names such as `gpu0/gi3/ci0/access`.
        pod_dir: the folder of the host that containers see as `POD_FOLDER`, empty for none.
        command: where else they see its `mgctl`, empty for nowhere.
        run_dir: the daemon's run directory, as the container runtime finds it too.
    """

    strategies: frozenset[DeviceListStrategy] = frozenset({DeviceListStrategy.ENVVAR})
    pass_device_specs: bool = True
    cdi_kind: str = cdi.KIND
    dev_root: str = ""
    present: frozenset[str] = frozenset()
    capabilities: Mapping[str, int] = msgspec.field(default_factory=dict)
    pod_dir: str = ""
    command: str = ""
    run_dir: str = "/run/metagpu"

    @property
    def names_here(self) -> bool:
        """Whether containers are told CDI names that our own specification has to have."""
        return bool(self.strategies & CDI_STRATEGIES) and self.cdi_kind == cdi.KIND

    @property
    def names_alone(self) -> bool:
        """Whether such a name is all that a container is told: what it stands for may change."""
        return self.names_here and self.strategies <= CDI_STRATEGIES

    def grant(self, gpus: Sequence[Gpu], variables: Mapping[str, str] | None = None) -> Grant:
        """Give whole GPUs to a container, in the order of their index, and further variables."""
        return self._grant([gpu.id for gpu in gpus], self._nodes(gpus), variables)

    def grant_made(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give what was made for some shares, once, and say how much memory they have of each.

        The GPUs come in the order of their index, and of one GPU the shares in theirs.
        """

        def order(share: Share) -> tuple[int, int, str]:
            return snapshot.gpus[share.gpu].gpu.index, share.number, share.id

        ordered = sorted(dict.fromkeys(shares), key=order)
        made = [snapshot.gpus[it.gpu].stocks[it.backend].made[it.id] for it in ordered]
        gpus = dict.fromkeys(snapshot.gpus[share.gpu].gpu for share in ordered)
        opened = [
            path
            for share, it in zip(ordered, made, strict=True)
            for path in self._opening(snapshot.gpus[share.gpu].gpu, it)
        ]
        amounts = Counter[str]()
        for share, it in zip(ordered, made, strict=True):
            amounts[it.device] += share.memory
        memory = ",".join(f"{device}={amount // MIB}" for device, amount in amounts.items())
        nodes = self._nodes(list(gpus), list(dict.fromkeys(opened)))
        return self._grant(list(amounts), nodes, {MEMORY: memory})

    def grant_places(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give what will stand for some shares, by names that are known before it is made.

        The memory is told by GPU.
        """
        held = by_gpu(shares)
        gpus = sorted((snapshot.gpus[gpu].gpu for gpu in held), key=lambda gpu: gpu.index)
        memory = ",".join(
            f"{gpu.id}={sum(share.memory for share in held[gpu.id]) // MIB}" for gpu in gpus
        )
        names = sorted({cdi.device_name(share.id) for share in shares})
        return self._grant(names, (), {MEMORY: memory})

    def common_nodes(self) -> tuple[DeviceNode, ...]:
        """Give the device nodes that belong to all GPUs."""
        return self._present(CONTROL_NODES)

    def nodes_of(self, gpu: Gpu, made: Made | None = None) -> tuple[DeviceNode, ...]:
        """Give the device nodes of a GPU, or of a MIG device on it; none if one is missing.

        With a part of them a container could not use it. A MIG device has two that open it, which
        the driver may not have numbered yet.
        """
        opening = [] if made is None else self._opening(gpu, made)
        paths = [*_own(gpu), *opening]
        nodes = self._present(paths)
        whole = len(nodes) == len(paths) and len(opening) == (0 if made is None else 2)
        return nodes if whole else ()

    def _grant(
        self,
        ids: Sequence[str],
        nodes: tuple[DeviceNode, ...],
        variables: Mapping[str, str] | None,
    ) -> Grant:
        ways = _ways(self.strategies)
        names = tuple(f"{self.cdi_kind}={gpu_id}" for gpu_id in ids) if ways.by_cdi else ()
        envs = dict(variables or {})
        mounts: tuple[Mount, ...] = ()

        if ways.envvar:
            envs[VISIBLE_DEVICES] = ",".join(ids)
        elif ways.volume_mounts:
            envs[VISIBLE_DEVICES] = _VOLUME_MOUNTS
        else:
            envs[VISIBLE_DEVICES] = _NO_DEVICES

        if ways.volume_mounts:
            mounts = tuple(Mount(f"{_VOLUME_MOUNTS}/{gpu_id}", "/dev/null") for gpu_id in ids)

        return Grant(
            envs=envs,
            mounts=mounts + _mgctl(self.pod_dir, self.command),
            nodes=() if ways.by_cdi or not self.pass_device_specs else nodes,
            annotations=_annotation(names) if ways.cdi_annotations else {},
            cdi_names=names if ways.cdi_cri else (),
        )

    def grant_shares(
        self,
        shares: Sequence[Share],
        snapshot: Snapshot,
        variables: Mapping[str, str] | None = None,
    ) -> Grant:
        """Give the GPUs of some shares, say how much memory of each the shares stand for.

        Further variables come from the backend.
        """
        held = by_gpu(shares)
        gpus = sorted((snapshot.gpus[gpu].gpu for gpu in held), key=lambda gpu: gpu.index)
        return self.grant_memory([(gpu, memory_mib(held[gpu.id])) for gpu in gpus], variables)

    def grant_memory(
        self, memory: Sequence[tuple[Gpu, int]], variables: Mapping[str, str] | None = None
    ) -> Grant:
        """Give GPUs, and say how much memory of each the container should keep to, in MiB."""
        told = ",".join([f"{gpu.id}={mib}" for gpu, mib in memory])
        return self.grant([gpu for gpu, _ in memory], {MEMORY: told, **(variables or {})})

    def _nodes(self, gpus: Sequence[Gpu], more: Sequence[str] = ()) -> tuple[DeviceNode, ...]:
        own = [path for gpu in gpus for path in _own(gpu)]
        return self._present([*CONTROL_NODES, *own, *more])

    def _opening(self, gpu: Gpu, made: Made) -> list[str]:
        """Name the nodes that open a MIG device: its GPU instance's and its compute instance's."""
        instance = f"gpu{gpu.minor}/gi{made.gpu_instance}"
        names = f"{instance}/access", f"{instance}/ci{made.compute_instance}/access"
        return [f"/dev/nvidia-caps/nvidia-cap{n}" for n in map(self.capabilities.get, names) if n]

    def _present(self, paths: Sequence[str]) -> tuple[DeviceNode, ...]:
        return _nodes_at(tuple(paths), self.dev_root, self.present)


class _Ways(NamedTuple):
    envvar: bool
    volume_mounts: bool
    cdi_cri: bool
    cdi_annotations: bool

    @property
    def by_cdi(self) -> bool:
        return self.cdi_cri or self.cdi_annotations


# The same few in every answer, for which somebody waits. To look an enumeration's member up takes
# a call of Python's own.
@lru_cache(maxsize=16)
def _ways(strategies: frozenset[DeviceListStrategy]) -> _Ways:
    return _Ways(*(way in strategies for way in DeviceListStrategy))


@lru_cache(maxsize=256)
def _nodes_at(
    paths: tuple[str, ...], dev_root: str, present: frozenset[str]
) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(path, f"{dev_root}{path}") for path in paths if path in present)


@lru_cache(maxsize=16)
def _mgctl(pod_dir: str, command: str) -> tuple[Mount, ...]:
    if not pod_dir:
        return ()
    # The folder, not what is in it: a new daemon's socket and program are seen at once.
    folder = Mount(POD_FOLDER, pod_dir)
    return (folder, Mount(command, f"{pod_dir}/{CLIENT_NAME}")) if command else (folder,)


def _own(gpu: Gpu) -> list[str]:
    return [] if gpu.minor is None else [f"/dev/nvidia{gpu.minor}"]


def memory_mib(shares: Sequence[Share]) -> int:
    """Say how much memory shares of one GPU are together, whichever pool cut it."""
    # Each was cut a part of a byte short: thirty hundredths of 40960 MiB are 12288, not 12287.
    return (sum([share.memory for share in shares]) + len(shares)) // MIB


def _annotation(names: Sequence[str]) -> dict[str, str]:
    """Build the CDI annotation; its key depends on the names alone, so a replay is the same."""
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()[:16]
    return {f"{cdi.ANNOTATIONS}metagpu_{digest}": ",".join(names)}
