"""The request of a pod in HAMi's terms, container by container."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from metagpu.core.model.quantities import whole_number
from metagpu.translation.hami_annotations import original_request
from metagpu.translation.values import Object, TranslationSettings

_WHOLE = 100


class GpuRequest(msgspec.Struct, frozen=True):
    """The request of one container.

    Attributes:
        path: of the container in the pod, as JSON Pointer.
        count: number of GPUs; 0 where there is no request, and `names` only have to go.
        memory: MiB of each; 0 where none are named.
        percentage: of the memory of each GPU; 0 where none is named.
        cores: percent of the multiprocessors of each; 0 where none is named.
        least: MiB that a whole GPU has to have.
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
    least: int = 0

    @property
    def whole(self) -> bool:
        """True if the container asks for whole GPUs."""
        return not self.memory and self.percentage in (0, _WHOLE)


class PodRequests(NamedTuple):
    """The requests of a pod.

    Attributes:
        problems: sentences about requests that cannot be read.
        others: the names of all resources that stay as they are.
    """

    requests: Sequence[GpuRequest]
    problems: Sequence[str]
    others: frozenset[str]


def read_requests(
    pod: Object, offered: frozenset[str], settings: TranslationSettings
) -> PodRequests:
    """Return the requests to translate.

    A container that names resources that are offered alone, or none, has no request, nor has one
    that is translated already.
    """
    offered |= settings.dra_resources
    original = original_request(pod)
    found: list[GpuRequest] = []
    problems: list[str] = []
    others: set[str] = set()

    for path, container in _containers(pod.get("spec") or {}):
        name, amounts = str(container.get("name") or ""), _amounts(container)
        named = {it: str(amounts[it]) for it in settings.names if it in amounts}
        names = _to_replace(named, offered, settings, translated=name in original)
        kept = amounts.keys() - names.keys()
        others |= {it for it in kept if "/" in it and whole_number(amounts[it])}
        try:
            if names:
                found.append(_request(path, container, names, settings))
        except ValueError as error:
            problems.append(f"container {name}: {error}")
    return PodRequests(found, problems, frozenset(others))


def _containers(spec: Object) -> Iterator[tuple[str, Object]]:
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or ()):
            yield f"/spec/{kind}/{index}", container


def _amounts(container: Object) -> Mapping[str, object]:
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def _to_replace(
    named: Mapping[str, str],
    offered: frozenset[str],
    settings: TranslationSettings,
    *,
    translated: bool,
) -> Mapping[str, str]:
    """Return the amounts of a container that a translation replaces or removes."""
    sizes = named.keys() & {settings.memory, settings.memory_percentage, settings.cores}
    if sizes & offered:
        return {}
    if sizes:
        return named
    kept = set(offered)
    if translated or whole_number(named.get(settings.gpu)) == 0:
        kept.add(settings.gpu)
    return {name: text for name, text in named.items() if name not in kept}


def _request(
    path: str, container: Object, names: Mapping[str, str], settings: TranslationSettings
) -> GpuRequest:
    """Return the request of a container; 100 % of the cores are a GPU, as in HAMi.

    Raises:
        ValueError: an amount is no whole number, or none that a GPU can have.
    """
    numbers = {name: _whole_number(name, text) for name, text in names.items()}
    percentage = numbers.get(settings.memory_percentage, 0)
    if percentage > _WHOLE:
        raise ValueError(f"{settings.memory_percentage}: {percentage} is more than a GPU has")
    memory = numbers.get(settings.memory, 0)
    exclusive = numbers.get(settings.cores, 0) >= _WHOLE
    return GpuRequest(
        path,
        str(container.get("name") or ""),
        numbers.get(settings.gpu, int(names.keys() != {settings.priority})),
        0 if exclusive else memory,
        0 if exclusive or memory else percentage,
        min(numbers.get(settings.cores, 0), _WHOLE),
        names,
        alone="/initContainers/" in path and container.get("restartPolicy") != "Always",
        others=frozenset(_amounts(container).keys() - names.keys()),
        least=memory if exclusive else 0,
    )


def _whole_number(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{name}: {text!r} is not a whole number")
    return number
