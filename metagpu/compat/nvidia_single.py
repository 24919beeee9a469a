"""The strategy `single` of NVIDIA's device plugin: one name for all MIG instances."""

from collections.abc import Sequence

from metagpu.compat import backend_options
from metagpu.compat.contract import ConfigDraft
from metagpu.compat.mig_parted import LayoutEntry
from metagpu.compat.nvidia_instances import LayoutInstances, pool_name


def offer(wanted: Sequence[LayoutEntry], instances: LayoutInstances, draft: ConfigDraft) -> None:
    """Offer all instances of a layout; all GPUs need instances of the same profile.

    A GPU with another layout is not offered, and its pool has the reason. NVIDIA's plugin would not
    start at all, and no GPU of the node would be offered.
    """
    for entry in wanted:
        if wrong := _mismatch(entry, wanted):
            reason = (
                "the strategy single wants instances of one profile on all GPUs, and "
                f"{wrong}; choose mixed, or another layout"
            )
            off = [] if entry.mig_enabled else [backend_options.mig_off()]
            rules = {"reason": reason}
            draft.add_pool("not-single", entry.gpus, off, entry.origin, rules=rules)
            draft.add_note(entry.origin, f"its GPUs are not offered: {reason}")
            continue
        backend = instances.backend_for(entry.instances)
        draft.add_pool(pool_name(entry.instances), entry.mig_gpus, [backend], entry.origin)

    if not any(entry.gpus is None for entry in wanted):
        text = "GPUs that this layout does not name are not offered under single"
        draft.add_note(wanted[-1].origin, text)


def _mismatch(entry: LayoutEntry, wanted: Sequence[LayoutEntry]) -> str:
    """Return why an entry's GPUs do not fit the strategy, empty where they fit."""
    alone = {tuple(each.instances) for each in wanted if len(each.instances) == 1}
    if not entry.instances:
        return "these have no MIG instances"
    if len(entry.instances) > 1:
        return f"these have {', '.join(sorted(entry.instances))}"
    if len(alone) > 1:  # no profile is more right than another
        profiles = sorted(profile for (profile,) in alone)
        return f"the GPUs of this layout have {', '.join(profiles)}"
    return ""
