"""Settings of the API server's side: Node, credentials and features."""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason

TOKEN_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""The token that Kubernetes gives to a pod with a service account."""
DEFAULT_NAMESPACE: Final = "kube-system"
"""The namespace of our own objects outside a pod."""
VIEWER: Final = "metagpu-viewer"
"""The ServiceAccount, in the namespace of our pod, that people create viewers' tokens of."""
AUDIENCE: Final = "metagpu.io/status"
"""The audience of viewers' tokens, of this account or of another one."""
STATUS_ROLE: Final = "metagpu-node-status"
"""The ClusterRole of the manifests that lets an account read the status of nodes."""
CORDON_PREFIX: Final = "cordon.metagpu.io/"
"""The Node's annotation that cordons a GPU, before its uuid or index; the value is the reason."""
_OBJECT_NAME: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


class Feature(StrEnum):
    """One feature that uses the API server, with rights of its own.

    docs/permissions.md lists the rights.
    """

    CONFIG = "config"
    LABELS = "labels"
    FREE_LABELS = "free-labels"
    NODE_FEATURE = "nodefeature"
    TAINT = "taint"
    CONDITION = "condition"
    EVENTS = "events"
    ALLOCATABLE = "allocatable"
    PODS = "pods"
    POD_EVENTS = "pod-events"
    COMPETING_PLUGINS = "competing-plugins"
    CORDON = "cordon"
    JANITOR = "janitor"
    JANITOR_DRY_RUN = "janitor-dry-run"


JANITORS: Final = frozenset((Feature.JANITOR, Feature.JANITOR_DRY_RUN))
"""The features that delete pods."""
ALL_FEATURES: Final = frozenset(Feature) - JANITORS - {Feature.FREE_LABELS}
"""Those of `all`: without the janitor, and without labels that change with nearly each pod."""


class ClusterTiming(msgspec.Struct, frozen=True):
    """Times of the API server's side, all in seconds.

    Attributes:
        restart_delay: after a fault of our own, before everything starts again.
        shutdown_timeout: for the API server, at the end of the daemon, to remove the labels.
        backoff_first: the delay after a first failure.
        backoff_longest: the limit of that delay, which doubles with each failure; that of
            client-go's reflectors.
        reconcile_interval: between two runs of a reconciler; one run covers all changes meanwhile.
        free_labels_interval: likewise for the labels, where they follow what is free.
        lower_interval: likewise for allocatable numbers that fall: until the Node has the new
            number, the scheduler sends pods by the old one.
        others_delay: from a change to labels, conditions and whatever else may wait until these
            numbers are on their way.
        raise_delay: before an allocatable number rises: the kubelet may not know the shares yet.
        spread: over which the nodes spread what one cause asks of all at once: to watch again after
            a watch that ended before its time, and to follow a changed ConfigMap.
        credentials_timeout: for a program, or another source, that provides credentials; those of
            clouds take one to five seconds.
        nfd_timeout: for NFD's master to put labels on the Node; later metagpu patches them.
        count_interval: between two updates of an Event's count.
        janitor_delay: between the rejection of a pod and its deletion: controllers count it, and
            people may look at it.
        difference_after: before a number of the Node that differs from ours is reported; the
            kubelet writes its numbers every 10 s.
    """

    restart_delay: float = 30.0
    shutdown_timeout: float = 2.0
    backoff_first: float = 0.2
    backoff_longest: float = 30.0
    reconcile_interval: float = 0.1
    free_labels_interval: float = 1.0
    lower_interval: float = 0.02
    others_delay: float = 0.02
    raise_delay: float = 0.1
    spread: float = 10.0
    credentials_timeout: float = 10.0
    nfd_timeout: float = 60.0
    count_interval: float = 30.0
    janitor_delay: float = 30.0
    difference_after: float = 60.0


class ClusterSettings(msgspec.Struct, frozen=True):
    """The features of the API server in use, and how to reach it.

    Attributes:
        node: the name of this machine's Node object.
        kubeconfig: a file with address and credentials; `None` takes those of the pod.
        config_map: namespace and name of the profiles, `None` without profiles in the cluster.
        features: the features in use.
        remove_labels: whether the end of the daemon removes labels and conditions.
        choice_timeout: seconds that the first offer waits for the node's profile.
        namespace: the namespace of our own objects, which is that of our pod.
        drain_on_driver_upgrade: whether the shares are withdrawn while the GPU operator upgrades
            the driver.
        timing: the times of all features.
    """

    node: str
    kubeconfig: Path | None = None
    config_map: tuple[str, str] | None = None
    features: frozenset[Feature] = ALL_FEATURES
    remove_labels: bool = False
    choice_timeout: float = 5.0
    namespace: str = DEFAULT_NAMESPACE
    drain_on_driver_upgrade: bool = False
    timing: ClusterTiming = ClusterTiming()


def parse_features(text: str) -> frozenset[Feature]:
    """Parse `all`, `none` or names of features, as in `all,-taint`.

    A `-` before a name removes the feature.

    Raises:
        ConfigError: a name is unknown, or a feature needs or excludes another one.
    """
    chosen: set[Feature] = set()
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words and words[0].startswith("-"):
        chosen |= ALL_FEATURES

    for word in words:
        name = word.removeprefix("-")
        if word == "all":
            chosen |= ALL_FEATURES
        elif word == "none":
            chosen.clear()
        elif name not in list(Feature):
            known = ", ".join(("all", "none", *Feature))
            problem = f"{name!r} is not a feature of the API server; allowed: {known}"
            raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="--cluster")
        elif word == name:
            chosen.add(Feature(name))
        else:
            chosen.discard(Feature(name))
    if chosen >= JANITORS:
        problem = "janitor deletes pods and janitor-dry-run deletes none; name one of them"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--cluster")
    if chosen & JANITORS and not {Feature.PODS, Feature.POD_EVENTS} <= chosen:
        problem = "the janitor watches pods and reports by Events; add pods,pod-events"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--cluster")
    if Feature.FREE_LABELS in chosen and Feature.LABELS not in chosen:
        problem = "free-labels are some of the labels; add labels"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--cluster")
    return frozenset(chosen)


def parse_config_map(text: str) -> tuple[str, str]:
    """Parse `NAMESPACE/NAME`.

    Raises:
        ConfigError: the text has another form.
    """
    found = re.fullmatch(rf"({_OBJECT_NAME})/({_OBJECT_NAME})", text)
    if found is None:
        problem = f"{text!r} names no ConfigMap; write NAMESPACE/NAME, as in kube-system/metagpu"
        raise ConfigError(problem, ConfigReason.INVALID_VALUE, file="--config-map")
    return found[1], found[3]


def resolve_settings(
    *,
    node: str | None,
    kubeconfig: Path | None,
    config_map: str | None,
    features: str,
    remove_labels: bool,
    drain_on_driver_upgrade: bool = False,
    environment: Mapping[str, str] = os.environ,
    token: Path = TOKEN_FILE,
) -> ClusterSettings | None:
    """Return the settings of options and environment, `None` for no API server.

    The API server is used where the node's name is known and credentials are there: a kubeconfig,
    or the service account of a pod. Blocks: for the start alone.

    Raises:
        ConfigError: an option needs another option that is missing.
    """
    wanted = parse_features(features)
    in_pod = bool(environment.get("KUBERNETES_SERVICE_HOST")) and token.exists()
    reachable = kubeconfig is not None or in_pod
    profiles = parse_config_map(config_map) if config_map else None

    if profiles is not None and not (node and reachable and Feature.CONFIG in wanted):
        problem = "a ConfigMap is read from the API server; also give --node-name" + (
            "" if reachable else " and --kubeconfig" if node is None else ""
        )
        if node and not reachable:
            problem = "a ConfigMap is read from the API server; also give --kubeconfig"
        if node and reachable:
            problem = "a ConfigMap is read by the feature `config`; add it to --cluster"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--config-map")

    if not (node and reachable and wanted):
        if drain_on_driver_upgrade:
            problem = (
                "the GPU operator's labels are read from the API server; also give --node-name, "
                "outside a pod --kubeconfig, and a feature in --cluster"
            )
            raise ConfigError(problem, ConfigReason.CONFLICT, file="--drain-on-driver-upgrade")
        return None
    own = _read_text(token.parent / "namespace") if in_pod else ""
    return ClusterSettings(
        node,
        kubeconfig,
        profiles,
        wanted,
        remove_labels,
        namespace=own or DEFAULT_NAMESPACE,
        drain_on_driver_upgrade=drain_on_driver_upgrade,
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
