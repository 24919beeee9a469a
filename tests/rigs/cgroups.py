"""Real cgroups of made-up containers: the kernel's own words about real processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from metagpu.core.contracts.host import Container

ROOT: Final = Path("/sys/fs/cgroup")
V2: Final = (ROOT / "cgroup.controllers").exists()
HIERARCHY: Final = ROOT if V2 else ROOT / "systemd"
"""Where a process can be moved without a limit on it: cgroup v2, or the named hierarchy of v1."""


@contextmanager
def real_cgroup(container: Container) -> Iterator[Path]:
    """Create the cgroup of a container, as a kubelet with the driver cgroupfs does.

    Write a pid into its `cgroup.procs` to move a process there; the process must end in the block.
    Tests of machines that let nobody create cgroups are skipped, and say so.
    """
    # No kubelet of this machine removes what is below another root than its own.
    top = HIERARCHY / f"metagpu-test-{os.getpid()}"
    folder = top / f"kubepods/besteffort/pod{container.pod_uid}/{container.id}"
    if not os.access(HIERARCHY, os.W_OK):
        pytest.skip(f"{HIERARCHY} cannot be written to: this needs root and cgroups of one's own")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be created in {HIERARCHY}: {error.strerror}")
    try:
        yield folder
    finally:
        for each in (folder, *folder.parents[:4]):
            each.rmdir()
