"""The strategy `single` of NVIDIA's device plugin: all MIG instances by one name."""

from collections.abc import Sequence

from metagpu.compat.contract import Draft
from metagpu.compat.mig_parted import Wanted
from metagpu.compat.nvidia_instances import Instances, pool_name


def offer(wanted: Sequence[Wanted], instances: Instances, draft: Draft) -> None:
    """Offer all instances of a layout: all GPUs have to be laid out, and all alike.

    GPUs that are laid out otherwise are offered to nobody, and say why: NVIDIA's plugin would not
    start, and take all GPUs of the node with it.
    """
    for entry in wanted:
        if wrong := _wrong(entry, wanted):
            reason = (
                "the strategy single wants instances of one profile on all GPUs, and "
                f"{wrong}; choose mixed, or another layout"
            )
            draft.pool("not-single", entry.gpus, [], entry.origin, {"reason": reason})
            draft.note(entry.origin, f"its GPUs are offered to nobody: {reason}")
            continue
        cut = instances.cut(entry.instances)
        draft.pool(pool_name(entry.instances), entry.gpus, [cut], entry.origin)

    if not any(entry.gpus is None for entry in wanted):
        text = "GPUs that this layout does not name are offered to nobody under single"
        draft.note(wanted[-1].origin, text)


def _wrong(entry: Wanted, wanted: Sequence[Wanted]) -> str:
    """Say why an entry's GPUs are none of the strategy's, empty where they are."""
    alone = {tuple(each.instances) for each in wanted if len(each.instances) == 1}
    if not entry.instances:
        return "these have no MIG instances"
    if len(entry.instances) > 1:
        return f"these have {', '.join(sorted(entry.instances))}"
    if len(alone) > 1:  # none of them is any more right than another
        profiles = sorted(profile for (profile,) in alone)
        return f"the GPUs of this layout have {', '.join(profiles)}"
    return ""
