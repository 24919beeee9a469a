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

from metagpu.core.reports.schema.status import StatusReport
from metagpu.plugins.control.socket import control_server
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.rigs.nvml_library import NvmlLibrary
from tests.rigs.reported import complete

CLUSTER_LIBRARIES: Final = {
    *("grpclib", "h2", "hpack", "betterproto2"),
    *("kubernetes_asyncio", "aiohttp", "prometheus_client", "pynvml", "rich", "cel_expr_python"),
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
NOT_OF_FRACTIONS: Final = (
    *("metagpu.backends.mig", "metagpu.backends.mps", "metagpu.backends.timeslice"),
    *("metagpu.backends.whole", "metagpu.backends.common.mps_daemon", "metagpu.testing"),
    *("metagpu.plugins.cluster.cluster", "metagpu.plugins.cluster.watch"),
    *("metagpu.plugins.dra", "metagpu.core.devices.slices"),
    *("metagpu.plugins.metrics.exporter", "metagpu.plugins.metrics.families"),
    *("metagpu.plugins.http.server", "metagpu.plugins.http.messages"),
    *("metagpu.plugins.web.access", "metagpu.plugins.web"),
    *("metagpu.compat.cnvrg", "metagpu.compat.hami", "metagpu.compat.mig_parted"),
    *("metagpu.compat.nvidia", "metagpu.core.reports.doctor", "metagpu.host.node_facts"),
    *("metagpu.display.status", "metagpu.cli.config_commands", "metagpu.cli.mgctl"),
)
"""Modules and packages that a daemon does not load for fractions, an `/metrics` page aside."""
NOT_SIMULATED: Final = (
    *("metagpu.sim.apiserver", "metagpu.sim.demo", "metagpu.sim.kubelet"),
    *("metagpu.sim.cluster", "metagpu.sim.commands"),
)
"""Parts of the simulator that a daemon on a simulated node does not load."""
FOREIGN: Final = {
    *("aiohttp", "cel_expr_python", "h11", "kubernetes_asyncio", "multiprocessing"),
    *("prometheus_client",),
    *("rich", "statistics", "unittest", "urllib3", "xml"),
}
"""Packages that such daemons do not load."""
STANDING: Final = 18
"""The most dataclasses of a daemon: the parts of which there is one for each node or session."""
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
    return complete({}, StatusReport)


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
        ("metagpu.kubectl.program", "top gpus --help"),
    ],
)
def test_help_loads_little(module: str, line: str) -> None:
    """Help loads no event loop, no simulator, and less than 200 modules in all."""
    names, count = loaded(module, *line.split())

    assert names & (CLUSTER_LIBRARIES | EVENT_LOOP) == set()
    assert count < 200


@pytest.mark.parametrize("simulated", [False, True])
async def test_a_node_of_fractions_loads_what_it_needs(tmp_path: Path, *, simulated: bool) -> None:
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
        "--kubelet-root": tmp_path,
        "--kubelet-dir": tmp_path / "dp",
        "--pod-resources": tmp_path / "pr.sock",
        **({"--simulate": "t4"} if simulated else {}),
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
    assert "metagpu.backends.fraction.backend" in names
    assert ("metagpu.sim.nvml" in names) == simulated
    assert not [name for name in names if is_in(name, NOT_OF_FRACTIONS + NOT_SIMULATED)]
    assert names & FOREIGN == set()
    # Three of them read annotations by which pods name GPUs: any request may be of such a pod.
    assert len(names) < (620 if simulated else 595)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether a module is one of some packages, or lies in one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_client_of_the_api_server_loads_no_models() -> None:
    """The client loads kubernetes_asyncio without its models, most of its memory and time."""
    program = "import sys, metagpu.plugins.cluster.client; print(*sys.modules)"
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = set(done.stdout.split())

    assert "kubernetes_asyncio.client.api_client" in names
    assert not [name for name in names if name.startswith("kubernetes_asyncio.client.models.")]
    assert not [name for name in names if name.startswith("kubernetes_asyncio.client.api.")]
    assert not [name for name in names if name.startswith("metagpu.core.model.")]


def test_a_client_that_needs_its_models_is_loaded_whole() -> None:
    """A release of kubernetes_asyncio that does not load without its models is loaded with them."""
    program = """
import importlib.abc, sys
class NeedsModels(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "kubernetes_asyncio.config.kube_config":
            from kubernetes_asyncio.client.models import V1Pod
sys.meta_path.insert(0, NeedsModels())
import metagpu.plugins.cluster.client
from metagpu.plugins.cluster import credentials
import kubernetes_asyncio.client as whole
print(whole.V1Pod.__name__, credentials.Configuration is whole.Configuration)
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["V1Pod", "True"]


@pytest.mark.parametrize("used_at_once", [False, True])
def test_the_client_loads_urllib3_at_its_first_use(*, used_at_once: bool) -> None:
    """The client loads urllib3 with the first password, or with another use of it."""
    program = f"""
import importlib.abc, sys
class Uses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if {used_at_once} and name == "kubernetes_asyncio.config.kube_config":
            from urllib3 import PoolManager
sys.meta_path.insert(0, Uses())
import metagpu.plugins.cluster.client
print("urllib3" in sys.modules)
from metagpu.plugins.cluster.credentials import Configuration
configuration = Configuration()
configuration.username, configuration.password = "a", "b"
print(configuration.get_basic_auth_token(), "urllib3" in sys.modules)
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [str(used_at_once), "Basic YTpi True"]


def test_values_of_the_daemon_are_structs() -> None:
    """The daemon's values are no dataclasses: Python compiles each one's methods at each start."""
    program = """
import metagpu.agent.agent, metagpu.nvml.driver, metagpu.sim.nvml.library, sys
own = [it for name, it in sys.modules.items() if name.startswith("metagpu.")]
for module in own:
    for name, it in vars(module).items():
        if "__dataclass_fields__" in getattr(it, "__dict__", ()):
            if it.__module__ == module.__name__ and ".pb." not in it.__module__:
                print(name)
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    found = done.stdout.split()
    assert "Agent" in found
    assert len(found) <= STANDING


def test_no_collection_while_a_command_is_loaded() -> None:
    """Python's garbage collector sleeps until the command's modules are loaded."""
    program = """
import gc, sys
early = []
def note(phase, info):
    early.append(not hasattr(sys.modules.get("metagpu.cli.metagpu"), "COMMANDS"))
from metagpu.__main__ import main  # the first module; to compile it may collect
gc.callbacks.append(note)
sys.argv[1:] = ["--help"]
try:
    main()
finally:
    print(any(early), gc.isenabled(), file=sys.stderr)
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stderr.split() == ["False", "True"]


def test_validate_loads_no_library_of_the_cluster(tmp_path: Path) -> None:
    """A check of a configuration loads the backends, but nothing that serves them."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]\n")

    names, _ = loaded("metagpu.cli.metagpu", "validate", str(file))

    assert names & CLUSTER_LIBRARIES <= {"rich"}  # where a developer's tool has installed it
