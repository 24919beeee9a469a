"""Metrics of who uses what of a GPU."""

import dataclasses

import pytest
from msgspec.structs import replace

from metagpu.core.backend import Guard
from metagpu.core.census import Findings
from metagpu.core.driver import GpuProcess
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.gpu import MIB
from metagpu.core.host import Identity
from metagpu.core.usage import Usage, account
from metagpu.core.usage_report import Rules
from metagpu.plugins.metrics.usage import fixed, of_findings
from metagpu.sim.host import container_of
from tests.core.test_usage_report import ALICE, BOB, RULES, A, B, node
from tests.plugins.metrics.rig import valued

ON_A, ON_B = ("0", A.id), ("1", B.id)
IS_ALICE, IS_BOB = ("team", "alice", "main"), ("team", "bob", "main")


def measured(rules: Rules = RULES, **changes: object) -> dict[tuple[str, ...], float]:
    """Measure that node."""
    snapshot, findings = node()
    return valued(of_findings(snapshot, dataclasses.replace(findings, **changes), rules))  # type: ignore[arg-type] # of any


def test_a_containers_part_of_a_gpu() -> None:
    """Shares' memory, limit, use and excess in bytes; all its processes count together."""
    values, of_alice = measured(at=1234.5), (*IS_ALICE, *ON_A)

    assert values["metagpu_usage_timestamp_seconds",] == 1234.5
    assert values["metagpu_container_memory_share_bytes", *of_alice] == 12288 * MIB
    assert values["metagpu_container_memory_limit_bytes", *of_alice] == (12102 + 512) * MIB
    assert values["metagpu_container_memory_used_bytes", *of_alice] == 13000 * MIB
    assert values["metagpu_container_memory_excess_bytes", *of_alice] == (13000 - 12614) * MIB
    assert values["metagpu_container_processes", *of_alice] == 2
    assert values["metagpu_container_busy_ratio", *of_alice] == 0.45
    assert values["metagpu_container_info", *of_alice, "fraction", "enforcer", "kill"] == 1


def test_who_uses_nothing_has_zeros() -> None:
    """An idle container is seen to be idle, not missing."""
    values = measured()

    for who in ((*IS_BOB, *ON_A), (*IS_ALICE, *ON_B)):
        assert values["metagpu_container_memory_used_bytes", *who] == 0
        assert values["metagpu_container_memory_excess_bytes", *who] == 0
        assert values["metagpu_container_processes", *who] == 0


def test_a_whole_gpu() -> None:
    """All processes together, and those that belong to nobody."""
    values = measured()

    assert values["metagpu_gpu_memory_used_bytes", *ON_A] == 13000 * MIB
    assert values["metagpu_gpu_busy_ratio", *ON_A] == 1
    assert values["metagpu_gpu_stranger_processes", *ON_A] == 0
    assert values["metagpu_gpu_memory_used_bytes", *ON_B] == 50 * MIB
    assert values["metagpu_gpu_stranger_processes", *ON_B] == 1
    assert values["metagpu_gpu_stranger_memory_bytes", *ON_B] == 50 * MIB


def test_what_the_driver_does_not_say_is_absent() -> None:
    """Unknown is not zero: of a GPU that could not be asked, that alone is told."""
    values = measured(failures={A.id: "hangs"})

    assert values["metagpu_gpu_usage_known", *ON_A] == 0
    assert values["metagpu_gpu_usage_known", *ON_B] == 1
    about_a = {name[0] for name in values if name[-1] == A.id or A.id in name}
    assert about_a == {"metagpu_gpu_usage_known"}
    assert ("metagpu_gpu_busy_ratio", *ON_B) not in values
    assert ("metagpu_container_busy_ratio", *IS_ALICE, *ON_B) not in values


@pytest.mark.parametrize(
    ("policy", "guard", "told"),
    [
        (Policy.OFF, Guard.ENFORCER, ("enforcer", "off")),
        (Policy.KILL, Guard.MPS, ("mps", "")),
        (Policy.KILL, None, ("", "")),
    ],
)
def test_no_limit_where_memory_is_not_enforced(
    policy: Policy, guard: Guard | None, told: tuple[str, str]
) -> None:
    """What guards a container is told, and a limit only where the enforcer has one."""
    guards = {"fraction": guard} if guard else {}
    values = measured(Rules(lambda _: Enforcement(policy=policy), guards))

    assert values["metagpu_container_info", *IS_ALICE, *ON_A, "fraction", *told] == 1
    assert not any("limit" in name[0] or "excess" in name[0] for name in values)


def test_the_drivers_own_limit_is_told_as_the_guard() -> None:
    """What the driver holds was asked once, before the page is made beside the event loop."""
    snapshot, findings = node()
    asked = []

    def limited(usage: Usage) -> bool:
        asked.append(usage.holder)
        return usage.holder == ALICE

    rules = fixed(replace(RULES, limited=limited), findings)
    assert sorted(map(str, asked)) == sorted(map(str, (ALICE, ALICE, BOB)))
    values = valued(of_findings(snapshot, findings, rules))

    assert len(asked) == 3
    assert values["metagpu_container_info", *IS_ALICE, *ON_A, "fraction", "driver", "kill"] == 1
    assert values["metagpu_container_info", *IS_BOB, *ON_A, "fraction", "enforcer", "kill"] == 1


def test_a_pod_and_the_one_it_replaces_are_one_series() -> None:
    """Two of one name are added up; the larger excess counts."""
    snapshot, _ = node()
    lives = [container_of(ALICE, life) for life in (0, 1)]
    identities = {pid: Identity(pid, 5, lives[pid]) for pid in (0, 1)}
    processes = [GpuProcess(0, 13000 * MIB), GpuProcess(1, 100 * MIB)]
    accounts = {
        A.id: account(snapshot.gpus[A.id], processes, identities, dict.fromkeys(lives, ALICE))
    }
    values = valued(of_findings(snapshot, Findings(accounts=accounts), RULES))

    assert values["metagpu_container_memory_used_bytes", *IS_ALICE, *ON_A] == 13100 * MIB
    assert values["metagpu_container_memory_excess_bytes", *IS_ALICE, *ON_A] == 386 * MIB
    assert values["metagpu_container_processes", *IS_ALICE, *ON_A] == 2


def test_a_gpu_that_was_looked_at_and_is_not_known() -> None:
    """A look may be older than the snapshot beside it."""
    snapshot, findings = node()
    values = valued(of_findings(replace(snapshot, gpus={}), findings, RULES))

    assert list(values) == [("metagpu_usage_timestamp_seconds",)]
