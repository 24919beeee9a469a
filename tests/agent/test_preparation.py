"""The look of a daemon at what it needs: what the kubelet's files tell."""

import socket
from pathlib import Path

import pytest

from metagpu.agent.paths import AgentPaths, pod_resources_socket
from metagpu.agent.preparation import _kubelet_problem
from metagpu.backends.fraction.backend import FractionBackend
from metagpu.plugins.kubelet.paths import KUBELET_SOCKET
from tests.rigs.agent import agent_at_work


def paths_of(folder: Path) -> AgentPaths:
    """Return paths whose kubelet is in a folder."""
    return AgentPaths(kubelet_dir=folder, pod_resources=folder / "kubelet.sock")


def test_a_kubelet_that_is_down_is_no_problem(tmp_path: Path) -> None:
    """A kubelet has neither a checkpoint nor a socket before its first start."""
    assert _kubelet_problem(paths_of(tmp_path / "none")) == ""


def test_a_kubelet_whose_pods_are_listed_elsewhere_is_a_problem(tmp_path: Path) -> None:
    """By a wrong `--kubelet-root`, no lease would ever end."""
    devices, elsewhere = tmp_path / "device-plugins", tmp_path / "root"
    devices.mkdir()
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(devices / KUBELET_SOCKET))
        kubelet.listen()
        paths = AgentPaths(kubelet_dir=devices, pod_resources=pod_resources_socket(elsewhere))
        assert "name its --root-dir by --kubelet-root" in _kubelet_problem(paths)
    (devices / KUBELET_SOCKET).unlink()
    assert _kubelet_problem(paths) == ""


def test_a_folder_that_may_not_be_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon without the right to look is not ready, and ends no more than it takes."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert "Permission denied; run as root" in _kubelet_problem(paths_of(tmp_path))


async def test_a_fault_of_metagpus_own_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error in the look keeps a daemon from being ready, and ends nothing."""

    def fail(*_: object) -> None:
        raise RuntimeError("nobody thought of that")

    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        preparation = scene.agent.preparation
        preparation._checked = None
        monkeypatch.setattr(FractionBackend, "shares", fail)
        await preparation.look()
        [problem] = preparation.problems
        monkeypatch.undo()

    assert problem == (
        "the configuration: metagpu failed (RuntimeError: nobody thought of that); see its log"
    )
