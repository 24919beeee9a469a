"""The shares that a GPU can have under a pool's options, or why it has none. Pure."""

from collections import Counter
from collections.abc import Sequence

from metagpu.backends.mig.geometry import geometry_of, share_id
from metagpu.backends.mig.layout import layout_name, place_layout
from metagpu.backends.mig.mode import LEAVING
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.planner import UnplaceableLayout
from metagpu.backends.mig.profiles import PlacedProfile
from metagpu.backends.mig.sharing import with_suffix
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share


def placed_profiles(options: MigOptions, gpu: Gpu) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    """Return the possible instances of a GPU, or those of the layout."""
    if options.fixed_layout is None:
        return geometry_of(gpu.mig_profiles, frozenset(options.profile_names)).placed_profiles
    if options.existing is not False:
        every = geometry_of(gpu.mig_profiles).placed_profiles
        return tuple(placed for placed in every if str(placed) in options.slots)
    return place_layout(gpu, options.fixed_layout)


def possible_shares(options: MigOptions, gpu: Gpu, backend: str) -> Sequence[Share]:
    """Return one share per placement of the allowed profiles, or those of the layout.

    The shares are the same whether MIG mode is on or off. A layout that does not fit has none.
    """
    if isinstance(placed := placed_profiles(options, gpu), UnplaceableLayout):
        return ()

    sharing_by_profile = options.sharing_by_profile(gpu)
    counted = Counter[ResourceName]()
    shares = []
    for it in placed:
        profile = it.profile.name
        resource, sharing = options.resource_of(profile), sharing_by_profile[profile]
        for suffix in sharing.suffixes:
            shares.append(
                Share(
                    id=share_id(gpu.id, f"{it}{suffix}"),
                    gpu=gpu.id,
                    resource=resource,
                    backend=backend,
                    number=counted[resource],
                    footprint=with_suffix(it.footprint, suffix),
                    memory=sharing.memory,
                    replica=sharing.replicas,
                )
            )
            counted[resource] += 1
    return shares


def misfit_reason(options: MigOptions, gpu: Gpu) -> str:
    """Return why a GPU can have none of the instances; its MIG mode plays no part."""
    if options.existing is not False or not options.profile_names:
        return ""
    if not gpu.mig_profiles:
        # A GPU that supports MIG has profiles, which NVML may fail to list.
        return "it does not support MIG" if gpu.mig_enabled is None else ""
    placed = placed_profiles(options, gpu)
    if isinstance(placed, UnplaceableLayout):
        return layout_problem(options, placed)
    return "" if placed else _profiles_problem(options, gpu)


def no_shares_reason(options: MigOptions, gpu: Gpu) -> str:
    """Return why a GPU has no instances, for one without any."""
    if options.disable_mig:
        return LEAVING if gpu.mig_enabled else "its pool has MIG mode off"
    if not gpu.mig_profiles:
        return "it does not support MIG, or NVML does not list its profiles"
    if isinstance(placed := placed_profiles(options, gpu), UnplaceableLayout):
        return layout_problem(options, placed)
    if not options.profile_names:
        return "it has no MIG instances, or under one name instances of several sizes"
    return _profiles_problem(options, gpu)


def _profiles_problem(options: MigOptions, gpu: Gpu) -> str:
    has = ", ".join(profile.name for profile in gpu.mig_profiles)
    wanted = ", ".join(options.profile_names)
    return f"it has none of the MIG profiles {wanted}; it has {has}"


def layout_problem(options: MigOptions, unplaceable: UnplaceableLayout) -> str:
    """Return why the fixed layout does not fit a GPU."""
    name = layout_name(options.fixed_layout or {})
    return f"the layout {name} does not fit: {unplaceable.reason}"
