"""The settings of `mgctl` in containers."""

from posixpath import basename, normpath
from typing import Final

import msgspec

from metagpu.core.grants.injection import POD_FOLDER

_NAME: Final = "mgctl"


class MgctlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The settings of `mgctl` in containers with shares.

    Attributes:
        in_pods: whether `mgctl` is mounted and its calls are answered.
        path: a second path of `mgctl` in containers, beside its own folder; `None` for none. The
            mount covers what an image has there, so the name of the file is always `mgctl`: the
            author of a configuration may not replace a program of somebody else's image.
    """

    in_pods: bool = True
    path: str | None = "/usr/local/bin/mgctl"

    def __post_init__(self) -> None:
        if self.path is not None and not _is_mountable(self.path):
            raise ValueError(
                f"path {self.path!r} cannot be mounted as a program; write one like "
                "/usr/local/bin/mgctl, or null"
            )
        if self.path is not None and basename(self.path) != _NAME:
            raise ValueError(
                f"path {self.path!r} would cover another program of every image; it has to end in "
                f"/{_NAME}, as /usr/local/bin/{_NAME}"
            )


def _is_mountable(path: str) -> bool:
    """Return whether every container runtime accepts this path as a mount point."""
    return (
        path.startswith("/")
        and not path.startswith("//")
        and path not in {"/", POD_FOLDER}
        and normpath(path) == path
        and path.isprintable()
        and ":" not in path
    )
