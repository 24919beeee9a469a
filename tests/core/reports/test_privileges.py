"""Capabilities that a configuration needs, each with its uses."""

import re
from pathlib import Path
from typing import Any

import pytest

from metagpu.core.config.config import Config, parse
from metagpu.core.model.privileges import Privilege, privileges_in
from metagpu.core.reports.diagnosis import needed_privileges, privileges_report
from metagpu.core.reports.schema.daemon import PrivilegeReport
from tests.rigs.build import BACKENDS

PAGE = Path(__file__).parents[3] / "docs" / "permissions.md"
FRACTION = "{backend: fraction, sharesPerGpu: 10}"


def config(backend: str = FRACTION, enforcement: str = "{}") -> Config:
    """Return the configuration of one pool."""
    text = f"""\
version: metagpu/v1
pools:
  - name: all
    memoryEnforcement: {enforcement}
    backends: [{backend}]
"""
    return parse(text, "metagpu.yaml", BACKENDS)


def uses(*args: Any) -> dict[str, list[str]]:  # noqa: ANN401 - of `config`
    """Return the capabilities that a configuration needs, without those that it does not."""
    needed = needed_privileges(config(*args), {})
    return {str(privilege): list(uses) for privilege, uses in needed.items() if uses}


@pytest.mark.parametrize(
    "backend",
    [FRACTION, "{backend: whole}", "{backend: timeslice, replicas: 4}"],
)
def test_shares_without_hardware_need_no_capability(backend: str) -> None:
    """Fractions, whole GPUs and time-slices of the driver's own length need none."""
    assert uses(backend) == {}


@pytest.mark.parametrize(
    ("backend", "use"),
    [
        ("{backend: timeslice, replicas: 4, timeSlice: long}", "the length of time-slices"),
        ("{backend: mig, profiles: [1g.5gb]}", "MIG instances"),
    ],
)
def test_who_changes_a_gpu_needs_sys_admin(backend: str, use: str) -> None:
    """The driver takes changes of a GPU from SYS_ADMIN alone."""
    assert uses(backend) == {"SYS_ADMIN": [f"{use} (pool all)"]}


@pytest.mark.parametrize(
    "backend",
    ["{backend: mps}", "{backend: mig, layout: {1g.5gb: 7}, mps: {unitsPerInstance: 2}}"],
)
def test_mps_needs_the_capabilities_of_its_daemons(backend: str) -> None:
    """MPS, of GPUs and of instances, needs what its mounts, cgroups and folders want."""
    needed = {"SYS_ADMIN", "SYS_PTRACE", "SYS_CHROOT", "DAC_OVERRIDE", "FOWNER"}
    assert set(uses(backend)) == needed


@pytest.mark.parametrize(
    ("enforcement", "privileges"),
    [
        ("{policy: warn}", set()),
        ("{policy: kill, dryRun: true}", set()),
        ("{policy: kill, driverLimits: false}", {"KILL"}),
        ("{policy: kill}", {"KILL", "SYS_ADMIN"}),
        ("{policy: warn, allowAnnotations: [policy]}", {"KILL"}),
    ],
)
def test_ending_processes_needs_kill(enforcement: str, privileges: set[str]) -> None:
    """KILL is needed where a process may be ended, SYS_ADMIN where the driver shall refuse."""
    assert set(uses(FRACTION, enforcement)) == privileges


@pytest.mark.parametrize(
    ("ports", "uses"),
    [
        ({}, []),
        ({"metrics": 1024, "page": 0}, []),
        ({"metrics": 9400, "page": 80}, ["the port 80 of the page"]),
    ],
)
def test_a_low_port_needs_net_bind_service(ports: dict[str, int], uses: list[str]) -> None:
    """Whatever is served below the port 1024 needs NET_BIND_SERVICE."""
    assert needed_privileges(config(), ports)[Privilege.NET_BIND_SERVICE] == uses


def test_the_kernels_mask_is_read_bit_by_bit() -> None:
    """A mask is that of `CapEff`: KILL is 5, SYS_ADMIN is 21, and every privilege has a bit."""
    assert privileges_in(0) == frozenset()
    assert privileges_in(1 << 5) == {Privilege.KILL}
    assert privileges_in(1 << 41) == frozenset()
    assert privileges_in((1 << 41) - 1) == set(Privilege)
    assert privileges_in(1 << 21 | 1 << 10) == {Privilege.SYS_ADMIN, Privilege.NET_BIND_SERVICE}


def test_the_page_lists_every_capability() -> None:
    """The page about permissions has each capability in its table, and the doctor's code of it."""
    page = PAGE.read_text(encoding="utf-8")
    table, told = page.partition("### Capabilities")[2].split("`metagpu status --json` has")[:2]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    names = set(Privilege)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == names
    assert set(re.findall(r"\[MG1\d\d\]\(doctor\.md#mg1\d\d\) `(\w+)`", told)) == names


def test_the_report_says_what_is_missing() -> None:
    """Each capability has its uses, and whether it is held."""
    needed = needed_privileges(config("{backend: mps}"), {})
    report = privileges_report(needed, frozenset({Privilege.KILL}))
    assert report["KILL"] == PrivilegeReport(held=True, needed_for=[])
    assert report["SYS_ADMIN"].held is False
    assert len(report["SYS_ADMIN"].needed_for) == 1
