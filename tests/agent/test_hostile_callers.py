"""Nothing that a pod sends makes the daemon wait: a real daemon, a real hostile process."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import anyio
import pytest

from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_daemon import METAGPU_ITSELF, Daemon, daemon
from tests.rigs.agent import METAGPU, QUICK
from tests.rigs.attack import attacker
from tests.rigs.mgctl import PROGRAM, require_built
from tests.rigs.waiting import becomes, until, within

pytestmark = pytest.mark.long

BEFORE_6_16: Final = (
    "-c",
    (
        "from metagpu.cli.metagpu import main\n"
        "from metagpu.plugins.pod_api.server import PodMgctlServer\n"
        "from metagpu.plugins.pod_api.socket import PodSocketLimits\n"
        "PodMgctlServer.limits = PodSocketLimits(passrights=9999); exit(main())"
    ),
)
"""A daemon that leaves SO_PASSRIGHTS alone, as on a kernel that does not have it."""

MANY: Final = QUICK.replace("sharesPerGpu: 10", "sharesPerGpu: 40")
kernels = pytest.mark.parametrize(
    "program", [METAGPU_ITSELF, BEFORE_6_16], ids=["this kernel", "a kernel before 6.16"]
)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


async def mgctl(socket: Path) -> tuple[int | None, str]:
    """Run `mgctl` in no container; return its exit status and error output."""
    done = await anyio.run_process(
        [PROGRAM, "version"], env={"METAGPU_SOCKET": str(socket)}, check=False
    )
    return done.returncode, done.stderr.decode()


async def admit(live_daemon: Daemon, name: str) -> int:
    """Start a pod: the kubelet gets its answer to Allocate; return the ticks that it took."""
    async with within(lambda: 3000, lambda: f"no answer for {name}") as ticks:
        await live_daemon.kubelet.admit(SimPod.single(name, {METAGPU: 1}))
    return ticks.count


@kernels
@pytest.mark.parametrize("count", [1, 253])
async def test_descriptors_that_linger_delay_nobody(
    tmp_path: Path, program: Sequence[str], count: int
) -> None:
    """Allocate, status and other callers are answered while a close would take a day.

    While another caller calls without an end, an Allocate takes, by the median, at most 50 ms more
    than five times what it takes without an attack, in ticks that a busy machine delays too.
    """
    require_built()
    socket = tmp_path / "pod" / "mgctl.sock"
    async with daemon(tmp_path, MANY, program=program) as live_daemon:
        await live_daemon.until(80)
        await until(anyio.Path(socket).exists)
        before = [await admit(live_daemon, f"early-{number}") for number in range(20)]
        async with attacker("linger", socket, count) as hostile:
            outcome = await hostile.attack()
            assert outcome == "sent" if program is BEFORE_6_16 else outcome in {"sent", "refused"}

            status, error = await mgctl(socket)

            async with attacker("siege", socket, 0) as siege:
                assert await siege.attack() == "sent"
                took = [await admit(live_daemon, f"victim-{number}") for number in range(20)]
                assert median(took) <= 5 + 5 * median(before)
                assert (await live_daemon.command("status"))[0] == 0

    assert (status, "this socket answers containers of pods alone" in error) == (1, True)


async def test_another_user_does_not_reach_the_control_socket(tmp_path: Path) -> None:
    """Descriptors of a user of the host never arrive at root's socket."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        async with attacker("linger", tmp_path / "metagpu.sock", 1) as hostile:
            assert await hostile.attack() == "refused"
            assert (await live_daemon.command("status"))[0] == 0


async def test_the_relay_ends_with_the_daemon(tmp_path: Path) -> None:
    """However the daemon ends, no relay stays behind, not even a stopped one."""
    async with daemon(tmp_path) as live_daemon:
        await until(anyio.Path(tmp_path / "pod" / "mgctl.sock").exists)
        (relay,) = children(live_daemon.process.pid)
        os.kill(relay, signal.SIGSTOP)
        live_daemon.process.kill()
        await becomes(lambda: has_ended(relay))


async def test_without_mgctl_in_pods_there_is_no_socket(tmp_path: Path) -> None:
    """`inPods: false` ends the relay and removes the socket; `true` brings both back."""
    socket, config = anyio.Path(tmp_path / "pod" / "mgctl.sock"), anyio.Path(tmp_path)
    async with daemon(tmp_path, "mgctl: {inPods: false}" + QUICK) as live_daemon:
        await live_daemon.until(20)
        assert not await socket.exists()
        assert children(live_daemon.process.pid) == []

        await (config / "metagpu.yaml").write_text(QUICK)
        live_daemon.process.send_signal(signal.SIGHUP)
        await until(socket.exists)

        await (config / "metagpu.yaml").write_text("mgctl: {inPods: false}" + QUICK)
        live_daemon.process.send_signal(signal.SIGHUP)
        await becomes(lambda: not (tmp_path / "pod" / "mgctl.sock").exists())
        await becomes(lambda: children(live_daemon.process.pid) == [])
