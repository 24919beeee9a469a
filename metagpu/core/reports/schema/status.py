"""The schema of reports: the status of a node, with its resources and leases."""

from msgspec import field

from metagpu.core.model.offers import RequestRule
from metagpu.core.reports.reading import ReportPart
from metagpu.core.reports.schema.daemon import (
    CdiReport,
    ClusterReport,
    ConfigurationReport,
    DraReport,
    DriverRootsReport,
    EnforcementReport,
    EventReport,
    LeaseDifferenceReport,
    LostDevicesReport,
    MixedRequestReport,
    PodMgctlReport,
    PrivilegeReport,
    StandbyReport,
)
from metagpu.core.reports.schema.gpus import GpuReport


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
        memory_policies: what happens to a container above the memory of its fraction or time-slice:
            `off`, `report`, `warn`, `dry-run`, `kill` or `burst`, by the pool.
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
    memory_policies: dict[str, str]
    topology: list[list[str]]
    offers: dict[str, OfferReport]
    devices: dict[str, DeviceTypeReport]
    remarks: list[RemarkReport]
    competing_plugins: dict[str, str]
    registration_problems: dict[str, str]


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
