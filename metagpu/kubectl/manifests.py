"""Manifests: the objects in files, and their pods: shape checked, or translated.

`translate` prints what the webhook would do with them.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.cli.live import print_text
from metagpu.cli.resource_names import resource_names_of
from metagpu.compat.kube_documents import KubeDocument, read_documents
from metagpu.core.config.errors import ConfigReason
from metagpu.display.encoding import encode
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.translation.claims import claim_pod
from metagpu.translation.patch import apply_patch
from metagpu.translation.translate import NodeWay, explain, translate
from metagpu.translation.values import NodeOffer, Translation, TranslationSettings

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


_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Where the pod of a manifest is, by its kind; elsewhere it is `spec.template`."""


def read_objects(file: str) -> Sequence[KubeDocument]:
    """Read the objects of a file and check the pods in them; blocks.

    Raises:
        MetagpuError: the file cannot be read, has no objects of Kubernetes, or a pod is none.
    """
    found = read_documents(file)
    for it in found:
        pod = pod_at(it.value, template_path(it.value))
        try:
            if pod is not None:
                check_pod(pod)
        except ValueError as error:
            problem = f"{name_of(it.value)}: not as a pod has it: {error}"
            raise it.error(problem, ConfigReason.INVALID_VALUE) from error
    return found


def name_of(document: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object, for sentences."""
    metadata = document.get("metadata") or {}
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{document['kind']} {name}".strip()


def template_path(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the way to the pod of an object that has one, by its kind."""
    return _TEMPLATES.get(document["kind"], ("spec", "template"))


def pod_at(document: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the pod or pod template of an object, `None` where it has none."""
    pod: Any = document
    for key in path:
        pod = pod.get(key) if isinstance(pod, Mapping) else None
    if not isinstance(pod, Mapping) or not isinstance(pod.get("spec"), Mapping):
        return None
    return pod


Object = Mapping[str, Any]

_LONGEST: Final = 58
"""Characters of a name that a template is named by."""


class TranslatedObject(msgspec.Struct):
    """One object of a manifest, and its translation where it has a pod.

    Attributes:
        name: kind and name, for sentences.
        document: the object as it is to be applied.
        ways: what each node would give, for `--explain`.
        template: the ResourceClaimTemplate that its pods claim, for `--claims`.
    """

    name: str
    document: Object
    outcome: Translation | None = None
    ways: Sequence[NodeWay] = ()
    template: Object | None = None


def read_nodes(file: Path) -> Sequence[Object]:
    """Read the Nodes of a file; blocks.

    Raises:
        MetagpuError: the file cannot be read, or has no objects of Kubernetes.
    """
    return [it.value for it in read_objects(str(file)) if it.value["kind"] == "Node"]


def print_translation(
    args: argparse.Namespace, nodes: Iterable[Object], dra_resources: Iterable[str] = ()
) -> int:
    """Print a translated manifest; return 1 if no node could serve a pod.

    The same is returned for a request that cannot be read. DeviceClasses of the cluster serve the
    `dra_resources`.

    Raises:
        MetagpuError: the file cannot be read, or has no objects of Kubernetes.
    """
    offers = [NodeOffer.from_node(it) for it in nodes]
    names = resource_names_of(args)
    served = frozenset(filter(None, args.dra_resources.split(","))) or frozenset(dra_resources)
    settings = TranslationSettings(
        order=args.order, policy=args.policy, dra_resources=served, **names
    )
    objects = [it.value for it in read_objects(args.filename)]
    driver = args.claims_driver if args.claims else ""
    templates = _template_names(objects)
    found = [
        _translated(it, offers, settings, driver, name)
        for it, name in zip(objects, templates, strict=True)
    ]
    if args.explain:
        _print_ways(found)
    else:
        documents = [each for it in found for each in (it.template, it.document) if each]
        print_text(_encoded(documents, args.output))
    for it in found:
        for sentence in _sentences(it):
            print(f"kubectl metagpu: {it.name}: {sentence}", file=sys.stderr)  # noqa: T201 - a command line speaks so
    outcomes = [it.outcome for it in found if it.outcome is not None]
    return int(any(it.impossible or it.unreadable for it in outcomes))


def _translated(
    document: Object,
    nodes: Sequence[NodeOffer],
    settings: TranslationSettings,
    driver: str,
    template_name: str,
) -> TranslatedObject:
    """Translate an object, into claims where a driver is named."""
    name = name_of(document)
    path = template_path(document)
    pod = pod_at(document, path)
    if pod is None:
        return TranslatedObject(name, document)
    ways = explain(pod, nodes, settings)
    if driver:
        claimed = claim_pod(pod, template_name, nodes, settings, driver)
        template: Object | None = claimed.template
        if template and (namespace := (document.get("metadata") or {}).get("namespace")):
            template = {**template, "metadata": {**template["metadata"], "namespace": namespace}}
        changed = _with_pod(document, path, claimed.pod)
        return TranslatedObject(name, changed, claimed.outcome, ways, template)
    outcome = translate(pod, nodes, settings)
    changed = _with_pod(document, path, apply_patch(pod, outcome.operations))
    return TranslatedObject(name, changed, outcome, ways)


def _template_names(objects: Sequence[Object]) -> Iterator[str]:
    """Yield a name for each object's template, which no other of its namespace has.

    Where objects have one name, their templates have the kind too, and a number if need be.
    """
    kept = {
        (_namespace(it), _own_name(it)) for it in objects if it["kind"] == "ResourceClaimTemplate"
    }
    wanted = [
        (_namespace(it), _template_name(_own_name(it)))
        for it in objects
        if pod_at(it, template_path(it)) is not None
    ]
    times = Counter([*wanted, *kept])
    used = {key for key, number in times.items() if number == 1} | kept
    for it in objects:
        namespace, own = _namespace(it), _own_name(it)
        name = _template_name(own)
        if times[namespace, name] > 1:
            stem = f"{own}-{it['kind'].lower()}"
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


def _with_pod(document: Object, path: Sequence[str], pod: Object) -> Object:
    """Return a copy of an object with another pod at a path."""
    if not path:
        return pod
    outer = [reduce(lambda at, key: at[key], path[:depth], document) for depth in range(len(path))]
    inner = pod
    for at, key in zip(reversed(outer), reversed(path), strict=True):
        inner = {**at, key: inner}
    return inner


def _encoded(documents: Sequence[Object], form: str) -> str:
    if form == "json":
        if len(documents) == 1:
            return encode(documents[0], form)
        return encode({"apiVersion": "v1", "kind": "List", "items": list(documents)}, form)
    from metagpu.compat.kube_yaml import dump_document

    return "---\n".join(map(dump_document, documents))


def _sentences(it: TranslatedObject) -> Iterator[str]:
    if it.outcome is None:
        return
    yield from it.outcome.warnings
    if it.outcome.impossible:
        yield it.outcome.impossible


def _print_ways(found: Iterable[TranslatedObject]) -> None:
    """Print what each node would give to each pod."""
    parts: list[Cell | TextTable] = []
    for it in found:
        if it.outcome is None:
            continue
        if not it.ways:
            parts.append(Cell(f"{it.name}: nothing to translate, it stays as it is"))
            continue
        columns = ("NODE", "BY", "RESOURCES", "MEMORY", "BEYOND", "CHOSEN")
        table = TextTable(columns, folded=frozenset({"RESOURCES"}))
        for way in it.ways:
            chosen = Cell("yes", "green") if way.chosen else "no"
            sizes = [f"{amount} MiB" if way.memory else "-" for amount in (way.memory, way.waste)]
            table.add(way.node, way.technique or "-", way.text, *sizes, chosen)
        parts += [Cell(it.name, "bold"), table]
    print_text(render(parts, stdout_terminal()))
