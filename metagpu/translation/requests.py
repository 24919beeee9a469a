"""The request of a pod in HAMi's terms, container by container."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from metagpu.core.model.quantities import whole_number
from metagpu.translation.values import Object, TranslationSettings

_WHOLE = 100


class GpuRequest(msgspec.Struct, frozen=True):
    """The request of one container.

    Attributes:
        path: of the container in the pod, as JSON Pointer.
        count: number of GPUs.
        memory: MiB of each; 0 where none are named.
        percentage: of the memory of each GPU; 0 where none is named.
        cores: percent of the multiprocessors of each; 0 where none is named.
        names: the amounts as the pod has them, by resource name.
        alone: whether an init container asks that ends before the others start.
        others: all resource names of the container beside these.
    """

    path: str
    container: str
    count: int
    memory: int
    percentage: int
    cores: int
    names: Mapping[str, str]
    alone: bool = False
    others: frozenset[str] = frozenset()

    @property
    def whole(self) -> bool:
        """True if the container asks for whole GPUs."""
        return not self.memory and self.percentage in (0, _WHOLE)


def read_requests(
    pod: Object, offered: frozenset[str], settings: TranslationSettings
) -> tuple[Sequence[GpuRequest], Sequence[str]]:
    """Return the requests to translate, and sentences about those that cannot be read.

    A container that names resources that are offered alone, or none, has no request.
    """
    found: list[GpuRequest] = []
    problems: list[str] = []

    for path, container in _containers(pod.get("spec") or {}):
        try:
            request = _request(path, container, offered, settings)
        except ValueError as error:
            problems.append(f"container {container.get('name')}: {error}; it is left as it is")
            continue
        if request is not None:
            found.append(request)
    return found, problems


def _containers(spec: Object) -> Iterator[tuple[str, Object]]:
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or ()):
            yield f"/spec/{kind}/{index}", container


def _request(
    path: str, container: Object, offered: frozenset[str], settings: TranslationSettings
) -> GpuRequest | None:
    """Return the request of a container; `None` where there is nothing to translate.

    Raises:
        ValueError: an amount is no whole number, or none that a GPU can have.
    """
    resources = container.get("resources") or {}
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    names = {name: str(amounts[name]) for name in settings.names if name in amounts}
    sizes = names.keys() - {settings.gpu}
    if not names or sizes & offered or (not sizes and settings.gpu in offered):
        return None

    numbers = {name: _whole_number(name, text) for name, text in names.items()}
    percentage = numbers.get(settings.memory_percentage, 0)
    if percentage > _WHOLE:
        raise ValueError(f"{settings.memory_percentage}: {percentage} is more than a GPU has")
    count = numbers.get(settings.gpu, 1)
    if not count:
        return None
    memory = numbers.get(settings.memory, 0)
    return GpuRequest(
        path,
        str(container.get("name") or ""),
        count,
        memory,
        0 if memory else percentage,
        min(numbers.get(settings.cores, 0), _WHOLE),
        names,
        alone="/initContainers/" in path and container.get("restartPolicy") != "Always",
        others=frozenset(amounts.keys() - names.keys()),
    )


def _whole_number(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{name}: {text!r} is no whole number")
    return number
