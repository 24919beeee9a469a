"""GPUs with more containers of ResourceClaims than they serve at once. Pure.

All containers of a claim use its shares together, and the kubelet asks for a claim once: a pod that
joins later meets no check.
"""

from collections.abc import Iterator

from metagpu.core.model.shares import count_containers
from metagpu.core.model.snapshot import Snapshot


def crowded_gpus(snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each GPU with too many containers of ResourceClaims."""
    for state in snapshot.gpus.values():
        for resource in dict.fromkeys(it.share.resource for it in state.leases.values()):
            offer = snapshot.offers.get(resource)
            most = offer and offer.rule.max_containers.get(state.gpu.id)
            leases = [it for it in state.leases.values() if it.share.resource == resource]
            claims = {str(it.resource_claim) for it in leases if it.sharers}
            if most and claims and (count := count_containers(leases)) > most:
                yield (
                    f"GPU {state.gpu.index} serves {most} containers of {resource} at once, and "
                    f"has {count} by ResourceClaim {', '.join(sorted(claims))}: the last of them "
                    "get no client of MPS; end a pod, or give it a claim of its own"
                )
