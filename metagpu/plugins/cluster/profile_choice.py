"""The configuration choice of the node's labels: pure functions."""

from collections.abc import Mapping
from typing import Any, Final

from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome, has_profile
from metagpu.core.model.snapshot import GpuState, Snapshot

CONFIG_LABEL: Final = "metagpu.io/config"
PLUGIN_LABEL: Final = "nvidia.com/device-plugin.config"
MIG_CONFIG_LABEL: Final = "nvidia.com/mig.config"
MIG_STATE_LABEL: Final = "nvidia.com/mig.config.state"


def read_choice(
    labels: Mapping[str, str],
    config_map: Mapping[str, Any] | None = None,
    place: str = "",
) -> ClusterChoice:
    """Return the configuration that the cluster chooses for this node.

    Our own label has precedence over that of NVIDIA's plugin. mig-manager's label chooses a layout
    of `mig-configs`; it chooses a profile too, if one has its name and no other label chooses one.

    Args:
        labels: the node's labels; an empty value counts as absent.
        config_map: the object with the profiles, `None` without one.
        place: the name of that object in messages.
    """
    data: Mapping[str, str] | None = None
    if config_map is not None:
        data = dict(config_map.get("data") or {})

    mig = labels.get(MIG_CONFIG_LABEL) or None
    candidates = [CONFIG_LABEL, PLUGIN_LABEL]
    if mig is not None and data is not None and has_profile(data, mig):
        candidates.append(MIG_CONFIG_LABEL)

    for label in candidates:
        if profile := labels.get(label):
            return ClusterChoice(profile, label, mig, place, data)
    return ClusterChoice(None, "", mig, place, data)


def mig_state(
    wanted: ClusterChoice | None, outcome: ConfigOutcome, snapshot: Snapshot
) -> str | None:
    """Return the answer to mig-manager's label, `None` for no answer."""
    if wanted is None or wanted.mig_config is None:
        return None
    ours = outcome.has_mig_layouts or wanted.profile == wanted.mig_config
    if outcome.rejection is not None:
        return "failed" if ours or wanted.mig_config in outcome.rejection else None
    if not ours:
        return None
    if outcome.mig_mismatch:
        return "failed"
    return "pending" if any(map(_is_pending, snapshot.gpus.values())) else "success"


def _is_pending(state: GpuState) -> bool:
    """Return whether a GPU does not match the configuration yet."""
    blocked = any(it.blocked or it.paused for it in state.provisioned.values())
    return bool(state.orphaned_leases or state.suspended or blocked)
