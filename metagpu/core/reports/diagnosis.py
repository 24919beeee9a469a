"""Diagnoses of `mgctl doctor`: checks of the daemon's status, and privileges."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from metagpu.core.config.config import Config
from metagpu.core.config.memory import AnnotationKind, EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import NeedsPrivileges
from metagpu.core.grants.injection import Injection
from metagpu.core.model.privileges import Privilege
from metagpu.core.reports.schema.daemon import PrivilegeReport, SlicesReport
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import StatusReport


class CheckResult(StrEnum):
    """Result of one check; only `error` makes the doctor exit with status 1."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Diagnosis(msgspec.Struct, frozen=True):
    """One check with its result; `fix` is empty where nothing has to be done."""

    code: str
    result: CheckResult
    finding: str
    fix: str = ""


Finding = tuple[CheckResult, str] | tuple[CheckResult, str, str]
"""Result, finding, and a fix where one is needed."""
OK, WARNING, ERROR = CheckResult


StatusCheck = Callable[[StatusReport], Finding]


def check_capability(privilege: Privilege, status: StatusReport) -> Finding:
    """Check that a capability is held, if a feature needs it."""
    report = status.privileges.get(privilege, PrivilegeReport(held=False, needed_for=[]))
    uses = ", ".join(report.needed_for)
    if report.held:
        return OK, f"{privilege} is held, {f'for {uses}' if uses else 'and not needed'}"
    if not uses:
        return OK, f"{privilege} is not held, and not needed"
    fix = f"add {privilege} to the capabilities of metagpu's container, or leave the feature out"
    return ERROR, f"{privilege} is not held, but needed for {uses}", fix


def check_offer(status: StatusReport) -> Finding:
    """Check that shares are on offer."""
    resources = status.resources
    if not any(numbers.capacity for numbers in resources.values()):
        fix = "run `metagpu explain`: it lists each GPU with its pool and the reason"
        return ERROR, "no resource is offered", fix
    if not any(numbers.allocatable for numbers in resources.values()):
        counts = ", ".join(f"0 of {amounts.capacity} {name}" for name, amounts in resources.items())
        fix = "run `metagpu status`: it lists the reason for each GPU"
        return ERROR, f"nothing is allocatable: {counts}", fix
    counts = ", ".join(f"{name} {amounts.allocatable}" for name, amounts in resources.items())
    return OK, f"allocatable: {counts}"


def check_health(status: StatusReport) -> Finding:
    """Check that every GPU is in service."""
    gpus = status.gpus
    out = [f"GPU {gpu.index}: {_returning(gpu)}{gpu.reason}" for gpu in gpus if not gpu.healthy]
    out += [f"cannot be read: {gpu.reason}" for gpu in status.unreadable_gpus]
    if out:
        fix = "see docs/health.md; `metagpu acknowledge` brings a repaired GPU back"
        return ERROR, "; ".join(out), fix
    count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    return OK, f"{count}, none out of service"


def check_main_tasks(status: StatusReport) -> Finding:
    """Check that no main task of the daemon has ended."""
    ended = status.ended_tasks
    if not ended:
        return OK, "every main task of the daemon runs"
    fix = "metagpu starts them again; if they end again, restart it and report its log"
    return ERROR, f"main tasks of the daemon ended: {_named(ended)}", fix


def check_registrations(status: StatusReport) -> Finding:
    """Check that the kubelet counts what metagpu lists."""
    problems = status.registration_problems
    if not problems:
        return OK, "the kubelet has what metagpu lists"
    fix = "look for another device plugin of the name; metagpu's log has each attempt"
    return ERROR, _named(problems), fix


def check_node_amounts(status: StatusReport) -> Finding:
    """Check that the API server answers, and its Node shows what metagpu lists."""
    if status.cluster and (problem := status.cluster.problem):
        fix = "see docs/permissions.md for the rights; metagpu tries again by itself"
        return WARNING, f"the API server does not serve metagpu: {problem}", fix
    differences = status.cluster.node_differences if status.cluster else {}
    if differences:
        fix = "see in the kubelet's log whether it updates its Node, and who else writes the Node"
        return WARNING, _named(differences), fix
    features = status.cluster.features if status.cluster else {}
    if refused := {feature: problem for feature, problem in features.items() if problem}:
        fix = "docs/permissions.md has the rights of each feature; metagpu tries again by itself"
        return WARNING, f"the API server refuses {_named(refused)}", fix
    return OK, "the Node shows what metagpu lists, or is not read"


def check_resource_claims(status: StatusReport) -> Finding:
    """Check that the kubelet has the DRA driver, and the API server its slices."""
    dra = status.dra
    if dra is None:
        return OK, "no pool has `api: dra`"
    if problem := dra.problem:
        fix = "pods with ResourceClaims wait until the kubelet has the driver; see its log too"
        return ERROR, f"DRA driver {dra.driver}: {problem}", fix
    slices = status.cluster.resource_slices if status.cluster else None
    if slices is not None and (found := _slice_finding(slices)) is not None:
        return found
    if crowded := dra.crowded:
        return WARNING, "; ".join(crowded), "docs/backends/mps.md has the number of clients"
    if problem := dra.status_problem:
        fix = "pods are not concerned: `status.devices` of their claims is empty"
        return WARNING, f"the status of ResourceClaims is not written: {problem}", fix
    return OK, f"the kubelet has the DRA driver {dra.driver}; claims: {dra.claims}"


def _slice_finding(slices: SlicesReport) -> Finding | None:
    """Return what is wrong with ResourceSlices and DeviceClasses, `None` for nothing."""
    problem = slices.problem
    if problem and problem == slices.dropped:
        return WARNING, problem, "docs/dra.md has what an earlier Kubernetes serves"
    if problem:
        fix = "the scheduler uses the earlier ResourceSlices; docs/permissions.md has the rights"
        return ERROR, f"ResourceSlices: {problem}", fix
    if contested := slices.contested:
        named = ", ".join(f"{offered} (DeviceClass {name})" for offered, name in contested.items())
        finding = f"the device plugin offers {named} here, so that nobody gets the class's devices"
        return WARNING, finding, "give the pool with `api: device-plugin` another resource name"
    if problem := slices.classes_problem:
        fix = "names in `limits` that DeviceClasses have are unknown; see docs/permissions.md"
        return WARNING, f"DeviceClasses: {problem}", fix
    return None


def check_driver_upgrade(status: StatusReport) -> Finding:
    """Check that no pod holds the driver while it is upgraded."""
    upgrade = status.cluster.present_upgrade if status.cluster else None
    if upgrade is None:
        return OK, "no driver upgrade is under way, or none is followed"
    if not upgrade.pods:
        return OK, upgrade.summary
    return WARNING, upgrade.summary, "delete the pods that the operator does not see"


def check_events(status: StatusReport) -> Finding:
    """Check that NVML delivers the XIDs of every GPU."""
    unheard = [
        f"GPU {gpu.index}: {gpu.unheard.reason}" for gpu in status.gpus if gpu.unheard is not None
    ]
    if not unheard:
        return OK, "NVML delivers the XIDs of every GPU in service"
    fix = "see docs/health.md; a fault of such a GPU is found by checks alone, and may be missed"
    return WARNING, f"XIDs are not heard: {'; '.join(unheard)}", fix


def check_leases(status: StatusReport) -> Finding:
    """Check that processes and cgroups show what the leases say."""
    differences = status.lease_differences
    if not differences:
        return OK, "no container uses a GPU without a lease, or holds a lease and does not run"
    fix = "look at these pods with `kubectl describe pod`; docs/doctor.md has the causes of each"
    return (
        WARNING,
        "; ".join(f"{difference.holder}: {difference.reason}" for difference in differences),
        fix,
    )


def check_configuration(status: StatusReport) -> Finding:
    """Check that the present configuration is in force, on all GPUs that it names."""
    configuration = status.configuration
    if error := configuration.error:
        fix = f"correct the place that the message names; {configuration.effect}"
        return ERROR, f"the configuration was rejected: {error}", fix
    if status.cluster and (refusal := status.cluster.refusal):
        return WARNING, refusal, "correct or remove the label"
    if misfits := configuration.misfits:
        fix = "give these GPUs a pool, or a layout, that they can have; the other GPUs have theirs"
        return WARNING, f"GPUs can have nothing of their pool: {'; '.join(misfits)}", fix
    if empty := [remark.text for remark in status.remarks if remark.reason == "resource_empty"]:
        fix = "correct the name of the profile or layout, or give the pool GPUs that have it"
        return WARNING, "; ".join(empty), fix
    layout = f", with the MIG layout {configuration.mig_layout}" if configuration.mig_layout else ""
    return OK, f"the configuration is in force{layout}"


def check_mixed_requests(status: StatusReport) -> Finding:
    """Check that no container sees the devices of one of its resources alone."""
    mixed = status.mixed_requests
    if not mixed:
        return OK, "no container holds devices that it does not see"
    fix = "request each resource in a container of its own, or change deviceListStrategy"
    return WARNING, "; ".join(f"{request.holder}: {request.reason}" for request in mixed), fix


def check_lost_devices(status: StatusReport) -> Finding:
    """Check that the devices of all containers exist."""
    lost = status.lost_devices
    if not lost:
        return OK, "every container's devices exist"
    holders = ", ".join(loss.holder for loss in lost)
    fixes = "; ".join(dict.fromkeys(f"`{loss.fix}`" for loss in lost))
    return ERROR, f"containers hold devices that no longer exist: {holders}", fixes


def _returning(gpu: GpuReport) -> str:
    returns_at = gpu.recovery.returns_at if gpu.recovery else None
    return f"recovering until {returns_at} after: " if returns_at else ""


def _named(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


_FIRST_FREE_PORT: Final = 1024
"""ip_unprivileged_port_start of a kernel, by default."""


def needed_privileges(config: Config, ports: Mapping[str, int]) -> Mapping[Privilege, list[str]]:
    """Return the capabilities that a configuration needs, each with its uses.

    `ports` are those that are served, by what they serve. docs/permissions.md lists all.
    """
    needed: dict[Privilege, list[str]] = {each: [] for each in Privilege}

    for pool, backends in config.build_backends(config.root.injection(Injection())):
        for backend in backends:
            if isinstance(backend, NeedsPrivileges):
                for privilege, use in backend.privileges().items():
                    needed[privilege].append(f"{use} (pool {pool.name})")
        for privilege, use in _of_enforcement(pool.memory_enforcement).items():
            needed[privilege].append(f"{use} (pool {pool.name})")
    for name, port in ports.items():
        if 0 < port < _FIRST_FREE_PORT:
            needed[Privilege.NET_BIND_SERVICE].append(f"the port {port} of the {name}")
    return needed


def privileges_report(
    needed: Mapping[Privilege, list[str]], held: frozenset[Privilege]
) -> dict[str, PrivilegeReport]:
    """Return for each capability whether it is held, and what needs it."""
    return {
        str(privilege): PrivilegeReport(privilege in held, uses)
        for privilege, uses in needed.items()
    }


def _of_enforcement(settings: MemoryEnforcement) -> Mapping[Privilege, str]:
    needed = {}
    may_kill = settings.policy is EnforcementPolicy.KILL and not settings.dry_run
    if may_kill or AnnotationKind.POLICY in settings.allow_annotations:
        needed[Privilege.KILL] = "the end of processes over their memory"
    if settings.uses_driver_limits:
        needed[Privilege.SYS_ADMIN] = "the driver's own memory limits"
    return needed
