"""Facts of a node: files, sockets and this process, below a root of the test."""

import base64
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metagpu.core.reports.doctor import NodeFacts
from metagpu.host.node_facts import SurveyPaths, survey_node


@pytest.fixture
def paths(tmp_path: Path) -> SurveyPaths:
    """Create an empty node."""
    for folder in ("dp", "pod", "proc/self", "etc/nvidia-container-runtime", "etc/cdi", "dev"):
        (tmp_path / folder).mkdir(parents=True)
    return SurveyPaths(
        tmp_path, tmp_path / "dp", tmp_path / "pr.sock", tmp_path / "run", tmp_path / "pod"
    )


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Hold sockets open for as long as the test runs."""
    with ExitStack() as stack:
        yield stack


def listen(sockets: ExitStack, path: Path) -> None:
    """Listen on a path."""
    live_socket = sockets.enter_context(socket.socket(socket.AF_UNIX))
    live_socket.bind(str(path))
    live_socket.listen()


def seen(paths: SurveyPaths) -> NodeFacts:
    """Survey without a daemon."""
    return survey_node(paths, None, "no daemon")


def test_an_empty_node(paths: SurveyPaths) -> None:
    """An empty node has no facts, and no error."""
    facts = seen(paths)

    assert (facts.uid, facts.in_host_pid_namespace) == (os.geteuid(), False)
    assert (facts.driver, facts.device_nodes, facts.competing_plugins, facts.cdi_files) == (
        "",
        frozenset(),
        {},
        (),
    )
    assert (facts.has_mgctl, facts.noexec, facts.envvar_accepted) == (False, False, None)
    assert (
        facts.kubelet_problem == f"{paths.kubelet_dir / 'kubelet.sock'} (No such file or directory)"
    )
    assert (facts.status, facts.status_problem) == (None, "no daemon")


def test_sockets_that_answer(paths: SurveyPaths, sockets: ExitStack) -> None:
    """A socket counts if a process accepts the connection."""
    for path in (paths.kubelet_dir / "kubelet.sock", paths.pod_resources):
        listen(sockets, path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.pod_dir / "mgctl.sock"))
    facts = seen(paths)

    assert (facts.kubelet_problem, facts.pod_resources_problem) == ("", "")
    assert facts.pod_socket_problem.endswith("(Connection refused)")


def test_competing_plugins_are_known_by_their_sockets(
    paths: SurveyPaths, sockets: ExitStack
) -> None:
    """NVIDIA's plugin and MetaGPU are named; our socket and a dead one are not."""
    metagpu = base64.b64encode(b"cnvrg.io/metagpu").decode()
    for name in ("nvidia-gpu.sock", metagpu, "metagpu-1.sock", "kubelet.sock"):
        listen(sockets, paths.kubelet_dir / name)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.kubelet_dir / "nvidia-mig-1g.5gb.sock"))

    assert seen(paths).competing_plugins == {
        "NVIDIA's device plugin": "nvidia-gpu.sock",
        "MetaGPU": "Y252cmcuaW8vbWV0YWdwdQ==",
    }


def test_files(paths: SurveyPaths) -> None:
    """Driver, program, toolkit and CDI are read from their files."""
    root = paths.root
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\nGCC 12.2.0\n"
    )
    (root / "var/log/containers").mkdir(parents=True)
    (root / "etc/nvidia-container-runtime/config.toml").write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    )
    (root / "etc/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    (root / "etc/cdi/ours.json").write_text('{"kind": "metagpu.io/gpu"}')
    (root / "etc/cdi/other.yaml").write_text("kind: example.com/nic\n")
    (paths.pod_dir / "mgctl").write_text("")
    (paths.pod_dir / "mgctl").chmod(0o755)
    facts = seen(paths)

    assert (facts.driver, facts.has_container_logs) == ("580.65.06", True)
    assert (facts.has_mgctl, facts.envvar_accepted) == (True, False)
    assert facts.cdi_files == ("/etc/cdi/nvidia.yaml", "/etc/cdi/ours.json")


def test_folders_that_metagpu_cannot_use_are_named(paths: SurveyPaths) -> None:
    """A folder counts if it exists with the access that metagpu needs."""
    for folder in (paths.kubelet_dir, paths.run_dir, paths.pod_dir, paths.root / "sys/fs/cgroup"):
        folder.mkdir(parents=True, exist_ok=True)
    assert seen(paths).inaccessible == ()

    paths.run_dir.rmdir()
    (paths.root / "sys/fs/cgroup").rmdir()
    assert seen(paths).inaccessible == (
        f"{paths.run_dir} (write)",
        f"{paths.root}/sys/fs/cgroup (read)",
    )


def test_a_setting_that_is_commented_out_is_none(paths: SurveyPaths) -> None:
    """The toolkit's own file has its defaults as comments."""
    (paths.root / "etc/nvidia-container-runtime/config.toml").write_text(
        "#accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    )
    assert seen(paths).envvar_accepted


def test_a_toolkit_of_the_gpu_operator_is_seen_too(paths: SurveyPaths) -> None:
    """A node with two toolkits takes the variable of every container if one of them does."""
    operators = paths.root / "usr/local/nvidia/toolkit/.config/nvidia-container-runtime"
    operators.mkdir(parents=True)
    (operators / "config.toml").write_text("disable-require = false\n")
    (paths.root / "etc/nvidia-container-runtime/config.toml").write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    )
    assert seen(paths).envvar_accepted
