"""Options that environment variables can set as well."""

import argparse
from pathlib import Path

import pytest

from metagpu.cli.arguments import parser
from metagpu.cli.metagpu import main
from metagpu.cli.options import (
    Variable,
    add_source,
    pod_resources_of,
    resolve_environment,
    source_of,
)
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.profiles import ProfileChoice


def settled(*arguments: str, **environment: str) -> argparse.Namespace:
    """Parse some arguments, with values of the environment for options that are not given."""
    made = argparse.ArgumentParser()
    add_source(made)
    args = made.parse_args(arguments)
    resolve_environment(args, environment)
    return args


def test_an_option_wins_over_the_environment() -> None:
    """Options come first, then our variables, then NVIDIA's, then the default."""
    both = {"METAGPU_PROFILE": "env", "METAGPU_DEFAULT_PROFILE": "ours", "DEFAULT_CONFIG": "theirs"}

    assert settled("--profile", "flag", **both).profile == "flag"
    assert settled(**both).profile == "env"
    assert settled(**both).default_profile == "ours"
    assert settled(DEFAULT_CONFIG="theirs").default_profile == "theirs"
    assert settled(METAGPU_PROFILE="").profile is None


def test_paths_may_be_several() -> None:
    """`--config` given twice is two paths, which replace the environment's, split at colons."""
    assert settled("--config", "a", "--config", "b", METAGPU_CONFIG="c").config == [
        Path("a"),
        Path("b"),
    ]
    assert settled(METAGPU_CONFIG="c:d", CONFIG_FILE="e").config == [Path("c"), Path("d")]
    assert settled(CONFIG_FILE="/config/config.yaml").config == [Path("/config/config.yaml")]
    assert settled().config is None


def test_nvidias_variables_name_files_that_belong_together() -> None:
    """The plugin's file, or config-manager's folder, goes with mig-parted's file; ours wins."""
    files = {"CONFIG_FILE_SRCDIR": "/available-configs", "MIG_PARTED_CONFIG_FILE": "/mig.yaml"}

    assert settled(**files).config == [Path("/available-configs"), Path("/mig.yaml")]
    assert settled(CONFIG_FILE="/mig.yaml", MIG_PARTED_CONFIG_FILE="/mig.yaml").config == [
        Path("/mig.yaml")
    ]
    assert settled(METAGPU_CONFIG="a", **files).config == [Path("a")]
    assert settled(METAGPU_DEVICE_PLUGIN_NODENAME="n").node_name == "n"


def test_a_source_has_all_options() -> None:
    """Every option about the configuration's source is in the source."""
    args = settled("--config", "a", "--mig-config", "all-1g.5gb", NODE_NAME="node-1")
    source = source_of(args)

    assert source.paths == (Path("a"),)
    assert source.choice == ProfileChoice(None, None)
    assert source.context.mig_config == "all-1g.5gb"
    assert source.context.node == "node-1"


def test_a_variable_with_an_impossible_value() -> None:
    """A wrong variable is named, with the allowed values."""
    variable = Variable(("METAGPU_LOG_LEVEL",), "info", allowed=("debug", "info"))

    with pytest.raises(ConfigError) as caught:
        variable.value({"METAGPU_LOG_LEVEL": "loud"})
    assert str(caught.value) == (
        "environment: METAGPU_LOG_LEVEL: 'loud' is unknown; allowed: debug, info"
    )
    assert variable.value({}) == "info"
    assert str(variable) == "info"


def test_every_option_of_run_has_its_variable() -> None:
    """Every option of `run` has a variable of METAGPU_ and the option's name."""
    options = vars(parser().parse_args(["run"]))
    defaults = {name: value for name, value in options.items() if name != "command"}

    assert len(defaults) > 10
    for name, value in defaults.items():
        assert isinstance(value, Variable)
        assert value.names[0] == f"METAGPU_{name.upper()}"


@pytest.mark.parametrize(
    ("words", "environment", "socket"),
    [
        ("", {}, "/var/lib/kubelet/pod-resources/kubelet.sock"),
        (
            "--kubelet-root /var/lib/k0s/kubelet",
            {},
            "/var/lib/k0s/kubelet/pod-resources/kubelet.sock",
        ),
        ("", {"METAGPU_KUBELET_ROOT": "/data"}, "/data/pod-resources/kubelet.sock"),
        ("--kubelet-root /data --pod-resources /pr.sock", {}, "/pr.sock"),
        ("--kubelet-root /data", {"METAGPU_POD_RESOURCES": "/pr.sock"}, "/pr.sock"),
    ],
)
def test_the_kubelets_root_moves_pod_resources_alone(
    words: str, environment: dict[str, str], socket: str
) -> None:
    """PodResources is below the kubelet's root; the device plugin folder stays where it is."""
    args = parser().parse_args(["run", *words.split()])
    resolve_environment(args, environment)

    assert pod_resources_of(args) == Path(socket)
    assert args.kubelet_dir == Path("/var/lib/kubelet/device-plugins")


def test_a_wrong_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong variable is one line and status 1; the help names the defaults."""
    monkeypatch.setenv("METAGPU_LOG_LEVEL", "loud")

    assert main(["run"]) == 1
    assert capsys.readouterr().err == (
        "metagpu: environment: METAGPU_LOG_LEVEL: 'loud' is unknown; allowed: debug, info, "
        "warning, error\n"
    )

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "(default: /var/lib/kubelet/device-plugins)" in " ".join(capsys.readouterr().out.split())
