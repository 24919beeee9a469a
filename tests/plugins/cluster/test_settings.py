"""What an operator may say of the API server, and the sentences about what they may not."""

from pathlib import Path

import pytest

from metagpu.core.errors import ConfigError
from metagpu.plugins.cluster.settings import (
    ALL,
    Feature,
    Settings,
    config_map_of,
    features_of,
    settings_of,
)

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("all", ALL),
        ("none", frozenset()),
        ("labels, events", {Feature.LABELS, Feature.EVENTS}),
        ("all,-taint", ALL - {Feature.TAINT}),
        ("-taint,-events", ALL - {Feature.TAINT, Feature.EVENTS}),
        ("", frozenset()),
    ],
)
def test_uses_are_named_or_left_out(text: str, features: frozenset[Feature]) -> None:
    """Each use of the API server has its own switch."""
    assert features_of(text) == features


def test_unknown_use_is_named() -> None:
    """A word that is no use is refused with those that are."""
    with pytest.raises(ConfigError) as refusal:
        features_of("all,-taints")
    assert str(refusal.value) == (
        "--cluster: 'taints' is no use of the API server; allowed: all, none, config, labels, "
        "nodefeature, taint, condition, events, allocatable, pods, pod-events, rivals"
    )


@pytest.mark.parametrize("text", ["metagpu", "a/b/c", "/b", "A/b", "a/"])
def test_config_map_has_a_namespace_and_a_name(text: str) -> None:
    """What names no ConfigMap is refused with an example."""
    with pytest.raises(ConfigError) as refusal:
        config_map_of(text)
    assert str(refusal.value) == (
        f"--config-map: {text!r} names no ConfigMap; write NAMESPACE/NAME, as in "
        "kube-system/metagpu"
    )


def made(
    node: str | None = "n",
    *,
    kubeconfig: Path | None = None,
    config_map: str | None = None,
    features: str = "all",
    environment: dict[str, str] | None = None,
    token: Path = Path(__file__),
) -> Settings | None:
    """Make settings; what is not named is ordinary."""
    return settings_of(
        node=node,
        kubeconfig=kubeconfig,
        config_map=config_map,
        features=features,
        remove_labels=False,
        environment=environment or {},
        token=token,
    )


def test_nothing_of_it_runs_without_name_credentials_or_uses() -> None:
    """The API server is used only where it is known who we are, how to reach it, and what for."""
    assert made(environment=POD) == Settings("n")
    assert made(kubeconfig=Path("k")) == Settings("n", Path("k"))
    assert made() is None
    assert made(environment=POD, token=Path("/none")) is None
    assert made(node=None, environment=POD) is None
    assert made(features="none", environment=POD) is None


def test_our_objects_stand_in_the_namespace_of_our_pod(tmp_path: Path) -> None:
    """A pod is told its namespace beside its token; outside one it is kube-system."""
    token = tmp_path / "token"
    token.write_text("x")
    beside = made(environment=POD, token=token)
    (tmp_path / "namespace").write_text("gpus\n")
    within = made(environment=POD, token=token)
    outside = made(kubeconfig=Path("k"), token=token)

    assert [it.namespace for it in (beside, within, outside) if it] == [
        "kube-system", "gpus", "kube-system",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "features", "environment", "mend"),
    [
        (None, "all", POD, "a ConfigMap is read from the API server; also give --node-name"),
        (
            None,
            "all",
            {},
            "a ConfigMap is read from the API server; also give --node-name and --kubeconfig",
        ),
        ("n", "all", {}, "a ConfigMap is read from the API server; also give --kubeconfig"),
        ("n", "labels", POD, "a ConfigMap is read by the use `config`; add it to --cluster"),
    ],
)
def test_config_map_that_cannot_be_read_is_refused(
    node: str | None, features: str, environment: dict[str, str], mend: str
) -> None:
    """Who asks for a ConfigMap is told what else it takes."""
    with pytest.raises(ConfigError) as refusal:
        made(node, config_map="a/b", features=features, environment=environment)
    assert str(refusal.value) == f"--config-map: {mend}"
