"""The JSON of status and usage, against what was recorded of an earlier release."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import anyio
import msgspec
import pytest

from metagpu.core.layout.layout import Layout
from metagpu.core.model.mig import Placement
from metagpu.core.model.shares import HardwareDevice, OfferTurn, ProvisionedState, Recovery
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.status import explain_report, lease_reports
from metagpu.core.state.facts import (
    BackendAttached,
    Fact,
    GpuFaulted,
    GpuRecovering,
    GpusFound,
    GpuUnheard,
    InstanceFaulted,
    ProvisioningReported,
    TurnsChanged,
)
from metagpu.core.usage.report import pod_report, usage_report
from metagpu.plugins.web.recent_events import GRANTED
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_resource_claims import at_work
from tests.agent.test_status_api import serving
from tests.core.usage.test_report import ALICE, RULES, node, pod
from tests.rigs.agent import METAGPU
from tests.rigs.build import after, offer
from tests.rigs.reported import CORDON, ENDED, FRACTIONS, HELD, SUSPENDED, UNITS, A
from tests.rigs.waiting import until

RECORDED: Final = Path(__file__).with_name("recorded_reports.json")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*")
_CHANGING: Final = frozenset(("at", "nextIn", "node", "podUid", "version", "privileges"))
"""Fields whose values differ from run to run, or from machine to machine."""


def snapshots() -> Iterator[Snapshot]:
    """Yield snapshots of GPUs in trouble."""
    unhealthy = GpuFaulted(A.id, "XID 79", at=0)
    provisioned = ProvisionedState(
        {
            FRACTIONS[0].id: HardwareDevice("MIG-0", 1, 0, placement=Placement(0, 4)),
            FRACTIONS[1].id: HardwareDevice("MIG-1", 2, 0, idle=True),
        },
        blocked={FRACTIONS[2].id: "there is no room"},
    )
    reported = ProvisioningReported(A.id, "fraction", provisioned, at=4)
    states: tuple[tuple[Fact, ...], ...] = (
        (CORDON, SUSPENDED, GpuUnheard(A.id, "refused", at=0)),
        (HELD,),
        (HELD, ENDED),
        (unhealthy, GpuRecovering(A.id, Recovery(60, 120))),
        (TurnsChanged({A.id: OfferTurn("fraction", 0, next="mps", until=10**9)}),),
        (reported, InstanceFaulted(A.id, "MIG-1", "XID 94", at=5)),
    )
    kept = BackendAttached(A.id, "mps", needs_setup=False, needs_cleanup=True, at=0)
    for facts in states:
        yield after(GpusFound((A,), at=0), kept, offer(*FRACTIONS, *UNITS), *facts)


async def served(folder: Path) -> dict[str, Any]:
    """Return what is served by several nodes."""
    found: dict[str, Any] = {}
    async with serving(folder / "api") as scene:
        await scene.node.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.node.wait_holders()
        token = scene.token()  # one, since new tokens are limited

        async def is_told() -> bool:
            status = await scene.get("/api/v1/status", token)
            return any(event["reason"] == GRANTED for event in status["events"])

        await until(is_told)
        for name in ("status", "usage"):
            found[f"api {name}"] = await scene.get(f"/api/v1/{name}", token)
        found["command status"] = await scene.node.status()
        found["command usage"] = await scene.node.usage()
    async with at_work(folder / "dra") as claims:
        await claims.prepared(claims.allocate("fraction", shares=5))
        found["claims status"] = await claims.scene.status()
    for number, snapshot in enumerate(snapshots()):
        explained = plain_report(explain_report(snapshot, Layout((), {}, ())))
        leases = [plain_report(report) for report in lease_reports(snapshot)]
        found[f"snapshot {number}"] = {**explained, "leases": leases}
    snapshot, node_usage = node()
    found["usage"] = plain_report(usage_report(snapshot, node_usage, RULES))
    found["pod usage"] = plain_report(pod_report(snapshot, node_usage, RULES, pod(ALICE)))
    return found


def steady(value: Any, folder: str, name: str = "") -> Any:  # noqa: ANN401 - any JSON
    """Return a value without what differs from run to run."""
    match value:
        case dict():
            return {key: steady(entry, folder, key) for key, entry in value.items()}
        case list():
            return [steady(entry, folder) for entry in value]
        case _ if value is not None and name in _CHANGING:
            return type(value).__name__
        case str():
            return _TIME.sub("TIME", value.replace(folder, "FOLDER").replace(gethostname(), "HOST"))
    return value


def differences(recorded: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:  # noqa: ANN401
    """Yield what was recorded and is gone, or has another value; fields may be new."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name, value in recorded.items():
            yield from differences(value, now.get(name, "no field"), f"{place}.{name}")
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for number, (value, other) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(value, other, f"{place}[{number}]")
    elif recorded != now:
        yield place, recorded, now


async def test_json_is_what_it_was(tmp_path: Path) -> None:
    """Every field that was recorded has its name, its place and its value."""
    for name in ("api", "dra"):
        await anyio.Path(tmp_path / name).mkdir()
    now = json.loads(msgspec.json.encode(await served(tmp_path)))
    now = steady(now, str(tmp_path))
    for place, recorded, found in differences(json.loads(RECORDED.read_bytes()), now):
        pytest.fail(f"{place}: {found!r} in place of {recorded!r}")
