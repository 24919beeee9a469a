"""The requests of containers, and those in HAMi's resources."""

from collections.abc import Iterator, Mapping

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
        annotations: those of the pod that ask, as the pod has them; they go too.
        technique: the only one that serves it; empty for any.
        limit: MiB of each GPU that it may use beyond its request; 0 for no more than that.
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
    annotations: Mapping[str, str] = {}
    technique: str = ""
    limit: int = 0

    @property
    def asked(self) -> Mapping[str, str]:
        """The names and annotations that ask, as the pod has them."""
        return {**self.names, **self.annotations}

    @property
    def whole(self) -> bool:
        """True if the container asks for whole GPUs."""
        return not self.memory and self.percentage in (0, _WHOLE)


def requests_in_resources(
    pod: Object, settings: TranslationSettings, offered: frozenset[str], problems: list[str]
) -> Iterator[GpuRequest]:
    """Yield the requests of HAMi's resources; what cannot be read is a problem each."""
    original = original_request(pod)
    for path, container in containers_of(pod):
        name, amounts = str(container.get("name") or ""), amounts_of(container)
        named = {
            resource: str(amounts[resource]) for resource in settings.names if resource in amounts
        }
        names = _to_replace(named, offered, settings, translated=name in original)
        try:
            if names:
                yield _request(path, container, names, settings)
        except ValueError as error:
            problems.append(f"container {name}: {error}")


def containers_of(pod: Object) -> Iterator[tuple[str, Object]]:
    """Yield the containers of a pod in the order of their start, with JSON Pointers."""
    spec = pod.get("spec") or {}
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or ()):
            yield f"/spec/{kind}/{index}", container


def amounts_of(container: Object) -> Mapping[str, object]:
    """Return what a container asks for, by resource."""
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def runs_alone(path: str, container: Object) -> bool:
    """Return whether an init container ends before the others start."""
    return "/initContainers/" in path and container.get("restartPolicy") != "Always"


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
        alone=runs_alone(path, container),
        others=frozenset(amounts_of(container).keys() - names.keys()),
        least=memory if exclusive else 0,
    )


def _whole_number(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{name}: {text!r} is not a whole number")
    return number
