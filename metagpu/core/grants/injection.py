"""The common part of grants: devices, CDI names, variables; grants joined."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from metagpu.core.grants import cdi
from metagpu.core.grants.grant import DeviceNode, Grant, Mount
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.shares import HardwareDevice, Share, by_gpu
from metagpu.core.model.snapshot import Snapshot

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
MEMORY: Final = "METAGPU_MEMORY_MIB"
"""The memory that the container should not exceed on each GPU or MIG device:
`GPU-<uuid>=<MiB>,...`."""
CONTROL_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
"""Device nodes that every CUDA program opens, beside the node of its GPU."""

POD_FOLDER: Final = "/run/metagpu"
"""The folder with `mgctl` and its socket, as containers see it."""
CLIENT_NAME: Final = "mgctl"
POD_SOCKET_NAME: Final = "mgctl.sock"
POD_SOCKET: Final = "METAGPU_SOCKET"
"""The variable by which `mgctl` finds a socket that is not in `POD_FOLDER`."""

_VOLUME_MOUNTS: Final = "/var/run/nvidia-container-devices"
"""The folder whose mounts name GPUs to NVIDIA's container runtime."""
_MIG_MONITOR: Final = "monitor"
"""The driver's name of the right to read all MIG devices."""
NO_DEVICES: Final = "void"
"""The value that makes NVIDIA's container runtime add nothing: CDI adds the devices."""


class DeviceListStrategy(StrEnum):
    """The ways to name GPUs to the container runtime (NVIDIA's option values)."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_CRI = "cdi-cri"
    CDI_ANNOTATIONS = "cdi-annotations"


CDI_STRATEGIES: Final = frozenset({DeviceListStrategy.CDI_CRI, DeviceListStrategy.CDI_ANNOTATIONS})


class Injection(msgspec.Struct, frozen=True):
    """The node's settings for GPUs in containers, and the grants of them.

    Attributes:
        strategies: one or several; with a CDI strategy, only CDI adds the device nodes.
        pass_device_specs: also name the device nodes to the kubelet, so that the container's
            device rules outlive a `systemctl daemon-reload`.
        cdi_kind: vendor and class of the CDI names: ours, or `nvidia.com/gpu` where NVIDIA's
            toolkit writes the specification.
        dev_root: the folder that holds the host's `/dev`, empty for the root.
        device_nodes_present: the existing device nodes; a grant names no others, because the
            container would not start.
        capabilities: the numbers of the device nodes below /dev/nvidia-caps that open a MIG
            instance, by the driver's names such as `gpu0/gi3/ci0/access`.
        pod_dir: the folder of the host that containers see as `POD_FOLDER`, empty for none.
        mgctl_path: a second path of `mgctl` in containers, empty for none.
        start_hook: the program that the runtime starts before a container, and its arguments; empty
            for none.
        run_dir: the daemon's run directory, on the path that the container runtime uses.
    """

    strategies: frozenset[DeviceListStrategy] = frozenset({DeviceListStrategy.ENVVAR})
    pass_device_specs: bool = True
    cdi_kind: str = cdi.KIND
    dev_root: str = ""
    device_nodes_present: frozenset[str] = frozenset()
    capabilities: Mapping[str, int] = msgspec.field(default_factory=dict)
    pod_dir: str = ""
    mgctl_path: str = ""
    start_hook: tuple[str, ...] = ()
    run_dir: str = "/run/metagpu"

    @property
    def uses_own_cdi(self) -> bool:
        """True if grants have CDI names that our own specification must have."""
        return bool(self.strategies & CDI_STRATEGIES) and self.cdi_kind == cdi.KIND

    @property
    def uses_only_own_cdi(self) -> bool:
        """True if grants have only such names: the device of a name may change."""
        return self.uses_own_cdi and self.strategies <= CDI_STRATEGIES

    @property
    def by_own_cdi(self) -> "Injection":
        """The injection that names GPUs to the runtime by our own specification alone."""
        return replace(self, strategies=frozenset({DeviceListStrategy.CDI_CRI}), cdi_kind=cdi.KIND)

    @property
    def shows_one_answer(self) -> bool:
        """True if a container sees one of several answers: all set one variable."""
        return DeviceListStrategy.ENVVAR in self.strategies and not self.strategies & CDI_STRATEGIES

    def grant(self, gpus: Sequence[Gpu], variables: Mapping[str, str] | None = None) -> Grant:
        """Return a grant of whole GPUs in the order of their index.

        `variables` are added to the grant's own.
        """
        return self._grant([gpu.id for gpu in gpus], self._nodes(gpus), variables)

    def grant_devices(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Return a grant of the shares' hardware devices, with the memory of each.

        The devices are in the order of their GPU's index, then of the shares' numbers.
        """

        def order(share: Share) -> tuple[int, int, str]:
            return snapshot.gpus[share.gpu].gpu.index, share.number, share.id

        ordered = sorted(dict.fromkeys(shares), key=order)
        devices = [
            snapshot.gpus[chosen_share.gpu]
            .provisioned[chosen_share.backend]
            .devices[chosen_share.id]
            for chosen_share in ordered
        ]
        gpus = dict.fromkeys(snapshot.gpus[share.gpu].gpu for share in ordered)
        capability_paths = [
            path
            for share, device in zip(ordered, devices, strict=True)
            for path in self._capability_paths(snapshot.gpus[share.gpu].gpu, device)
        ]
        amounts = Counter[str]()
        for share, hardware_device in zip(ordered, devices, strict=True):
            amounts[hardware_device.device] += share.memory
        memory = ",".join(f"{device}={amount // MIB}" for device, amount in amounts.items())
        nodes = self._nodes(list(gpus), list(dict.fromkeys(capability_paths)))
        return self._grant(list(amounts), nodes, {MEMORY: memory})

    def grant_cdi_names(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Return a grant of shares by CDI names, which are known before the devices exist.

        The memory variable is by GPU.
        """
        held = by_gpu(shares)
        gpus = sorted((snapshot.gpus[gpu].gpu for gpu in held), key=lambda gpu: gpu.index)
        memory = ",".join(
            f"{gpu.id}={sum(share.memory for share in held[gpu.id]) // MIB}" for gpu in gpus
        )
        names = sorted({cdi.device_name(share.id) for share in shares})
        return self._grant(names, (), {MEMORY: memory})

    def common_nodes(self) -> tuple[DeviceNode, ...]:
        """Return the device nodes that belong to all GPUs."""
        return self._present(CONTROL_NODES)

    def monitor_common_nodes(self) -> tuple[DeviceNode, ...]:
        """Return the device node that NVML opens whatever it is asked about."""
        return self._present(CONTROL_NODES[:1])

    def monitor_nodes(self, gpu: Gpu) -> tuple[DeviceNode, ...]:
        """Return the device nodes by which NVML reads a GPU; none without the GPU's own.

        In MIG mode they include the right to read all MIG devices, where the driver has it.
        """
        own = self._present(_gpu_paths(gpu))
        number = self.capabilities.get(_MIG_MONITOR) if gpu.mig_enabled else None
        rights = [] if number is None else [f"/dev/nvidia-caps/nvidia-cap{number}"]
        return (*own, *self._present(rights)) if own else ()

    def device_nodes(
        self, gpu: Gpu, device: HardwareDevice | None = None
    ) -> tuple[DeviceNode, ...]:
        """Return the device nodes of a GPU or MIG device; none if one is missing.

        A container could not use the GPU with a part of its nodes. A MIG device has two nodes of
        its own, which the driver may not have numbered yet.
        """
        capability_paths = [] if device is None else self._capability_paths(gpu, device)
        paths = [*_gpu_paths(gpu), *capability_paths]
        nodes = self._present(paths)
        expected = 0 if device is None else 2
        complete = len(nodes) == len(paths) and len(capability_paths) == expected
        return nodes if complete else ()

    def _grant(
        self,
        ids: Sequence[str],
        nodes: tuple[DeviceNode, ...],
        variables: Mapping[str, str] | None,
    ) -> Grant:
        chosen = _chosen(self.strategies)
        names = tuple(f"{self.cdi_kind}={gpu_id}" for gpu_id in ids) if chosen.by_cdi else ()
        envs = dict(variables or {})
        mounts: tuple[Mount, ...] = ()

        if chosen.envvar:
            envs[VISIBLE_DEVICES] = ",".join(ids)
        elif chosen.volume_mounts:
            envs[VISIBLE_DEVICES] = _VOLUME_MOUNTS
        else:
            envs[VISIBLE_DEVICES] = NO_DEVICES

        if chosen.volume_mounts:
            mounts = tuple(Mount(f"{_VOLUME_MOUNTS}/{gpu_id}", "/dev/null") for gpu_id in ids)

        return Grant(
            envs=envs,
            mounts=mounts + _mgctl(self.pod_dir, self.mgctl_path),
            nodes=() if chosen.by_cdi or not self.pass_device_specs else nodes,
            annotations=_annotation(names) if chosen.cdi_annotations else {},
            cdi_names=names if chosen.cdi_cri else (),
        )

    def grant_shares(
        self,
        shares: Sequence[Share],
        snapshot: Snapshot,
        variables: Mapping[str, str] | None = None,
    ) -> Grant:
        """Return a grant of the shares' GPUs, with the memory of the shares on each GPU.

        Further variables come from the backend.
        """
        held = by_gpu(shares)
        gpus = sorted((snapshot.gpus[gpu].gpu for gpu in held), key=lambda gpu: gpu.index)
        return self.grant_memory([(gpu, memory_mib(held[gpu.id])) for gpu in gpus], variables)

    def grant_memory(
        self, memory: Sequence[tuple[Gpu, int]], variables: Mapping[str, str] | None = None
    ) -> Grant:
        """Return a grant of GPUs, each with the container's memory in MiB, 0 for unknown."""
        amounts = ",".join([f"{gpu.id}={mib}" for gpu, mib in memory if mib])
        known = {MEMORY: amounts} if amounts else {}
        nodes = self._nodes([gpu for gpu, _ in memory])
        return self._grant([gpu.id for gpu, _ in memory], nodes, {**known, **(variables or {})})

    def _nodes(self, gpus: Sequence[Gpu], more: Sequence[str] = ()) -> tuple[DeviceNode, ...]:
        own = [f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None]
        paths = (*CONTROL_NODES, *own, *more)
        return _nodes_at(paths, self.dev_root, self.device_nodes_present)

    def _capability_paths(self, gpu: Gpu, device: HardwareDevice) -> list[str]:
        """Return the two nodes of a MIG device: GPU instance and compute instance."""
        instance = f"gpu{gpu.minor}/gi{device.gpu_instance}"
        names = f"{instance}/access", f"{instance}/ci{device.compute_instance}/access"
        return [f"/dev/nvidia-caps/nvidia-cap{n}" for n in map(self.capabilities.get, names) if n]

    def _present(self, paths: Sequence[str]) -> tuple[DeviceNode, ...]:
        return _nodes_at(tuple(paths), self.dev_root, self.device_nodes_present)


class _ChosenStrategies(NamedTuple):
    envvar: bool
    volume_mounts: bool
    cdi_cri: bool
    cdi_annotations: bool
    by_cdi: bool


# Cached: the same few sets are in every answer, while the kubelet waits. A set lookup of an
# enumeration's member costs a Python call of `__hash__`.
@lru_cache(maxsize=16)
def _chosen(strategies: frozenset[DeviceListStrategy]) -> _ChosenStrategies:
    chosen = [strategy in strategies for strategy in DeviceListStrategy]
    return _ChosenStrategies._make([*chosen, bool(strategies & CDI_STRATEGIES)])


@lru_cache(maxsize=256)
def _nodes_at(
    paths: tuple[str, ...], dev_root: str, present: frozenset[str]
) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(path, f"{dev_root}{path}") for path in paths if path in present)


def add_mount(grant: Grant, mount: Mount) -> Grant:
    """Add a mount to a grant, also at a path below mgctl's folder.

    That folder is read-only: nothing can be mounted below it, and the container would not start.
    It moves to its path on the host then, and a variable names its socket.
    """
    folder = next((own for own in grant.mounts if own.container_path == POD_FOLDER), None)
    if folder is None or not mount.container_path.startswith(f"{POD_FOLDER}/"):
        return replace(grant, mounts=(*grant.mounts, mount))
    moved = Mount(folder.host_path, folder.host_path)
    mounts = (moved if own == folder else own for own in grant.mounts)
    socket = f"{folder.host_path}/{POD_SOCKET_NAME}"
    return replace(grant, envs={**grant.envs, POD_SOCKET: socket}, mounts=(*mounts, mount))


@lru_cache(maxsize=16)
def _mgctl(pod_dir: str, command: str) -> tuple[Mount, ...]:
    if not pod_dir:
        return ()
    # The folder is mounted, not its files: containers see a new daemon's socket and program.
    folder = Mount(POD_FOLDER, pod_dir)
    return (folder, Mount(command, f"{pod_dir}/{CLIENT_NAME}")) if command else (folder,)


def _gpu_paths(gpu: Gpu) -> list[str]:
    return [] if gpu.minor is None else [f"/dev/nvidia{gpu.minor}"]


def memory_mib(shares: Sequence[Share]) -> int:
    """Return the memory of shares of one GPU together, in MiB."""
    # Each share was rounded down to a byte: thirty hundredths of 40960 MiB are 12288, not 12287.
    return (sum([share.memory for share in shares]) + len(shares)) // MIB


def _annotation(names: Sequence[str]) -> dict[str, str]:
    """Build the CDI annotation; its key depends on the names alone."""
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()[:16]
    return {f"{cdi.ANNOTATION_PREFIX}metagpu_{digest}": ",".join(names)}


MEMORY_SUM: Final = "METAGPU_MAX_MEM"
"""The container's memory on all GPUs together, in MiB."""
SHARE_NAMES: Final = "CNVRG_META_GPU_DEVICES"
"""The container's shares, in MetaGPU's form."""


def joined_variables(grants: Iterable[Grant]) -> dict[str, str]:
    """Return the variables of a container with all these grants.

    Memory is added up, by GPU or MIG device, and lists are joined. Of others the last value
    counts, as at the runtime: a CUDA program has one MPS control daemon.
    """
    found: dict[str, str] = {}
    amounts = Counter[str]()
    total, names = 0, list[str]()
    for grant in grants:
        found.update(grant.envs)
        for entry in filter(None, grant.envs.get(MEMORY, "").split(",")):
            device, _, mib = entry.rpartition("=")
            amounts[device] += int(mib)
        total += int(grant.envs.get(MEMORY_SUM, 0))
        names += filter(None, [grant.envs.get(SHARE_NAMES, "")])
    together = {
        MEMORY: ",".join(f"{device}={mib}" for device, mib in amounts.items()),
        MEMORY_SUM: str(total),
        SHARE_NAMES: ",".join(names),
    }
    return {**found, **{name: value for name, value in together.items() if name in found}}
