"""Profiles: which of several a node has."""

import pytest

from metagpu.core.errors import ConfigError
from metagpu.core.profiles import Choice, choose, has

SLICES = ("slice-4.yaml", "slice-10", "default")


@pytest.mark.parametrize(
    ("names", "choice", "chosen"),
    [
        (SLICES, Choice("slice-10", "slice-4"), "slice-10"),
        (SLICES, Choice("slice-4"), "slice-4.yaml"),
        (SLICES, Choice("slice-4.yaml"), "slice-4.yaml"),
        (SLICES, Choice(None, "slice-4"), "slice-4.yaml"),
        (SLICES, Choice(), "default"),
        (("only.json",), Choice(), "only.json"),
        (("a", "default.yml"), Choice(), "default.yml"),
        (("a", "a.yaml"), Choice("a"), "a"),
    ],
)
def test_the_nodes_own_then_the_default_then_the_only_one(
    names: tuple[str, ...], choice: Choice, chosen: str
) -> None:
    """The order of precedence, with or without a file's suffix."""
    assert choose(names, choice, "profiles") == chosen


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (
            SLICES,
            Choice("slice-5"),
            (
                "profiles: there is no profile 'slice-5' (--profile); there are: default, "
                "slice-10, slice-4.yaml"
            ),
        ),
        (
            ("a", "b"),
            Choice(None, "c"),
            "profiles: there is no profile 'c' (--default-profile); there are: a, b",
        ),
        (
            ("a", "b"),
            Choice(),
            "profiles: no profile is chosen; give --profile or --default-profile; there are: a, b",
        ),
        (
            (),
            Choice(),
            "profiles: there is no profile in it; put a configuration there",
        ),
        (
            tuple(f"p{number:03}" for number in range(300)),
            Choice(),
            (
                "profiles: no profile is chosen; give --profile or --default-profile; there are: "
                f"{', '.join(f'p{number:03}' for number in range(20))}, and 280 more"
            ),
        ),
    ],
)
def test_no_profile_is_told_with_those_that_are(
    names: tuple[str, ...], choice: Choice, message: str
) -> None:
    """What cannot be chosen is answered with what can."""
    with pytest.raises(ConfigError) as caught:
        choose(names, choice, "profiles")
    assert str(caught.value) == message


def test_a_profile_of_another_place_is_not_missed_here() -> None:
    """Where another place has the node's profile, this one goes by its own default."""
    assert choose(("a.yaml",), Choice("slice-4"), "mig", {"slice-4"}) == "a.yaml"
    assert choose(("a.yaml",), Choice(None, "slice-4"), "mig", {"slice-4"}) == "a.yaml"
    assert has(SLICES, "slice-4")
    assert not has(SLICES, "slice")
