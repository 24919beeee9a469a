"""The daemon as a process: started, steered, reloaded and stopped as an operator would."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process

from metagpu.sim.apiserver import SimApiServer
from metagpu.sim.kubelet import SimKubelet
from tests.agent_rig import METAGPU, QUICK
from tests.mgctl_rig import assert_built

METAGPU_ITSELF: Final = ("-m", "metagpu")
IMPATIENT: Final = (
    "-c",
    "from metagpu import cli, nvml; nvml.Nvml.__init__.__defaults__ = None, 1.0; exit(cli.main())",
)
"""The same, but what NVML does not answer within a second is given up, not within five."""


@dataclass
class Daemon:
    """A running `metagpu run --simulate` and the kubelet it serves."""

    process: Process
    folder: Path
    kubelet: SimKubelet

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run another metagpu command against it; give exit status and output."""
        name, *rest = arguments
        done = await anyio.run_process(
            [sys.executable, "-m", "metagpu", name, "--run-dir", str(self.folder), *rest],
            check=False,
        )
        return done.returncode, (done.stdout or done.stderr).decode()

    async def until(self, allocatable: int) -> None:
        """Wait until the kubelet has so many healthy shares."""
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
        """Ask it to end; give its exit status."""
        self.process.terminate()
        with anyio.fail_after(30):
            return await self.process.wait()


@asynccontextmanager
async def daemon(
    folder: Path, config: str = QUICK, *more: str, program: Sequence[str] = METAGPU_ITSELF
) -> AsyncIterator[Daemon]:
    """Run the daemon on two simulated GPUs while the block lasts; `more` are further options."""
    await anyio.Path(folder / "metagpu.yaml").write_text(config)
    kubelet = SimKubelet(folder / "dp", pod_resources=folder / "pr.sock")

    async with (
        kubelet.running(),
        await anyio.open_process([*command_line(folder, program), *more]) as process,
    ):
        try:
            yield Daemon(process, folder, kubelet)
        finally:
            if process.returncode is None:
                process.kill()


def command_line(folder: Path, program: Sequence[str] = METAGPU_ITSELF) -> list[str]:
    """Give the command that serves the simulated node in a folder."""
    places = {
        "--config": folder / "metagpu.yaml",
        "--run-dir": folder,
        "--kubelet-dir": folder / "dp",
        "--pod-resources": folder / "pr.sock",
    }
    options = [str(part) for option in places.items() for part in option]
    return [sys.executable, *program, "run", "--simulate", "a100-40gb:2", *options]


async def test_serves_until_told_to_stop(tmp_path: Path) -> None:
    """SIGTERM ends it with status 0; nothing is allocatable then and no socket is left."""
    async with daemon(tmp_path) as it:
        await it.until(20)

        assert await it.stop() == 0

        await it.until(0)

    left = {path.name for path in (tmp_path / "dp").iterdir()} - {"kubelet_internal_checkpoint"}
    assert left == {"kubelet.sock"}
    assert not (tmp_path / "metagpu.sock").exists()


async def test_double_reload_keeps_one_stream(tmp_path: Path) -> None:
    """Two SIGHUPs at once leave exactly one stream, and not one message on it (case 9)."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        os.kill(it.process.pid, signal.SIGHUP)
        os.kill(it.process.pid, signal.SIGHUP)
        await it.logged("configuration read")

        assert it.kubelet.open_streams[METAGPU] == 1
        assert it.kubelet.lists[METAGPU] == 1

        await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK.replace("10}", "30}"))
        os.kill(it.process.pid, signal.SIGHUP)
        await it.until(60)

        assert it.kubelet.registrations[METAGPU] == 1


async def test_bad_reload_is_logged_and_ignored(tmp_path: Path) -> None:
    """A broken file at SIGHUP is told with its line, and the node goes on as it was."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        await anyio.Path(tmp_path / "metagpu.yaml").write_text("version: metagpu/v1\npool: []\n")
        os.kill(it.process.pid, signal.SIGHUP)
        await it.logged("metagpu.yaml: 2: pool: unknown key")

        assert it.kubelet.open_streams[METAGPU] == 1


async def test_steered_and_asked(tmp_path: Path) -> None:
    """`sim` breaks a GPU, `status` says so with reason and time, `acknowledge` is answered."""
    # No look beside the events: one at that moment would find the GPU lost before its XID is heard.
    config = QUICK.replace("100ms", "1h")

    async with daemon(tmp_path, config) as it:
        await it.until(20)

        assert await it.command("sim", "xid", "0", "79") == (0, "XID 79 on GPU 0\n")

        await it.until(10)
        status, told = await it.command("status", "--json")
        [broken] = [gpu for gpu in json.loads(told)["gpus"] if not gpu["healthy"]]

        assert status == 0
        assert broken["reason"] == "XID 79: GPU has fallen off the bus"
        assert broken["since"].startswith("20")

        status, told = await it.command("acknowledge", "0")

        assert (status, "lost" in told) == (1, True)

        await it.command("sim", "recover", "0")
        status, told = await it.command("acknowledge", "0")

        assert (status, "is back in service" in told) == (0, True)

        await it.until(20)
        status, told = await it.command("acknowledge", "7")

        assert (status, told) == (1, "metagpu: there is no GPU '7' here; there are: 0, 1\n")


async def test_cordoned_and_uncordoned(tmp_path: Path) -> None:
    """`cordon` takes the free shares of a GPU away until `uncordon`; `status` says why."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        status, told = await it.command("cordon", "1", "--reason", "fan")
        assert status == 0
        assert told.endswith("gives no new shares; held of it now: 0\n")
        await it.until(10)

        status, told = await it.command("status", "--json")
        cordons = [gpu["cordon"] for gpu in json.loads(told)["gpus"]]
        assert cordons[0] is None
        assert cordons[1]["reason"] == "fan"

        status, told = await it.command("uncordon", "1")
        assert (status, "gives new shares again" in told) == (0, True)
        await it.until(20)
        status, told = await it.command("uncordon", "1")
        assert (status, "is not cordoned" in told) == (1, True)


async def test_configuration_too_large_for_the_node_is_one_line(tmp_path: Path) -> None:
    """A list that only this node's GPUs make too long ends the start with one line, status 1."""
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK.replace("10}", "40000}"))
    done = await anyio.run_process(command_line(tmp_path), check=False)

    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"metagpu: {tmp_path}/metagpu.yaml: {METAGPU} would have 80000 shares")


async def test_second_daemon_is_refused(tmp_path: Path) -> None:
    """A second daemon on the same node says that one runs already, and changes nothing."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        done = await anyio.run_process(command_line(tmp_path), check=False)

        assert done.returncode == 1
        assert "another metagpu runs here already" in done.stderr.decode()
        assert it.kubelet.registrations[METAGPU] == 1


async def test_killed_daemon_starts_again(tmp_path: Path) -> None:
    """After SIGKILL, which leaves sockets behind, the next daemon serves as if nothing was."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        it.process.kill()
        await it.until(0)

        async with await anyio.open_process(command_line(tmp_path)) as again:
            await it.until(20)
            again.terminate()


async def test_hanging_nvml_does_not_keep_it_alive(tmp_path: Path) -> None:
    """A GPU whose driver hangs for an hour does not keep the daemon from ending."""
    async with daemon(tmp_path, program=IMPATIENT) as it:
        await it.until(20)
        await it.command("sim", "hang", "0", "1h")
        await it.until(10)

        assert await it.stop() == 0


async def test_a_plan_is_asked_of_the_daemon(tmp_path: Path) -> None:
    """`plan` compares with what runs, over the control socket, and changes nothing."""
    new = tmp_path / "new.yaml"
    await anyio.Path(new).write_text(QUICK.replace("10}", "30}"))

    async with daemon(tmp_path) as it:
        await it.until(20)
        status, told = await it.command("plan", "--config", str(new), "--json")
        _, drawn = await it.command("plan", "--config", str(new))
        broken = await it.command("plan", "--config", str(tmp_path / "none.yaml"))

        assert status == 0
        assert json.loads(told)["resources"][METAGPU] == {
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
        assert it.kubelet.lists[METAGPU] == 1


async def test_without_an_api_server_its_library_is_not_loaded(tmp_path: Path) -> None:
    """The daemon stays small where no API server is configured."""
    async with daemon(tmp_path) as it:
        await it.until(20)
        maps = await anyio.Path(f"/proc/{it.process.pid}/maps").read_text()
        code, told = await it.command("status", "--json")

    assert "aiohttp" not in maps
    assert code == 0
    assert json.loads(told)["cluster"] is None


async def test_joins_its_cluster_and_leaves_it(tmp_path: Path) -> None:
    """The label's profile is offered, the node says so, and takes its labels along if asked to."""
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
        async with daemon(tmp_path, QUICK, *options) as it:
            await it.until(10)
            await server.until(lambda: server.labels("gpu-1").get("nvidia.com/gpu.count") == "2")
            await server.until(lambda: any("/status" in each.what for each in server.requests))
            code, told = await it.command("status")
            assert code == 0
            assert "API server, condition: the API server does not allow it" in told

            assert await it.stop() == 0
        assert dict(server.labels("gpu-1")) == {"metagpu.io/config": "five"}


async def test_mgctl_in_containers_outlives_the_daemon(tmp_path: Path) -> None:
    """After SIGKILL the program stays where containers see it; the next daemon answers it."""
    assert_built()
    program, refused = tmp_path / "pod" / "mgctl", "answers containers of pods alone"
    env = {"METAGPU_SOCKET": str(tmp_path / "pod" / "mgctl.sock")}

    async def said() -> str:
        done = await anyio.run_process([program, "get", "pods"], env=env, check=False)
        return done.stderr.decode()

    async with daemon(tmp_path) as it:
        await it.until(20)
        assert refused in await said()
        it.process.kill()
        await it.process.wait()
        assert "Connection refused" in await said()

        async with await anyio.open_process(command_line(tmp_path)) as again:
            await it.until(20)
            assert refused in await said()
            again.terminate()
            await again.wait()
        assert "there is no " in await said()
