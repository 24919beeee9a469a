"""The daemon finds driver, toolkit and device nodes in each layout, and names the host's paths."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from metagpu.plugins.control.client import send_request
from tests.agent.test_daemon import daemon
from tests.e2e.rig.go_programs import go_programs
from tests.rigs.cdi import check_spec
from tests.rigs.driver_layouts import DRIVER_CONTAINER, HOST_FOLDERS, NodeLayout
from tests.rigs.file_systems import command_inside

pytestmark = pytest.mark.long

CONFIG = """
version: metagpu/v1
deviceListStrategy: cdi-cri
pools:
  - {name: all, backends: [{backend: fraction, sharesPerGpu: 10}]}
"""


@pytest.fixture(params=["stand-in", pytest.param("NVIDIA's", marks=pytest.mark.e2e)])
def toolkit(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder of NVIDIA's own programs, or none for a stand-in."""
    if request.param == "stand-in":
        return None
    [found] = [program for program in go_programs() if program.name == "nvidia-ctk"]
    if found.missing():
        pytest.skip("NVIDIA's toolkit is not built here: run `make e2e`")
    return found.folder


def host_paths(spec: dict[str, Any]) -> Iterator[str]:
    """Yield all paths of a specification that the container runtime opens or starts."""
    for edits in (
        spec["containerEdits"],
        *(device["containerEdits"] for device in spec["devices"]),
    ):
        for node in edits.get("deviceNodes", ()):
            yield node.get("hostPath", node["path"])
        for mount in edits.get("mounts", ()):
            yield mount["hostPath"]
        for hook in edits.get("hooks", ()):
            if hook["args"][0] != "metagpu-hook":  # ours: its folder has one path everywhere
                yield hook["path"]


async def served(
    tmp_path: Path, inside: Sequence[str], *options: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a daemon until it offers two GPUs; return its status and its CDI specification."""
    run = tmp_path / "run"
    await anyio.Path(run).mkdir()
    more = ("--cdi-dir", str(run / "cdi"), *options)
    async with daemon(run, CONFIG, *more, launcher=inside, simulate=False) as live_daemon:
        await live_daemon.until(20)
        status = await to_thread.run_sync(send_request, run, {"command": "status"})
        text = await anyio.Path(run / "cdi/metagpu.io-gpu.json").read_text()
    assert isinstance(status, dict)
    return status, check_spec(text)


def mounts_of_a_pod(node: NodeLayout) -> dict[str, Path]:
    """Return the chart's mounts of the host's folders, which the kubelet creates if missing."""
    for folder in HOST_FOLDERS:
        (node.root / folder).mkdir(parents=True, exist_ok=True)
    return {f"/host/{host_folder}": node.root / host_folder for host_folder in HOST_FOLDERS}


def check_names(node: NodeLayout, status: dict[str, Any], spec: dict[str, Any]) -> None:
    """Check that a specification names two GPUs, the driver and hooks, as the node has them."""
    assert status["cdi"]["noLibraries"] is None
    assert len(spec["devices"]) == 2
    found = list(host_paths(spec))
    assert any("libcuda.so.550" in path for path in found)
    assert any(path.endswith("/nvidia-cdi-hook") for path in found)
    assert [path for path in found if not node.has(path)] == []


@pytest.mark.parametrize("in_pod", [True, False], ids=["pod", "process of the host"])
@pytest.mark.parametrize("of_containers", [False, True], ids=["packages", "operator"])
async def test_every_layout_serves(
    tmp_path: Path, toolkit: Path | None, *, of_containers: bool, in_pod: bool
) -> None:
    """Without any option GPUs are served, and CDI names the node's own paths and hooks."""
    driver = DRIVER_CONTAINER if of_containers else ""
    node = NodeLayout(tmp_path / "node", driver, toolkit, in_container=of_containers, dev=driver)
    await to_thread.run_sync(node.build)
    here = node.root / "usr", node.root / "run", node.root / "dev"
    for folder in here:
        folder.mkdir(exist_ok=True)
    inside = (
        command_inside(tmp_path / "fs", mounts_of_a_pod(node))
        if in_pod
        else command_inside(
            tmp_path / "fs",
            {"/run": here[1], **({} if of_containers else {"/dev": here[2]})},
            {"/usr": here[0]},
        )
    )
    status, spec = await served(tmp_path, inside)

    roots = status["driverRoots"]
    assert roots["driverRoot"] == f"/{driver}"
    assert roots["devRoot"] == (f"/{driver}" if in_pod or of_containers else "/")
    assert roots["containerHostRoot"] == ("/host" if in_pod else "/")
    assert roots["library"].startswith(roots["containerDriverRoot"])
    check_names(node, status, spec)


async def test_a_named_root_of_the_chart_serves(tmp_path: Path) -> None:
    """With the driver's root named and mounted on its own, CDI names the same paths."""
    node = NodeLayout(tmp_path / "node", DRIVER_CONTAINER, in_container=True, dev=DRIVER_CONTAINER)
    await to_thread.run_sync(node.build)
    mounts = mounts_of_a_pod(node) | {"/driver-root": node.root / DRIVER_CONTAINER}
    inside = command_inside(tmp_path / "fs", mounts)

    status, spec = await served(tmp_path, inside, "--driver-root", f"/{DRIVER_CONTAINER}")

    roots = status["driverRoots"]
    assert (roots["driverRoot"], roots["containerDriverRoot"]) == (
        f"/{DRIVER_CONTAINER}",
        "/driver-root",
    )
    check_names(node, status, spec)
