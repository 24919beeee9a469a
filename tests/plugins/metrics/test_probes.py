"""The probes: the daemon's answers to the kubelet."""

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import DraReport
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import (
    CompetingPluginFound,
    RegistrationProblemFound,
    RegistrationProblemGone,
)
from metagpu.plugins.metrics.probes import LoopLagProbe, liveness_problems, readiness_problems
from tests.rigs.build import METAGPU, after, gpu, offered, pool
from tests.rigs.reported import complete

DRA = pool("sharesPerGpu: 10").replace("- name: all\n", "- name: all\n    api: dra\n")


def test_a_daemon_with_running_tasks_is_live() -> None:
    """A small delay of the event loop does not fail the liveness probe."""
    assert liveness_problems(0.5, {}, late=5) == []


def test_faults_that_a_restart_fixes() -> None:
    """An ended main task or a stalled event loop fails the liveness probe."""
    assert liveness_problems(7.26, {"leases": "it returned"}, late=5) == [
        "the main task leases has ended: it returned",
        "the event loop was 7.3 s late",
    ]


def test_ready_is_every_resource_at_the_kubelet() -> None:
    """Readiness names missing registrations; without an offer the daemon is not ready."""
    record = KubeletCallStats()
    _, snapshot = offered(gpu(0))

    assert readiness_problems(Snapshot(), record) == ["no resource is offered yet"]
    assert readiness_problems(snapshot, record) == [f"{METAGPU} is not registered with the kubelet"]

    record.of_resource(METAGPU).listed = True
    assert readiness_problems(snapshot, record) == []


def test_a_registration_problem_is_named() -> None:
    """Readiness names a resource that the kubelet counts otherwise than metagpu lists it."""
    record = KubeletCallStats()
    record.of_resource(METAGPU).listed = True
    _, snapshot = offered(gpu(0))
    problem = after(RegistrationProblemFound(METAGPU, "it counts 0"), since=snapshot)

    assert readiness_problems(problem, record) == [f"{METAGPU}: it counts 0"]
    solved = after(RegistrationProblemGone(METAGPU), since=problem)
    assert readiness_problems(solved, record) == []


def test_a_driver_that_the_kubelet_lacks_is_named() -> None:
    """The kubelet has to have the driver where a pool has DRA."""
    _, snapshot = offered(gpu(0), text=DRA)
    record = KubeletCallStats()
    partial = {"driver": "gpu.metagpu.io", "problem": "pod x answers there"}
    driver = complete(partial, DraReport)

    assert readiness_problems(snapshot, record, None) == ["the DRA driver does not run yet"]
    assert readiness_problems(snapshot, record, driver) == [
        "the DRA driver gpu.metagpu.io is not registered with the kubelet: pod x answers there"
    ]
    assert readiness_problems(snapshot, record, replace(driver, registered=True)) == []


def test_a_competing_plugin_is_named() -> None:
    """Readiness names a resource that another plugin serves."""
    _, snapshot = offered(gpu(0))
    snapshot = after(CompetingPluginFound(ResourceName(METAGPU), "/dp/other.sock"), since=snapshot)

    assert readiness_problems(snapshot, KubeletCallStats()) == [
        f"{METAGPU} is served by another device plugin on /dp/other.sock"
    ]


async def test_the_pulse_measures_how_late_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay counts from the moment of the expected wake-up."""
    clock, pulse = iter([10.0, 11.25]), LoopLagProbe()

    async def at_once(_: float) -> None:
        """Wake when the clock says."""

    monkeypatch.setattr(anyio, "current_time", lambda: next(clock))
    monkeypatch.setattr(anyio, "sleep", at_once)
    with pytest.raises(RuntimeError, match="StopIteration"):  # the clock has no more to say
        await pulse.run()

    assert pulse.lag == 0.25
