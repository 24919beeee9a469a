"""The schema of reports: a GPU, in a status and in a usage."""

from msgspec import field

from metagpu.core.reports.reading import ReportPart


class PauseReport(ReportPart, frozen=True):
    """The reason why something is stopped by intent.

    Attributes:
        reason: a sentence.
        since: time, ISO 8601 in UTC.
        reset: whether it lasts until the GPU is reset.
    """

    reason: str
    since: str
    reset: bool


class RecoveryReport(ReportPart, frozen=True):
    """The return of a GPU whose checks pass again.

    Attributes:
        since: time at which its checks began to pass, ISO 8601 in UTC.
        returns_at: time at which the GPU returns if none fails; `null` where an operator decides.
    """

    since: str
    returns_at: str | None


class TurnReport(ReportPart, frozen=True):
    """The turn of the backend that alone offers the free shares of a GPU.

    Attributes:
        backend: the backend whose turn it is.
        withdrawn: whether its shares are withdrawn already, before the next turn.
        next: the backend of the next turn; empty for none.
        next_in: seconds to the next turn.
    """

    backend: str
    withdrawn: bool
    next: str
    next_in: float


class FaultReport(ReportPart, frozen=True):
    """A fault of a MIG device.

    Attributes:
        device: uuid of the MIG device.
        shares: ids of the shares on it; empty for a MIG device that metagpu did not create.
        reason: a sentence.
        since: time, ISO 8601 in UTC.
    """

    device: str
    shares: list[str]
    reason: str
    since: str


class PlacementReport(ReportPart, frozen=True):
    """The place of a MIG instance on its GPU.

    Attributes:
        start: first memory slice.
        size: number of memory slices.
    """

    start: int
    size: int


class MigDeviceReport(ReportPart, frozen=True):
    """A MIG device that metagpu has created.

    Attributes:
        share: id of the share that it serves.
        holder: container, `namespace/pod (container)`; `null` where no container holds the share.
        device: uuid of the MIG device.
        profile: MIG profile, such as `1g.5gb`.
        placement: place on the GPU; `null` where NVML does not tell.
        gpu_instance: id of the GPU instance.
        compute_instance: id of the compute instance.
        idle: whether no process uses it.
    """

    share: str
    holder: str | None
    device: str
    profile: str
    placement: PlacementReport | None
    gpu_instance: int
    compute_instance: int
    idle: bool


class SharesReport(ReportPart, frozen=True, omit_defaults=True):
    """The shares of one resource on a GPU.

    Attributes:
        capacity: number of shares on offer.
        held: those that containers hold.
        free: those that the next pod can get.
        reason: why the Node has none of the shares that nobody holds, a name of the table of
            reasons in docs/pools.md; absent where it has some, or all are held.
    """

    capacity: int
    held: int
    free: int
    reason: str | None = None


class MoveReport(ReportPart, frozen=True):
    """A pod whose move would free a place for a profile that fits on no GPU.

    Attributes:
        profile: the MIG profile that would fit.
        freed_slot: where it would fit, such as `3g.20gb@4`.
        holder: container that would have to move; `null` where the kubelet has not named it.
        from_slot: the instance that it holds.
        to_slot: the place that it could have instead.
        to_gpu: index of the GPU of that place.
    """

    profile: str
    freed_slot: str
    holder: str | None
    from_slot: str = field(name="from")
    to_slot: str = field(name="to")
    to_gpu: int


class FreeCapacityReport(ReportPart, frozen=True):
    """The free capacity of a GPU whose MIG instances are created as pods ask for them.

    Attributes:
        largest: the largest MIG profile that could be placed now; `null` for none.
        largest_slices: memory slices of that profile.
        free_slices: memory slices that nothing occupies; they need not be adjacent.
        slices: memory slices of the GPU.
        moves: moves of pods that would help.
    """

    largest: str | None
    largest_slices: int
    free_slices: int
    slices: int
    moves: list[MoveReport]


class GpuReport(ReportPart, frozen=True, kw_only=True):
    """A GPU, its health and its shares.

    Attributes:
        index: index of the GPU, as NVML counts.
        uuid: uuid of the GPU.
        product: name of the model.
        memory_mib: memory in MiB; `null` where the driver does not report it.
        pci_bus_id: PCI address.
        numa_node: NUMA node; `null` where it is unknown.
        healthy: whether the GPU is in service.
        reason: why it is not in service; empty for a healthy GPU.
        since: time since which it is healthy or not, ISO 8601 in UTC.
        recovery: its return; `null` where none has begun.
        backends: the backends that offer shares of it.
        owner: the backend that has it now; `null` for an idle GPU.
        api: API of Kubernetes by which pods get its shares: `device-plugin` or `dra`.
        turn: the turn of a backend; `null` where the backends take none.
        cleaning: time since which a backend cleans up, by the backend.
        suspended: why a backend gives no shares of it, by the backend.
        cordon: why no new shares of it are given; `null` for no cordon.
        unheard: why its XIDs are not heard; `null` where they are.
        faults: faults of its MIG devices.
        devices: MIG devices that metagpu has created.
        blocked: sentences that say why shares are withheld.
        paused: those of `blocked` that concern single shares.
        waits_for: the pods that it waits for, as a sentence; `null` for none.
        nvlink_peers: indices of the GPUs that it reaches over NVLink.
        pool: name of its pool; `null` for none.
        pool_reason: why it is in this pool, or in none.
        shares: shares by resource.
        free_capacity: what MIG instances could still be created; `null` where none are.
    """

    index: int
    uuid: str
    product: str
    memory_mib: int | None
    pci_bus_id: str | None
    numa_node: int | None
    healthy: bool
    reason: str
    since: str
    recovery: RecoveryReport | None = None
    backends: list[str]
    owner: str | None
    api: str
    turn: TurnReport | None = None
    cleaning: dict[str, str]
    suspended: dict[str, PauseReport]
    cordon: PauseReport | None
    unheard: PauseReport | None = None
    faults: list[FaultReport]
    devices: list[MigDeviceReport]
    blocked: list[str]
    paused: list[str]
    waits_for: str | None
    nvlink_peers: list[int]
    pool: str | None
    pool_reason: str
    shares: dict[str, SharesReport]
    free_capacity: FreeCapacityReport | None


class OfferedSharesReport(ReportPart, frozen=True):
    """The shares of one resource on a GPU, with their size.

    Attributes:
        resource: name of the resource.
        capacity: number of shares on offer.
        held: those that containers hold; in a pod's own answer, those of the pod.
        share_mib: memory of one share in MiB.
    """

    resource: str
    capacity: int
    held: int
    share_mib: int


class DatedReason(ReportPart, frozen=True):
    """A reason, and since when it is one.

    Attributes:
        reason: a sentence.
        since: time, ISO 8601 in UTC.
    """

    reason: str
    since: str


class HeldDeviceReport(ReportPart, frozen=True):
    """A MIG device of which the asking pod holds a share.

    Attributes:
        share: id of the share.
        container: name of the container.
        device: uuid of the MIG device.
        profile: MIG profile, such as `1g.5gb`.
        placement: place on the GPU; `null` where NVML does not tell.
        fault: why it is out of service; `null` where it is in service.
    """

    share: str
    container: str
    device: str
    profile: str
    placement: PlacementReport | None
    fault: DatedReason | None


class UsedGpuReport(ReportPart, frozen=True, omit_defaults=True):
    """A GPU in a usage.

    Attributes:
        index: index of the GPU, as NVML counts.
        uuid: uuid of the GPU.
        product: name of the model.
        memory_mib: memory in MiB; `null` where the driver does not report it.
        usable_mib: memory without the driver's own part, in MiB; `null` where it is unknown.
        used_mib: memory in use, in MiB; `null` where it cannot be read.
        utilization: percent of the time in which kernels ran; `null` where it is unknown.
        shares: shares of each resource.
        held_part: part of it that containers hold, from 0 to 1 ([how](metrics.md#showback)); in a
            pod's own answer, the pod's.
        healthy: whether the GPU is in service.
        reason: why it is not in service; empty for a healthy GPU.
        since: time since which it is healthy or not, ISO 8601 in UTC.
        faults: reason by the uuid of a faulty MIG device.
        cordon: why no new shares of it are given; `null` for no cordon.
        suspended: why a backend gives no shares of it, by the backend; not in a pod's own answer.
        policy: what happens to processes over their memory: `off`, `warn` or `kill`.
        failure: why its usage cannot be read; `null` where it can.
        devices: MIG devices of which the asking pod holds a share; a pod's own answer alone.
        slices: memory slices of the GPU, 0 without such devices; a pod's own answer alone.
    """

    index: int
    uuid: str
    product: str
    memory_mib: int | None
    usable_mib: int | None
    used_mib: int | None
    utilization: int | None
    shares: list[OfferedSharesReport]
    held_part: float
    healthy: bool
    reason: str
    since: str
    faults: dict[str, str]
    cordon: str | None
    policy: str
    failure: str | None
    suspended: dict[str, str] = field(default_factory=dict)
    devices: list[HeldDeviceReport] | None = None
    slices: int | None = None
