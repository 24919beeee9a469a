"""The judgement of a soak, on invented samples."""

from tests.soak.__main__ import GROWTH, growth, plot


def samples(leak: float) -> list[dict[str, float]]:
    """Return samples of figures that swing, and grow by `leak` each."""
    return [
        {"seconds": 10.0 * number, **dict.fromkeys(GROWTH, 50 + number % 5 + leak * number)}
        for number in range(80)
    ]


def test_a_figure_that_swings_has_not_grown() -> None:
    """Figures that go up and down by their work are no leak."""
    assert all(by <= GROWTH[name] for name, by in growth(samples(0)).items())


def test_a_figure_that_grows_is_found() -> None:
    """A slow leak under the same swings is found, of each figure."""
    assert all(by > GROWTH[name] for name, by in growth(samples(0.5)).items())


def test_the_plot_has_every_figure() -> None:
    """The picture names each figure with its maximum."""
    assert all(f"{name}" in plot(samples(0)) for name in GROWTH)
