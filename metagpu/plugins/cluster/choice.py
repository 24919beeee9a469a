"""Which configuration the node's labels choose: a pure decision."""

from collections.abc import Mapping
from typing import Any, Final

from metagpu.core.profiles import Instruction, has

OUR_LABEL: Final = "metagpu.io/config"
PLUGIN_LABEL: Final = "nvidia.com/device-plugin.config"
MIG_LABEL: Final = "nvidia.com/mig.config"
MIG_STATE: Final = "nvidia.com/mig.config.state"


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
