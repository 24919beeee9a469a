"""The choice of a node's profile among several."""

import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.core.config.profiles import ProfileChoice, choose_profile, has_profile

SLICES = ("slice-4.yaml", "slice-10", "default")


@pytest.mark.parametrize(
    ("names", "choice", "chosen"),
    [
        (SLICES, ProfileChoice("slice-10", "slice-4"), "slice-10"),
        (SLICES, ProfileChoice("slice-4"), "slice-4.yaml"),
        (SLICES, ProfileChoice("slice-4.yaml"), "slice-4.yaml"),
        (SLICES, ProfileChoice(None, "slice-4"), "slice-4.yaml"),
        (SLICES, ProfileChoice(), "default"),
        (("only.json",), ProfileChoice(), "only.json"),
        (("a", "default.yml"), ProfileChoice(), "default.yml"),
        (("a", "a.yaml"), ProfileChoice("a"), "a"),
    ],
)
def test_the_nodes_own_then_the_default_then_the_only_one(
    names: tuple[str, ...], choice: ProfileChoice, chosen: str
) -> None:
    """The node's profile comes before the default, and the default before a single profile."""
    assert choose_profile(names, choice, "profiles") == chosen


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (
            SLICES,
            ProfileChoice("slice-5"),
            (
                "profiles: there is no profile 'slice-5' (--profile); there are: default, "
                "slice-10, slice-4.yaml"
            ),
        ),
        (
            ("a", "b"),
            ProfileChoice(None, "c"),
            "profiles: there is no profile 'c' (--default-profile); there are: a, b",
        ),
        (
            ("a", "b"),
            ProfileChoice(),
            "profiles: no profile is chosen; give --profile or --default-profile; there are: a, b",
        ),
        (
            (),
            ProfileChoice(),
            "profiles: there is no profile in it; put a configuration there",
        ),
        (
            tuple(f"p{number:03}" for number in range(300)),
            ProfileChoice(),
            (
                "profiles: no profile is chosen; give --profile or --default-profile; there are: "
                f"{', '.join(f'p{number:03}' for number in range(20))}, and 280 more"
            ),
        ),
    ],
)
def test_an_unknown_profile_is_refused_with_the_known_ones(
    names: tuple[str, ...], choice: ProfileChoice, message: str
) -> None:
    """The error for an unknown profile lists the known ones."""
    with pytest.raises(ConfigError) as caught:
        choose_profile(names, choice, "profiles")
    assert str(caught.value) == message


def test_a_profile_of_another_place_is_not_missed_here() -> None:
    """A place without the node's profile uses its default if another place has it."""
    assert choose_profile(("a.yaml",), ProfileChoice("slice-4"), "mig", {"slice-4"}) == "a.yaml"
    assert (
        choose_profile(("a.yaml",), ProfileChoice(None, "slice-4"), "mig", {"slice-4"}) == "a.yaml"
    )
    assert has_profile(SLICES, "slice-4")
    assert not has_profile(SLICES, "slice")
