"""The folders of the host that metagpu's pods mount, the node's own for the length of a run.

What the machine has at these places is hidden meanwhile, and stays as it is. The mounts are
shared, as all of a host with systemd are: pods of the DaemonSet see mounts that come later.
"""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

RUN_DIR: Final = Path("/run/metagpu")
POD_DIR: Final = Path("/var/lib/metagpu")
CDI_DIR: Final = Path("/run/cdi")
NVIDIA_DIR: Final = Path("/run/nvidia")
FOLDERS: Final = (RUN_DIR, POD_DIR, CDI_DIR, NVIDIA_DIR)


def mount(home: Path) -> None:
    """Mount an empty folder of HOME at each place."""
    for place in FOLDERS:
        source = home / "host-folders" / place.name
        if place is POD_DIR:
            source = source.with_name("pod")
        source.mkdir(parents=True, exist_ok=True)
        place.mkdir(exist_ok=True)
        for options in (["--bind", str(source)], ["--make-shared"]):
            subprocess.run(["mount", *options, str(place)], check=True)


def clear() -> None:
    """Remove everything in the folders; nothing may be mounted there."""
    for place in FOLDERS:
        for entry in place.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def unmount() -> None:
    """Unmount the folders, and remove those that the machine does not use."""
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for place in FOLDERS:
        if str(place) in mounted:
            command = ["umount", "--recursive", "--lazy", str(place)]
            subprocess.run(command, check=False, capture_output=True)
            with suppress(OSError):  # it has files of others
                place.rmdir()
