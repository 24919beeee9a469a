"""The schema of reports: parts of the daemon, and what it has done."""

from msgspec import UNSET, UnsetType

from metagpu.core.reports.reading import ReportPart


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
