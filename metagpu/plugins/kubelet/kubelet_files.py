"""The identities of a kubelet's files: what changes when it starts or allocates."""

from pathlib import Path
from typing import NamedTuple, TypeAlias

from metagpu.core.runtime.files import file_identity
from metagpu.plugins.kubelet.checkpoint import CHECKPOINT_FILE
from metagpu.plugins.kubelet.paths import KUBELET_SOCKET

Identity: TypeAlias = tuple[int, int, int] | None
"""The identity of a file, `None` without one (`core.runtime.files`)."""


class KubeletFiles(NamedTuple):
    """The files of one moment.

    Attributes:
        kubelet: what a kubelet makes when it starts: its sockets for PodResources and for plugins.
        checkpoint: what it writes when it allocates.
    """

    kubelet: tuple[Identity, Identity] = (None, None)
    checkpoint: Identity = None


def find_files(socket: Path, directory: Path) -> KubeletFiles:
    """Return the files of now; blocks.

    Args:
        socket: the PodResources socket.
        directory: the folder for device plugins.
    """
    return KubeletFiles(
        (file_identity(socket), file_identity(directory / KUBELET_SOCKET)),
        file_identity(directory / CHECKPOINT_FILE),
    )
