"""Fixed layouts: the placement of instances, and the choice for a container. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from metagpu.backends.mig.geometry import geometry_of
from metagpu.backends.mig.planner import UnplaceableLayout, plan_layout
from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import slot_of
from metagpu.core.model.shares import Share, by_gpu
from metagpu.core.model.snapshot import Snapshot


def layout_name(layout: Mapping[str, int]) -> str:
    """Return the name of a layout as in mig-parted: `2x2g.10gb-3x1g.5gb`."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])


def place_layout(
    gpu: Gpu, layout: Mapping[str, int]
) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    """Place the instances of a layout on a GPU, or return why they do not fit.

    The placement follows from the layout and its own profiles alone: share ids rest on it.
    """
    missing = layout.keys() - {profile.name for profile in gpu.mig_profiles}
    if missing:
        # The planner, with all profiles of the GPU, gives the reason.
        return plan_layout(geometry_of(gpu.mig_profiles), dict.fromkeys(sorted(missing), 1))
    geometry = geometry_of(gpu.mig_profiles, frozenset(layout))
    return _place(geometry, frozenset(layout.items()))


@lru_cache(maxsize=64)
def _place(
    geometry: MigGeometry, wanted: frozenset[tuple[str, int]]
) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    found = plan_layout(geometry, dict(sorted(wanted)))
    if isinstance(found, UnplaceableLayout):
        return found
    chosen = set(found)
    return tuple(placed for placed in geometry.placed_profiles if placed in chosen)


def choose_least_shared(
    size: int, available: Sequence[Share], required: Sequence[Share], snapshot: Snapshot
) -> list[Share]:
    """Choose shares of the instances with the fewest containers, required ones first.

    Among equal instances, the GPU with the lowest index comes first. Shares that cannot be given
    now come last: the kubelet may not have the newest list yet.
    """
    shares_by_gpu = by_gpu([*required, *available])
    taken = Counter((share.gpu, slot_of(share.id)) for share in required)
    for gpu in shares_by_gpu:
        taken.update((gpu, slot_of(share)) for share in snapshot.gpus[gpu].leases)

    ranked = []
    for gpu, shares in shares_by_gpu.items():
        state = snapshot.gpus[gpu]
        unhealthy = state.unhealthy_shares
        for share in sorted(shares, key=lambda share: share.number):
            if share in required:
                continue
            last = share.id in unhealthy or not state.open_to(share.backend)
            instance = gpu, slot_of(share.id)
            ranked.append(((last, taken[instance], state.gpu.index, share.number), share))
            taken[instance] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [*required, *(share for _, share in ranked)][:size]
