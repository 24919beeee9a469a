"""Diagnoses of a node's facts: each problem has a code and a fix."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.model.driver_roots import DriverRoots, Folder
from metagpu.core.reports.diagnosis import CheckResult, Diagnosis
from metagpu.core.reports.doctor import CHECKS, NodeFacts, diagnose
from metagpu.core.reports.reading import plain_report, read_report
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.status import roots_report
from tests.rigs.reported import complete

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
GPU = {"index": 0, "healthy": True, "reason": ""}
HELD = {
    "KILL": {"held": True, "neededFor": ["policy kill (pool a)"]},
    "SYS_ADMIN": {"held": True, "neededFor": []},
    "NET_BIND_SERVICE": {"held": False, "neededFor": []},
}
STATUS: Mapping[str, Any] = {
    "resources": {"x/y": {"capacity": 100, "allocatable": 90}},
    "gpus": [GPU],
    "privileges": HELD,
    "configuration": {"error": None, "deviceListStrategy": ["envvar"]},
    "mgctl": {"inPods": True},
}
SOUND = NodeFacts(
    uid=0,
    inaccessible=(),
    in_host_pid_namespace=True,
    has_container_logs=True,
    driver="580.65.06",
    device_nodes=frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"}),
    kubelet_problem="",
    pod_resources_problem="",
    competing_plugins={},
    status=complete(STATUS, StatusReport),
    status_problem="",
    pod_dir="/pod",
    has_mgctl=True,
    noexec=False,
    pod_socket_problem="",
    envvar_accepted=None,
    cdi_files=("/etc/cdi/nvidia.yaml",),
    roots=roots_report(DriverRoots(library="/usr/lib64/libnvidia-ml.so.1")),
    unlinked_nodes=(),
    mps_program="/usr/bin/nvidia-cuda-mps-control",
)
NOTHING: dict[str, Any] = {
    **STATUS,
    "resources": {"x/y": {"capacity": 0, "allocatable": 0}},
    "gpus": [],
}
NO_DRIVER = roots_report(DriverRoots(driver=Folder("/", "/host")))
SHUT = {**NOTHING, "resources": {"a/b": {"capacity": 7, "allocatable": 0}}}
DUMB = {**STATUS, "unreadableGpus": [{"index": 1, "reason": "GPU 1: it hangs"}]}
BROKEN = {**STATUS, "gpus": [{**GPU, "healthy": False, "reason": "XID 79"}]}
UNMOUNTED = {
    **STATUS,
    "gpus": [{**GPU, "suspended": {"mps": {"reason": "give CAP_SYS_ADMIN"}}}],
}
UPGRADED = {
    **STATUS,
    "cluster": {
        "driverUpgrade": {"label": "a=b", "pods": [{"pod": "team/a"}], "summary": "team/a holds it"}
    },
}
PAUSED = {
    **STATUS,
    "gpus": [{**GPU, "paused": ["instance 1g.5gb@4: not emptied"]}],
}
ASKED = {"driver": "gpu.metagpu.io", "claims": 2, "problem": None}
UNASKED = {**STATUS, "dra": {**ASKED, "problem": "the kubelet has not asked yet"}}
REFUSED_SLICES = {"resourceSlices": {"problem": "the API server does not allow it"}}
DROPPED_FIELDS = {"resourceSlices": dict.fromkeys(("problem", "dropped"), "it dropped fields")}
CONTESTED_NAME = {"resourceSlices": {"contested": {"nvidia.com/gpu": "whole.example"}}}
UNREAD_CLASSES = {"resourceSlices": {"classesProblem": "the API server does not allow it"}}
CLASSES_DENIED = {**STATUS, "dra": ASKED, "cluster": UNREAD_CLASSES}
CROWDED = {**STATUS, "dra": {**ASKED, "crowded": ["GPU 0 serves 2 containers"]}}
TWO_APIS = {**STATUS, "dra": ASKED, "cluster": CONTESTED_NAME}
WITHOUT_GATES = {**STATUS, "dra": ASKED, "cluster": DROPPED_FIELDS}
UNPUBLISHED = {**STATUS, "dra": ASKED, "cluster": REFUSED_SLICES}
DIFFERING = {
    **STATUS,
    "cluster": {"nodeDifferences": {"a/b": "the Node shows 0 allocatable, and metagpu lists 4"}},
}
API_SERVER_AWAY = {**STATUS, "cluster": {"problem": "403 nodes is forbidden"}}
FEATURE_DENIED = {
    **STATUS,
    "cluster": {"features": {"labels": "", "events": "403 events is forbidden"}},
}
UNUSED = {
    **STATUS,
    "leaseDifferences": [{"holder": "team/alice (main)", "reason": "container main holds 3"}],
}
LOST = {
    **STATUS,
    "lostDevices": [{"holder": "team/alice (main)", "fix": "kubectl delete pod -n team alice"}],
}
UNREGISTERED = {
    **STATUS,
    "registrationProblems": {"x/y": "the kubelet counts 0 shares as allocatable"},
}
ENDED = {**STATUS, "endedTasks": {"leases": "it returned"}}
UNHEARD = {
    **STATUS,
    "gpus": [{**GPU, "unheard": {"reason": "Unknown Error", "since": "2026-01-01T00:00:00+00:00"}}],
}
REFUSED = {**STATUS, "configuration": {"error": "f: 4: pools[0]: no GPU can"}}
MISFIT = {**STATUS, "configuration": {"error": None, "misfits": ["GPU 1: too small"]}}
MIXED = {
    **STATUS,
    "mixedRequests": [{"holder": "team/alice (main)", "reason": "container main holds GPU 0"}],
}
NO_LIBRARIES = {
    **STATUS,
    "cdi": {"problem": None, "noLibraries": "there is no nvidia-ctk here"},
}
NO_FILE = {
    **STATUS,
    "cdi": {
        "problem": "/var/run/cdi cannot be written: Read-only file system",
        "noLibraries": None,
    },
}
NO_RELAY = {
    **STATUS,
    "mgctl": {"inPods": True, "problem": "the relay of calls has ended"},
}
NOT_IN_PODS = {**STATUS, "mgctl": {"inPods": False, "problem": None}}


def lacking(privilege: str) -> dict[str, Any]:
    """Return the status of a daemon that needs a capability and does not hold it."""
    lacks = {privilege: {"held": False, "neededFor": ["a use (pool a)"]}}
    return {**STATUS, "privileges": {**HELD, **lacks}}


def found(**changes: Any) -> dict[str, Diagnosis]:  # noqa: ANN401 - of any fact
    """Check a sound node with some facts changed; return the diagnoses that are not ok."""
    if changes.get("status"):
        changes["status"] = complete(changes["status"], StatusReport)
    diagnoses = diagnose(replace(SOUND, **changes))
    return {
        diagnosis.code: diagnosis
        for diagnosis in diagnoses
        if diagnosis.result is not CheckResult.OK
    }


def test_a_sound_node_is_ok() -> None:
    """Every check reports its finding, and none needs a fix."""
    diagnoses = diagnose(SOUND)

    assert [diagnosis.code for diagnosis in diagnoses] == list(CHECKS)
    assert {diagnosis.result for diagnosis in diagnoses} == {CheckResult.OK}
    assert all(diagnosis.finding and not diagnosis.fix for diagnosis in diagnoses)
    findings = {diagnosis.code: diagnosis.finding for diagnosis in diagnoses}
    assert findings["MG402"] == "allocatable: x/y 90"
    assert findings["MG403"] == "1 GPU, none out of service"


@pytest.mark.parametrize(
    ("code", "verdict", "changes", "part"),
    [
        ("MG101", CheckResult.ERROR, {"uid": 1000}, "runs as user 1000"),
        ("MG102", CheckResult.ERROR, {"in_host_pid_namespace": False}, "`hostPID: true`"),
        ("MG103", CheckResult.ERROR, {"has_container_logs": False}, "/var/log/containers"),
        ("MG104", CheckResult.ERROR, {"status": lacking("KILL")}, "needed for a use (pool a)"),
        ("MG105", CheckResult.ERROR, {"status": lacking("SYS_ADMIN")}, "SYS_ADMIN is not held"),
        ("MG106", CheckResult.ERROR, {"status": lacking("NET_BIND_SERVICE")}, "is not held"),
        ("MG107", CheckResult.ERROR, {"inaccessible": ("/run/metagpu (write)",)}, "/run/metagpu"),
        ("MG108", CheckResult.ERROR, {"status": lacking("SYS_PTRACE")}, "is not held"),
        ("MG109", CheckResult.ERROR, {"status": lacking("SYS_CHROOT")}, "is not held"),
        ("MG110", CheckResult.ERROR, {"status": lacking("DAC_OVERRIDE")}, "is not held"),
        ("MG111", CheckResult.ERROR, {"status": lacking("FOWNER")}, "is not held"),
        ("MG201", CheckResult.ERROR, {"driver": ""}, "kernel module is not loaded"),
        ("MG201", CheckResult.WARNING, {"driver": "470.256.02"}, "own part of the memory"),
        (
            "MG202",
            CheckResult.WARNING,
            {"device_nodes": frozenset({"/dev/nvidiactl"})},
            "missing device nodes: /dev/nvidia-uvm",
        ),
        (
            "MG203",
            CheckResult.ERROR,
            {"roots": NO_DRIVER, "status": {**STATUS, "gpus": []}},
            "is not in / (here /host)",
        ),
        (
            "MG204",
            CheckResult.WARNING,
            {"unlinked_nodes": ("/dev/nvidia0",)},
            "to /dev/nvidia0: con",
        ),
        ("MG301", CheckResult.ERROR, {"kubelet_problem": "/k (No such file)"}, "/k (No such file)"),
        ("MG302", CheckResult.ERROR, {"pod_resources_problem": "/p (refused)"}, "/p (refused)"),
        (
            "MG303",
            CheckResult.WARNING,
            {"competing_plugins": {"MetaGPU": "x.sock"}},
            "MetaGPU (x.sock)",
        ),
        ("MG304", CheckResult.ERROR, {"status": UNREGISTERED}, "x/y: the kubelet counts 0"),
        ("MG305", CheckResult.WARNING, {"status": DIFFERING}, "a/b: the Node shows 0"),
        ("MG305", CheckResult.WARNING, {"status": API_SERVER_AWAY}, "403 nodes is forbidden"),
        ("MG305", CheckResult.WARNING, {"status": FEATURE_DENIED}, "events: 403 events is forb"),
        ("MG306", CheckResult.ERROR, {"status": UNASKED}, "gpu.metagpu.io: the kubelet has not"),
        (
            *("MG306", CheckResult.WARNING, {"status": TWO_APIS}),
            "offers nvidia.com/gpu (DeviceClass whole.example) here",
        ),
        ("MG306", CheckResult.ERROR, {"status": UNPUBLISHED}, "ResourceSlices: the API server"),
        ("MG306", CheckResult.WARNING, {"status": CLASSES_DENIED}, "DeviceClasses: the API server"),
        ("MG306", CheckResult.WARNING, {"status": CROWDED}, "GPU 0 serves 2 containers"),
        ("MG306", CheckResult.WARNING, {"status": WITHOUT_GATES}, "it dropped fields"),
        ("MG407", CheckResult.WARNING, {"status": UNUSED}, "team/alice (main): container main"),
        ("MG402", CheckResult.ERROR, {"status": NOTHING}, "no resource is offered"),
        ("MG402", CheckResult.ERROR, {"status": SHUT}, "nothing is allocatable: 0 of 7 a/b"),
        ("MG403", CheckResult.ERROR, {"status": BROKEN}, "GPU 0: XID 79"),
        ("MG403", CheckResult.ERROR, {"status": DUMB}, "cannot be read: GPU 1: it hangs"),
        (
            "MG404",
            CheckResult.ERROR,
            {"status": LOST},
            "devices that no longer exist: team/alice (main)",
        ),
        ("MG405", CheckResult.ERROR, {"status": ENDED}, "ended: leases: it returned"),
        (
            "MG406",
            CheckResult.WARNING,
            {"status": UNHEARD},
            "GPU 0: Unknown Error",
        ),
        ("MG408", CheckResult.ERROR, {"status": REFUSED}, "f: 4: pools[0]: no GPU can"),
        ("MG408", CheckResult.WARNING, {"status": MISFIT}, "GPU 1: too small"),
        ("MG501", CheckResult.WARNING, {"has_mgctl": False}, "/pod/mgctl does not exist"),
        ("MG501", CheckResult.WARNING, {"noexec": True}, "noexec"),
        (
            "MG501",
            CheckResult.ERROR,
            {"pod_socket_problem": "/pod/s (refused)"},
            "/pod/s (refused)",
        ),
        ("MG501", CheckResult.ERROR, {"status": NO_RELAY}, "the relay of calls has ended"),
        ("MG502", CheckResult.WARNING, {"status": MIXED}, "team/alice (main): container main"),
        ("MG601", CheckResult.WARNING, {"envvar_accepted": True}, "any pod gets all GPUs"),
        ("MG601", CheckResult.WARNING, {"envvar_accepted": False}, "privileged containers only"),
        ("MG602", CheckResult.WARNING, {"cdi_files": ()}, "no CDI specification"),
        (
            "MG602",
            CheckResult.WARNING,
            {"status": NO_LIBRARIES},
            "through CDI: there is no nvidia-ctk here",
        ),
        (
            "MG602",
            CheckResult.ERROR,
            {"status": NO_FILE},
            "may not start: /var/run/cdi cannot be writ",
        ),
        ("MG701", CheckResult.WARNING, {"mps_program": ""}, "nvidia-cuda-mps-control"),
        ("MG701", CheckResult.ERROR, {"status": UNMOUNTED}, "GPU 0: give CAP_SYS_ADMIN"),
        ("MG205", CheckResult.WARNING, {"status": UPGRADED}, "team/a holds it delete the pods"),
        ("MG701", CheckResult.ERROR, {"status": PAUSED}, "GPU 0: instance 1g.5gb@4: not empt"),
    ],
)
def test_each_problem_has_a_code_a_result_and_a_fix(
    code: str, verdict: CheckResult, changes: dict[str, Any], part: str
) -> None:
    """One problem is one diagnosis, under its code, with a fix."""
    [(only, diagnosis)] = found(**changes).items()

    assert (only, diagnosis.result) == (code, verdict)
    assert part in f"{diagnosis.finding} {diagnosis.fix}"
    assert diagnosis.fix


def test_mgctl_that_is_switched_off_needs_no_socket() -> None:
    """Without `mgctl` in pods the missing socket is as it should be."""
    assert not found(status=NOT_IN_PODS, has_mgctl=False, pod_socket_problem="/pod/s (none)")


@pytest.mark.parametrize("strategies", [["volume-mounts"], ["cdi-cri", "cdi-annotations"]])
def test_a_node_without_the_variable_is_well(strategies: list[str]) -> None:
    """A toolkit that refuses the variable is right where metagpu does not use it."""
    status = {**STATUS, "configuration": {"deviceListStrategy": strategies}}

    assert found(envvar_accepted=False, status=status) == {}


def test_without_a_daemon_the_daemons_facts_are_unknown() -> None:
    """A daemon that does not answer is one error; the checks that need it are warnings."""
    troubles = found(status=None, status_problem="no daemon answers on /x")

    assert {code: diagnosis.result for code, diagnosis in troubles.items()} == {
        "MG104": CheckResult.WARNING,
        "MG105": CheckResult.WARNING,
        "MG106": CheckResult.WARNING,
        "MG108": CheckResult.WARNING,
        "MG109": CheckResult.WARNING,
        "MG110": CheckResult.WARNING,
        "MG111": CheckResult.WARNING,
        "MG205": CheckResult.WARNING,
        "MG304": CheckResult.WARNING,
        "MG305": CheckResult.WARNING,
        "MG306": CheckResult.WARNING,
        "MG401": CheckResult.ERROR,
        "MG402": CheckResult.WARNING,
        "MG403": CheckResult.WARNING,
        "MG404": CheckResult.WARNING,
        "MG405": CheckResult.WARNING,
        "MG406": CheckResult.WARNING,
        "MG407": CheckResult.WARNING,
        "MG408": CheckResult.WARNING,
        "MG502": CheckResult.WARNING,
    }
    assert troubles["MG401"].fix == "no daemon answers on /x"


def test_every_code_has_its_place_in_the_docs() -> None:
    """The page has a heading for each code, and for no other."""
    headings = re.findall(r"^### (MG\d+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(CHECKS)


def test_what_a_daemon_of_another_release_does_not_report_is_unknown() -> None:
    """A check that needs a field that the status lacks says so; the others have their result."""
    gpu = plain_report(complete({**GPU, "healthy": True}, GpuReport))
    status = read_report({"gpus": [gpu], "unreadableGpus": []}, StatusReport)
    results = {diagnosis.code: diagnosis for diagnosis in diagnose(replace(SOUND, status=status))}
    assert results["MG403"].result is CheckResult.OK
    assert results["MG405"].result is CheckResult.WARNING
    assert "does not report the field endedTasks of StatusReport" in results["MG405"].finding
