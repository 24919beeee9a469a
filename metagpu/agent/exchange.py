"""The messages between two daemons, of which one takes over from the other.

Both may be of any version: a reader ignores fields that it does not know, and a field that is
missing has its default. So a field is never renamed, and a new one has a default.
"""

from typing import Final

import msgspec

from metagpu.core.config.profiles import ClusterChoice
from metagpu.core.health.fault_note import FaultNote
from metagpu.core.model.shares import Lease, ResourceName

COMMAND: Final = "takeover"
"""The command on the control socket that begins the exchange."""
PROTOCOL: Final = 1
"""The version of the order of the steps; another one is refused."""


class Step:
    """The steps of an exchange, in order; each is asked for by the new daemon.

    Attributes:
        BEGIN: the old daemon holds the kubelet's calls, leaves the GPUs as they are, and answers
            with its `HandedState`.
        DETACH: the kubelet is about to forget the old daemon's registrations.
        END_LISTS: the old daemon forwards calls to the new one's `sockets`, and ends its lists.
        FINISH: the kubelet reads all lists of the new daemon; the old one releases its locks,
            and ends once the calls that it forwarded are answered.
    """

    BEGIN: Final = "begin"
    DETACH: Final = "detach"
    END_LISTS: Final = "end-lists"
    FINISH: Final = "finish"


class ExchangeTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        poll: between two attempts to get the locks of a daemon that is about to release them.
        probes: from the begin of a wait for the node to the probes of the daemon that waits: the
            one that got the node needs their port first, where both are in one network.
        retry: between two attempts to take over, and to get the locks while another daemon runs.
        calls: for calls of the kubelet that are in flight when an exchange begins.
        pause: for everything of the old daemon that changes the node to end.
        answer: for the old daemon's answer to one step.
        ready: for the backends of the new daemon to get their GPUs ready.
        lists: for the kubelet to read the new daemon's lists.
        successor: for the new daemon's steps: it gives up before the old one goes on.
        exchange: for a whole exchange, after which the old daemon goes on.
        look: for the old daemon's look at what the kubelet gave out meanwhile, before it goes on.
    """

    poll: float = 0.01
    probes: float = 2.0
    retry: float = 1.0
    calls: float = 5.0
    pause: float = 10.0
    answer: float = 15.0
    ready: float = 5.0
    lists: float = 10.0
    successor: float = 35.0
    exchange: float = 45.0
    look: float = 6.0


class Hello(msgspec.Struct, frozen=True):
    """The first message of the old daemon."""

    protocol: int = 0
    version: str = ""


class HandedState(msgspec.Struct, frozen=True):
    """All that the memory of the old daemon has, and the new one's may not.

    Attributes:
        leases: all; the kubelet does not report claims whose pods are being admitted, nor shares
            that it has forgotten, and the new daemon's look at the others may be older.
        listed: the resources whose lists the kubelet reads.
        note: the faults and cordons; the file of the note has them too, a moment later.
        choice: the part of the configuration that the cluster chose; `None` if it chose none.
    """

    leases: tuple[Lease, ...] = ()
    listed: tuple[ResourceName, ...] = ()
    note: FaultNote | None = None
    choice: ClusterChoice | None = None
