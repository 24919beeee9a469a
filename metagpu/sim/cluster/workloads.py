"""The simulated controllers, which make and delete the pods of workloads. Pure.

Deployments make ReplicaSets; ReplicaSets, StatefulSets, DaemonSets and Jobs make Pods. A pod that
is gone is made again; one that has failed stays, but for those of a Job.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from uuid import uuid4

from metagpu.sim.apiserver.objects import KINDS, Object
from metagpu.sim.cluster.pod_objects import ENDED, node_of, phase_of

_HASH: Final = "pod-template-hash"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_BACKOFF_LIMIT: Final = 6
"""Failed pods that a Job replaces, unless it says otherwise."""


class Children(NamedTuple):
    """Objects that a controller makes now, and those that it deletes."""

    made: Sequence[Object] = ()
    surplus: Sequence[Object] = ()


def control(workload: Object, children: Sequence[Object]) -> Children:
    """Return what the controller of a workload does, given its objects."""
    return _CONTROLLERS[workload["kind"]](workload, children)


def owner_of(document: Object) -> str:
    """Return the uid of an object's controller, empty without one."""
    with suppress(AttributeError, KeyError, TypeError):  # of any form after a patch
        owners = document["metadata"].get("ownerReferences") or ()
        return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")
    return ""


def _deployment(workload: Object, children: Sequence[Object]) -> Children:
    spec = workload["spec"]
    text = json.dumps(spec["template"], sort_keys=True)
    name = f"{workload['metadata']['name']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    current = [child for child in children if child["metadata"]["name"] == name]
    surplus = [child for child in children if child not in current]
    replicas = spec.get("replicas", 1)
    if current and current[0]["spec"]["replicas"] == replicas:
        return Children(surplus=surplus)
    labels = {_HASH: name.rpartition("-")[2]}
    template = _labelled(spec["template"], labels)
    content = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    metadata = template["metadata"]
    made = {**_child(workload, name, metadata), "kind": "ReplicaSet", "spec": content}
    return Children([made], surplus)


def _replica_set(workload: Object, children: Sequence[Object]) -> Children:
    return _filled(workload, children, workload["spec"].get("replicas", 1))


def _daemon_set(workload: Object, children: Sequence[Object]) -> Children:
    return _filled(workload, children, 1)  # one for each node, and there is one


def _filled(workload: Object, children: Sequence[Object], count: int) -> Children:
    live = sorted(filter(_lives, children), key=lambda document: not node_of(document))
    return Children([_pod(workload) for _ in range(count - len(live))], live[count:])


def _stateful_set(workload: Object, children: Sequence[Object]) -> Children:
    spec, name = workload["spec"], workload["metadata"]["name"]
    names = [f"{name}-{number}" for number in range(spec.get("replicas", 1))]
    known = {child["metadata"]["name"]: child for child in children}
    surplus = [
        child for child in filter(_lives, children) if child["metadata"]["name"] not in names
    ]
    made = []
    for place, each in enumerate(names):
        if each not in known:
            labels = {
                "statefulset.kubernetes.io/pod-name": each,
                "apps.kubernetes.io/pod-index": str(place),
            }
            made.append(_pod(workload, each, labels))
        if spec.get("podManagementPolicy") == "Parallel":
            continue
        if each not in known or phase_of(known[each]) != "Running":
            break  # each waits for the one before it
    return Children(made, surplus)


def _job(workload: Object, children: Sequence[Object]) -> Children:
    spec, name = workload["spec"], workload["metadata"]["name"]
    phases = [phase_of(child) for child in children]
    active = [child for child in filter(_lives, children) if phase_of(child) not in ENDED]
    if spec.get("suspend") or phases.count("Failed") > spec.get("backoffLimit", _BACKOFF_LIMIT):
        return Children(surplus=active)
    parallelism = spec.get("parallelism", 1)
    completions = spec.get("completions", 1 if "parallelism" not in spec else None)
    left = parallelism
    if completions is not None:
        left = min(parallelism, completions - phases.count("Succeeded"))
    elif "Succeeded" in phases:
        left = len(active)  # a queue of work ends with the first that has none
    labels = {"batch.kubernetes.io/job-name": name, "job-name": name}
    if spec.get("completionMode") != "Indexed":
        return Children([_pod(workload, labels=labels) for _ in range(left - len(active))])
    taken = {
        (child["metadata"].get("annotations") or {}).get(_INDEX)
        for child in children
        if phase_of(child) != "Failed"
    }
    free = (document for document in map(str, range(completions or 0)) if document not in taken)
    return Children(
        [
            _pod(workload, f"{name}-{at}-{_suffix()}", {**labels, _INDEX: at}, {_INDEX: at})
            for at, _ in zip(free, range(left - len(active)), strict=False)
        ]
    )


def _lives(document: Object) -> bool:
    return "deletionTimestamp" not in document["metadata"]


def _pod(
    workload: Object,
    name: str = "",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    template = _labelled(workload["spec"]["template"], labels or {}, annotations or {})
    name = name or f"{workload['metadata']['name']}-{_suffix()}"
    return {
        **_child(workload, name, template["metadata"]),
        "kind": "Pod",
        "spec": template["spec"],
    }


def _labelled(
    template: Object, labels: Mapping[str, str], annotations: Mapping[str, str] = {}
) -> Object:
    metadata = template.get("metadata") or {}
    return {
        **template,
        "metadata": {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": {**(metadata.get("annotations") or {}), **annotations},
        },
    }


def _child(workload: Object, name: str, metadata: Mapping[str, Any]) -> Object:
    owner = {key: workload["metadata"][key] for key in ("name", "uid")}
    owner |= {key: workload[key] for key in ("apiVersion", "kind")} | {"controller": True}
    return {
        "metadata": {
            **metadata,
            "name": name,
            "namespace": workload["metadata"]["namespace"],
            "ownerReferences": [owner],
        }
    }


def _suffix() -> str:
    return uuid4().hex[:5]


_CONTROLLERS: Final[Mapping[str, Callable[[Object, Sequence[Object]], Children]]] = {
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "ReplicationController": _replica_set,
    "StatefulSet": _stateful_set,
    "DaemonSet": _daemon_set,
    "Job": _job,
}
WORKLOADS: Final = tuple(KINDS[controller].collection for controller in _CONTROLLERS)
"""The collections of workloads; each makes objects of later ones, or Pods."""
