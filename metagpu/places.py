"""Where the agent finds the kubelet and the host, and may be found itself."""

from pathlib import Path

import msgspec

from metagpu.plugins import control, kubelet_directory, podresources


class Places(msgspec.Struct, frozen=True):
    """Folders and sockets; those that are `None` are not used, `dev_root` is the host's root."""

    kubelet: Path = kubelet_directory.DEFAULT_DIRECTORY
    pod_resources: Path = podresources.DEFAULT_SOCKET
    run: Path = control.DEFAULT_RUN_DIR
    dev_root: Path | None = None
    pods: Path | None = None
    cdi: Path | None = None
