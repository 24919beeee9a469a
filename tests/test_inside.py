"""`mgctl` in containers: the real program, a real daemon's socket, real processes.

Only what makes a process one of a container, its cgroup, is a folder of the test's.
"""

import json
import os
import pty
import re
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio.abc import Process

from metagpu import __version__
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder
from metagpu.sheets import AFRESH
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost
from metagpu.sim.kubelet import Pod
from metagpu.usage_text import FORMATS, KINDS
from tests.agent_rig import METAGPU, QUICK, Scene, agent_at_work
from tests.host_rig import running
from tests.mgctl_rig import PROGRAM, Pods, assert_built, ended

ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Have the program of this source."""
    assert_built()


@dataclass
class Node(Pods):
    """A node with two pods, each with a process on GPU 0; nobody else is told of either's."""

    scene: Scene | None = None
    alices: Process | None = None
    bobs: Process | None = None

    def use(self, process: Process, mib: int) -> None:
        """Let a process use so much of GPU 0."""
        assert self.scene
        node = self.scene.node
        node.add_process(node.gpu(0), SimProcess(process.pid, mib * MIB, sm=20))


@asynccontextmanager
async def node(tmp_path: Path, config: str = QUICK) -> AsyncIterator[Node]:
    """Serve a node while the block lasts: Alice holds 3 shares, Bob 2."""
    machine, folder = SimHost(tmp_path), tmp_path / "pod"
    async with (
        agent_at_work(tmp_path, config=config, host=machine.host, pods=folder) as scene,
        running("sleep", "60") as alices,
        running("sleep", "61") as bobs,
        anyio.create_task_group() as group,
    ):
        await scene.until(20, 20)
        for name, shares in (("alice", 3), ("bob", 2)):
            await scene.kubelet.admit(Pod.single(name, {METAGPU: shares}))
        await scene.told()
        it = Node(machine, folder, group, scene=scene, alices=alices, bobs=bobs)
        for process, holder, mib in ((alices, ALICE, 1000), (bobs, BOB, 777)):
            machine.house(process.pid, holder)
            it.use(process, mib)
        yield it


def pids_of(answer: Any) -> list[int]:  # noqa: ANN401 - JSON
    """List the pids that an answer of `get processes` names."""
    parts = [part for container in answer["containers"] for part in container["gpus"]]
    return [process["pid"] for part in parts for process in part["processes"]]


# --- one's own ------------------------------------------------------------------------------------


async def test_a_container_sees_its_own_processes(tmp_path: Path) -> None:
    """In a pod, `get processes` names the pod's own, with MetaGPU's columns, and no neighbour's."""
    async with node(tmp_path) as it:
        said = await it.mgctl(ALICE, "get", "processes")

    assert (said.status, said.err) == (0, "")
    head, _, row, _, total = (line.split() for line in said.out.splitlines())
    assert head == ["POD", "NS", "DEVICE", "NODE", "GPU", "MEMORY", "PID", "CMD", "REQ"]
    assert row[:3] == ["alice", "default", "0"]
    assert row[5:] == ["1000/12288", "MiB", str(it.alices and it.alices.pid), "sleep", "3"]
    assert total == ["1", "1000", "MiB", "3"]
    assert "bob" not in said.out


@pytest.mark.parametrize("form", FORMATS)
async def test_in_no_form_is_there_anything_of_a_neighbour(tmp_path: Path, form: str) -> None:
    """Whatever is asked, neither names, pids, memory nor shares of another pod are in it."""
    async with node(tmp_path) as it:
        said = {kind: await it.mgctl(ALICE, "get", kind, "-o", form) for kind in KINDS}

    assert {each.status for each in said.values()} == {0}
    assert it.bobs
    for leak in ("bob", "777", "sleep 61", f"pid: {it.bobs.pid}", f'pid": {it.bobs.pid}'):
        assert not any(re.search(rf"\b{leak}\b", each.out) for each in said.values())
    if form in {"json", "yaml"}:
        told = [yaml.safe_load(each.out) for each in said.values()]  # JSON is YAML
        assert all(each["node"] for each in told)


async def test_each_sees_itself_at_the_same_time(tmp_path: Path) -> None:
    """Two pods that ask at once, and share one look, each get their own."""
    async with node(tmp_path) as it:
        told: dict[Holder, Any] = {}

        async def ask(holder: Holder) -> None:
            told[holder] = json.loads((await it.mgctl(holder, "get", "p", "-o", "json")).out)

        async with anyio.create_task_group() as group:
            for holder in (ALICE, BOB):
                group.start_soon(ask, holder)

    assert it.alices
    assert it.bobs
    assert (pids_of(told[ALICE]), pids_of(told[BOB])) == ([it.alices.pid], [it.bobs.pid])


async def test_who_asks_for_others_is_misunderstood(tmp_path: Path) -> None:
    """There are no words for other pods; the answer is status 2 and one line."""
    async with node(tmp_path) as it:
        for arguments in (
            ("get", "pods", "bob"),
            ("get", "pods", "-n", "default", "bob"),
            ("get", "processes", "--pod=bob"),
            ("--token", "l0", "get", "processes"),
        ):
            said = await it.mgctl(ALICE, *arguments)

            assert (said.status, said.out) == (2, "")
            assert said.err.startswith("mgctl: ")
            assert said.err.count("\n") == 1


async def test_watching_ends_with_the_watcher(tmp_path: Path) -> None:
    """`-w` with JSON is a line each second; when the program ends, so does the answering."""
    async with (
        node(tmp_path) as it,
        it.started(ALICE, PROGRAM, "get", "processes", "-w", "-o", "json") as process,
    ):
        assert process.stdout
        lines = b""
        with anyio.fail_after(30):
            while lines.count(b"\n") < 2:
                lines += await process.stdout.receive()
        assert it.alices
        first_two = lines.splitlines()[:2]
        assert [pids_of(json.loads(line)) for line in first_two] == [[it.alices.pid]] * 2

        process.kill()
        assert (await it.mgctl(ALICE, "version")).out == f"metagpu {__version__}\n"


async def test_top_is_drawn_once_where_nobody_can_watch(tmp_path: Path) -> None:
    """Without a terminal, `top` is one picture of one's own, without colours."""
    async with node(tmp_path) as it:
        said = await it.mgctl(ALICE, "top")

    assert "default/alice (main)" in said.out
    assert "1000/40340 MiB" in said.out
    assert "3/10" in said.out
    assert "\x1b" not in said.out


async def test_help_and_version(tmp_path: Path) -> None:
    """Both are the daemon's own words."""
    async with node(tmp_path) as it:
        assert (await it.mgctl(ALICE, "--help")).out.startswith("usage: mgctl get")
        assert (await it.mgctl(BOB, "version")).out == f"metagpu {__version__}\n"


async def test_metagpus_variables_are_told_to_be_needless(tmp_path: Path) -> None:
    """An image that was made for MetaGPU hears that address and token mean nothing any more."""
    async with node(tmp_path) as it:
        said = await it.mgctl(ALICE, "get", "pods", env={"MG_CTL_TOKEN": "secret"})

    assert said.status == 0
    assert said.err == (
        "mgctl: MG_CTL_ADDR and MG_CTL_TOKEN are MetaGPU's and mean nothing here: metagpu is on "
        "this node, and knows who asks\n"
    )


# --- strangers ------------------------------------------------------------------------------------


async def test_who_is_in_no_pod_gets_nothing(tmp_path: Path) -> None:
    """A process of the host, root's too, is sent to the node's own mgctl."""
    async with node(tmp_path) as it:
        said = await it.mgctl(None, "get", "processes")

    assert (said.status, said.out) == (1, "")
    assert said.err == (
        "mgctl: this socket answers containers of pods alone; on the node, root asks with "
        "metagpu's own mgctl\n"
    )


async def test_who_cannot_be_seen_gets_nothing(tmp_path: Path) -> None:
    """From another pid namespace nobody can be told apart, so nobody is answered."""
    async with node(tmp_path) as it:
        it.machine.show(1, "")  # a /proc that lacks the caller
        async with it.started(ALICE, "sh", "-c", f"read x; exec {PROGRAM} get pods") as process:
            for shown in (it.machine.proc / str(process.pid)).iterdir():
                shown.unlink()
            assert process.stdin
            await process.stdin.send(b"\n")
            said = await ended(process)

    assert (said.status, said.out) == (1, "")
    assert "metagpu cannot see who asks" in said.err
    assert "`hostPID: true`" in said.err


async def test_a_container_without_a_name_gets_nothing(tmp_path: Path) -> None:
    """Whose container it is has to be known for certain."""
    async with node(tmp_path) as it:
        for link in it.machine.logs.iterdir():
            if link.name.startswith("carol"):
                link.unlink()
        carol = Holder("default", "carol", "main")
        async with it.started(carol, "sh", "-c", f"read x; exec {PROGRAM} get pods") as process:
            for link in it.machine.logs.glob("carol*"):
                link.unlink()
            assert process.stdin
            await process.stdin.send(b"\n")
            said = await ended(process)

    assert (said.status, said.out) == (1, "")
    assert "does not know this container's name yet" in said.err


async def test_a_pod_without_shares_sees_empty_tables(tmp_path: Path) -> None:
    """Who found the folder by other ways learns about itself, which is nothing."""
    async with node(tmp_path) as it:
        told = await it.mgctl(Holder("default", "carol", "main"), "get", "devices", "-o", "json")

    assert json.loads(told.out)["gpus"] == []


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """Switched off, no grant mounts it, and a pod that has it from before is told."""
    async with node(tmp_path, "mgctl: {inPods: false}\n" + QUICK.lstrip()) as it:
        assert it.scene
        options = await it.scene.kubelet.admit(Pod.single("dora", {METAGPU: 1}))
        assert options["main"].mounts == ()
        said = await it.mgctl(ALICE, "get", "pods")

    assert said.status == 1
    assert said.err == "mgctl: mgctl is switched off on this node: `mgctl: {inPods: false}`\n"


# --- mounts ---------------------------------------------------------------------------------------


async def test_every_grant_mounts_it(tmp_path: Path) -> None:
    """A container gets the folder, and the program where it looks for programs, read-only."""
    async with node(tmp_path) as it:
        assert it.scene
        options = await it.scene.kubelet.admit(Pod.single("dora", {METAGPU: 1}))

    assert [(m.container_path, m.host_path, m.read_only) for m in options["main"].mounts] == [
        ("/run/metagpu", str(it.folder), True),
        ("/usr/local/bin/mgctl", str(it.folder / "mgctl"), True),
    ]


async def test_a_folder_that_cannot_be_made_costs_only_mgctl(tmp_path: Path) -> None:
    """Pods get their shares all the same, without mounts that would keep them from starting."""
    (tmp_path / "file").write_text("")
    async with agent_at_work(tmp_path, pods=tmp_path / "file" / "pod") as scene:
        await scene.until(20, 20)
        options = await scene.kubelet.admit(Pod.single("dora", {METAGPU: 1}))

    assert options["main"].mounts == ()


# --- at a terminal --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("top",), ("get", "pods", "-w")])
async def test_at_a_terminal_it_is_drawn_again_and_again(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """At a terminal, `top` and `-w` draw in place, in colours, until the program ends."""
    async with node(tmp_path) as it:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 120))
        os.set_blocking(ours, False)
        line = " ".join(arguments)
        async with it.started(ALICE, "sh", "-c", f"exec {PROGRAM} {line} > {os.ttyname(theirs)}"):
            seen = b""
            with anyio.fail_after(30):
                while seen.count(AFRESH.encode()) < 2:
                    await anyio.wait_readable(ours)
                    seen += os.read(ours, 65536)
        for file in (ours, theirs):
            os.close(file)

    assert b"alice" in seen
    assert b"bob" not in seen
    assert b"\x1b[1m" in seen
