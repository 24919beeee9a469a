"""Pages parsed as Prometheus does it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from metagpu.core.model.gpu import Gpu
from metagpu.plugins.metrics.samples import HistogramValue, Sample
from tests.plugins.http.rig import asked


@dataclass
class Page:
    """The samples of a page, by name and labels.

    Attributes:
        families: names of what has a type, as the page says it.
    """

    text: str
    families: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in text_string_to_metric_families(self.text):
            self.families[family.name] = family.type
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series of a name that have these labels."""
        wanted = set(labels.items())
        return [
            value for (key, given), value in self.samples.items() if key == name and wanted <= given
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only series of a name that has these labels."""
        [value] = self.values(name, **labels)
        return value

    def labels(self, name: str, **labels: str) -> Mapping[str, str]:
        """Return all labels of that series."""
        wanted = set(labels.items())
        [found] = [dict(given) for key, given in self.samples if key == name and wanted <= given]
        return found


def labels_of(gpu: Gpu) -> dict[str, str]:
    """Return the labels of a GPU."""
    return {"gpu": str(gpu.index), "uuid": gpu.id}


def valued(samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    """Return samples by name and labels, without histograms; no sample may appear twice."""
    found: dict[tuple[str, ...], float] = {}
    for family, labels, value in samples:
        assert len(labels) == len(family.labels)
        if not isinstance(value, HistogramValue):
            assert (family.name, *labels) not in found
            found[family.name, *labels] = value
    return found


async def page_at(port: int) -> Page:
    """Scrape a page."""
    status, _, body = await asked(port)
    assert status == 200
    return Page(body)
