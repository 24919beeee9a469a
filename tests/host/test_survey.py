"""What can be seen of a node: files, sockets and this process, below a root of the test's own."""

import base64
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metagpu.core.doctor import NodeFacts
from metagpu.host.survey import Where, survey


@pytest.fixture
def where(tmp_path: Path) -> Where:
    """Have an empty node."""
    for folder in ("dp", "pod", "proc/self", "etc/nvidia-container-runtime", "etc/cdi", "dev"):
        (tmp_path / folder).mkdir(parents=True)
    return Where(tmp_path, tmp_path / "dp", tmp_path / "pr.sock", tmp_path / "pod")


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Hold sockets open for as long as the test."""
    with ExitStack() as stack:
        yield stack


def listen(sockets: ExitStack, path: Path) -> None:
    """Listen on a path."""
    it = sockets.enter_context(socket.socket(socket.AF_UNIX))
    it.bind(str(path))
    it.listen()


def seen(where: Where) -> NodeFacts:
    """Survey without a daemon."""
    return survey(where, None, "no daemon")


def test_an_empty_node(where: Where) -> None:
    """Where nothing is, that is what is seen; nothing fails."""
    facts = seen(where)

    assert (facts.uid, facts.can_kill, facts.sees_host) == (os.geteuid(), False, False)
    assert (facts.driver, facts.nodes, facts.rivals, facts.cdi) == ("", frozenset(), {}, ())
    assert (facts.client, facts.noexec, facts.envvar_refused) == (False, False, False)
    assert facts.kubelet == f"{where.kubelet_dir / 'kubelet.sock'} (No such file or directory)"
    assert (facts.status, facts.no_status) == (None, "no daemon")


def test_sockets_that_answer(where: Where, sockets: ExitStack) -> None:
    """A socket counts if somebody takes the call."""
    for path in (where.kubelet_dir / "kubelet.sock", where.pod_resources):
        listen(sockets, path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(where.pod_dir / "mgctl.sock"))
    facts = seen(where)

    assert (facts.kubelet, facts.pod_resources) == ("", "")
    assert facts.pod_socket.endswith("(Connection refused)")


def test_rivals_are_known_by_their_sockets(where: Where, sockets: ExitStack) -> None:
    """NVIDIA's plugin and MetaGPU are told by name; ours and a dead one are none."""
    metagpu = base64.b64encode(b"cnvrg.io/metagpu").decode()
    for name in ("nvidia-gpu.sock", metagpu, "metagpu-1.sock", "kubelet.sock"):
        listen(sockets, where.kubelet_dir / name)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(where.kubelet_dir / "nvidia-mig-1g.5gb.sock"))

    assert seen(where).rivals == {
        "NVIDIA's device plugin": "nvidia-gpu.sock",
        "MetaGPU": "Y252cmcuaW8vbWV0YWdwdQ==",
    }


def test_files(where: Where) -> None:
    """Driver, capabilities, program, toolkit and CDI are read from where they say so."""
    root = where.root
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\nGCC 12.2.0\n"
    )
    (root / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000000020\n")
    (root / "var/log/containers").mkdir(parents=True)
    (root / "etc/nvidia-container-runtime/config.toml").write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    )
    (root / "etc/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    (root / "etc/cdi/ours.json").write_text('{"kind": "metagpu.io/gpu"}')
    (root / "etc/cdi/other.yaml").write_text("kind: example.com/nic\n")
    (where.pod_dir / "mgctl").write_text("")
    (where.pod_dir / "mgctl").chmod(0o755)
    facts = seen(where)

    assert (facts.driver, facts.can_kill, facts.names_containers) == ("580.65.06", True, True)
    assert (facts.client, facts.envvar_refused) == (True, True)
    assert facts.cdi == ("/etc/cdi/nvidia.yaml", "/etc/cdi/ours.json")


def test_a_setting_that_is_commented_out_is_none(where: Where) -> None:
    """The toolkit's own file has its defaults as comments."""
    (where.root / "etc/nvidia-container-runtime/config.toml").write_text(
        "#accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    )
    assert not seen(where).envvar_refused
