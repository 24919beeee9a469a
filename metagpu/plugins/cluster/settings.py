"""What an operator says of the cluster: which node this is, and what of the API server we use."""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.errors import ConfigError

TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""What Kubernetes gives to a pod with a service account."""
OUTSIDE: Final = "kube-system"
"""The namespace of our own objects where no pod has one."""
_OBJECT_NAME: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


class Feature(StrEnum):
    """One use of the API server; each needs rights of its own (docs/permissions.md)."""

    CONFIG = "config"
    LABELS = "labels"
    NODE_FEATURE = "nodefeature"
    TAINT = "taint"
    CONDITION = "condition"
    EVENTS = "events"
    ALLOCATABLE = "allocatable"
    PODS = "pods"
    POD_EVENTS = "pod-events"
    RIVALS = "rivals"


ALL: Final = frozenset(Feature)


class Settings(msgspec.Struct, frozen=True):
    """What of the API server is used, and where it is.

    Attributes:
        node: the name of the Node object that stands for this machine.
        kubeconfig: a file with address and credentials; `None` takes what a pod is given.
        config_map: namespace and name of the profiles, `None` if they are not in the cluster.
        features: what is done at all.
        remove_labels: whether labels and condition go when the daemon ends.
        patience: seconds that the first offer waits for the node's profile.
        namespace: where objects of our own stand: that of our pod.
    """

    node: str
    kubeconfig: Path | None = None
    config_map: tuple[str, str] | None = None
    features: frozenset[Feature] = ALL
    remove_labels: bool = False
    patience: float = 5.0
    namespace: str = OUTSIDE


def features_of(text: str) -> frozenset[Feature]:
    """Read `all`, `none`, or names, each with a `-` before it to leave one out: `all,-taint`.

    Raises:
        ConfigError: if one is not known.
    """
    chosen: set[Feature] = set()
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words and words[0].startswith("-"):
        chosen |= ALL

    for word in words:
        name = word.removeprefix("-")
        if word == "all":
            chosen |= ALL
        elif word == "none":
            chosen.clear()
        elif name not in list(Feature):
            known = ", ".join(("all", "none", *Feature))
            problem = f"{name!r} is no use of the API server; allowed: {known}"
            raise ConfigError(problem, file="--cluster")
        elif word == name:
            chosen.add(Feature(name))
        else:
            chosen.discard(Feature(name))
    return frozenset(chosen)


def config_map_of(text: str) -> tuple[str, str]:
    """Read `NAMESPACE/NAME`.

    Raises:
        ConfigError: if it is not.
    """
    found = re.fullmatch(rf"({_OBJECT_NAME})/({_OBJECT_NAME})", text)
    if found is None:
        problem = f"{text!r} names no ConfigMap; write NAMESPACE/NAME, as in kube-system/metagpu"
        raise ConfigError(problem, file="--config-map")
    return found[1], found[3]


def settings_of(
    *,
    node: str | None,
    kubeconfig: Path | None,
    config_map: str | None,
    features: str,
    remove_labels: bool,
    environment: Mapping[str, str] = os.environ,
    token: Path = TOKEN,
) -> Settings | None:
    """Make the settings of what was given; `None` if the API server is not to be used.

    It is used where the node's name is known and there are credentials, from a file or as a pod has
    them. Blocks: for the start alone.

    Raises:
        ConfigError: if something was asked for that needs what is missing.
    """
    wanted = features_of(features)
    in_pod = bool(environment.get("KUBERNETES_SERVICE_HOST")) and token.exists()
    reachable = kubeconfig is not None or in_pod
    place = config_map_of(config_map) if config_map else None

    if place is not None and not (node and reachable and Feature.CONFIG in wanted):
        problem = "a ConfigMap is read from the API server; also give --node-name" + (
            "" if reachable else " and --kubeconfig" if node is None else ""
        )
        if node and not reachable:
            problem = "a ConfigMap is read from the API server; also give --kubeconfig"
        if node and reachable:
            problem = "a ConfigMap is read by the use `config`; add it to --cluster"
        raise ConfigError(problem, file="--config-map")

    if not (node and reachable and wanted):
        return None
    own = _text(token.parent / "namespace") if in_pod else ""
    return Settings(node, kubeconfig, place, wanted, remove_labels, namespace=own or OUTSIDE)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
