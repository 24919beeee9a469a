"""Options that the environment may set as well."""

import argparse
from pathlib import Path

import pytest

from metagpu.arguments import parser
from metagpu.cli import main
from metagpu.core.errors import ConfigError
from metagpu.core.profiles import Choice
from metagpu.options import Variable, add_source, settle, source_of


def settled(*arguments: str, **environment: str) -> argparse.Namespace:
    """Parse some arguments and put the environment's values where none was given."""
    made = argparse.ArgumentParser()
    add_source(made)
    args = made.parse_args(arguments)
    settle(args, environment)
    return args


def test_an_option_wins_over_the_environment() -> None:
    """Options first, then our variables, then those of NVIDIA's daemon sets, then the default."""
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


def test_a_source_is_what_was_settled() -> None:
    """Everything that says where the configuration is arrives in the source."""
    args = settled("--config", "a", "--mig-config", "all-1g.5gb", NODE_NAME="node-1")
    source = source_of(args)

    assert source.paths == (Path("a"),)
    assert source.choice == Choice(None, None)
    assert source.circumstances.mig_config == "all-1g.5gb"
    assert source.circumstances.node == "node-1"


def test_a_variable_that_says_what_cannot_be() -> None:
    """A wrong variable is named, with what is allowed."""
    variable = Variable(("METAGPU_LOG_LEVEL",), "info", allowed=("debug", "info"))

    with pytest.raises(ConfigError) as caught:
        variable.value({"METAGPU_LOG_LEVEL": "loud"})
    assert str(caught.value) == (
        "environment: METAGPU_LOG_LEVEL: 'loud' is not known here; allowed: debug, info"
    )
    assert variable.value({}) == "info"
    assert str(variable) == "info"


def test_every_option_of_run_has_its_variable() -> None:
    """What `run` can be told by options it can be told by METAGPU_ and the option's name."""
    told = vars(parser().parse_args(["run"]))
    defaults = {name: value for name, value in told.items() if name != "command"}

    assert len(defaults) > 10
    for name, value in defaults.items():
        assert isinstance(value, Variable)
        assert value.names[0] == f"METAGPU_{name.upper()}"


def test_a_wrong_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong variable is one line and status 1; the help names the defaults."""
    monkeypatch.setenv("METAGPU_LOG_LEVEL", "loud")

    assert main(["run"]) == 1
    assert capsys.readouterr().err == (
        "metagpu: environment: METAGPU_LOG_LEVEL: 'loud' is not known here; allowed: debug, info, "
        "warning, error\n"
    )

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "(default: /var/lib/kubelet/device-plugins)" in " ".join(capsys.readouterr().out.split())
