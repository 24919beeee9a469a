"""Metrics of GPU usage by containers."""

import pytest
from msgspec.structs import replace

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.gpu import MIB
from metagpu.core.usage.accounting import ContainerUsage, attribute_processes
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.compute import Overuse
from metagpu.core.usage.report import ReportRules
from metagpu.plugins.metrics.gpus import rules_for_thread, usage_samples
from metagpu.sim.machine.containers import container_of
from tests.core.usage.test_report import ALICE, BOB, RULES, A, B, node
from tests.plugins.metrics.rig import valued

ON_A, ON_B = ("0", A.id), ("1", B.id)
IS_ALICE, IS_BOB = ("team", "alice", "main"), ("team", "bob", "main")


def measured(rules: ReportRules = RULES, **changes: object) -> dict[tuple[str, ...], float]:
    """Collect the usage metrics of that node."""
    snapshot, findings = node()
    return valued(usage_samples(snapshot, replace(findings, **changes), rules))


def test_a_containers_part_of_a_gpu() -> None:
    """A container has memory, limit and use in bytes, over all its processes."""
    values, of_alice = measured(at=1234.5), (*IS_ALICE, *ON_A)

    assert values["metagpu_usage_timestamp_seconds",] == 1234.5
    assert values["metagpu_container_memory_share_bytes", *of_alice] == 12288 * MIB
    assert values["metagpu_container_memory_limit_bytes", *of_alice] == (12102 + 512) * MIB
    assert values["metagpu_container_memory_used_bytes", *of_alice] == 13000 * MIB
    assert values["metagpu_container_processes", *of_alice] == 2
    assert values["metagpu_container_utilization_ratio", *of_alice] == 0.45
    assert values["metagpu_container_info", *of_alice, "fraction", "enforcer", "kill"] == 1


def test_an_idle_container_has_zeros() -> None:
    """An idle container has zeros, not missing series."""
    values = measured()

    for who in ((*IS_BOB, *ON_A), (*IS_ALICE, *ON_B)):
        assert values["metagpu_container_memory_used_bytes", *who] == 0
        assert values["metagpu_container_processes", *who] == 0


def test_time_beyond_the_shares_is_counted_where_a_pool_asks_for_it() -> None:
    """A container that is looked at has a counter, from 0 on; others have none."""
    name, known = "metagpu_container_over_share_seconds_total", {(A.id, ALICE): Overuse(9, 12.5)}
    rules = replace(RULES, overuse=lambda *key: known.get(key))

    found = {key: value for key, value in measured(rules).items() if key[0] == name}
    assert found == {(name, *IS_ALICE, *ON_A): 12.5}


def test_a_whole_gpu() -> None:
    """A GPU's series count all processes, and separately the unauthorized ones."""
    values = measured()

    assert values["metagpu_gpu_memory_used_bytes", *ON_A] == 13000 * MIB
    assert values["metagpu_gpu_utilization_ratio", *ON_A] == 1
    assert values["metagpu_gpu_unauthorized_processes", *ON_A] == 0
    assert values["metagpu_gpu_memory_used_bytes", *ON_B] == 50 * MIB
    assert values["metagpu_gpu_unauthorized_processes", *ON_B] == 1
    assert values["metagpu_gpu_unauthorized_memory_bytes", *ON_B] == 50 * MIB


def test_unknown_values_are_absent() -> None:
    """Unknown values are absent, not zero; an unreadable GPU has only that fact."""
    values = measured(failures={A.id: "hangs"})

    assert values["metagpu_gpu_usage_known", *ON_A] == 0
    assert values["metagpu_gpu_usage_known", *ON_B] == 1
    about_a = {name[0] for name in values if name[-1] == A.id or A.id in name}
    assert about_a == {"metagpu_gpu_usage_known"}
    assert ("metagpu_gpu_utilization_ratio", *ON_B) not in values
    assert ("metagpu_container_utilization_ratio", *IS_ALICE, *ON_B) not in values


@pytest.mark.parametrize(
    ("policy", "guard", "labels"),
    [
        (EnforcementPolicy.OFF, MemoryGuard.ENFORCER, ("enforcer", "off")),
        (EnforcementPolicy.KILL, MemoryGuard.MPS, ("mps", "")),
        (EnforcementPolicy.KILL, None, ("", "")),
    ],
)
def test_no_limit_where_memory_is_not_enforced(
    policy: EnforcementPolicy, guard: MemoryGuard | None, labels: tuple[str, str]
) -> None:
    """Each container has its guard, and a limit only under the enforcer."""
    guards = {"fraction": guard} if guard else {}
    values = measured(ReportRules(lambda _: MemoryEnforcement(policy=policy), guards))

    assert values["metagpu_container_info", *IS_ALICE, *ON_A, "fraction", *labels] == 1
    assert not any("limit" in name[0] or "excess" in name[0] for name in values)


def test_the_drivers_own_limit_is_the_guard() -> None:
    """The driver's limits are read once, before the page is written."""
    snapshot, findings = node()
    asked = []

    def limited(usage: ContainerUsage) -> bool:
        asked.append(usage.holder)
        return usage.holder == ALICE

    rules = rules_for_thread(replace(RULES, is_driver_limited=limited), findings)
    assert sorted(map(str, asked)) == sorted(map(str, (ALICE, ALICE, BOB)))
    values = valued(usage_samples(snapshot, findings, rules))

    assert len(asked) == 3
    assert values["metagpu_container_info", *IS_ALICE, *ON_A, "fraction", "driver", "kill"] == 1
    assert values["metagpu_container_info", *IS_BOB, *ON_A, "fraction", "enforcer", "kill"] == 1


def test_a_pod_and_the_one_it_replaces_are_one_series() -> None:
    """Two containers of one name are summed."""
    snapshot, _ = node()
    lives = [container_of(ALICE, life) for life in (0, 1)]
    identities = {pid: ProcessIdentity(pid, 5, lives[pid]) for pid in (0, 1)}
    processes = [GpuProcess(0, 13000 * MIB), GpuProcess(1, 100 * MIB)]
    accounts = {
        A.id: attribute_processes(
            snapshot.gpus[A.id], processes, identities, dict.fromkeys(lives, ALICE)
        )
    }
    values = valued(usage_samples(snapshot, NodeUsage(gpus=accounts), RULES))

    assert values["metagpu_container_memory_used_bytes", *IS_ALICE, *ON_A] == 13100 * MIB
    assert values["metagpu_container_processes", *IS_ALICE, *ON_A] == 2


def test_usage_of_a_gpu_that_is_not_known() -> None:
    """A usage report may be older than the snapshot beside it."""
    snapshot, findings = node()
    values = valued(usage_samples(replace(snapshot, gpus={}), findings, RULES))

    assert list(values) == [("metagpu_usage_timestamp_seconds",)]
