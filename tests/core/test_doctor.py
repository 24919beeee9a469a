"""What is made of a node's facts: each trouble has its code, and a mend."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.doctor import CHECKS, Diagnosis, NodeFacts, Verdict, examine

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
GPU = {"index": 0, "healthy": True, "reason": ""}
SOUND = NodeFacts(
    uid=0,
    can_kill=True,
    sees_host=True,
    names_containers=True,
    driver="580.65.06",
    nodes=frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"}),
    kubelet="",
    pod_resources="",
    rivals={},
    status={"resources": {"x/y": {"capacity": 100, "allocatable": 90}}, "gpus": [GPU]},
    no_status="",
    pod_dir="/pod",
    client=True,
    noexec=False,
    pod_socket="",
    envvar_refused=False,
    cdi=("/etc/cdi/nvidia.yaml",),
    mps="/usr/bin/nvidia-cuda-mps-control",
)
NOTHING: dict[str, Any] = {"resources": {"x/y": {"capacity": 0, "allocatable": 0}}, "gpus": []}
SHUT = {"resources": {"a/b": {"capacity": 7, "allocatable": 0}}, "gpus": []}
BROKEN = {**(SOUND.status or {}), "gpus": [{**GPU, "healthy": False, "reason": "XID 79"}]}
LOST = {
    **(SOUND.status or {}),
    "lost": [{"holder": "team/alice (main)", "mend": "kubectl delete pod -n team alice"}],
}
NO_LIBRARIES = {
    **(SOUND.status or {}),
    "cdi": {"problem": None, "noLibraries": "there is no nvidia-ctk here"},
}
NO_FILE = {
    **(SOUND.status or {}),
    "cdi": {
        "problem": "/var/run/cdi cannot be written: Read-only file system",
        "noLibraries": None,
    },
}


def found(**changes: Any) -> dict[str, Diagnosis]:  # noqa: ANN401 - of any fact
    """Examine a sound node with some facts changed; give what is not good."""
    diagnoses = examine(replace(SOUND, **changes))
    return {it.code: it for it in diagnoses if it.verdict is not Verdict.GOOD}


def test_a_sound_node_is_good() -> None:
    """Every check says what it saw, and nothing has to be mended."""
    diagnoses = examine(SOUND)

    assert [it.code for it in diagnoses] == list(CHECKS)
    assert {it.verdict for it in diagnoses} == {Verdict.GOOD}
    assert all(it.finding and not it.mend for it in diagnoses)
    assert diagnoses[9].finding == "on offer: x/y 90"
    assert diagnoses[10].finding == "1 GPU, none out of service"


@pytest.mark.parametrize(
    ("code", "verdict", "changes", "part"),
    [
        ("MG101", Verdict.BAD, {"uid": 1000}, "this is user 1000"),
        ("MG101", Verdict.NOTE, {"can_kill": False}, "without the capability KILL"),
        ("MG102", Verdict.BAD, {"sees_host": False}, "`hostPID: true`"),
        ("MG103", Verdict.BAD, {"names_containers": False}, "/var/log/containers"),
        ("MG201", Verdict.BAD, {"driver": ""}, "kernel module is not loaded"),
        ("MG202", Verdict.NOTE, {"nodes": frozenset({"/dev/nvidiactl"})}, "no /dev/nvidia-uvm"),
        ("MG301", Verdict.BAD, {"kubelet": "/k (No such file)"}, "/k (No such file)"),
        ("MG302", Verdict.BAD, {"pod_resources": "/p (refused)"}, "/p (refused)"),
        ("MG303", Verdict.NOTE, {"rivals": {"MetaGPU": "x.sock"}}, "MetaGPU (x.sock)"),
        ("MG402", Verdict.BAD, {"status": NOTHING}, "nothing is on offer"),
        ("MG402", Verdict.BAD, {"status": SHUT}, "no pod can have anything: 0 of 7 a/b"),
        ("MG403", Verdict.BAD, {"status": BROKEN}, "GPU 0: XID 79"),
        (
            "MG404",
            Verdict.BAD,
            {"status": LOST},
            "given MIG devices that are no more: team/alice (main)",
        ),
        ("MG501", Verdict.NOTE, {"client": False}, "no program /pod/mgctl"),
        ("MG501", Verdict.BAD, {"noexec": True}, "noexec"),
        ("MG501", Verdict.BAD, {"pod_socket": "/pod/s (refused)"}, "/pod/s (refused)"),
        ("MG601", Verdict.NOTE, {"envvar_refused": True}, "privileged containers alone"),
        ("MG602", Verdict.NOTE, {"cdi": ()}, "no CDI specification"),
        ("MG602", Verdict.NOTE, {"status": NO_LIBRARIES}, "by CDI: there is no nvidia-ctk here"),
        ("MG602", Verdict.BAD, {"status": NO_FILE}, "may not start: /var/run/cdi cannot be writ"),
        ("MG701", Verdict.NOTE, {"mps": ""}, "nvidia-cuda-mps-control"),
    ],
)
def test_each_trouble_is_told_with_a_mend(
    code: str, verdict: Verdict, changes: dict[str, Any], part: str
) -> None:
    """One thing that is wrong is one finding, under its code, and says what to do."""
    [(only, diagnosis)] = found(**changes).items()

    assert (only, diagnosis.verdict) == (code, verdict)
    assert part in f"{diagnosis.finding} {diagnosis.mend}"
    assert diagnosis.mend


def test_without_a_daemon_its_knowledge_is_missing() -> None:
    """That it does not answer is bad; what it would have said is not known rather than bad."""
    troubles = found(status=None, no_status="no daemon answers on /x")

    assert {code: it.verdict for code, it in troubles.items()} == {
        "MG401": Verdict.BAD,
        "MG402": Verdict.NOTE,
        "MG403": Verdict.NOTE,
        "MG404": Verdict.NOTE,
    }
    assert troubles["MG401"].mend == "no daemon answers on /x"


def test_every_code_has_its_place_in_the_docs() -> None:
    """The page has a heading for each code, and for no other."""
    headings = re.findall(r"^### (MG\d+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(CHECKS)
