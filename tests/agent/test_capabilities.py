"""The daemon with the capabilities that its configuration needs, and without."""

import json
import os
from pathlib import Path
from shutil import which

import pytest

from metagpu.sim.kubelet.pods import SimContainer, SimPod
from tests.agent.test_daemon import daemon
from tests.rigs.agent import METAGPU, QUICK
from tests.rigs.privileges import with_only

KILL = QUICK.replace("name: all", "name: all\n    memoryEnforcement: {policy: kill}")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives capabilities up"),
    pytest.mark.skipif(which("setpriv") is None, reason="setpriv of util-linux is missing"),
]


async def test_fractions_need_no_capability(tmp_path: Path) -> None:
    """Root without any capability serves fractions, and lacks nothing."""
    async with daemon(tmp_path, launcher=with_only()) as live_daemon:
        await live_daemon.until(20)
        await live_daemon.kubelet.admit(
            SimPod("alice", containers=(SimContainer("main", {METAGPU: 5}),))
        )
        status, answer = await live_daemon.command("status", "--json")

        assert status == 0
        privileges = json.loads(answer)["privileges"]
        assert not any(each["held"] or each["neededFor"] for each in privileges.values())
        assert await live_daemon.stop() == 0


async def test_a_missing_capability_is_told(tmp_path: Path) -> None:
    """A feature without its capability is a warning at the start, and in the status."""
    async with daemon(tmp_path, KILL, launcher=with_only("kill")) as live_daemon:
        await live_daemon.logged("the driver's own memory limits (pool all)")
        await live_daemon.until(20)
        _, answer = await live_daemon.command("status", "--json")

        privileges = json.loads(answer)["privileges"]
        assert privileges["KILL"]["held"]
        assert not privileges["SYS_ADMIN"]["held"]
        assert privileges["SYS_ADMIN"]["neededFor"]
