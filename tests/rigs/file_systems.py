"""A process in a file system of its own, as a container has it; only root may make one."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from tests.rigs.privileges import require_mounts


def command_inside(
    root: Path, mounts: Mapping[str, Path], over: Mapping[str, Path] | None = None
) -> list[str]:
    """Return the beginning of a command that runs in this machine's file system, changed.

    Args:
        root: an empty folder, where the file system is made.
        mounts: folders by the path where the command sees them.
        over: folders whose files the command sees beside those of a folder of this machine.
    """
    require_mounts("the layouts of a node")
    root.mkdir()
    lines = ["set -e", f"root={quote(str(root))}", "mount -t tmpfs tmpfs $root"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            lines.append(f"cp -P {entry} $root/")
        elif entry.is_dir():
            lines.append(f"mkdir $root{entry}; mount --rbind {entry} $root{entry}")
    for path, folder in (over or {}).items():
        layers = f"lowerdir={quote(str(folder))}:{path}"
        lines.append(f"mount -t overlay overlay -o {layers} $root{path}")
    for path, folder in mounts.items():
        lines.append(f"mkdir -p $root{path}; mount --rbind {quote(str(folder))} $root{path}")
    start = f'cd {quote(str(Path.cwd()))} && exec "$@"'
    lines.append(f'exec chroot $root sh -c {quote(start)} sh "$@"')
    return [
        *("unshare", "--mount", "--propagation", "private"),
        *("sh", "-c", "\n".join(lines), "sh"),
    ]
