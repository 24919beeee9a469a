"""Names in `limits` become the claim that kube-scheduler makes of them.

`kube-extended-claims.jsonl.gz` has 120 random pods, the names that classes serve, and the requests
and mappings of `createRequestsAndMappings` of Kubernetes 1.36.3, asked on 2026-11-29.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from metagpu.sim.cluster.extended_resources import class_of_names, extended_claim, served_names

_FILE = Path(__file__).with_name("kube-extended-claims.jsonl.gz")
ANSWERS = [json.loads(line) for line in gzip.decompress(_FILE.read_bytes()).splitlines()]
CLASSES = {"a.com/one": "class-0", "b.com/two": "class-1", "c.com/three": "class-2"}
METADATA = {"name": "p", "namespace": "d", "uid": "u"}


@pytest.mark.parametrize("answer", ANSWERS)
def test_requests_and_mappings_are_those_of_kubernetes(answer: dict[str, Any]) -> None:
    """Of each container, in the same order, with devices that init containers use before."""
    pod = {"metadata": METADATA, "spec": answer["spec"]}
    made = extended_claim(pod, {name: CLASSES[name] for name in answer["served"]})

    requests = made.claim["spec"]["devices"]["requests"] if made else []
    mappings = made.status["extendedResourceClaimStatus"]["requestMappings"] if made else []
    assert requests == (answer["requests"] or [])
    assert mappings == (answer["mappings"] or [])


def test_a_pod_that_waits_has_one_message() -> None:
    """The claim of a pod has one name, so that its refusal changes no object again and again."""
    limits = {"resources": {"limits": {"a.com/one": 33}}}
    pod = {"metadata": METADATA, "spec": {"containers": [{"name": "c", **limits}]}}
    first, again = (extended_claim(pod, {"a.com/one": "class-0"}) for _ in range(2))
    assert first is not None
    assert first == again


def test_of_two_classes_with_one_name_the_younger_serves_it() -> None:
    """Of one moment the one with the lower name; each also serves a name of its own."""

    def device_class(name: str, created: str) -> dict[str, Any]:
        metadata = {"name": name, "creationTimestamp": created}
        return {"metadata": metadata, "spec": {"extendedResourceName": "a.com/gpu"}}

    old, young, twin = (
        device_class("old", "2026-01-01T00:00:00Z"),
        device_class("young", "2026-01-02T00:00:00Z"),
        device_class("younger", "2026-01-02T00:00:00Z"),
    )
    found = class_of_names([twin, young, old])
    assert found["a.com/gpu"] == "young"
    assert found["deviceclass.resource.kubernetes.io/old"] == "old"


def test_a_name_that_the_node_has_an_amount_of_is_the_device_plugins() -> None:
    """And one of which the pod requests none needs no claim."""
    classes = {"a.com/gpu": "young"}
    assert served_names({"a.com/gpu": 1}, classes, {}) == classes
    assert served_names({"a.com/gpu": 1}, classes, {"a.com/gpu": "0"}) == classes
    assert served_names({"a.com/gpu": 9}, classes, {"a.com/gpu": "1"}) == {}
    assert served_names({"a.com/gpu": 0, "b.com/x": 1}, classes, {}) == {}
