"""`mgctl` in containers: the real program, a real daemon's socket, real processes.

Only what makes a process one of a container, its cgroup, is a folder of the test's.
"""

import json
import os
import pty
import re
import shutil
import signal
import sys
import termios
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio.abc import Process
from msgspec.structs import replace

from metagpu import __version__
from metagpu.core.contracts.host import Container
from metagpu.core.grants.injection import POD_SOCKET_NAME
from metagpu.core.model.gpu import MIB
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.shares import Holder
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.core.usage.report import RequestingPod
from metagpu.display.options import WIDE_FORMATS as FORMATS
from metagpu.display.table import CLEAR_SCREEN
from metagpu.display.usage import KINDS
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.plugins.http.rig import exchanged
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work
from tests.rigs.host import running
from tests.rigs.mgctl import PROGRAM, Pods, require_built, wait_ended
from tests.rigs.waiting import becomes, until

ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Skip all where the program is not built from this source."""
    require_built()


@dataclass
class Node(Pods):
    """A node with two pods, each with a process on GPU 0 that the other must not see."""

    scene: Scene | None = None
    alices: Process | None = None
    bobs: Process | None = None

    def use(self, process: Process, mib: int) -> None:
        """Start a process that uses so much memory of GPU 0."""
        assert self.scene
        node = self.scene.node
        node.start_process(node.gpu(0), SimProcess(process.pid, mib * MIB, sm=20))


@asynccontextmanager
async def node(
    tmp_path: Path,
    config: str = QUICK,
    *,
    has_socket: bool = True,
    web: ListenAddress | None = None,
) -> AsyncIterator[Node]:
    """Serve a node while the block lasts: Alice holds 3 shares, Bob 2."""
    machine, folder = SimHost(tmp_path), tmp_path / "pod"
    async with (
        agent_at_work(
            tmp_path, config=config, host=machine.host, pod_dir=folder, web_address=web
        ) as scene,
        running("sleep", "60") as alices,
        running("sleep", "61") as bobs,
        anyio.create_task_group() as group,
    ):
        await scene.until(20, 20)
        if has_socket:
            await until(anyio.Path(folder / POD_SOCKET_NAME).exists)
        for name, shares in (("alice", 3), ("bob", 2)):
            await scene.kubelet.admit(SimPod.single(name, {METAGPU: shares}))
        await scene.wait_holders()
        live_node = Node(machine, folder, group, scene=scene, alices=alices, bobs=bobs)
        for process, holder, mib in ((alices, ALICE, 1000), (bobs, BOB, 777)):
            machine.add_container_process(process.pid, holder)
            live_node.use(process, mib)
        yield live_node


def pids_of(answer: Any) -> list[int]:  # noqa: ANN401 - JSON
    """List the pids in an answer of `get processes`."""
    parts = [part for container in answer["containers"] for part in container["gpus"]]
    return [process["pid"] for part in parts for process in part["processes"]]


# --- own data ------------------------------------------------------------------------------------


async def test_a_container_sees_its_own_processes(tmp_path: Path) -> None:
    """In a pod, `get processes` lists the pod's own, with MetaGPU's columns, and no neighbour's."""
    async with node(tmp_path) as live_node:
        result = await live_node.mgctl(ALICE, "get", "processes")

    assert (result.status, result.err) == (0, "")
    head, _, row, _, total = (line.split() for line in result.out.splitlines())
    assert head == ["POD", "NAMESPACE", "GPU", "NODE", "LOAD", "MEMORY", "PID", "CMD", "SHARES"]
    assert row[:3] == ["alice", "default", "0"]
    assert row[5:] == [
        "1000/12288",
        "MiB",
        str(live_node.alices and live_node.alices.pid),
        "sleep",
        "3",
    ]
    assert total == ["total", "1000", "MiB", "3"]
    assert "bob" not in result.out


@pytest.mark.parametrize("form", FORMATS)
async def test_no_output_shows_anything_of_a_neighbour(tmp_path: Path, form: str) -> None:
    """No output has names, pids, memory or shares of another pod."""
    async with node(tmp_path) as live_node:
        result = {kind: await live_node.mgctl(ALICE, "get", kind, "-o", form) for kind in KINDS}
        result["top"] = await live_node.mgctl(ALICE, "top", "-o", form)

    assert {each.status for each in result.values()} == {0}
    assert live_node.bobs
    for leak in (
        "bob",
        "777",
        "sleep 61",
        f"pid: {live_node.bobs.pid}",
        f'pid": {live_node.bobs.pid}',
    ):
        assert not any(re.search(rf"\b{leak}\b", each.out) for each in result.values())
    if form in {"json", "yaml"}:
        answers = [yaml.safe_load(each.out) for each in result.values()]  # JSON is YAML
        assert all(each["node"] for each in answers)


async def test_each_sees_itself_at_the_same_time(tmp_path: Path) -> None:
    """Two pods that ask at once, and share one usage collection, each get their own."""
    async with node(tmp_path) as live_node:
        answers: dict[Holder, Any] = {}

        async def ask(holder: Holder) -> None:
            answers[holder] = json.loads(
                (await live_node.mgctl(holder, "get", "p", "-o", "json")).out
            )

        async with anyio.create_task_group() as group:
            for holder in (ALICE, BOB):
                group.start_soon(ask, holder)

    assert live_node.alices
    assert live_node.bobs
    assert (pids_of(answers[ALICE]), pids_of(answers[BOB])) == (
        [live_node.alices.pid],
        [live_node.bobs.pid],
    )


async def test_the_page_of_a_pod_has_nothing_of_others(tmp_path: Path) -> None:
    """`mgctl web` of Alice's container serves her own part, whoever else is on her GPU.

    Events are hers and those of her GPU's own health, and its fault has its time.
    """
    web = [sys.executable, "-m", "metagpu.cli.mgctl", "web", "--address", "127.0.0.1:0"]
    address = ListenAddress("127.0.0.1", 0)
    async with node(tmp_path, web=address) as live_node, live_node.started(ALICE, *web) as process:
        assert live_node.scene
        machine, recent = live_node.scene.node, live_node.scene.agent.recent_events
        assert recent
        machine.raise_xid(machine.gpu(1), 48)  # of a GPU that Alice holds nothing of
        machine.raise_xid(machine.gpu(0), 48)
        reasons = Counter[str]()

        def have_come() -> bool:
            reasons.clear()
            reasons.update(each.reason for each in recent.report())
            return reasons["GPUUnhealthy"] == reasons["GPUSharesGranted"] == 2

        await becomes(have_come)
        since = live_node.scene.agent.registry.snapshot.gpus[machine.gpu(0).id].verdict.since
        assert process.stdout is not None
        with anyio.fail_after(30):
            line = (await process.stdout.receive()).decode()
        assert line.endswith("/ shows the GPUs of this pod; Ctrl-C ends it\n")
        port = int(line.split("/")[2].rpartition(":")[2])
        request = b"GET /api/v1/view HTTP/1.1\r\nHost: %b\r\n\r\n"
        answer = await exchanged(port, request % b"localhost:8400")
        assert (await exchanged(port, request % b"proxy.example")).status == 403
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(30):
            assert await process.wait() == 130

    view = json.loads(answer.body)
    [shown] = view["nodes"]
    assert (view["kind"], shown["pod"], shown["problem"]) == ("pod", "default/alice", "")
    [faulty] = shown["status"]["gpus"]
    assert (faulty["healthy"], faulty["since"]) == (False, iso_time(since))
    assert {(each["reason"], each["gpu"], each["node"]) for each in view["events"]} == {
        ("GPUSharesGranted", 0, shown["name"]),
        ("GPUUnhealthy", 0, shown["name"]),
    }
    [gpu] = shown["usage"]["gpus"]
    assert (gpu["usedMiB"], [share["held"] for share in gpu["shares"]]) == (1000, [3])
    [part] = shown["usage"]["containers"][0]["gpus"]
    assert (part["usedMiB"], part["limitMiB"], part["processes"]) == (1000, 12614, 1)
    assert [lease["holder"] for lease in shown["status"]["leases"]] == ["default/alice (main)"]
    assert shown["status"]["gpus"][0]["shares"] == {METAGPU: {"capacity": 10}}
    assert b"bob" not in answer.body


async def test_a_pod_of_a_gpu_that_is_lost_still_sees_it(tmp_path: Path) -> None:
    """A GPU off the bus has no readable processes: its pod keeps its part, and use is unknown."""
    async with node(tmp_path) as live_node:
        assert live_node.scene
        machine = live_node.scene.node
        machine.raise_xid(machine.gpu(0), 79)
        await live_node.scene.until(20, 10)
        gpus = json.loads((await live_node.mgctl(ALICE, "get", "devices", "-o", "json")).out)[
            "gpus"
        ]
        pods = (await live_node.mgctl(ALICE, "get", "pods")).out

    assert [(gpu["index"], gpu["healthy"], gpu["usedMiB"]) for gpu in gpus] == [(0, False, None)]
    assert "?/12288 MiB" in pods
    assert "bob" not in pods


async def test_a_request_for_other_pods_is_misuse(tmp_path: Path) -> None:
    """No command reads other pods; the answer is status 2 and one line."""
    async with node(tmp_path) as live_node:
        for arguments in (
            ("get", "pods", "bob"),
            ("get", "pods", "-n", "default", "bob"),
            ("get", "processes", "--pod=bob"),
            ("--token", "l0", "get", "processes"),
        ):
            result = await live_node.mgctl(ALICE, *arguments)

            assert (result.status, result.out) == (2, ""), result.err
            assert result.err.startswith("mgctl: ")
            assert result.err.count("\n") == 1


async def test_an_unknown_field_has_a_reason(tmp_path: Path) -> None:
    """A field that no row has is a failure with a reason, as on the node."""
    async with node(tmp_path) as live_node:
        words = "get", "processes", "--sort-by", "nothing", "-o", "json"
        result = await live_node.mgctl(ALICE, *words)

    assert (result.status, result.out, json.loads(result.err)["reason"]) == (1, "", "unknown_field")


async def test_watching_ends_with_the_watcher(tmp_path: Path) -> None:
    """`-w` with JSON is a line each second, and ends with the program."""
    async with (
        node(tmp_path) as live_node,
        live_node.started(ALICE, PROGRAM, "get", "processes", "-w", "-o", "json") as process,
    ):
        assert process.stdout
        lines = b""
        with anyio.fail_after(30):
            while lines.count(b"\n") < 2:
                lines += await process.stdout.receive()
        assert live_node.alices
        first_two = lines.splitlines()[:2]
        assert [pids_of(json.loads(line)) for line in first_two] == [[live_node.alices.pid]] * 2

        process.kill()
        assert (await live_node.mgctl(ALICE, "version")).out == f"metagpu {__version__}\n"


async def test_top_is_drawn_once_without_a_terminal(tmp_path: Path) -> None:
    """Without a terminal, `top` prints the pod's own table once, without colours."""
    async with node(tmp_path) as live_node:
        result = await live_node.mgctl(ALICE, "top")

    assert "default/alice (main)" in result.out
    assert "1000/40340 MiB" in result.out
    assert "3/10" in result.out
    assert "\x1b" not in result.out


async def test_help_and_version(tmp_path: Path) -> None:
    """Help and version are the daemon's own texts."""
    async with node(tmp_path) as live_node:
        assert (await live_node.mgctl(ALICE, "--help")).out.startswith("usage: mgctl get")
        assert (await live_node.mgctl(BOB, "version")).out == f"metagpu {__version__}\n"


async def test_metagpus_variables_are_reported_as_unused(tmp_path: Path) -> None:
    """An image with MetaGPU's address and token gets a note that both are unused."""
    async with node(tmp_path) as live_node:
        result = await live_node.mgctl(ALICE, "get", "pods", env={"MG_CTL_TOKEN": "secret"})

    assert result.status == 0
    assert result.err == (
        "mgctl: MG_CTL_ADDR and MG_CTL_TOKEN are MetaGPU's and have no effect here: metagpu "
        "runs on this node and identifies the caller\n"
    )


async def test_a_failure_as_json_has_no_line_beside_it(tmp_path: Path) -> None:
    """A program that reads the object of a failure reads no remark before it."""
    async with node(tmp_path) as live_node:
        env = {"MG_CTL_TOKEN": "secret"}
        result = await live_node.mgctl(
            ALICE, "get", "pods", "-o", "json", "--sort-by", "no", env=env
        )

    assert set(json.loads(result.err)) == {"reason", "error"}


# --- other callers --------------------------------------------------------------------------------


async def test_a_process_outside_pods_gets_nothing(tmp_path: Path) -> None:
    """A process of the host, root's too, is sent to the node's own mgctl."""
    async with node(tmp_path) as live_node:
        result = await live_node.mgctl(None, "get", "processes")

    assert (result.status, result.out) == (1, "")
    assert result.err == (
        "mgctl: this socket answers containers of pods alone; on the node, root asks with "
        "metagpu's own mgctl\n"
    )


async def test_a_process_of_another_pid_namespace_gets_nothing(tmp_path: Path) -> None:
    """A process that the daemon cannot identify gets an error and no data."""
    async with node(tmp_path) as live_node:
        live_node.machine.add_process(1, "")  # a /proc that lacks the caller
        async with live_node.started(
            ALICE, "sh", "-c", f"read x; exec {PROGRAM} get pods"
        ) as process:
            for shown in (live_node.machine.proc / str(process.pid)).iterdir():
                shown.unlink()
            assert process.stdin
            await process.stdin.send(b"\n")
            result = await wait_ended(process)

    assert (result.status, result.out) == (1, "")
    assert "metagpu cannot see who asks" in result.err
    assert "`hostPID: true`" in result.err


async def test_a_container_without_a_name_gets_nothing(tmp_path: Path) -> None:
    """A container whose name is not known yet gets an error and no data."""
    async with node(tmp_path) as live_node:
        for link in live_node.machine.logs.iterdir():
            if link.name.startswith("carol"):
                link.unlink()
        carol = Holder("default", "carol", "main")
        async with live_node.started(
            carol, "sh", "-c", f"read x; exec {PROGRAM} get pods"
        ) as process:
            for link in live_node.machine.logs.glob("carol*"):
                link.unlink()
            for folder in live_node.machine.logs.with_name("pods").glob("*_carol_*"):
                shutil.rmtree(folder)
            assert process.stdin
            await process.stdin.send(b"\n")
            result = await wait_ended(process)

    assert (result.status, result.out) == (1, "")
    assert "does not know this container's name yet" in result.err


async def test_a_name_that_comes_a_moment_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command of a container is answered, although its link comes after its start."""
    async with node(tmp_path) as live_node:
        assert live_node.scene
        host, looks = live_node.scene.agent.pod_server.host, count()
        named = host.holders

        async def late(containers: Collection[Container]) -> Mapping[Container, Holder]:
            return {} if next(looks) < 2 else await named(containers)

        monkeypatch.setattr(host, "holders", late)
        result = await live_node.mgctl(ALICE, "get", "pods")

    assert (result.status, result.err) == (0, "")
    assert next(looks) > 2


async def test_shares_that_the_kubelet_lists_a_moment_later_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command of a container shows what it holds."""
    async with node(tmp_path) as live_node:
        assert live_node.scene
        server, reports = live_node.scene.agent.pod_server, count()
        whole = server.usage_report

        async def late(pod: RequestingPod) -> UsageReport:
            report = await whole(pod)
            return replace(report, containers=[], gpus=[]) if next(reports) < 2 else report

        monkeypatch.setattr(server, "usage_report", late)
        result = await live_node.mgctl(ALICE, "get", "pods", "-o", "json")

    assert [each["pod"] for each in json.loads(result.out)["containers"]] == ["alice"]


async def test_a_pod_without_shares_sees_empty_tables(tmp_path: Path) -> None:
    """A pod without shares that has the folder sees empty tables."""
    async with node(tmp_path) as live_node:
        answers = await live_node.mgctl(
            Holder("default", "carol", "main"), "get", "devices", "-o", "json"
        )

    assert json.loads(answers.out)["gpus"] == []


async def test_mgctl_can_be_switched_off(tmp_path: Path) -> None:
    """Switched off, no grant mounts the folder, and an older pod finds no socket."""
    config = "mgctl: {inPods: false}\n" + QUICK.lstrip()
    async with node(tmp_path, config, has_socket=False) as live_node:
        assert live_node.scene
        options = await live_node.scene.kubelet.admit(SimPod.single("dora", {METAGPU: 1}))
        assert options["main"].mounts == ()
        result = await live_node.mgctl(ALICE, "get", "pods")

    assert result.status == 1
    assert "there is no " in result.err
    assert "or not for containers (`mgctl: {inPods: false}`)" in result.err


# --- mounts ---------------------------------------------------------------------------------------


async def test_every_grant_mounts_mgctl(tmp_path: Path) -> None:
    """A container gets the folder, and the program in its PATH, read-only."""
    async with node(tmp_path) as live_node:
        assert live_node.scene
        options = await live_node.scene.kubelet.admit(SimPod.single("dora", {METAGPU: 1}))

    assert [(m.container_path, m.host_path, m.read_only) for m in options["main"].mounts] == [
        ("/run/metagpu", str(live_node.folder), True),
        ("/usr/local/bin/mgctl", str(live_node.folder / "mgctl"), True),
    ]


async def test_a_folder_that_cannot_be_created_costs_only_mgctl(tmp_path: Path) -> None:
    """Pods get their shares without mounts when the folder cannot be created."""
    (tmp_path / "file").write_text("")
    async with agent_at_work(tmp_path, pod_dir=tmp_path / "file" / "pod") as scene:
        await scene.until(20, 20)
        options = await scene.kubelet.admit(SimPod.single("dora", {METAGPU: 1}))

    assert options["main"].mounts == ()


# --- at a terminal --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("top",), ("get", "pods", "-w")])
async def test_at_a_terminal_tables_are_redrawn(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """At a terminal, `top` and `-w` draw in place, in colours, until the program ends."""
    async with node(tmp_path) as live_node:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 120))
        os.set_blocking(ours, False)
        line = " ".join(arguments)
        async with live_node.started(
            ALICE, "sh", "-c", f"exec {PROGRAM} {line} > {os.ttyname(theirs)}"
        ):
            seen = b""
            with anyio.fail_after(30):
                while seen.count(CLEAR_SCREEN.encode()) < 2:
                    await anyio.wait_readable(ours)
                    seen += os.read(ours, 65536)
        for file in (ours, theirs):
            os.close(file)

    assert b"alice" in seen
    assert b"bob" not in seen
    assert b"\x1b[1m" in seen
