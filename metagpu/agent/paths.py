"""Folders and sockets of the agent and its neighbours, with their defaults.

Command lines read them too, so this module loads no plugin.
"""

from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.model.driver_roots import RootOptions

RUN_DIR: Final = Path("/run/metagpu")
"""The agent's control socket and its lock."""
KUBELET_ROOT: Final = Path("/var/lib/kubelet")
"""The default of the kubelet's own option `--root-dir`."""
KUBELET_DIR: Final = KUBELET_ROOT / "device-plugins"
"""Compiled into the kubelet: its `--root-dir` moves PodResources and not this folder."""
POD_DIR: Final = Path("/var/lib/metagpu/pod")
"""Not in /run: distributions mount that `noexec`, in containers too."""
CDI_DIR: Final = Path("/var/run/cdi")
"""One of the two folders that container runtimes read CDI specifications from."""


def pod_resources_socket(kubelet_root: Path) -> Path:
    """Return the PodResources socket of a kubelet with this `--root-dir`."""
    return kubelet_root / "pod-resources" / "kubelet.sock"


class AgentPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths that one agent uses.

    Attributes:
        kubelet_root: the kubelet's own folder, its `--root-dir`.
        kubelet_dir: the kubelet's device-plugins folder.
        pod_resources: the kubelet's PodResources socket.
        run_dir: the folder of the control socket.
        roots: what was said of the driver's root and the root of /dev.
        pod_dir: the folder mounted into containers, with mgctl; `None` mounts none.
        cdi_dir: the folder of the CDI specification; `None` writes none.
        cdi_hook: the program of CDI's hooks, by its path on the host; empty to look for it.
    """

    kubelet_root: Path = KUBELET_ROOT
    kubelet_dir: Path = KUBELET_DIR
    pod_resources: Path = pod_resources_socket(KUBELET_ROOT)
    run_dir: Path = RUN_DIR
    roots: RootOptions = RootOptions()
    pod_dir: Path | None = None
    cdi_dir: Path | None = None
    cdi_hook: str = ""


def default_pod_dir(run_dir: Path) -> Path:
    """Return the pod folder of a daemon, which is in a run folder of its own."""
    return POD_DIR if run_dir == RUN_DIR else run_dir / "pod"
