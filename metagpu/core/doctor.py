"""What `mgctl doctor` makes of a node: each check has a code, a verdict, and a mend if one helps.

docs/doctor.md explains each code.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec


class Verdict(StrEnum):
    """What a check found; only `bad` makes the doctor fail."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


class NodeFacts(msgspec.Struct, frozen=True):
    """What can be seen of a node without changing it.

    Attributes:
        uid: of who looks.
        can_kill: has the capability KILL.
        sees_host: is in the host's pid namespace.
        names_containers: the kubelet's folder of links to logs is there.
        driver: the kernel module's version, empty when it is not loaded.
        nodes: NVIDIA's device nodes.
        kubelet, pod_resources: why the kubelet's sockets take no connection, empty if they do.
        rivals: sockets of other plugins that offer GPUs, by the plugin's name.
        status: what the daemon answers to `status`; `None` when it does not.
        no_status: why it does not.
        pod_dir: the folder that containers see.
        client: its program is there, and may be run.
        noexec: programs may not be run from its file system.
        pod_socket: why its socket does not take a connection, empty if it does.
        envvar_refused: NVIDIA's toolkit ignores NVIDIA_VISIBLE_DEVICES of unprivileged containers.
        cdi: files of CDI specifications for NVIDIA's GPUs.
        mps: where `nvidia-cuda-mps-control` is, empty for nowhere.
    """

    uid: int
    can_kill: bool
    sees_host: bool
    names_containers: bool
    driver: str
    nodes: frozenset[str]
    kubelet: str
    pod_resources: str
    rivals: Mapping[str, str]
    status: Mapping[str, Any] | None
    no_status: str
    pod_dir: str
    client: bool
    noexec: bool
    pod_socket: str
    envvar_refused: bool
    cdi: Sequence[str]
    mps: str


class Diagnosis(msgspec.Struct, frozen=True):
    """One check's result; `mend` is empty where nothing has to be done."""

    code: str
    verdict: Verdict
    finding: str
    mend: str = ""


_GOOD, _NOTE, _BAD = Verdict
_UNKNOWN: Final = "not known, as the daemon does not answer"


def examine(facts: NodeFacts) -> Sequence[Diagnosis]:
    """Judge a node, in the order of the codes."""
    return [Diagnosis(code, *check(facts)) for code, check in CHECKS.items()]


Judged = tuple[Verdict, str] | tuple[Verdict, str, str]


def _root(facts: NodeFacts) -> Judged:
    if facts.uid != 0:
        return _BAD, f"this is user {facts.uid}", "run the doctor, and metagpu, as root"
    if not facts.can_kill:
        return (
            _NOTE,
            "root, without the capability KILL: memory cannot be enforced by `kill`",
            "give metagpu's container the capability KILL",
        )
    return _GOOD, "root, with the capability KILL"


def _pids(facts: NodeFacts) -> Judged:
    if facts.sees_host:
        return _GOOD, "in the host's pid namespace"
    return (
        _BAD,
        "in a pid namespace of its own: no process can be told whose it is, no container who asks",
        "set `hostPID: true` for metagpu's pod",
    )


def _names(facts: NodeFacts) -> Judged:
    if facts.names_containers:
        return _GOOD, "/var/log/containers is there"
    return (
        _BAD,
        "there is no /var/log/containers: containers have no names",
        "mount the host's /var/log read-only at the same place",
    )


def _driver(facts: NodeFacts) -> Judged:
    if facts.driver:
        return _GOOD, f"NVIDIA's driver {facts.driver} is loaded"
    return (
        _BAD,
        "NVIDIA's kernel module is not loaded",
        "install the driver, then `nvidia-smi` shows the GPUs; on a simulated node there is none",
    )


def _nodes(facts: NodeFacts) -> Judged:
    missing = sorted({"/dev/nvidiactl", "/dev/nvidia-uvm"} - facts.nodes)
    if not missing:
        return _GOOD, f"{len(facts.nodes)} device nodes"
    return (
        _NOTE,
        f"no {' and no '.join(missing)}",
        "`nvidia-modprobe -u -c 0`, at each start of the node",
    )


def _kubelet(facts: NodeFacts) -> Judged:
    return _socket(
        "the kubelet's socket for device plugins",
        facts.kubelet,
        "start the kubelet; in a container mount /var/lib/kubelet/device-plugins",
    )


def _pod_resources(facts: NodeFacts) -> Judged:
    return _socket(
        "the kubelet's PodResources socket",
        facts.pod_resources,
        "start the kubelet; in a container mount /var/lib/kubelet/pod-resources",
    )


def _rivals(facts: NodeFacts) -> Judged:
    if not facts.rivals:
        return _GOOD, "no other plugin for GPUs"
    told = ", ".join(f"{name} ({socket})" for name, socket in sorted(facts.rivals.items()))
    return (
        _NOTE,
        f"another plugin offers GPUs here: {told}",
        "a GPU that both offer is given twice: keep them apart by `gpus` of pools, or remove it",
    )


def _daemon(facts: NodeFacts) -> Judged:
    if facts.status is not None:
        return _GOOD, "the daemon answers"
    return _BAD, "the daemon does not answer", facts.no_status


def _offer(facts: NodeFacts) -> Judged:
    if facts.status is None:
        return _NOTE, _UNKNOWN
    resources = facts.status["resources"]
    if not any(numbers["capacity"] for numbers in resources.values()):
        mend = "`metagpu explain` says which GPU is in which pool, and why"
        return _BAD, "nothing is on offer", mend
    if not any(numbers["allocatable"] for numbers in resources.values()):
        told = ", ".join(f"0 of {it['capacity']} {name}" for name, it in resources.items())
        return _BAD, f"no pod can have anything: {told}", "`metagpu status` says why of each GPU"
    told = ", ".join(f"{name} {it['allocatable']}" for name, it in resources.items())
    return _GOOD, f"on offer: {told}"


def _health(facts: NodeFacts) -> Judged:
    if facts.status is None:
        return _NOTE, _UNKNOWN
    gpus = facts.status["gpus"]
    out = [f"GPU {gpu['index']}: {gpu['reason']}" for gpu in gpus if not gpu["healthy"]]
    if out:
        return _BAD, "; ".join(out), "see docs/health.md; `metagpu acknowledge` takes one back"
    some = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    return _GOOD, f"{some}, none out of service"


def _lost(facts: NodeFacts) -> Judged:
    if facts.status is None:
        return _NOTE, _UNKNOWN
    lost = facts.status.get("lost") or ()
    if not lost:
        return _GOOD, "every container's MIG devices are there"
    holders = ", ".join(str(it["holder"]) for it in lost)
    mends = "; ".join(dict.fromkeys(f"`{it['mend']}`" for it in lost))
    return _BAD, f"given MIG devices that are no more: {holders}", mends


def _client(facts: NodeFacts) -> Judged:
    if not facts.client:
        return (
            _NOTE,
            f"there is no program {facts.pod_dir}/mgctl: containers have none",
            "the daemon's log says why; `make wheel` builds a package that has it",
        )
    if facts.noexec:
        return (
            _BAD,
            f"{facts.pod_dir} is on a file system mounted with noexec: no container can run mgctl",
            "name a folder elsewhere with --pod-dir",
        )
    return _socket(
        f"the socket in {facts.pod_dir}", facts.pod_socket, "start `metagpu run`; its log says why"
    )


def _toolkit(facts: NodeFacts) -> Judged:
    if not facts.envvar_refused:
        return _GOOD, "NVIDIA's toolkit, where it is, takes NVIDIA_VISIBLE_DEVICES of everybody"
    return (
        _NOTE,
        "NVIDIA's toolkit heeds NVIDIA_VISIBLE_DEVICES of privileged containers alone",
        "by `envvar` others see no GPU: set `deviceListStrategy` to `volume-mounts` or a CDI one",
    )


def _cdi(facts: NodeFacts) -> Judged:
    ours = (facts.status or {}).get("cdi") or {}
    if why := ours.get("problem"):
        return (
            _BAD,
            f"containers are given GPUs by CDI, and may not start: {why}",
            "see the finding",
        )
    if why := ours.get("noLibraries"):
        return (
            _NOTE,
            f"containers get no libraries of the driver by CDI: {why}",
            "install NVIDIA's container toolkit where metagpu finds `nvidia-ctk`",
        )
    if facts.cdi:
        return _GOOD, f"CDI specifications: {', '.join(facts.cdi)}"
    return (
        _NOTE,
        "no CDI specification of NVIDIA's GPUs; only cdi-cri and cdi-annotations need one",
        "with one of them metagpu writes it; for another `cdiKind`, whoever that is",
    )


def _mps(facts: NodeFacts) -> Judged:
    if facts.mps:
        return _GOOD, f"MPS: {facts.mps}"
    return (
        _NOTE,
        "no nvidia-cuda-mps-control; only pools that share through MPS need it",
        "install the driver's programs, or mount them where metagpu looks",
    )


def _socket(name: str, problem: str, mend: str) -> Judged:
    return (_BAD, f"{name}: {problem}", mend) if problem else (_GOOD, f"{name} answers")


CHECKS: Final[Mapping[str, Callable[[NodeFacts], Judged]]] = {
    "MG101": _root,
    "MG102": _pids,
    "MG103": _names,
    "MG201": _driver,
    "MG202": _nodes,
    "MG301": _kubelet,
    "MG302": _pod_resources,
    "MG303": _rivals,
    "MG401": _daemon,
    "MG402": _offer,
    "MG403": _health,
    "MG404": _lost,
    "MG501": _client,
    "MG601": _toolkit,
    "MG602": _cdi,
    "MG701": _mps,
}
"""By code: 1 permissions, 2 driver, 3 kubelet, 4 daemon, 5 containers, 6 toolkit, 7 MPS."""
