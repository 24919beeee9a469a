"""The schema of a daemon's reports: status and usage.

The daemon writes them; kubectl, the page, tables and the doctor read them.

A field without a default is in every report of this release. docs/status.md is made of this module:
after a change run `make reasons`.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import UNSET, UnsetType, field

from metagpu.core.model.offers import RequestRule
from metagpu.core.reports.reading import ReportPart

# --- status: GPUs ---------------------------------------------------------------------------------


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


# --- status: resources, leases, remarks -----------------------------------------------------------


class ResourceReport(ReportPart, frozen=True):
    """The amounts of a resource at the kubelet.

    Attributes:
        capacity: number of shares on offer.
        allocatable: those that are listed as healthy.
    """

    capacity: int
    allocatable: int


class OfferReport(ReportPart, frozen=True, omit_defaults=True):
    """The free shares of a resource.

    Attributes:
        free: shares that pods can still get.
        held_back: free shares that are hidden from the scheduler, as no request could take them.
        largest_request: the most shares that one request can get now.
        request_rule: the sets of shares that one request may take: `any`, `one_gpu` or
            `whole_gpus`.
        free_devices: devices of DRA that have a free part; absent for a device plugin's resource.
    """

    free: int
    held_back: int
    largest_request: int
    request_rule: RequestRule
    free_devices: int | None = None


class DeviceTypeReport(ReportPart, frozen=True):
    """The devices of one type in ResourceSlices.

    Attributes:
        devices: number of devices.
        free: those that have a free part.
        largest: the largest free part of one device, by capacity: `memory` in bytes, all others as
            a number of shares.
    """

    devices: int
    free: int
    largest: dict[str, int]


class UnreadableGpuReport(ReportPart, frozen=True):
    """A GPU that NVML lists and cannot read.

    Attributes:
        index: index of the GPU.
        reason: a sentence.
        since: time, ISO 8601 in UTC.
    """

    index: int
    reason: str
    since: str


class RemarkReport(ReportPart, frozen=True):
    """A sentence about what is free and cannot be had.

    Attributes:
        reason: its kind, which no release changes; docs/events.md lists all.
        gpu: index of the only GPU that it is about; `null` for none.
        text: the sentence.
    """

    reason: str
    gpu: int | None
    text: str


class LeaseReport(ReportPart, frozen=True, omit_defaults=True):
    """The shares of one resource on one GPU that a container holds.

    Attributes:
        resource: name of the resource.
        gpu: index of the GPU.
        uuid: uuid of the GPU.
        shares: number of shares.
        part: the part of the GPU that they are, from 0 to 1; `null` where it is unknown.
        holder: container, `namespace/pod (container)`; `null` where the kubelet has not named it.
        resource_claim: `namespace/name` of the ResourceClaim; absent for none.
        sharers: further containers that use the same ResourceClaim; absent for none.
        pod_uid: uid of the holder's pod; absent where the API server is not read.
        pod_owner: controller of the pod, `Kind/name`; absent where the API server is not read.
        pod_phase: phase of the pod; absent where the API server is not read.
    """

    resource: str
    gpu: int
    uuid: str
    shares: int
    part: float | None
    holder: str | None
    resource_claim: str | None = None
    sharers: list[str] = field(default_factory=list)
    pod_uid: str | None = None
    pod_owner: str | None = None
    pod_phase: str | None = None

    @property
    def holders(self) -> list[str]:
        """The containers that use these shares, none where the kubelet has not named one."""
        return [*([self.holder] if self.holder else []), *self.sharers]


class Explanation(ReportPart, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of `metagpu explain`: what is offered, and why.

    Attributes:
        version: version of metagpu; the status API alone has it.
        node: name of the node; the status API alone has it.
        resources: amounts at the kubelet, by resource.
        gpus: all GPUs.
        unreadable_gpus: GPUs that cannot be read.
        unused_pools: why a pool has no GPU, by the pool.
        topology: connection of every two GPUs, in the order of `gpus`, in the words of
            `nvidia-smi topo -m`.
        offers: free shares, by resource.
        devices: devices in ResourceSlices, by type.
        remarks: sentences about what is free and cannot be had.
        competing_plugins: socket of another device plugin, by the resource that it serves.
        registration_problems: why the kubelet does not count a resource as listed, by resource.
    """

    version: str = ""
    node: str = ""
    resources: dict[str, ResourceReport]
    gpus: list[GpuReport]
    unreadable_gpus: list[UnreadableGpuReport]
    unused_pools: dict[str, str]
    topology: list[list[str]]
    offers: dict[str, OfferReport]
    devices: dict[str, DeviceTypeReport]
    remarks: list[RemarkReport]
    competing_plugins: dict[str, str]
    registration_problems: dict[str, str]


# --- status: parts of the daemon ------------------------------------------------------------------


class OverLimitReport(ReportPart, frozen=True):
    """A container that uses more memory than its limit.

    Attributes:
        gpu: index of the GPU.
        container: `namespace/pod (container)`.
        excess_mib: memory above the limit, in MiB.
    """

    gpu: int
    container: str
    excess_mib: int


class EnforcementReport(ReportPart, frozen=True):
    """Memory enforcement since the daemon's start.

    Attributes:
        driver_limits: number of limits that the driver has been given.
        warnings: number of warnings.
        signals: number of signals sent, by signal.
        over_limit: containers above their limit now.
    """

    driver_limits: int
    warnings: int
    signals: dict[str, int]
    over_limit: list[OverLimitReport]


class LeaseDifferenceReport(ReportPart, frozen=True):
    """A difference between the leases and what processes and cgroups show.

    Attributes:
        difference: its kind: `use_without_lease` or `lease_without_container`.
        holder: container, or the pod's uid where its names are unknown.
        pod_uid: uid of the pod; `null` where it is unknown.
        reason: a sentence.
    """

    difference: str
    holder: str
    pod_uid: str | None
    reason: str


class MixedRequestReport(ReportPart, frozen=True):
    """A container that holds shares of several resources and sees the devices of one.

    Attributes:
        holder: container, `namespace/pod (container)`.
        pod_uid: uid of the pod; `null` where it is unknown.
        reason: a sentence.
    """

    holder: str
    pod_uid: str | None
    reason: str


class LostDevicesReport(ReportPart, frozen=True):
    """A container that holds devices that no longer exist.

    Attributes:
        holder: container, `namespace/pod (container)`.
        pod_uid: uid of the pod.
        devices: uuids of the lost GPUs and MIG devices.
        reason: a sentence.
        fix: the command that helps.
    """

    holder: str
    pod_uid: str
    devices: list[str]
    reason: str
    fix: str


class ConfigurationReport(ReportPart, frozen=True):
    """The configuration, and what of it is not in force.

    Attributes:
        file: path of the file.
        formats: formats of the sources.
        profiles: names of the profiles that there are.
        notes: settings that are not honoured.
        device_list_strategy: how containers learn of their devices.
        error: why the last text was rejected; `null` where it is in force.
        reason: kind of the error; docs/events.md lists all.
        effect: what the error changes; `null` without one.
        misfits: GPUs that can have nothing of their pool, each with the reason.
        mig_layout: layout of `mig-configs`, or of those made from the GPUs; `null` for none.
    """

    file: str
    formats: list[str]
    profiles: list[str]
    notes: list[str]
    device_list_strategy: list[str]
    error: str | None
    reason: str | None
    effect: str | None
    misfits: list[str]
    mig_layout: str | None = None


class SlicesReport(ReportPart, frozen=True):
    """ResourceSlices and DeviceClasses at the API server.

    Attributes:
        pools: number of pools that are published.
        problem: why not all are; empty for none.
        dropped: what the API server does not accept of them; empty for nothing.
        extended_resources: DeviceClass by the extended resource that it serves.
        classes_problem: why DeviceClasses are unknown; empty where they are known.
        contested: DeviceClass by the resource that the device plugin offers here too.
    """

    pools: int
    problem: str
    dropped: str
    extended_resources: dict[str, str]
    classes_problem: str
    contested: dict[str, str]


class CompetingPodReport(ReportPart, frozen=True):
    """A pod of another device plugin on this node.

    Attributes:
        program: its program.
        pod: `namespace/name`.
        contested: resources that it may serve too.
    """

    program: str
    pod: str
    contested: list[str]


class DriverPodReport(ReportPart, frozen=True):
    """A pod that holds the driver while it is upgraded.

    Attributes:
        pod: `namespace/name`.
        seen_by_operator: whether the GPU operator finds it.
    """

    pod: str
    seen_by_operator: bool


class DriverUpgradeReport(ReportPart, frozen=True):
    """An upgrade of the driver by the GPU operator.

    Attributes:
        label: state of the upgrade, by the Node's label.
        pods: pods that hold the driver.
        summary: a sentence.
    """

    label: str
    pods: list[DriverPodReport]
    summary: str


class ClusterReport(ReportPart, frozen=True, kw_only=True):
    """The daemon's side towards the API server.

    Attributes:
        node: name of the Node.
        connected: whether the Node is known and followed.
        problem: why the API server cannot be reached; empty where it can.
        features: problem by feature; empty for a feature in order.
        label: value of the Node's label `metagpu.io/config`; `null` for none.
        profile: configuration profile that is followed; `null` for none.
        mig_config: value of the Node's label `nvidia.com/mig.config`; `null` for none.
        refusal: why the choice is not in force; `null` where it is.
        node_feature: `namespace/name` of the object with the labels; `null` for labels of the Node.
        missing_labels: labels that the Node lacks.
        resource_slices: ResourceSlices; `null` where none are published.
        competing_plugins: pods of other device plugins on the node.
        node_differences: difference between Node and lists, by resource.
        driver_upgrade: upgrade of the driver; `null` for none, absent where none is followed.
        events_dropped: Events of the Node that could not be written.
        pod_events_dropped: Events of Pods that could not be written.
    """

    node: str
    connected: bool
    problem: str
    features: dict[str, str]
    label: str | None
    profile: str | None
    mig_config: str | None
    refusal: str | None
    node_feature: str | UnsetType | None = UNSET
    missing_labels: list[str] | UnsetType = UNSET
    resource_slices: SlicesReport | None
    competing_plugins: list[CompetingPodReport]
    node_differences: dict[str, str]
    driver_upgrade: DriverUpgradeReport | UnsetType | None = UNSET
    events_dropped: int
    pod_events_dropped: int

    @property
    def present_upgrade(self) -> DriverUpgradeReport | None:
        """The upgrade of the driver, `None` for none and where none is followed."""
        return None if self.driver_upgrade is UNSET else self.driver_upgrade


class DraReport(ReportPart, frozen=True):
    """The DRA driver.

    Attributes:
        driver: its name.
        registered: whether the kubelet has it.
        problem: why it serves no claims; `null` for none.
        claims: number of prepared claims.
        monitored: uuids of GPUs that claims with adminAccess look at.
        status_problem: why the status of claims is not written; `null` for none.
        crowded: GPUs with more MPS clients than there can be, each as a sentence.
    """

    driver: str
    registered: bool
    problem: str | None
    claims: int
    monitored: list[str]
    status_problem: str | None
    crowded: list[str]


class CdiReport(ReportPart, frozen=True):
    """The CDI specification that metagpu writes.

    Attributes:
        file: path of the file.
        kind: kind of its devices.
        devices: number of devices.
        problem: why containers may not start; `null` for none.
        no_libraries: why it has no libraries of the driver; `null` where it has them.
    """

    file: str
    kind: str
    devices: int
    problem: str | None
    no_libraries: str | None


class PrivilegeReport(ReportPart, frozen=True):
    """A Linux capability of the daemon.

    Attributes:
        held: whether the daemon has it.
        needed_for: what the configuration needs it for; empty where it is not needed.
    """

    held: bool
    needed_for: list[str]


class DriverRootsReport(ReportPart, frozen=True):
    """The folders of the driver.

    Attributes:
        driver_root: root of the driver on the host.
        container_driver_root: the same root as the daemon sees it.
        dev_root: root of the device nodes on the host.
        container_dev_root: the same root as the daemon sees it.
        container_host_root: root of the host as the daemon sees it.
        library: path of NVML; empty where the linker finds it.
        reason: why these roots were chosen.
    """

    driver_root: str
    container_driver_root: str
    dev_root: str
    container_dev_root: str
    container_host_root: str
    library: str
    reason: str


class PodMgctlReport(ReportPart, frozen=True):
    """The program `mgctl` in containers.

    Attributes:
        in_pods: whether the configuration has it.
        problem: why calls are not answered; `null` for none.
    """

    in_pods: bool
    problem: str | None


class StandbyReport(ReportPart, frozen=True):
    """A daemon that waits for the node.

    Attributes:
        version: version of metagpu.
        problems: why it is not ready to take the node; empty if it is.
    """

    version: str
    problems: list[str]


class EventReport(ReportPart, frozen=True):
    """An event of the node.

    Attributes:
        at: time, ISO 8601 in UTC.
        node: name of the node.
        gpu: index of the GPU; `null` for none.
        severity: `info`, `warning` or `error`.
        reason: its kind, which no release changes; docs/events.md lists all.
        text: a sentence.
    """

    at: str
    node: str
    gpu: int | None
    severity: str
    reason: str
    text: str


class StatusReport(Explanation, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of `metagpu status`, and of the status API at `/api/v1/status`.

    Attributes:
        leases: shares that containers hold, once for each holder, resource and GPU.
        enforcement: what memory enforcement has done.
        lease_differences: differences between leases and what runs.
        mixed_requests: containers that see the devices of one of their resources alone.
        lost_devices: containers whose GPUs or MIG devices no longer exist.
        configuration: the configuration.
        cluster: the side towards the API server; `null` without one.
        dra: the DRA driver; `null` where no pool has it.
        cdi: the CDI specification; `null` where none is written.
        ended_tasks: why a main task of the daemon has ended, by the task.
        privileges: Linux capabilities, by name.
        driver_roots: folders of the driver.
        mgctl: `mgctl` in containers.
        standby: daemon that waits for the node; `null` for none.
        events: last events of the node, the latest first; the status API alone has them.
    """

    leases: list[LeaseReport]
    enforcement: EnforcementReport
    lease_differences: list[LeaseDifferenceReport]
    mixed_requests: list[MixedRequestReport]
    lost_devices: list[LostDevicesReport]
    configuration: ConfigurationReport
    cluster: ClusterReport | None
    dra: DraReport | None
    cdi: CdiReport | None
    ended_tasks: dict[str, str]
    privileges: dict[str, PrivilegeReport]
    driver_roots: DriverRootsReport
    mgctl: PodMgctlReport
    standby: StandbyReport | None
    events: list[EventReport] | None = None


# --- usage ----------------------------------------------------------------------------------------


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


class ProcessReport(ReportPart, frozen=True):
    """A process on a GPU.

    Attributes:
        pid: process id on the host; in a pod's own answer that of its container, `null` outside.
        container_pid: process id in its container; `null` where it is unknown.
        memory_mib: memory of the GPU in MiB; `null` where the driver does not report it.
        utilization: percent of the time in which its kernels ran; `null` where it is unknown.
        user: `root`, or the number of the user; `null` where it is unknown.
        command: program and arguments; `null` where they are unknown.
        started_at: time of its start, ISO 8601 in UTC; `null` where it is unknown.
        host_memory_mib: resident memory of the host in MiB; `null` where it is unknown.
        cpu_seconds: processor time in seconds; `null` where it is unknown.
    """

    pid: int | None
    container_pid: int | None
    memory_mib: int | None
    utilization: int | None
    user: str | None
    command: list[str] | None
    started_at: str | None
    host_memory_mib: int | None
    cpu_seconds: float | None


class UnauthorizedReport(ProcessReport, frozen=True):
    """A process that uses a GPU without a share of it.

    Attributes:
        index: index of the GPU.
        uuid: uuid of the GPU.
        namespace: of its pod; `null` outside of pods.
        pod: name of its pod; `null` outside of pods.
        container: name of its container; `null` outside of pods.
        reason: a sentence.
    """

    index: int
    uuid: str
    namespace: str | None
    pod: str | None
    container: str | None
    reason: str


class ContainerGpuReport(ReportPart, frozen=True):
    """The shares of a GPU that a container holds, and their use.

    Attributes:
        index: index of the GPU.
        uuid: uuid of the GPU.
        resource: name of the resource.
        shares: number of shares.
        capacity: number of shares of the resource on the GPU.
        part: part of the GPU that it holds, from 0 to 1 ([how](metrics.md#showback)); it has its
            part alone of a claim that several containers use.
        share_mib: memory of its shares in MiB; `null` where shares have none.
        limit_mib: memory above which the policy acts, in MiB; `null` for no such limit.
        used_mib: memory in use, in MiB; `null` where it cannot be read.
        over_limit: whether it uses more memory than its limit.
        utilization: percent of the time in which its kernels ran; `null` where it is unknown.
        relative_utilization: the same in percent of its part of the GPU; above 100 where others
            leave time; `null` where it is unknown.
        guard: who holds it to its memory; `null` for nobody.
        policy: what happens above the limit; `null` where the daemon does not enforce it.
        processes: its processes; at the status API their number.
    """

    index: int
    uuid: str
    resource: str
    shares: int
    capacity: int
    part: float
    share_mib: int | None
    limit_mib: int | None
    used_mib: int | None
    over_limit: bool
    utilization: int | None
    relative_utilization: int | None
    guard: str | None
    policy: str | None
    processes: list[ProcessReport] | int

    @property
    def known_processes(self) -> list[ProcessReport]:
        """The processes, none in a report that only counts them."""
        return [] if isinstance(self.processes, int) else self.processes


class ContainerReport(ReportPart, frozen=True):
    """A container that holds shares.

    Attributes:
        namespace: of its pod.
        pod: name of its pod.
        container: name of the container.
        pod_uid: uid of its pod; `null` where it is unknown.
        pod_owner: controller of the pod, `Kind/name`; `null` where it is unknown.
        pod_phase: phase of the pod; `null` where it is unknown.
        gpus: its shares of each GPU.
    """

    namespace: str
    pod: str
    container: str
    pod_uid: str | None
    pod_owner: str | None
    pod_phase: str | None
    gpus: list[ContainerGpuReport]


class UsageReport(ReportPart, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of `mgctl get` and `top`, and of the status API at `/api/v1/usage`.

    Attributes:
        version: version of metagpu.
        node: name of the node.
        at: time of the reading, in seconds of the Unix epoch.
        gpus: all GPUs; in a pod's own answer, those of which it holds shares.
        containers: containers that hold shares.
        unauthorized: processes without a share; at the status API their number.
        warnings: what could not be read.
        enforcement: what memory enforcement has done; absent in a pod's own answer.
        events: events that a pod may read, the latest first; a pod's own answer alone.
    """

    version: str = ""
    node: str = ""
    at: float
    gpus: list[UsedGpuReport]
    containers: list[ContainerReport]
    unauthorized: list[UnauthorizedReport] | int
    warnings: list[str]
    enforcement: EnforcementReport | None = None
    events: list[EventReport] | None = None

    @property
    def known_unauthorized(self) -> list[UnauthorizedReport]:
        """The processes without a share, none in a report that only counts them."""
        return [] if isinstance(self.unauthorized, int) else self.unauthorized


class NodeReports(NamedTuple):
    """The reports that viewers of a node get.

    They have no processes: command lines are private.

    Attributes:
        status: makes the status, with the last events.
        usage: makes the usage, with numbers of processes.
    """

    status: Callable[[], Awaitable[StatusReport]]
    usage: Callable[[], Awaitable[UsageReport]]
