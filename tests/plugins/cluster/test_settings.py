"""The options about the API server, and the errors about wrong ones."""

from pathlib import Path

import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.plugins.cluster.settings import (
    ALL_FEATURES,
    ClusterSettings,
    Feature,
    parse_config_map,
    parse_features,
    resolve_settings,
)

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("all", ALL_FEATURES),
        ("none", frozenset()),
        ("labels, events", {Feature.LABELS, Feature.EVENTS}),
        ("all,-taint", ALL_FEATURES - {Feature.TAINT}),
        ("-taint,-events", ALL_FEATURES - {Feature.TAINT, Feature.EVENTS}),
        ("", frozenset()),
        ("all,janitor", ALL_FEATURES | {Feature.JANITOR}),
        (
            "pods,pod-events,janitor-dry-run",
            {Feature.PODS, Feature.POD_EVENTS, Feature.JANITOR_DRY_RUN},
        ),
    ],
)
def test_features_are_named_or_left_out(text: str, features: frozenset[Feature]) -> None:
    """Each use of the API server has its own switch."""
    assert parse_features(text) == features


def test_unknown_feature_is_named() -> None:
    """An unknown feature is refused with the list of known ones."""
    with pytest.raises(ConfigError) as refusal:
        parse_features("all,-taints")
    assert str(refusal.value) == (
        "--cluster: 'taints' is not a feature of the API server; allowed: all, none, config, "
        "labels, free-labels, nodefeature, taint, condition, events, allocatable, pods, "
        "pod-events, competing-plugins, cordon, janitor, janitor-dry-run"
    )


def test_labels_of_the_free_are_some_of_the_labels() -> None:
    """They are not in `all`, as each pod changes them, and need the others."""
    assert Feature.FREE_LABELS not in ALL_FEATURES
    assert Feature.FREE_LABELS in parse_features("all,free-labels")
    with pytest.raises(ConfigError, match="add labels"):
        parse_features("events,free-labels")


def test_a_janitor_either_deletes_or_does_not() -> None:
    """Both janitors together are refused in one line: a dry run would be silently ignored."""
    with pytest.raises(ConfigError, match="name one of them"):
        parse_features("all,janitor,janitor-dry-run")


def test_the_janitor_deletes_only_where_it_is_named() -> None:
    """No list of all features has the janitor, and it needs the features that it reports by."""
    assert not {Feature.JANITOR, Feature.JANITOR_DRY_RUN} & ALL_FEATURES
    with pytest.raises(ConfigError, match="add pods,pod-events"):
        parse_features("labels,janitor")


@pytest.mark.parametrize("text", ["metagpu", "a/b/c", "/b", "A/b", "a/"])
def test_config_map_has_a_namespace_and_a_name(text: str) -> None:
    """A name without a namespace is refused with an example."""
    with pytest.raises(ConfigError) as refusal:
        parse_config_map(text)
    assert str(refusal.value) == (
        f"--config-map: {text!r} names no ConfigMap; write NAMESPACE/NAME, as in "
        "kube-system/metagpu"
    )
    assert parse_config_map("kube-system/metagpu") == ("kube-system", "metagpu")


def made(
    node: str | None = "n",
    *,
    kubeconfig: Path | None = None,
    config_map: str | None = None,
    features: str = "all",
    environment: dict[str, str] | None = None,
    token: Path = Path(__file__),
    drain: bool = False,
) -> ClusterSettings | None:
    """Return settings with the usual values of all others."""
    return resolve_settings(
        node=node,
        kubeconfig=kubeconfig,
        config_map=config_map,
        features=features,
        remove_labels=False,
        drain_on_driver_upgrade=drain,
        environment=environment or {},
        token=token,
    )


def test_nothing_runs_without_name_credentials_or_features() -> None:
    """The plugin needs the node's name, credentials and a feature."""
    assert made(environment=POD) == ClusterSettings("n")
    assert made(kubeconfig=Path("k")) == ClusterSettings("n", Path("k"))
    assert made() is None
    assert made(environment=POD, token=Path("/none")) is None
    assert made(node=None, environment=POD) is None
    assert made(features="none", environment=POD) is None


def test_our_objects_stand_in_the_namespace_of_our_pod(tmp_path: Path) -> None:
    """A pod has its namespace beside its token; outside one it is kube-system."""
    token = tmp_path / "token"
    token.write_text("x")
    beside = made(environment=POD, token=token)
    (tmp_path / "namespace").write_text("gpus\n")
    within = made(environment=POD, token=token)
    outside = made(kubeconfig=Path("k"), token=token)

    assert [settings.namespace for settings in (beside, within, outside) if settings] == [
        "kube-system", "gpus", "kube-system",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "features", "environment", "reason"),
    [
        (None, "all", POD, "a ConfigMap is read from the API server; also give --node-name"),
        (
            None,
            "all",
            {},
            "a ConfigMap is read from the API server; also give --node-name and --kubeconfig",
        ),
        ("n", "all", {}, "a ConfigMap is read from the API server; also give --kubeconfig"),
        ("n", "labels", POD, "a ConfigMap is read by the feature `config`; add it to --cluster"),
    ],
)
def test_config_map_that_cannot_be_read_is_refused(
    node: str | None, features: str, environment: dict[str, str], reason: str
) -> None:
    """The error names the options that a ConfigMap needs too."""
    with pytest.raises(ConfigError) as refusal:
        made(node, config_map="a/b", features=features, environment=environment)
    assert str(refusal.value) == f"--config-map: {reason}"


def test_driver_upgrades_are_followed_at_the_api_server_alone() -> None:
    """An option that has no effect is an error, which names what is missing."""
    settings = made(environment=POD, drain=True)
    assert settings == ClusterSettings("n", drain_on_driver_upgrade=True)
    for node, environment, features in ((None, POD, "all"), ("n", {}, "all"), ("n", POD, "none")):
        with pytest.raises(ConfigError, match="also give --node-name"):
            made(node, environment=environment, features=features, drain=True)
