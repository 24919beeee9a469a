"""Periods and delays of the usage service."""

from typing import Final

import msgspec


class UsageTiming(msgspec.Struct, frozen=True):
    """Periods and delays of the usage service, all in seconds.

    Attributes:
        idle_period: between two checks of a GPU on which the enforcer has no container to keep
            within a limit.
        cgroup_period: between two searches for containers that were started again in their pods.
        start_window: after a change of leases. A container may start at any moment of this window,
            so each check searches for containers whose cgroup is not known yet.
        inherit_window: after the daemon's start, in which limits of an earlier daemon are searched
            for where no limit is wanted any more. By its end the kubelet has listed every pod that
            is older than this daemon.
        limit_retry: until the driver is asked again for a limit that it could not set.
        start_deadline: for the limits of a container that starts, and waits for them. The kubelet
            lists a pod half a second after its grant.
        lost_period: between two checks for lost devices. A loss is reported when two checks in
            a row have found it: in between, a pod may have come.
        unauthorized_period: between two checks of all GPUs for unauthorized use.
        admission_window: from a pod's admission until the kubelet has surely listed the pod.
        absent_period: between two checks for leases whose containers do not run.
        absent_after: without a process, after which a container is reported. The kubelet waits for
            5 min at most before it starts a container that fails.
        compute_period: between two readings of the time that containers take of their GPUs.
        mixed_period: between two checks for containers that hold shares of several resources.
        cache_age: for which callers share one collection of all GPUs.
        recent: for which a scrape takes a GPU's processes from the last check of the GPU alone; a
            little more than twice the enforcer's period: checks come once in each.
        turn: for which a collection waits for each GPU's answer before it goes on without it. It is
            longer than a GPU that hangs may delay the others, 40 ms.
        costly_age: from which a scrape reads in any case what costs NVML much: the utilization of
            a GPU's processes, its energy, its PCIe replays. Turns of eight GPUs take 4 min at the
            usual period of 30 s.
    """

    idle_period: float = 0.5
    cgroup_period: float = 2.0
    start_window: float = 30.0
    inherit_window: float = 120.0
    limit_retry: float = 10.0
    start_deadline: float = 8.0
    lost_period: float = 10.0
    unauthorized_period: float = 10.0
    admission_window: float = 15.0
    absent_period: float = 30.0
    absent_after: float = 600.0
    compute_period: float = 10.0
    mixed_period: float = 5.0
    cache_age: float = 0.9
    recent: float = 1.1
    turn: float = 0.05
    costly_age: float = 300.0


DEFAULT_TIMING: Final = UsageTiming()
