"""The vocabularies that pods may ask in, each read into the same requests."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from metagpu.core.model.quantities import whole_number
from metagpu.translation import kai_annotations
from metagpu.translation.requests import (
    GpuRequest,
    amounts_of,
    containers_of,
    requests_in_resources,
)
from metagpu.translation.values import Object, TranslationSettings


class Vocabulary(NamedTuple):
    """One program's way to ask for GPUs.

    Attributes:
        read: yields the requests of a pod, among the resources that are offered, and adds to its
            problems what cannot be read.
        scheduler: the program's own, which a translated pod no longer needs.
        is_annotation: whether the annotation of a key is part of a request.
        in_annotations: whether its requests are annotations, and no resources.
    """

    read: Callable[[Object, TranslationSettings, frozenset[str], list[str]], Iterator[GpuRequest]]
    scheduler: str
    is_annotation: Callable[[str], bool] = lambda _: False
    in_annotations: bool = False


VOCABULARIES: Final[Mapping[str, Vocabulary]] = {
    "hami": Vocabulary(requests_in_resources, "hami-scheduler"),
    "kai": Vocabulary(
        kai_annotations.requests_in_annotations,
        "kai-scheduler",
        kai_annotations.is_request,
        in_annotations=True,
    ),
}
"""By the names that settings have for them."""


def scheduler_left_by(pod: Object, requests: Iterable[GpuRequest]) -> str:
    """Return the pod's scheduler if its requests need it no longer, else nothing.

    A pod that asks in another vocabulary than its scheduler's stays with it, for its queue and its
    group.
    """
    name = str((pod.get("spec") or {}).get("schedulerName") or "")
    ways = {bool(request.annotations) for request in requests}
    left = {known.scheduler for known in VOCABULARIES.values() if known.in_annotations in ways}
    return name if name in left else ""


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
    """Return the requests to translate, in the order of the containers.

    A container that names resources that are offered alone, or none, has no request, nor has one
    that is translated already.
    """
    offered |= settings.dra_resources
    problems: list[str] = []
    found = {
        request.path: request
        for name in settings.vocabularies
        for request in VOCABULARIES[name].read(pod, settings, offered, problems)
    }
    problems += [
        f"a container without a name asks for {request.count} GPUs: give it a name"
        for request in found.values()
        if request.count > 1 and not request.container
    ]
    containers = list(containers_of(pod))
    others: set[str] = set()
    for path, container in containers:
        amounts = amounts_of(container)
        kept = amounts.keys() - (found[path].names.keys() if path in found else ())
        others |= {name for name in kept if "/" in name and whole_number(amounts[name])}
    ordered = [found[path] for path, _ in containers if path in found]
    return PodRequests(ordered, problems, frozenset(others))
