"""Manifests: the objects in files, and their pods: shape checked, or translated.

`translate` prints what the webhook would do with them.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from metagpu.cli.live import print_text
from metagpu.cli.translation_options import translation_of
from metagpu.compat.kube_documents import KubeDocument, read_documents
from metagpu.core.config.errors import ConfigReason
from metagpu.core.model.quantities import whole_number
from metagpu.display.options import encode
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.kubectl.pod_places import (
    Keys,
    Object,
    PodPlace,
    path_text,
    places_in,
    value_at,
    values_outside,
    with_value,
)
from metagpu.translation.claims import claim_pod
from metagpu.translation.hami_annotations import GPUS_PREFIX
from metagpu.translation.node_offers import FRACTION, MPS, NodeGroups, OfferedPart
from metagpu.translation.patch import apply_patch
from metagpu.translation.translate import NodeWay, explain, translate
from metagpu.translation.values import NodeOffer, Translation, TranslationSettings
from metagpu.translation.vocabularies import VOCABULARIES

_Amounts = dict[str, str | float | None]


class _ClaimEntry(msgspec.Struct):
    name: str = ""


class _Resources(msgspec.Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None
    claims: list[_ClaimEntry] | None = None


class _Container(msgspec.Struct):
    name: str = ""
    resources: _Resources | None = None


class _Expression(msgspec.Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(msgspec.Struct, rename="camel"):
    match_expressions: list[_Expression] | None = None
    match_fields: list[_Expression] | None = None


class _Required(msgspec.Struct, rename="camel"):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(msgspec.Struct):
    required: _Required | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Toleration(msgspec.Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resource_claims: list[_ClaimEntry] | None = None
    node_selector: dict[str, str] | None = None
    node_name: str | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None


class _PodMetadata(msgspec.Struct):
    annotations: dict[str, str | None] | None = None


class _Pod(msgspec.Struct):
    spec: _Spec
    metadata: _PodMetadata | None = None


def check_pod(pod: Mapping[str, Any]) -> None:
    """Check the shape of a pod.

    Raises:
        ValueError: a value has another type than Kubernetes has for it; the text says where.
    """
    msgspec.convert(pod, _Pod)


def read_objects(file: str) -> Sequence[KubeDocument]:
    """Read the objects of a file and check the pods in them; blocks.

    Raises:
        MetagpuError: the file cannot be read, has no objects of Kubernetes, or a pod is none.
    """
    found = read_documents(file)
    for document in found:
        places = places_in(document.value)
        for place in places:
            try:
                check_pod(place.pod(document.value))
            except ValueError as error:
                problem = f"{_named(document.value, place, places)}: not as a pod has it: {error}"
                raise document.error(problem, ConfigReason.INVALID_VALUE) from error
    return found


def name_of(document: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object, for sentences."""
    metadata = document.get("metadata") or {}
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{document['kind']} {name}".strip()


def _named(document: Object, place: PodPlace, places: Sequence[PodPlace]) -> str:
    """Return the name of a pod's object, with the pod's place among several."""
    name = name_of(document)
    return f"{name}, {place.text}" if len(places) > 1 else name


_MOST_NAMED: Final = 3
_LABELS: Final = frozenset(("labels", "matchLabels", "nodeSelector"))
"""Objects whose keys are labels; a label or a taint may have the name of a resource."""
_RAY_GPUS: Final = "num-gpus"
_RAY_GPU: Final = re.compile(r"gpu$|nvidia\.com/mig-\d+g\.\d+gb$")
"""Names of resources that KubeRay takes for GPUs (1.4)."""
_LONGEST: Final = 58
"""Characters of a name that a template is named by."""


class TranslatedPod(msgspec.Struct):
    """One pod of an object, and its translation.

    Attributes:
        name: kind and name of the object, for sentences.
        ways: what each node would give, for `--explain`.
        template: the ResourceClaimTemplate that the pods claim, for `--claims`.
    """

    name: str
    pod: Object
    outcome: Translation
    ways: Sequence[NodeWay] = ()
    template: Object | None = None


class TranslatedObject(msgspec.Struct):
    """One object of a manifest as it is to be applied.

    Attributes:
        left: sentences about what of it asks in such terms and is not translated.
    """

    name: str
    document: Object
    pods: Sequence[TranslatedPod] = ()
    left: Sequence[str] = ()


def read_nodes(file: Path) -> Sequence[Object]:
    """Read the Nodes of a file; blocks.

    Raises:
        MetagpuError: the file cannot be read, or has no objects of Kubernetes.
    """
    return [
        document.value for document in read_objects(str(file)) if document.value["kind"] == "Node"
    ]


def print_translation(
    args: argparse.Namespace, nodes: Iterable[Object], dra_resources: Iterable[str] = ()
) -> int:
    """Print a translated manifest; return 1 if no node could serve a pod.

    The same is returned for a request that cannot be read. DeviceClasses of the cluster serve the
    `dra_resources`.

    Raises:
        MetagpuError: the file cannot be read, or has no objects of Kubernetes.
    """
    offers = [NodeOffer.from_node(node) for node in nodes]
    settings = translation_of(args, dra_resources=dra_resources)
    objects = [document.value for document in read_objects(args.filename)]
    driver = args.claims_driver if args.claims else ""
    setup = _Setup(offers, NodeGroups(offers), settings, driver, _template_names(objects))
    found = [_translated(entry, setup) for entry in objects]
    if args.explain:
        _print_ways(found)
    else:
        documents = [
            each
            for other in found
            for each in (*(pod.template for pod in other.pods), other.document)
            if each
        ]
        print_text(_encoded(documents, args.output))
    for translated_object in found:
        for sentence in _sentences(translated_object):
            print(f"kubectl metagpu: {sentence}", file=sys.stderr)  # noqa: T201 - a command line speaks so
    outcomes = [pod.outcome for other in found for pod in other.pods]
    failed = any(outcome.impossible or outcome.unreadable for outcome in outcomes)
    return int(failed or any(other.left for other in found))


class _Setup(NamedTuple):
    """The nodes and settings that all objects of a manifest are translated with."""

    nodes: Sequence[NodeOffer]
    groups: NodeGroups
    settings: TranslationSettings
    driver: str
    template_names: Iterator[str]


def _translated(document: Object, setup: _Setup) -> TranslatedObject:
    """Translate the pods of an object, into claims where a driver is named."""
    places, pods = places_in(document), []
    changed = document
    for place in places:
        pod = _translated_pod(_named(document, place, places), place.pod(document), setup)
        if pod.template and (namespace := (document.get("metadata") or {}).get("namespace")):
            metadata = {**pod.template["metadata"], "namespace": namespace}
            pod.template = {**pod.template, "metadata": metadata}
        if pod.outcome.operations:
            changed = place.replaced(changed, pod.pod)
        pods.append(pod)
        changed, warnings = _with_ray_gpus(changed, place, setup.groups, pod.template)
        pod.outcome = replace(pod.outcome, warnings=(*pod.outcome.warnings, *warnings))
    left = list(_left(changed, places, setup.groups, setup.settings))
    return TranslatedObject(name_of(document), changed, pods, left)


def _translated_pod(name: str, pod: Object, setup: _Setup) -> TranslatedPod:
    nodes, settings, template_name = setup.nodes, setup.settings, next(setup.template_names)
    ways = explain(pod, nodes, settings)
    if setup.driver:
        claimed = claim_pod(pod, template_name, nodes, settings, setup.driver)
        return TranslatedPod(name, claimed.pod, claimed.outcome, ways, claimed.template)
    outcome = translate(pod, nodes, settings)
    return TranslatedPod(name, apply_patch(pod, outcome.operations), outcome, ways)


def _left(
    document: Object,
    places: Sequence[PodPlace],
    nodes: NodeGroups,
    settings: TranslationSettings,
) -> Iterator[str]:
    """Yield what asks in such terms outside the pods of an object, each key once."""
    names: frozenset[str] = frozenset()
    if "hami" in settings.vocabularies:
        names = frozenset(settings.names) - settings.dra_resources - nodes.offered
    vocabularies = [VOCABULARIES[vocabulary] for vocabulary in settings.vocabularies]
    found: dict[str, tuple[Keys, Any]] = {}
    for path, value in values_outside(document, places):
        *_, above, key = ("", "", *map(str, path))
        texts = [value if key != "key" else "", key if above not in _LABELS else ""]
        for text in texts:
            if isinstance(text, str) and _without_kind(text) in names:
                found.setdefault(text, (path, value))
        if above == "annotations" and any(
            vocabulary.is_annotation(key) for vocabulary in vocabularies
        ):
            found.setdefault(key, (path, value))
    for text, (path, value) in found.items():
        is_quota = document["kind"] == "ResourceQuota"
        memory = whole_number(value) if _without_kind(text) == settings.memory else 0
        others = [_instead(part, memory or 0, is_quota=is_quota) for part in nodes.parts.values()]
        yield (
            f"{text} at {path_text(path[:-1])} is not translated, and no translated pod asks for "
            f"it: write {' and '.join(others[:_MOST_NAMED]) or 'what nodes offer'} in its place"
        )


def _without_kind(name: str) -> str:
    return name.removeprefix("requests.").removeprefix("limits.")


def _instead(part: OfferedPart, memory: int, *, is_quota: bool) -> str:
    """Return the name of a part; in a quota with the number that has some MiB."""
    if not is_quota:
        return part.resource
    number = f": {-(-memory // part.memory)} ({part.memory} MiB each)" if memory else ""
    return f"requests.{part.resource}{number}"


def _with_ray_gpus(
    document: Object, place: PodPlace, nodes: NodeGroups, claimed: Object | None
) -> tuple[Object, Sequence[str]]:
    """Return a Ray cluster whose group says the GPUs that KubeRay reads wrong.

    KubeRay takes the first of the sorted limits of the first container that looks like a GPU.
    """
    group = place.path[:-1]
    found = value_at(document, group)
    if not str(document.get("apiVersion")).startswith("ray.io/") or not place.path:
        return document, ()
    params, pod = found.get("rayStartParams") or {}, place.pod(document)
    container: Object = next(iter(pod["spec"].get("containers") or ()), {})
    limits = (container.get("resources") or {}).get("limits") or {}
    amounts = {name: whole_number(limits[name]) or 0 for name in sorted(limits)}
    parts = nodes.parts
    gpus = sum(
        _gpus_of(pod, container, parts[part], amounts[part]) for part in parts if part in amounts
    )
    requests = claimed["spec"]["spec"]["devices"]["requests"] if claimed else ()
    own = [
        request["firstAvailable"][0]
        for request in requests
        if request["name"] == container.get("name")
    ]
    gpus += sum(entry.get("count", 1) for entry in own)
    read = next((amount for name, amount in amounts.items() if amount and _RAY_GPU.search(name)), 0)
    if _RAY_GPUS in params or gpus == read:
        return document, ()
    changed = {**found, "rayStartParams": {**params, _RAY_GPUS: str(gpus)}}
    warning = (
        f'{path_text(group)}.rayStartParams gets {_RAY_GPUS}: "{gpus}": Ray would count {read}'
    )
    return with_value(document, group, changed), (warning,)


def _gpus_of(pod: Object, container: Object, part: OfferedPart, amount: int) -> int:
    """Return how many GPUs an amount of a resource belongs to."""
    if part.technique not in (FRACTION, MPS):
        return amount
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    named = whole_number(annotations.get(GPUS_PREFIX + container["name"], 0))
    return named or -(-amount // part.per_gpu)


def _template_names(objects: Sequence[Object]) -> Iterator[str]:
    """Yield a name for each pod's template, which no other of its namespace has.

    Where objects have one name, their templates have the kind too, and a number if need be.
    """
    kept = {
        (_namespace(entry), _own_name(entry))
        for entry in objects
        if entry["kind"] == "ResourceClaimTemplate"
    }
    with_pods = [entry for entry in objects for _ in places_in(entry)]
    wanted = [(_namespace(with_pod), _template_name(_own_name(with_pod))) for with_pod in with_pods]
    times = Counter([*wanted, *kept])
    used = {key for key, number in times.items() if number == 1} | kept
    for pod in with_pods:
        namespace, own = _namespace(pod), _own_name(pod)
        name = _template_name(own)
        if times[namespace, name] > 1:
            stem = f"{own}-{pod['kind'].lower()}"
            names = (_template_name(f"{stem}-{n}" if n > 1 else stem) for n in count(1))
            name = next(each for each in names if (namespace, each) not in used)
            used.add((namespace, name))
        yield name


def _namespace(document: Object) -> str:
    return str((document.get("metadata") or {}).get("namespace") or "default")


def _own_name(document: Object) -> str:
    """Return the name of an object, or the beginning of the name that it gets."""
    metadata = document.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName") or "pod").rstrip("-.")


def _template_name(own: str) -> str:
    """Return the name of a template, of 63 characters at most, by a name of its own."""
    if len(own) > _LONGEST:
        shortened = sha256(own.encode()).hexdigest()[:8]
        own = f"{own[: _LONGEST - 9].rstrip('-.')}-{shortened}"
    return f"{own}-gpus"


def _encoded(documents: Sequence[Object], form: str) -> str:
    if form == "json":
        if len(documents) == 1:
            return encode(documents[0], form)
        return encode({"apiVersion": "v1", "kind": "List", "items": list(documents)}, form)
    from metagpu.compat.kube_yaml import dump_document

    return "---\n".join(map(dump_document, documents))


def _sentences(translated_object: TranslatedObject) -> Iterator[str]:
    for pod in translated_object.pods:
        for sentence in (*pod.outcome.warnings, pod.outcome.impossible):
            if sentence:
                yield f"{pod.name}: {sentence}"
    yield from (f"{translated_object.name}: {sentence}" for sentence in translated_object.left)


def _print_ways(found: Iterable[TranslatedObject]) -> None:
    """Print what each node would give to each pod."""
    parts: list[Cell | TextTable] = []
    for translated_pod in (pod for each in found for pod in each.pods):
        if not translated_pod.ways:
            parts.append(Cell(f"{translated_pod.name}: nothing to translate, it stays as it is"))
            continue
        columns = ("NODE", "BY", "RESOURCES", "MEMORY", "BEYOND", "CHOSEN")
        table = TextTable(columns, folded=frozenset({"RESOURCES"}))
        for way in translated_pod.ways:
            chosen = Cell("yes", "green") if way.chosen else "no"
            sizes = [f"{amount} MiB" if way.memory else "-" for amount in (way.memory, way.waste)]
            table.add(way.node, way.technique or "-", way.text, *sizes, chosen)
        parts += [Cell(translated_pod.name, "bold"), table]
    print_text(render(parts, stdout_terminal()))
