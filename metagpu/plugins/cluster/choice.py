"""Which configuration the node's labels choose, and what is answered: pure decisions."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from metagpu.core.profiles import Instruction, has
from metagpu.core.snapshot import GpuState, Snapshot

OUR_LABEL: Final = "metagpu.io/config"
PLUGIN_LABEL: Final = "nvidia.com/device-plugin.config"
MIG_LABEL: Final = "nvidia.com/mig.config"
MIG_STATE: Final = "nvidia.com/mig.config.state"


class Outcome(msgspec.Struct, frozen=True):
    """What became of an instruction.

    Attributes:
        refusal: why it was not taken, `None` if it was.
        lays_mig: whether layouts of mig-parted are part of the configuration.
        misfit: why GPUs of such a layout are offered to nobody, empty if none are kept.
    """

    refusal: str | None = None
    lays_mig: bool = False
    misfit: str = ""


def instruction(
    labels: Mapping[str, str],
    config_map: Mapping[str, Any] | None = None,
    place: str = "",
) -> Instruction:
    """Say what the cluster wants of this node.

    Our own label counts before that of NVIDIA's plugin. mig-manager's chooses a layout among
    `mig-configs`, and a profile if there is one of its name and nobody else chose.

    Args:
        labels: of the node; one that is set to nothing counts as absent.
        config_map: the object with the profiles; `None` if there is none.
        place: how messages call it.
    """
    data: Mapping[str, str] | None = None
    if config_map is not None:
        data = dict(config_map.get("data") or {})

    mig = labels.get(MIG_LABEL) or None
    candidates = [OUR_LABEL, PLUGIN_LABEL]
    if mig is not None and data is not None and has(data, mig):
        candidates.append(MIG_LABEL)

    for label in candidates:
        if profile := labels.get(label):
            return Instruction(profile, label, mig, place, data)
    return Instruction(None, "", mig, place, data)


def mig_state(wanted: Instruction | None, outcome: Outcome, snapshot: Snapshot) -> str | None:
    """Answer mig-manager's label in its words; `None` where it asks nothing of us."""
    if wanted is None or wanted.mig_config is None:
        return None
    ours = outcome.lays_mig or wanted.profile == wanted.mig_config
    if outcome.refusal is not None:
        return "failed" if ours or wanted.mig_config in outcome.refusal else None
    if not ours:
        return None
    if outcome.misfit:
        return "failed"
    return "pending" if any(map(_waits, snapshot.gpus.values())) else "success"


def _waits(state: GpuState) -> bool:
    """Tell whether a GPU is not yet as the configuration wants it."""
    blocked = any(stock.blocked or stock.paused for stock in state.stocks.values())
    return bool(state.waits_for or state.suspended or blocked)
