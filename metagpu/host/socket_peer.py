"""The identity of a process at the other end of a socket.

These functions block, for microseconds.
"""

import select
from pathlib import Path

from metagpu.core.contracts.host import Peer, ProcessIdentity
from metagpu.host.cgroups import DEFAULT_ROOT
from metagpu.host.process import read_identity


def read_peer(proc: Path, peer: Peer, cgroups: Path = DEFAULT_ROOT) -> ProcessIdentity | None:
    """Return the identity of a peer; `None` if its process has ended or is hidden."""
    identity = read_identity(proc, peer.pid, cgroups)
    # The identity is this process's only if the process kept its pid meanwhile.
    return identity if _is_running(peer.pidfd) else None


def _is_running(process: int) -> bool:
    """Return whether a process runs: its pidfd is readable once it has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return not poll.poll(0)
