"""The view of one node, also while NVML hangs."""

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import NodeReports, UsageReport
from metagpu.core.state.facts import GpuFaulted, GpusFound
from metagpu.core.state.registry import Registry
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.web import node as module
from metagpu.plugins.web.node import NodeWeb
from tests.plugins.http.rig import exchanged
from tests.rigs.build import gpu
from tests.rigs.reported import complete
from tests.rigs.waiting import until

REQUEST = b"GET /api/v1/view HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_fault_is_in_the_view_while_nvml_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view waits little for the usage, and then has an older one; its status is of now."""
    monkeypatch.setattr(module, "USAGE_TIMEOUT", 30)
    registry, a, hangs, count = Registry(), gpu(0), False, 0
    registry.apply(GpusFound((a,), at=1))

    async def status() -> StatusReport:
        healthy = registry.snapshot.gpus[a.id].verdict.healthy
        return complete({"gpus": [{"healthy": healthy}]}, StatusReport)

    async def usage() -> UsageReport:
        nonlocal count
        count += 1
        await (anyio.sleep_forever() if hangs else anyio.lowlevel.checkpoint())
        return complete({"at": count}, UsageReport)

    reports = NodeReports(status, usage)
    web = NodeWeb(ListenAddress("127.0.0.1", 0), registry, "gpu-1", reports, tokens=None)

    async def listens() -> bool:
        return web.server.port != 0

    async def node() -> Mapping[str, Any]:
        web.server._view.invalidate()
        view = msgspec.json.decode((await exchanged(web.server.port, REQUEST)).body)
        [found] = view["nodes"]
        [gpu] = found["status"]["gpus"]
        assert "`kubectl metagpu web` lists all that wait" in view["lacking"]
        return {"name": found["name"], "healthy": gpu["healthy"], "at": found["usage"]["at"]}

    async with anyio.create_task_group() as group:
        group.start_soon(web.run)
        await until(listens, deadline=30)
        expected = {"name": "gpu-1", "healthy": True, "at": 1}
        assert await node() == expected
        hangs = True
        monkeypatch.setattr(module, "USAGE_TIMEOUT", 0.01)
        registry.apply(GpuFaulted(a.id, "XID 79", at=5))
        for _ in range(2):
            assert await node() == expected | {"healthy": False}
        assert count == 2
        group.cancel_scope.cancel()
