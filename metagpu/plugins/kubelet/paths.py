"""The files of the kubelet, and the length limit of paths in its folder."""

import os
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.runtime.files import file_identity

KUBELET_SOCKET: Final = "kubelet.sock"
"""The name of the kubelet's Registration socket in its device-plugins folder."""
CHECKPOINT_FILE: Final = "kubelet_internal_checkpoint"
PATH_LIMIT: Final = 107
"""Bytes of a unix socket's path (sun_path, less its closing zero)."""

_LONGEST_NAME: Final = len("metagpu--ffffffff-99999.sock")
"""Bytes of a socket's name in the folder, without the resource's name, which may be left out."""


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
    """Return the present files; blocks.

    Args:
        socket: the PodResources socket.
        directory: the folder for device plugins.
    """
    return KubeletFiles(
        (file_identity(socket), file_identity(directory / KUBELET_SOCKET)),
        file_identity(directory / CHECKPOINT_FILE),
    )


def check_kubelet_dir(path: Path) -> None:
    """Refuse a path that can never be the kubelet's folder; a missing one may appear.

    Raises:
        ConfigError: the path is no folder, or leaves no bytes for a socket's name.
    """
    longest, length = PATH_LIMIT - _LONGEST_NAME - 1, len(os.fsencode(path))
    problem = ""

    if path.exists() and not path.is_dir():
        problem = f"{path} is not a folder; name the kubelet's device-plugins folder"
    elif length > longest:
        problem = (
            f"{path} has {length} bytes, which leaves no room for a socket's path; allowed: "
            f"{longest} at most"
        )
    if problem:
        raise ConfigError(problem, ConfigReason.INVALID_VALUE, file="--kubelet-dir")
