"""Checks of a node for `mgctl doctor`, each with code, result, finding and fix.

docs/doctor.md explains each code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from metagpu.core.grants.injection import DeviceListStrategy
from metagpu.core.model.driver_roots import MOUNT_HOST, NVML_LIBRARY
from metagpu.core.model.privileges import Privilege
from metagpu.core.reports import diagnosis as daemon
from metagpu.core.reports.diagnosis import ERROR, OK, WARNING, Diagnosis, Finding
from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.daemon import DriverRootsReport
from metagpu.core.reports.schema.status import StatusReport

T = TypeVar("T")


def check_roots(roots: DriverRootsReport, status: StatusReport | None) -> Finding:
    """Check that NVML is in the driver's root, and name both roots."""
    driver = _folder(roots.driver_root, roots.container_driver_root)
    dev = _folder(roots.dev_root, roots.container_dev_root)
    found = f"driver in {driver}, {roots.reason}; device nodes below {dev}"
    if roots.library:
        return OK, found
    if status is not None and status.gpus:
        return OK, f"{found}; NVML is found by the linker"
    fix = f"install the driver; in a container, {MOUNT_HOST}, or see --driver-root"
    return ERROR, f"{NVML_LIBRARY} is not in {driver}, {roots.reason}", fix


def check_links(unlinked: Sequence[str]) -> Finding:
    """Check that systemd can find the device nodes of running containers."""
    if not unlinked:
        return OK, "every device node has the link in /dev/char that it needs"
    effect = "containers lose these devices at the next `systemctl daemon-reload`"
    finding = f"no link in /dev/char to {', '.join(unlinked)}: {effect}"
    other = "`nvidia-ctk system create-dev-char-symlinks --create-all`"
    fix = f"let metagpu write to the host's /dev/char, or run {other} at each start of the node"
    return WARNING, finding, fix


def _folder(host: str, here: str) -> str:
    return host if host == here else f"{host} (here {here})"


class NodeFacts(msgspec.Struct, frozen=True):
    """Facts about a node, found without changing anything.

    A `_problem` is one sentence, empty where there is no problem.

    Attributes:
        uid: the user that runs the doctor.
        inaccessible: folders that metagpu cannot use, each with the missing access.
        in_host_pid_namespace: the process is in the host's pid namespace.
        has_container_logs: the kubelet's folder of links to container logs exists.
        driver: the kernel module's version, empty when the module is not loaded.
        device_nodes: NVIDIA's device nodes.
        kubelet_problem, pod_resources_problem: why a socket of the kubelet accepts no connection.
        competing_plugins: sockets of other plugins that offer GPUs, by the plugin's name.
        status: the daemon's answer to `status`; `None` when the daemon does not answer.
        status_problem: why the daemon does not answer.
        pod_dir: the folder that is mounted into containers.
        has_mgctl: the folder has an executable `mgctl`.
        noexec: the folder's file system is mounted with `noexec`, here or on the host.
        pod_socket_problem: why the folder's socket accepts no connection.
        envvar_accepted: NVIDIA's toolkit reads NVIDIA_VISIBLE_DEVICES of unprivileged containers;
            `None` where it has no configuration.
        cdi_files: CDI specifications for NVIDIA's GPUs.
        roots: the roots of driver and device nodes.
        unlinked_nodes: device nodes that need a link in /dev/char and have none.
        mps_program: path of `nvidia-cuda-mps-control`, empty when it is not found.
    """

    uid: int
    inaccessible: Sequence[str]
    in_host_pid_namespace: bool
    has_container_logs: bool
    driver: str
    device_nodes: frozenset[str]
    kubelet_problem: str
    pod_resources_problem: str
    competing_plugins: Mapping[str, str]
    status: StatusReport | None
    status_problem: str
    pod_dir: str
    has_mgctl: bool
    noexec: bool
    pod_socket_problem: str
    envvar_accepted: bool | None
    cdi_files: Sequence[str]
    roots: DriverRootsReport
    unlinked_nodes: Sequence[str]
    mps_program: str


UNKNOWN: Final = "unknown: the daemon does not answer"
"""The finding of the checks that need the daemon's status, where it gives none."""
GROUPS: Final = ("permissions", "driver", "kubelet", "daemon", "containers", "toolkit", "MPS")
"""The groups of checks, by the first digit of their codes from 1 on."""
_ORDER: Final = (ERROR, WARNING, OK)
OLDEST_DRIVER: Final = 510
"""The branch from which on NVML has all functions that metagpu uses, but for recovery actions."""


def diagnose(facts: NodeFacts) -> Sequence[Diagnosis]:
    """Run every check, in the order of the codes."""
    return [Diagnosis(code, *_finding(check, facts)) for code, check in CHECKS.items()]


def diagnose_status(status: StatusReport) -> Sequence[Diagnosis]:
    """Run the checks of the status of any node's daemon, in the order of the codes."""
    return [Diagnosis(code, *_finding(check, status)) for code, check in STATUS_CHECKS.items()]


def in_groups(found: Iterable[Diagnosis]) -> Mapping[str, Sequence[Diagnosis]]:
    """Return the checks of each group, those with problems first.

    A check that is unknown, because no daemon answers, is in no group: the daemon's own check has
    the cause.
    """
    ordered = sorted(found, key=lambda diagnosis: _ORDER.index(diagnosis.result))
    groups: dict[str, list[Diagnosis]] = {}
    for diagnosis in ordered:
        if diagnosis.finding != UNKNOWN:
            group = GROUPS[int(diagnosis.code[2]) - 1]
            groups.setdefault(group, []).append(diagnosis)
    return groups


def _finding(check: Callable[[T], Finding], about: T) -> Finding:
    """Return what a check finds, or which field its daemon does not report."""
    try:
        return check(about)
    except FieldMissing as error:
        return WARNING, f"unknown: {error}"


def _privileges(facts: NodeFacts) -> Finding:
    if facts.uid != 0:
        return ERROR, f"the doctor runs as user {facts.uid}", "run mgctl and metagpu as root"
    return OK, "root"


def _folders(facts: NodeFacts) -> Finding:
    if not facts.inaccessible:
        return OK, "every folder that metagpu reads or writes is accessible"
    fix = "mount the host's folders as docs/permissions.md lists them"
    return ERROR, f"not accessible: {', '.join(facts.inaccessible)}", fix


def _pid_namespace(facts: NodeFacts) -> Finding:
    if facts.in_host_pid_namespace:
        return OK, "in the host's pid namespace"
    return (
        ERROR,
        "not in the host's pid namespace: processes and callers cannot be identified",
        "set `hostPID: true` for metagpu's pod",
    )


def _container_names(facts: NodeFacts) -> Finding:
    if facts.has_container_logs:
        return OK, "/var/log/containers exists"
    return (
        ERROR,
        "/var/log/containers does not exist: containers have no names",
        "mount the host's /var/log read-only at the same path",
    )


def _driver(facts: NodeFacts) -> Finding:
    branch = facts.driver.partition(".")[0]
    if branch.isdecimal() and int(branch) < OLDEST_DRIVER:
        return (
            WARNING,
            f"NVIDIA driver {facts.driver} is loaded: its own part of the memory is unknown",
            f"update the driver to {OLDEST_DRIVER} or newer",
        )
    if facts.driver:
        return OK, f"NVIDIA driver {facts.driver} is loaded"
    return (
        ERROR,
        "NVIDIA's kernel module is not loaded",
        "install the driver until `nvidia-smi` lists the GPUs; a simulated node has no driver",
    )


def _device_nodes(facts: NodeFacts) -> Finding:
    missing = sorted({"/dev/nvidiactl", "/dev/nvidia-uvm"} - facts.device_nodes)
    if not missing:
        return OK, f"{len(facts.device_nodes)} device nodes"
    return (
        WARNING,
        f"missing device nodes: {', '.join(missing)}",
        "run `nvidia-modprobe -u -c 0` at each start of the node",
    )


def _kubelet(facts: NodeFacts) -> Finding:
    return _socket(
        "the kubelet's device plugin socket",
        facts.kubelet_problem,
        "start the kubelet; in a container, mount /var/lib/kubelet/device-plugins",
    )


def _pod_resources(facts: NodeFacts) -> Finding:
    return _socket(
        "the kubelet's PodResources socket",
        facts.pod_resources_problem,
        "start the kubelet, and name its --root-dir by --kubelet-root; in a container, mount "
        "pod-resources of that folder",
    )


def _competing_plugins(facts: NodeFacts) -> Finding:
    if not facts.competing_plugins:
        return OK, "no other GPU device plugin"
    plugins = sorted(facts.competing_plugins.items())
    names = ", ".join(f"{name} ({socket})" for name, socket in plugins)
    return (
        WARNING,
        f"another device plugin offers GPUs: {names}",
        "two plugins may give one GPU twice: separate them by `gpus` of pools, or remove one",
    )


def _daemon(facts: NodeFacts) -> Finding:
    if facts.status is not None:
        return OK, "the daemon answers"
    return ERROR, "the daemon does not answer", facts.status_problem


def _mgctl_in_containers(facts: NodeFacts) -> Finding:
    mgctl = facts.status.mgctl if facts.status else None
    if mgctl is not None and not mgctl.in_pods:
        return OK, "mgctl is not for containers here: `mgctl: {inPods: false}`"
    if not facts.has_mgctl:
        return (
            WARNING,
            f"{facts.pod_dir}/mgctl does not exist: containers have no mgctl",
            "see the daemon's log; `make wheel` builds a package with the program",
        )
    if facts.noexec:
        return (
            WARNING,
            f"{facts.pod_dir} is mounted with noexec: no `startHook` there, and maybe no mgctl",
            "choose another folder with --pod-dir",
        )
    return _socket(
        f"the socket in {facts.pod_dir}",
        (mgctl and mgctl.problem) or facts.pod_socket_problem,
        "start `metagpu run`; its log has the reason",
    )


def _toolkit(facts: NodeFacts) -> Finding:
    if facts.envvar_accepted is None:
        return OK, "NVIDIA's toolkit has no configuration here"
    if facts.envvar_accepted:
        return (
            WARNING,
            "NVIDIA's toolkit takes NVIDIA_VISIBLE_DEVICES of everybody: any pod gets all GPUs",
            (
                "set `accept-nvidia-visible-devices-envvar-when-unprivileged = false` in the "
                "toolkit's config.toml, and `deviceListStrategy` to `volume-mounts` or a CDI "
                "strategy"
            ),
        )
    finding = "NVIDIA's toolkit takes NVIDIA_VISIBLE_DEVICES of privileged containers only"
    strategies = facts.status.configuration.device_list_strategy if facts.status else ["envvar"]
    if DeviceListStrategy.ENVVAR not in strategies:
        return OK, finding
    return (
        WARNING,
        finding,
        (
            "with `envvar` other containers get no GPU: set `deviceListStrategy` to "
            "`volume-mounts` or a CDI strategy"
        ),
    )


def _cdi(facts: NodeFacts) -> Finding:
    node_cdi = facts.status.cdi if facts.status else None
    if node_cdi is not None and (problem := node_cdi.problem):
        return (
            ERROR,
            f"containers get GPUs through CDI and may not start: {problem}",
            "remove the cause that the finding names",
        )
    if node_cdi is not None and (problem := node_cdi.no_libraries):
        return (
            WARNING,
            f"containers get no driver libraries through CDI: {problem}",
            "install NVIDIA's container toolkit where metagpu finds `nvidia-ctk`",
        )
    if facts.cdi_files:
        return OK, f"CDI specifications: {', '.join(facts.cdi_files)}"
    return (
        WARNING,
        "no CDI specification of NVIDIA's GPUs; only cdi-cri and cdi-annotations need one",
        (
            "metagpu writes one for these strategies; for another `cdiKind` run "
            "`nvidia-ctk cdi generate --device-name-strategy=uuid`"
        ),
    )


def _mps(facts: NodeFacts) -> Finding:
    gpus = facts.status.gpus if facts.status else []
    suspended = [
        f"GPU {gpu.index}: {gpu.suspended['mps'].reason}" for gpu in gpus if "mps" in gpu.suspended
    ]
    suspended += [f"GPU {gpu.index}: {reason}" for gpu in gpus for reason in gpu.paused]
    if suspended:
        fix = "the reason says what to do; see docs/backends/mps.md, When something breaks"
        return ERROR, f"no shares through MPS: {'; '.join(suspended)}", fix
    if facts.mps_program:
        return OK, f"MPS: {facts.mps_program}"
    return (
        WARNING,
        "nvidia-cuda-mps-control not found; only pools that share through MPS need it",
        "install the driver's programs, or mount them where metagpu finds them",
    )


def _socket(name: str, problem: str, fix: str) -> Finding:
    return (ERROR, f"{name}: {problem}", fix) if problem else (OK, f"{name} answers")


def _of_status(check: daemon.StatusCheck) -> Callable[[NodeFacts], Finding]:
    """Return a check of the daemon's status as a check of the node."""

    def checked(facts: NodeFacts) -> Finding:
        if facts.status is None:
            return WARNING, UNKNOWN
        return check(facts.status)

    return checked


STATUS_CHECKS: Final[Mapping[str, daemon.StatusCheck]] = {
    "MG104": partial(daemon.check_capability, Privilege.KILL),
    "MG105": partial(daemon.check_capability, Privilege.SYS_ADMIN),
    "MG106": partial(daemon.check_capability, Privilege.NET_BIND_SERVICE),
    "MG108": partial(daemon.check_capability, Privilege.SYS_PTRACE),
    "MG109": partial(daemon.check_capability, Privilege.SYS_CHROOT),
    "MG110": partial(daemon.check_capability, Privilege.DAC_OVERRIDE),
    "MG111": partial(daemon.check_capability, Privilege.FOWNER),
    "MG304": daemon.check_registrations,
    "MG305": daemon.check_node_amounts,
    "MG306": daemon.check_resource_claims,
    "MG402": daemon.check_offer,
    "MG403": daemon.check_health,
    "MG404": daemon.check_lost_devices,
    "MG405": daemon.check_main_tasks,
    "MG406": daemon.check_events,
    "MG407": daemon.check_leases,
    "MG408": daemon.check_configuration,
    "MG502": daemon.check_mixed_requests,
}
"""The checks of the daemon's status alone, by code."""
_NODE_CHECKS: Final[Mapping[str, Callable[[NodeFacts], Finding]]] = {
    "MG101": _privileges,
    "MG102": _pid_namespace,
    "MG103": _container_names,
    "MG107": _folders,
    "MG201": _driver,
    "MG202": _device_nodes,
    "MG203": lambda facts: check_roots(facts.roots, facts.status),
    "MG204": lambda facts: check_links(facts.unlinked_nodes),
    "MG205": _of_status(daemon.check_driver_upgrade),
    "MG301": _kubelet,
    "MG302": _pod_resources,
    "MG303": _competing_plugins,
    "MG401": _daemon,
    "MG501": _mgctl_in_containers,
    "MG601": _toolkit,
    "MG602": _cdi,
    "MG701": _mps,
}
CHECKS: Final = dict(
    sorted({**_NODE_CHECKS, **{k: _of_status(check) for k, check in STATUS_CHECKS.items()}}.items())
)
"""By code, whose first digit is that of its group."""
