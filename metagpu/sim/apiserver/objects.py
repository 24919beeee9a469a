"""The objects of a simulated API server: stored, versioned, patched. No HTTP.

Follows Kubernetes 1.34 in what metagpu sends: a merge patch (RFC 7386), and server-side apply of
labels and conditions with managers, conflicts, and removal of fields that a manager no longer
applies.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from uuid import uuid4

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Collection (`nodes`, `pods`, `configmaps`, …), namespace (empty for none), name."""


class Kind(NamedTuple):
    """A kind of objects: its API's version, its collection, kubectl's short names."""

    api: str
    collection: str
    namespaced: bool = True
    short: str = ""


KINDS: Final[Mapping[str, Kind]] = {
    "Pod": Kind("v1", "pods", short="po"),
    "Namespace": Kind("v1", "namespaces", namespaced=False, short="ns"),
    "Node": Kind("v1", "nodes", namespaced=False, short="no"),
    "Event": Kind("v1", "events", short="ev"),
    "ResourceQuota": Kind("v1", "resourcequotas", short="quota"),
    "ConfigMap": Kind("v1", "configmaps", short="cm"),
    "Secret": Kind("v1", "secrets"),
    "Service": Kind("v1", "services", short="svc"),
    "ServiceAccount": Kind("v1", "serviceaccounts", short="sa"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims", short="pvc"),
    "ReplicationController": Kind("v1", "replicationcontrollers", short="rc"),
    "Deployment": Kind("apps/v1", "deployments", short="deploy"),
    "ReplicaSet": Kind("apps/v1", "replicasets", short="rs"),
    "StatefulSet": Kind("apps/v1", "statefulsets", short="sts"),
    "DaemonSet": Kind("apps/v1", "daemonsets", short="ds"),
    "Job": Kind("batch/v1", "jobs"),
    "CronJob": Kind("batch/v1", "cronjobs", short="cj"),
    "ResourceClaim": Kind("resource.k8s.io/v1", "resourceclaims"),
    "ResourceClaimTemplate": Kind("resource.k8s.io/v1", "resourceclaimtemplates"),
    "DeviceClass": Kind("resource.k8s.io/v1", "deviceclasses", namespaced=False),
    "ResourceSlice": Kind("resource.k8s.io/v1", "resourceslices", namespaced=False),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": Kind("rbac.authorization.k8s.io/v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind(
        "rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False
    ),
    "PriorityClass": Kind("scheduling.k8s.io/v1", "priorityclasses", namespaced=False),
    "RuntimeClass": Kind("node.k8s.io/v1", "runtimeclasses", namespaced=False),
}
"""The kinds that a manifest may have, and those that only a cluster's own parts write."""

_LABEL: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True)
class ObjectSelection:
    """A selection of a collection's objects, by namespace, fields and labels."""

    collection: str
    namespace: str
    fields: Sequence["Requirement"] = ()
    labels: Sequence["Requirement"] = ()

    @classmethod
    def of(
        cls, collection: str, namespace: str, selector: str, labels: str = ""
    ) -> "ObjectSelection":
        """Read a field selector such as `spec.nodeName=gpu-1`, and one of labels.

        Raises:
            ApiError: one of them cannot be read.
        """
        fields, wanted = _requirements(selector, _FIELD), _requirements(labels, _REQUIREMENT)
        return cls(collection, namespace, fields, wanted)

    def contains(self, key: Key, document: Object) -> bool:
        """Return whether the selection contains an object."""
        if key[0] != self.collection or self.namespace not in {"", key[1]}:
            return False
        given = document["metadata"].get("labels") or {}
        return all(each.holds(_field(document, each.key) or "") for each in self.fields) and all(
            each.holds(given.get(each.key)) for each in self.labels
        )


class Requirement(NamedTuple):
    """A part of a selector: the values that a key may have, `None` for every one.

    Attributes:
        negated: whether it may have all others, or may be missing.
    """

    key: str
    values: frozenset[str] | None
    negated: bool

    def holds(self, value: object) -> bool:
        """Return whether a value is chosen; `None` is a missing one."""
        found = value is not None and (self.values is None or value in self.values)
        return found != self.negated


_KEY: Final = r"(?P<key>([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)"
_REQUIREMENT: Final = re.compile(
    rf"(?P<absent>!)?\s*{_KEY}"
    rf"(\s*(?P<equal>!?=|==)\s*(?P<value>{_LABEL.pattern})"
    r"|\s+(?P<of>in|notin)\s*\((?P<values>[-\w., ]*)\))?",
    re.ASCII,
)
_FIELD: Final = re.compile(r"(?P<absent>)(?P<key>[\w.]+)(?P<equal>!?=|==)(?P<value>[^=,]*)(?P<of>)")
_PARTS: Final = re.compile(r",(?![^(]*\))")


def _requirements(selector: str, form: re.Pattern[str]) -> Sequence[Requirement]:
    """Read a selector's parts.

    Raises:
        ApiError: one of them has another form.
    """
    found = []
    for part in map(str.strip, _PARTS.split(selector)) if selector else ():
        read = form.fullmatch(part)
        if read is None or (read["absent"] and (read["equal"] or read["of"])):
            problem = f"unable to parse requirement: found '{part}', expected: KEY, !KEY, KEY=VALUE"
            raise ApiError(400, "BadRequest", f"{problem}, KEY!=VALUE, KEY in (VALUE, ...)")
        values = None
        if read["equal"]:
            values = frozenset((read["value"],))
        elif read["of"]:
            values = frozenset(other.strip() for other in read["values"].split(","))
        negated = bool(read["absent"]) or read["equal"] == "!=" or read["of"] == "notin"
        found.append(Requirement(read["key"], values, negated))
    return found


def _field(value: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
    for name in path.split("."):
        value = value.get(name) or {}
    return value


class ApiError(Exception):
    """Raised for an error response, with Kubernetes' `Status` object."""

    def __init__(
        self, code: int, reason: str, message: str, fields: tuple[str, ...] = (), retry: int = 0
    ) -> None:
        super().__init__(message)
        self.code, self.retry = code, retry
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
            "details": {
                "causes": [{"reason": "FieldManagerConflict", "field": path} for path in fields]
            },
        }


@dataclass
class ObjectStore:
    """All objects, and the history of their changes.

    Attributes:
        version: of the last change; every change has the next number.
        history: changes as (version, type, key, object); `oldest` is the version before them.
        changed: called after every change.
    """

    version: int = 100
    oldest: int = 0
    objects: dict[Key, Object] = field(default_factory=dict)
    history: list[tuple[int, str, Key, Object]] = field(default_factory=list)
    changed: Callable[[], None] = lambda: None

    def dump(self) -> Object:
        """Return all objects and their version as JSON can hold them."""
        rows = [[*key, document] for key, document in self.objects.items()]
        return {"version": self.version, "objects": rows}

    def load(self, content: Mapping[str, Any]) -> None:
        """Take in what `dump` returned; watches from before have to list again."""
        self.version = self.oldest = int(content["version"])
        self.objects = {
            (kind, namespace, name): value for kind, namespace, name, value in content["objects"]
        }

    def put(self, key: Key, content: Mapping[str, Any]) -> Object:
        """Create or replace an object."""
        known = key in self.objects
        document: Object = copy.deepcopy(dict(content))
        metadata = document.setdefault("metadata", {})
        metadata["name"] = key[2]
        if key[1]:
            metadata["namespace"] = key[1]
        metadata.setdefault("uid", self.objects[key]["metadata"]["uid"] if known else str(uuid4()))
        self._note("MODIFIED" if known else "ADDED", key, document)
        self.objects[key] = document
        return document

    def delete(self, key: Key) -> None:
        """Delete an object."""
        self._note("DELETED", key, self.objects.pop(key))

    def compact(self) -> None:
        """Clear the history: watches from an older version have to list again."""
        self.oldest = self.version
        self.history.clear()

    def get_object(self, key: Key) -> Object:
        """Return an object.

        Raises:
            ApiError: the object does not exist.
        """
        if key not in self.objects:
            raise ApiError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def select(self, selection: ObjectSelection) -> Iterator[Object]:
        """Yield the objects of a selection."""
        for key, document in self.objects.items():
            if selection.contains(key, document):
                yield document

    def merge(self, key: Key, patch: Mapping[str, Any], *, status: bool, manager: str) -> Object:
        """Merge a patch into an object: into its status only, or into all but its status.

        Raises:
            ApiError: the patch is for another version, or its result is not valid.
        """
        before = self.get_object(key)
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, before["metadata"]["resourceVersion"]):
            raise ApiError(
                409, "Conflict", "the object has been modified; please apply your changes"
            )

        merged = _merged(before, patch)
        after = {**before, **_side(merged, status=status)}
        for name, value in (patch.get("metadata", {}).get("labels") or {}).items():
            _note_manager(after, name, manager if value is not None else None)
        return self._replace(key, before, after)

    def apply(
        self, key: Key, said: Mapping[str, Any], *, status: bool, manager: str, force: bool
    ) -> Object:
        """Apply labels or conditions under a field manager's name.

        Raises:
            ApiError: another manager owns a label with another value, and `force` is not set.
        """
        before = self.get_object(key)
        uid = said.get("metadata", {}).get("uid")
        if uid not in (None, before["metadata"]["uid"]):
            raise ApiError(409, "Conflict", "Precondition failed: UID in precondition")

        after = copy.deepcopy(before)
        if status:
            _apply_conditions(after, said, manager)
        else:
            _apply_labels(after, said, manager, force=force)
        return self._replace(key, before, after)

    def apply_object(self, key: Key, said: Mapping[str, Any]) -> Object:
        """Apply an object that has one manager only; create it if it does not exist."""
        if key not in self.objects:
            return self.put(key, said)
        before = self.objects[key]
        after = {**before, **copy.deepcopy(dict(said))}
        after["metadata"] = {**before["metadata"], **said["metadata"]}
        return self._replace(key, before, after)

    def _replace(self, key: Key, before: Object, after: Object) -> Object:
        for name, value in (after["metadata"].get("labels") or {}).items():
            if not _LABEL.fullmatch(value):
                raise ApiError(422, "Invalid", f"metadata.labels: Invalid value: {name}={value!r}")
        if after == before:
            return before
        return self.put(key, after)

    def _note(self, kind: str, key: Key, document: Object) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, key, copy.deepcopy(document)))
        self.changed()


def _merged(before: Any, patch: Any) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    base = dict(before) if isinstance(before, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            base.pop(name, None)
        else:
            base[name] = _merged(base.get(name), value)
    return base


def _side(document: Object, *, status: bool) -> Object:
    return {name: value for name, value in document.items() if (name == "status") == status}


def _entry(document: Object, manager: str, subresource: str) -> Object:
    entries = document["metadata"].setdefault("managedFields", [])
    for entry in entries:
        same = entry["manager"] == manager and entry["operation"] == "Apply"
        if same and entry.get("subresource", "") == subresource:
            return dict(entry)
    return {"manager": manager, "operation": "Apply", "subresource": subresource, "fieldsV1": {}}


def _keep_entry(document: Object, entry: Object) -> None:
    entries = document["metadata"]["managedFields"]
    rest = [
        each
        for each in entries
        if (each["manager"], each["operation"], each.get("subresource", ""))
        != (entry["manager"], entry["operation"], entry["subresource"])
    ]
    document["metadata"]["managedFields"] = [*rest, entry] if entry["fieldsV1"] else rest


def _labels_of(entry: Object) -> set[str]:
    fields = entry["fieldsV1"].get("f:metadata", {}).get("f:labels", {})
    return {name.removeprefix("f:") for name in fields}


def _apply_labels(document: Object, said: Mapping[str, Any], manager: str, *, force: bool) -> None:
    wanted = said.get("metadata", {}).get("labels") or {}
    labels = document["metadata"].setdefault("labels", {})
    own = _entry(document, manager, "")
    others = {
        name: entry["manager"]
        for entry in document["metadata"]["managedFields"]
        if entry["manager"] != manager
        for name in _labels_of(entry)
    }

    clashes = [n for n, value in wanted.items() if n in others and labels.get(n) != value]
    if clashes and not force:
        message = f"Apply failed with {len(clashes)} conflict(s)"
        raise ApiError(409, "Conflict", message, tuple(f".metadata.labels.{n}" for n in clashes))
    for name in _labels_of(own) - wanted.keys():
        if name not in others:
            labels.pop(name, None)
    labels.update(wanted)
    fields: Object = {f"f:{name}": {} for name in wanted}
    own["fieldsV1"] = {"f:metadata": {"f:labels": fields}} if fields else {}
    _keep_entry(document, own)


def _apply_conditions(document: Object, said: Mapping[str, Any], manager: str) -> None:
    wanted = {each["type"]: each for each in said.get("status", {}).get("conditions") or ()}
    own = _entry(document, manager, "status")
    mine = set(own["fieldsV1"].get("types", ())) | wanted.keys()
    status = document.setdefault("status", {})
    rest = [each for each in status.get("conditions") or () if each["type"] not in mine]
    status["conditions"] = [*rest, *wanted.values()]
    own["fieldsV1"] = {"types": sorted(wanted)} if wanted else {}
    _keep_entry(document, own)


def _note_manager(document: Object, label: str, manager: str | None) -> None:
    """Record the manager of a label that was written without apply; None removes it."""
    entries = document["metadata"].setdefault("managedFields", [])
    for entry in entries:
        entry["fieldsV1"].get("f:metadata", {}).get("f:labels", {}).pop(f"f:{label}", None)
    if manager is None:
        return
    own = next((e for e in entries if e["manager"] == manager and e["operation"] == "Update"), None)
    if own is None:
        own = {"manager": manager, "operation": "Update", "fieldsV1": {}}
        entries.append(own)
    fields = own["fieldsV1"].setdefault("f:metadata", {}).setdefault("f:labels", {})
    fields[f"f:{label}"] = {}
