"""The daemon as a process: started, operated, reloaded and stopped as an operator does."""

import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio.abc import Process

from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.rigs.agent import METAGPU, QUICK
from tests.rigs.mgctl import require_built
from tests.rigs.nvml_library import NvmlLibrary

pytestmark = pytest.mark.long

METAGPU_ITSELF: Final = ("-m", "metagpu")
IMPATIENT: Final = (
    "-c",
    (
        "from metagpu.cli.metagpu import main\n"
        "from metagpu.nvml.driver import NvmlDriver, NvmlTiming\n"
        "NvmlDriver.__init__.__defaults__ = None, 1.0, NvmlTiming(); exit(main())"
    ),
)
"""The same, but what NVML does not answer within a second is given up, not within five."""
PATIENT: Final = (IMPATIENT[0], IMPATIENT[1].replace("1.0", "600.0"))
"""The same, but nothing is given up."""


@dataclass
class Daemon:
    """A running `metagpu run --simulate` and the kubelet it serves."""

    process: Process
    folder: Path
    kubelet: SimKubelet

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run another metagpu command against the daemon; return its exit status and output."""
        name, *rest = arguments
        done = await anyio.run_process(
            [sys.executable, "-m", "metagpu", name, "--run-dir", str(self.folder), *rest],
            check=False,
        )
        return done.returncode, (done.stdout or done.stderr).decode()

    async def until(self, allocatable: int) -> None:
        """Wait until the kubelet has this number of healthy shares."""
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable().get(METAGPU, 0) == allocatable
        )

    async def logged(self, text: str) -> None:
        """Read the daemon's log until a line has this text."""
        assert self.process.stderr is not None
        seen = b""
        with anyio.fail_after(30):
            while text not in seen.decode():
                seen += await self.process.stderr.receive()

    async def stop(self) -> int:
        """Stop the daemon by SIGTERM; return its exit status."""
        self.process.terminate()
        with anyio.fail_after(30):
            return await self.process.wait()


@asynccontextmanager
async def daemon(
    folder: Path,
    config: str = QUICK,
    *more: str,
    program: Sequence[str] = METAGPU_ITSELF,
    launcher: Sequence[str] = (),
    library: NvmlLibrary | None = None,
    simulate: bool = True,
) -> AsyncIterator[Daemon]:
    """Run the daemon on two simulated GPUs while the block lasts.

    Args:
        folder: the daemon's folder, and the kubelet's.
        config: the configuration, as text.
        more: further options.
        program: the program and its first arguments.
        launcher: a command that starts the program, such as setpriv with its options.
        library: the machine's NVML library, in place of simulated GPUs.
        simulate: whether GPUs are simulated, where no library is given.
    """
    await anyio.Path(folder / "metagpu.yaml").write_text(config)
    kubelet = SimKubelet(folder / "dp", pod_resources=folder / "pr.sock")

    async with (
        kubelet.running(),
        await anyio.open_process(
            [
                *launcher,
                *command_line(folder, program, simulate=simulate and library is None),
                *more,
            ],
            env=None if library is None else library.environment,
        ) as process,
    ):
        try:
            yield Daemon(process, folder, kubelet)
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def next_daemon(folder: Path) -> AsyncIterator[Process]:
    """Run another daemon in the folder of one that has ended, while the block lasts."""
    async with await anyio.open_process(command_line(folder)) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()  # or a failed test waits for its end


def command_line(
    folder: Path, program: Sequence[str] = METAGPU_ITSELF, *, simulate: bool = True
) -> list[str]:
    """Return the command that serves the simulated node in a folder, or the machine's own."""
    places = {
        "--config": folder / "metagpu.yaml",
        "--run-dir": folder,
        "--kubelet-root": folder,
        "--kubelet-dir": folder / "dp",
        "--pod-resources": folder / "pr.sock",
    }
    options = [str(part) for option in places.items() for part in option]
    return [
        sys.executable,
        *program,
        "run",
        *(("--simulate", "a100-40gb:2") if simulate else ()),
        *options,
    ]


async def test_serves_until_sigterm(tmp_path: Path) -> None:
    """SIGTERM ends the daemon with status 0, with nothing allocatable and no socket left."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)

        assert await live_daemon.stop() == 0

        await live_daemon.until(0)

    left = {path.name for path in (tmp_path / "dp").iterdir()} - {"kubelet_internal_checkpoint"}
    assert left == {"kubelet.sock"}
    assert not (tmp_path / "metagpu.sock").exists()


OPEN_MASK: Final = (
    "-c",
    "import os; from metagpu.cli.metagpu import main; os.umask(0); exit(main())",
)
"""The daemon, started by a program that leaves all folders open to all."""


async def test_folders_are_closed_to_others(tmp_path: Path) -> None:
    """A folder that the daemon makes is not writable by others, whatever mask it starts with."""
    pods = tmp_path / "made" / "pods"
    async with daemon(tmp_path, QUICK, "--pod-dir", str(pods), program=OPEN_MASK) as live_daemon:
        await live_daemon.until(20)

    for folder in (pods, pods.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


async def test_the_node_has_the_name_that_kubernetes_knows(tmp_path: Path) -> None:
    """`mgctl` shows the name of `--node-name`, in a pod the machine's is the pod's own."""
    async with daemon(tmp_path, QUICK, "--node-name", "gpu-7") as live_daemon:
        await live_daemon.until(20)
        command = [sys.executable, "-m", "metagpu.cli.mgctl", "get", "devices", "-o", "json"]
        done = await anyio.run_process([*command, "--run-dir", str(tmp_path)])

    assert json.loads(done.stdout)["node"] == "gpu-7"


async def test_double_reload_keeps_one_stream(tmp_path: Path) -> None:
    """Two SIGHUPs at once leave exactly one stream, and not one message on it (case 9)."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        lists = live_daemon.kubelet.lists[METAGPU]  # a slow start adds an empty one
        os.kill(live_daemon.process.pid, signal.SIGHUP)
        os.kill(live_daemon.process.pid, signal.SIGHUP)
        await live_daemon.logged("configuration applied")

        assert live_daemon.kubelet.open_streams[METAGPU] == 1
        assert live_daemon.kubelet.lists[METAGPU] == lists

        await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK.replace("10}", "30}"))
        os.kill(live_daemon.process.pid, signal.SIGHUP)
        await live_daemon.until(60)

        assert live_daemon.kubelet.registrations[METAGPU] == 1


async def test_bad_reload_is_logged_and_ignored(tmp_path: Path) -> None:
    """A wrong file at SIGHUP is logged with its line, and the node continues unchanged."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        await anyio.Path(tmp_path / "metagpu.yaml").write_text("version: metagpu/v1\npool: []\n")
        os.kill(live_daemon.process.pid, signal.SIGHUP)
        await live_daemon.logged("metagpu.yaml: 2: pool: unknown key")

        assert live_daemon.kubelet.open_streams[METAGPU] == 1


BLOCKED: Final = (
    "-c",
    """\
import time
from metagpu.agent.agent import Agent
from metagpu.cli.metagpu import main
async def reload(agent): time.sleep(0.2)
Agent.reload = reload
exit(main())
""",
)
"""The daemon with a reload that blocks its event loop."""


async def test_a_blocked_event_loop_is_logged(tmp_path: Path) -> None:
    """A turn of 0.2 s of the daemon is a line of its log."""
    async with daemon(tmp_path, program=BLOCKED) as live_daemon:
        await live_daemon.until(20)
        os.kill(live_daemon.process.pid, signal.SIGHUP)
        await live_daemon.logged("event loop blocked")


async def test_operator_commands(tmp_path: Path) -> None:
    """`sim` breaks a GPU, `status` shows reason and time, `acknowledge` is answered."""
    # No device check beside the events: a check at that moment finds the GPU lost before its XID.
    config = QUICK.replace("100ms", "1h")

    async with daemon(tmp_path, config) as live_daemon:
        await live_daemon.until(20)

        assert await live_daemon.command("sim", "xid", "0", "79") == (0, "XID 79 on GPU 0\n")

        await live_daemon.until(10)
        status, output = await live_daemon.command("status", "--json")
        [broken] = [gpu for gpu in json.loads(output)["gpus"] if not gpu["healthy"]]

        assert status == 0
        assert broken["reason"] == "XID 79: GPU has fallen off the bus"
        assert broken["since"].startswith("20")

        status, output = await live_daemon.command("acknowledge", "0")

        assert (status, "lost" in output) == (1, True)

        await live_daemon.command("sim", "reset", "0")
        status, output = await live_daemon.command("acknowledge", "0")

        assert (status, "is back in service" in output) == (0, True)

        await live_daemon.until(20)
        status, output = await live_daemon.command("acknowledge", "7")

        assert (status, output) == (1, "metagpu: there is no GPU '7' here; there are: 0, 1\n")


async def test_cordoned_and_uncordoned(tmp_path: Path) -> None:
    """`cordon` takes the free shares of a GPU away until `uncordon`; `status` says why."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        status, output = await live_daemon.command("cordon", "1", "--reason", "fan")
        assert status == 0
        assert output.endswith("is cordoned; 0 shares are still in use\n")
        await live_daemon.until(10)

        status, output = await live_daemon.command("status", "--json")
        cordons = [gpu["cordon"] for gpu in json.loads(output)["gpus"]]
        assert cordons[0] is None
        assert cordons[1]["reason"] == "fan"

        status, output = await live_daemon.command("uncordon", "1")
        assert (status, "gives new shares again" in output) == (0, True)
        await live_daemon.until(20)
        status, output = await live_daemon.command("uncordon", "1")
        assert (status, "is not cordoned" in output) == (1, True)


async def test_configuration_too_large_for_the_node_is_one_line(tmp_path: Path) -> None:
    """A list that this node's GPUs make too long ends the start with one line and status 1."""
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK.replace("10}", "40000}"))
    done = await anyio.run_process(command_line(tmp_path), check=False)

    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"metagpu: {tmp_path}/metagpu.yaml: {METAGPU} would have 80000 shares")


async def test_second_daemon_is_refused(tmp_path: Path) -> None:
    """A second daemon on the same node ends with an error and changes nothing."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        done = await anyio.run_process(command_line(tmp_path), check=False)

        assert done.returncode == 1
        assert "another metagpu runs here already" in done.stderr.decode()
        assert live_daemon.kubelet.registrations[METAGPU] == 1


async def test_second_daemon_with_a_run_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    """A second daemon on the same kubelet ends with an error, wherever its run folder is."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        command = [*command_line(tmp_path), "--run-dir", str(tmp_path / "other")]
        done = await anyio.run_process(command, check=False)

        assert done.returncode == 1
        assert "another metagpu serves the kubelet of" in done.stderr.decode()
        assert live_daemon.kubelet.registrations[METAGPU] == 1


async def test_killed_daemon_starts_again(tmp_path: Path) -> None:
    """After SIGKILL, which leaves sockets, the next daemon serves normally and removes them."""

    def sockets() -> list[Path]:
        return list(tmp_path.rglob("metagpu-*.sock"))

    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        live_daemon.process.kill()
        await live_daemon.until(0)
        left = sockets()
        assert left

        async with next_daemon(tmp_path) as again:
            await live_daemon.until(20)
            with anyio.fail_after(30):
                while {*left} & {*sockets()}:  # noqa: ASYNC110 - no event
                    await anyio.sleep(0.01)
            assert sockets()
            again.terminate()
            assert await again.wait() == 0


async def test_hanging_nvml_does_not_keep_it_alive(tmp_path: Path) -> None:
    """A GPU whose driver hangs for an hour does not keep the daemon from ending."""
    async with daemon(tmp_path, program=IMPATIENT) as live_daemon:
        await live_daemon.until(20)
        await live_daemon.command("sim", "hang", "0", "1h")
        await live_daemon.until(10)

        assert await live_daemon.stop() == 0


async def test_a_plan_is_computed_by_the_daemon(tmp_path: Path) -> None:
    """`plan` compares with the daemon's configuration, and changes nothing."""
    new = tmp_path / "new.yaml"
    await anyio.Path(new).write_text(QUICK.replace("10}", "30}"))

    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        lists = live_daemon.kubelet.lists[METAGPU]  # a slow start adds an empty one
        status, output = await live_daemon.command("plan", "--config", str(new), "--json")
        _, drawn = await live_daemon.command("plan", "--config", str(new))
        broken = await live_daemon.command("plan", "--config", str(tmp_path / "none.yaml"))

        assert status == 0
        assert json.loads(output)["resources"][METAGPU] == {
            "change": "changed",
            "before": 20,
            "after": 60,
            "backendBefore": "fraction",
            "backendAfter": "fraction",
        }
        assert "20 -> 60" in drawn
        assert broken == (
            1,
            f"metagpu: {tmp_path}/none.yaml: cannot be read: No such file or directory\n",
        )
        assert live_daemon.kubelet.lists[METAGPU] == lists


async def test_without_an_api_server_its_library_is_not_loaded(tmp_path: Path) -> None:
    """The daemon does not load the API client where no API server is configured."""
    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        maps = await anyio.Path(f"/proc/{live_daemon.process.pid}/maps").read_text()
        code, output = await live_daemon.command("status", "--json")

    assert "aiohttp" not in maps
    assert code == 0
    assert json.loads(output)["cluster"] is None


async def test_joins_its_cluster_and_leaves_it(tmp_path: Path) -> None:
    """The label's profile is offered and reported; `cluster leave` removes the node's labels."""
    server = SimApiServer()
    server.add_node("gpu-1", {"metagpu.io/config": "five"})
    five = QUICK.replace("sharesPerGpu: 10", "sharesPerGpu: 5")
    server.configure("kube-system", "metagpu", {"five": five})
    server.denied.append(("PATCH", "/status"))

    async with server.running():
        options = (
            *("--node-name", "gpu-1"),
            *("--kubeconfig", str(server.kubeconfig(tmp_path))),
            *("--config-map", "kube-system/metagpu"),
            "--remove-labels-on-exit",
        )
        async with daemon(tmp_path, QUICK, *options) as live_daemon:
            await live_daemon.until(10)
            await server.until(lambda: server.labels("gpu-1").get("nvidia.com/gpu.count") == "2")
            await server.until(lambda: any("/status" in each.target for each in server.requests))
            code, output = await live_daemon.command("status")
            assert code == 0
            assert "API server, condition: the API server does not allow it" in output

            assert await live_daemon.stop() == 0
        assert dict(server.labels("gpu-1")) == {"metagpu.io/config": "five"}


async def test_mgctl_in_containers_outlives_the_daemon(tmp_path: Path) -> None:
    """After SIGKILL the program stays in the containers' folder; the next daemon answers it."""
    require_built()
    program, refused = tmp_path / "pod" / "mgctl", "answers containers of pods alone"
    env = {"METAGPU_SOCKET": str(tmp_path / "pod" / "mgctl.sock")}

    async def mgctl_error() -> str:
        done = await anyio.run_process([program, "get", "pods"], env=env, check=False)
        return done.stderr.decode()

    async def answered() -> None:
        """Wait until the daemon answers: its socket comes beside the first list, not before it."""
        with anyio.fail_after(30):
            while refused not in await mgctl_error():
                pass

    async with daemon(tmp_path) as live_daemon:
        await live_daemon.until(20)
        await answered()
        live_daemon.process.kill()
        await live_daemon.process.wait()
        assert "Connection refused" in await mgctl_error()

        async with next_daemon(tmp_path) as again:
            await live_daemon.until(20)
            await answered()
            again.terminate()
            await again.wait()
        assert "there is no " in await mgctl_error()


async def test_faults_and_cordons_outlive_the_daemon_and_end_with_a_reboot(tmp_path: Path) -> None:
    """After kill -9 a GPU is out for the same reason since the same time, and one is cordoned."""
    node = tmp_path / "node.yaml"
    node.write_text('driver: "550.54"\ngpus: [{model: a100-40gb, count: 2}]', encoding="utf-8")
    simulated = ("--simulate", str(node))

    async def faults(own_daemon: Daemon) -> list[object]:
        gpu, other = json.loads((await own_daemon.command("status", "--json"))[1])["gpus"]
        return [gpu["healthy"], gpu["reason"], gpu["since"], other["healthy"], other["cordon"]]

    async with daemon(tmp_path, QUICK, *simulated) as live_daemon:
        await live_daemon.until(20)
        await live_daemon.command("sim", "xid", "0", "95")
        await live_daemon.until(10)
        await live_daemon.command("cordon", "1", "--reason", "fan")
        await live_daemon.until(0)
        before = await faults(live_daemon)
        live_daemon.process.kill()
        await live_daemon.process.wait()
    assert not before[0]

    async with daemon(tmp_path, QUICK, *simulated) as live_daemon:
        await live_daemon.logged("resource registered")
        assert await faults(live_daemon) == before
        assert await live_daemon.stop() == 0

    note = tmp_path / "faults.json"
    written = json.loads(note.read_text(encoding="utf-8"))
    note.write_text(json.dumps({**written, "boot": "another"}), encoding="utf-8")
    async with daemon(tmp_path, QUICK, *simulated) as live_daemon:
        await live_daemon.until(20)
