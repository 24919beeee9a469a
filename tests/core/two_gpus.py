"""Two GPUs, their shares and the containers that hold them."""

from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder, Lease, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed
from tests.rigs.build import after, gpu, offer, share

A, B = gpu(0), gpu(1)
A_SHARES = (share(A, 0), share(A, 1), share(A, 2))
B_SHARES = (share(B, 0), share(B, 1))
ALICE = Holder("team", "alice", "main")
BOB = Holder("team", "bob", "main")

FOUND = GpusFound((A, B), at=1)
OFFERED = offer(*A_SHARES, *B_SHARES)
NODE = after(FOUND, OFFERED)
NOTHING = LeasesObserved({}, at=0)
TOLD = after(NOTHING, since=NODE)
LEASED = after(SharesClaimed(A_SHARES[:2], at=10), since=NODE)


def leases(snapshot: Snapshot, of: Gpu = A) -> dict[ShareId, Lease]:
    """Return the leases on one GPU."""
    return dict(snapshot.gpus[of.id].leases)
