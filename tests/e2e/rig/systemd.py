"""A systemd of its own, as the first process of a PID namespace, beside the machine's init.

Its units are those that a test writes and none of the machine's; /run is empty at its start. The
mounts are private, files and the network are the machine's.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.programs import Program
from tests.e2e.rig.settings import NodePaths
from tests.e2e.rig.waiting import wait_for

PROGRAM = Path("/usr/lib/systemd/systemd")
_TARGETS = ("sysinit", "basic", "shutdown", "umount", "final", "exit", "local-fs")
_BOOT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
cd /sys/fs/cgroup
if [ -d systemd ]; then
    mount --bind systemd/metagpu-e2e-init systemd
    for each in *; do [ "$each" = systemd ] || umount "$each" 2>/dev/null || true; done
else
    mount --bind metagpu-e2e-init .
fi
cd /
mount -t tmpfs tmpfs /run
[ ! -e /dev/console ] || mount --bind "$3" /dev/console
mount -t tmpfs tmpfs /usr/lib/systemd/system
mount -t tmpfs tmpfs /etc/systemd
cp -r "$1"/etc/systemd/. /etc/systemd/
exec env -i PATH="$PATH" container=metagpu-e2e "$2" --system --unit=multi-user.target \
    --log-target=console --log-level=info
"""


def missing() -> str:
    """Return why no systemd can run here, empty if one can."""
    if not PROGRAM.exists() or shutil.which("unshare") is None:
        return "Debian's packages systemd and util-linux have systemd and unshare"
    return ""


class Systemd:
    """A running systemd, and `systemctl` for it."""

    def __init__(self, process: int) -> None:
        self._process = process

    def __call__(self, *arguments: str) -> str:
        """Run `systemctl`; return its output.

        Raises:
            RigError: it failed; the text is its own.
        """
        command = ["nsenter", f"--target={self._process}", "--mount", "--pid", "systemctl"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RigError(f"systemctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()


@contextmanager
def booted(root: Path, paths: NodePaths) -> Iterator[Systemd]:
    """Boot a systemd with the units of ROOT/etc/systemd, while the block lasts."""
    units = root / "etc/systemd/system"
    for name in _TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    groups = _groups()
    for group in groups:
        group.mkdir(exist_ok=True)
    enter = "".join(f"echo 0 >{group}/cgroup.procs; " for group in groups)
    spaces = ("--pid", "--mount", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
    inner = [
        "unshare",
        *spaces,
        "bash",
        "-c",
        _BOOT,
        "boot",
        str(root),
        str(PROGRAM),
        str(paths.logs / "systemd.log"),
    ]
    launcher = ["bash", "-c", f'{enter}exec "$@"', "enter"]
    init = Program("systemd", inner, logs=paths.logs, pids=paths.pids, launcher=launcher)
    init.start()
    try:
        pid = init.pid or 0
        yield Systemd(wait_for("systemd to boot", lambda: _child(pid), within_s=30))
    finally:
        init.kill()  # with all processes of its namespace
        _remove(groups)


def _child(parent: int) -> int:
    """Return the first process of the namespace, once it is a systemd that answers."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ready = [
        child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "systemd"
    ]
    if ready and Path(f"/proc/{ready[0]}/root/run/systemd/private").exists():
        return int(ready[0])
    return 0


def _groups() -> Sequence[Path]:
    root = Path("/sys/fs/cgroup")
    homes = [root / "systemd"] if (root / "systemd").is_dir() else [root]
    return [home / "metagpu-e2e-init" for home in homes]


def _remove(groups: Sequence[Path]) -> None:
    """Remove the cgroups of processes that have just been killed."""
    deadline = time.monotonic() + 10
    for group in groups:
        while group.exists():
            try:
                for inner in sorted(group.rglob("*"), reverse=True):
                    if inner.is_dir():
                        inner.rmdir()
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
