"""What the configuration says about `mgctl` in containers."""

from posixpath import normpath

import msgspec

from metagpu.core.injection import POD_FOLDER


class Mgctl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whether containers with shares have `mgctl`.

    Attributes:
        in_pods: mount it, and answer it.
        path: where containers see it beside its own folder; `None` for nowhere.
    """

    in_pods: bool = True
    path: str | None = "/usr/local/bin/mgctl"

    def __post_init__(self) -> None:
        if self.path is not None and not _is_place(self.path):
            raise ValueError(
                f"path {self.path!r} is no place for a program; write one like "
                "/usr/local/bin/mgctl, or null"
            )


def _is_place(path: str) -> bool:
    """Say whether every container runtime takes this path for what it is."""
    return (
        path.startswith("/")
        and not path.startswith("//")
        and path not in {"/", POD_FOLDER}
        and normpath(path) == path
        and path.isprintable()
        and ":" not in path
    )
