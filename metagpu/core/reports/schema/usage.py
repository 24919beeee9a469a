"""The schema of reports: the use of GPUs by containers and processes."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from metagpu.core.reports.reading import ReportPart
from metagpu.core.reports.schema.daemon import EnforcementReport, EventReport
from metagpu.core.reports.schema.gpus import UsedGpuReport
from metagpu.core.reports.schema.status import StatusReport


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
        borrowed_mib: MiB above its share, where its pool has [burst](enforcement.md#bursting).
        processes: its processes; at the status API their number.
        over_share_seconds: seconds for which it has taken more of the GPU's time than its shares
            give while others want more; `null` for less than the window of `computeEnforcement`.
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
    borrowed_mib: int | UnsetType = UNSET
    over_share_seconds: int | None = None

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
