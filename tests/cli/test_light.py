"""Start-up cost of short commands: no library of the daemon is loaded."""

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import to_thread

from metagpu.plugins.control.socket import control_server
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.rigs.nvml_library import NvmlLibrary

CLUSTER_LIBRARIES: Final = {
    *("grpclib", "h2", "hpack", "betterproto2"),
    *("kubernetes_asyncio", "aiohttp", "prometheus_client", "pynvml", "rich"),
}
"""Never loaded by a command that serves nothing."""
EVENT_LOOP: Final = {"asyncio", "anyio", "structlog", "subprocess", "ssl", "email", "yaml"}
"""Not loaded by a command that asks the daemon, or only prints its help."""
PROGRAM: Final = """
import sys
from {module} import main
try:
    status = main({arguments!r})
except SystemExit as end:
    status = end.code
print(*(name for name in sys.modules if "." not in name), file=sys.stderr)
print(len(sys.modules), file=sys.stderr)
sys.exit(status)
"""
DAEMON: Final = """
import os, sys
from metagpu.cli.metagpu import main
end = os._exit
def note(status):
    with open({modules!r}, "w") as file:
        file.write(" ".join(sys.modules))
    end(status)
os._exit = note
note(main({arguments!r}))
"""
NOT_OF_FRACTIONS: Final = {
    *("metagpu.backends.mig", "metagpu.backends.mps", "metagpu.backends.timeslice"),
    *("metagpu.backends.whole", "metagpu.plugins.cluster.cluster", "metagpu.plugins.cluster.watch"),
    *("metagpu.plugins.metrics.exporter", "metagpu.sim", "metagpu.sim.machine", "metagpu.testing"),
}
USAGE: Final = {
    "version": "1",
    "node": "n",
    "at": 0.0,
    "gpus": [],
    "containers": [],
    "unauthorized": [],
    "enforcement": None,
    "warnings": [],
}


def loaded(module: str, *arguments: str) -> tuple[set[str], int]:
    """Run a command in a fresh interpreter; return its top-level modules, and how many in all."""
    program = PROGRAM.format(module=module, arguments=list(arguments))
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *_, names, count = done.stderr.splitlines()
    return set(names.split()), int(count)


async def usage(_: Mapping[str, Any]) -> object:
    """Return `usage` of a node without GPUs."""
    return USAGE


async def status(_: Mapping[str, Any]) -> object:
    """Return `status` of a node without GPUs."""
    return {"resources": {}, "gpus": [], "leases": [], "remarks": []}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("metagpu.cli.mgctl", "get devices"),
        ("metagpu.cli.mgctl", "get processes -o json"),
        ("metagpu.cli.mgctl", "top"),
        ("metagpu.cli.metagpu", "status"),
    ],
)
async def test_a_question_to_the_daemon_loads_little(
    tmp_path: Path, module: str, line: str
) -> None:
    """A command that queries the daemon loads no event loop, and less than 200 modules in all."""
    async with control_server(tmp_path, {"usage": usage, "status": status}):
        arguments = (*line.split(), "--run-dir", str(tmp_path))
        names, count = await to_thread.run_sync(partial(loaded, module, *arguments))

    assert names & (CLUSTER_LIBRARIES | EVENT_LOOP) == set()
    assert count < 200


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("metagpu.cli.mgctl", "--help"),
        ("metagpu.cli.metagpu", "--help"),
        ("metagpu.cli.metagpu", "run --help"),
    ],
)
def test_help_loads_little(module: str, line: str) -> None:
    """Help loads no event loop, no simulator, and less than 200 modules in all."""
    names, count = loaded(module, *line.split())

    assert names & (CLUSTER_LIBRARIES | EVENT_LOOP) == set()
    assert count < 200


async def test_a_node_of_fractions_loads_what_it_needs(tmp_path: Path) -> None:
    """A daemon that shares by fractions loads no other backend, no API client, no simulator."""
    library, modules = NvmlLibrary(tmp_path / "nvml"), tmp_path / "modules"
    kubelet = SimKubelet(tmp_path / "dp", pod_resources=tmp_path / "pr.sock")
    config = tmp_path / "metagpu.yaml"
    await anyio.Path(config).write_text(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]\n"
    )
    places = {
        "--config": config,
        "--run-dir": tmp_path,
        "--kubelet-dir": tmp_path / "dp",
        "--pod-resources": tmp_path / "pr.sock",
    }
    arguments = ["run", *(str(part) for option in places.items() for part in option)]
    program = DAEMON.format(arguments=arguments, modules=str(modules))

    async with (
        kubelet.running(),
        await anyio.open_process(
            [sys.executable, "-c", program], env=library.environment, stderr=None
        ) as process,
    ):
        try:
            await kubelet.wait_for(lambda: bool(kubelet.allocatable()), within=30)
            process.terminate()
            with anyio.fail_after(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()

    names = set((await anyio.Path(modules).read_text()).split())
    own = {".".join(name.split(".")[:3]) for name in names if name.startswith("metagpu.")}
    assert "metagpu.backends.fraction" in own
    assert own & NOT_OF_FRACTIONS == set()
    assert names & {"kubernetes_asyncio", "aiohttp", "prometheus_client", "rich"} == set()
    assert len(names) < 580


def test_validate_loads_no_library_of_the_cluster(tmp_path: Path) -> None:
    """A check of a configuration loads the backends, but nothing that serves them."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]\n")

    names, _ = loaded("metagpu.cli.metagpu", "validate", str(file))

    assert names & CLUSTER_LIBRARIES <= {"rich"}  # where a developer's tool has installed it
