"""Requests in annotations of KAI Scheduler and gpu-fractioning, and the page about them."""

import copy
import json
import re
from collections.abc import Mapping
from time import process_time
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.translation.claims import claim_pod
from metagpu.translation.translate import translate
from metagpu.translation.values import NodeOffer, TranslationSettings
from tests.translation.nodes import applied, limits, node, pod
from tests.translation.test_hamis_examples import FRACTIONS, INSTANCES, MPS, PAGE

KAI: Final = TranslationSettings(vocabularies=("hami", "kai"))
OWN: Final = "nvidia.com/container.c0."
EXAMPLES: Final[Mapping[str, Mapping[str, str]]] = {
    "`gpu-sharing`, `gpu-sharing-with-mps`": {"gpu-fraction": "0.5"},
    "`gpu-sharing-non-default-container`": {
        "gpu-fraction": "0.5",
        "gpu-fraction-container-name": "gpu-workload",
    },
    "`gpu-sharing-init-container`": {
        "gpu-fraction": "0.5",
        "gpu-fraction-container-name": "gpu-init",
    },
    "`gpu-memory`": {"gpu-memory": "2000"},
    "two parts": {"gpu-memory": "2000", "gpu-fraction-num-devices": "2"},
    "KAI's `nv-fractions-memory`": {f"{OWN}gpu-memory.request": "7680Mi"},
    "KAI's `nv-fractions-request-limit`": {
        f"{OWN}gpu-memory.request": "4096Mi",
        f"{OWN}gpu-memory.limit": "8192Mi",
    },
    "gpu-fractioning's `sm-sharing`": {
        f"{OWN}gpu-memory.request": "8Gi",
        f"{OWN}gpu-compute.mode": "sm-sharing",
    },
    "a compute portion": {
        f"{OWN}gpu-memory.request": "8Gi",
        f"{OWN}gpu-compute.portion": "0.3",
    },
}
"""The annotations of KAI's `docs/gpu-sharing` and of gpu-fractioning's README, November 2026."""


def kai_pod(annotations: Mapping[str, str], **spec: object) -> dict[str, Any]:
    """Return a pod as in KAI's examples: its container names no resources at all."""
    asked = pod({}, annotations=annotations, schedulerName="kai-scheduler", **spec)
    del asked["spec"]["containers"][0]["resources"]
    name = annotations.get("gpu-fraction-container-name")
    if name and name.endswith("init"):
        asked["spec"]["initContainers"] = [{"name": name, "image": "cuda"}]
    elif name:
        asked["spec"]["containers"].append({"name": name, "image": "cuda"})
    return asked


def becomes(annotations: Mapping[str, str], offer: NodeOffer) -> str:
    """Return the cell of the page: what a pod with annotations becomes on a node."""
    asked = kai_pod(annotations)
    outcome = translate(asked, [offer], KAI)
    if outcome.impossible:
        return "impossible"
    patched = applied(asked, outcome.operations)["spec"]
    [found] = [
        container["resources"]["limits"]
        for container in (*patched.get("initContainers", ()), *patched["containers"])
        if "resources" in container
    ]
    return ", ".join(f"`{name}: {count}`" for name, count in found.items())


def rows() -> Mapping[str, list[str]]:
    """Return the rows of the page's table, by example."""
    section = PAGE.read_text(encoding="utf-8").partition("## KAI's pods")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]
    return {name: rest for name, *rest in (line.split(" | ") for line in lines)}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_page_says_what_kais_examples_become(example: str) -> None:
    """The row has the annotations, and the resources on nodes of three kinds."""
    asks, *cells = rows()[example]
    keys = re.findall(r"`([^`:]+): ([^`]+)`", asks)

    assert cells == [becomes(EXAMPLES[example], offer) for offer in (INSTANCES, FRACTIONS, MPS)]
    own = {key.removeprefix(OWN): text for key, text in EXAMPLES[example].items()}
    assert dict(keys) == own
    assert rows().keys() == EXAMPLES.keys()


def test_the_annotations_and_the_scheduler_go() -> None:
    """A translated pod asks for nothing in KAI's terms, and has Kubernetes' scheduler."""
    asked = kai_pod({"team": "a", "gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"})
    outcome = translate(asked, [FRACTIONS], KAI)
    patched = applied(asked, outcome.operations)
    annotations = patched["metadata"]["annotations"]

    assert json.loads(annotations.pop("metagpu.io/original-request")) == {
        "c0": {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}
    }
    assert annotations == {"team": "a", "gpus.metagpu.io/c0": "2"}
    assert patched["spec"]["schedulerName"] == "default-scheduler"
    assert any("becomes default-scheduler" in warning for warning in outcome.warnings)
    again = translate(patched, [FRACTIONS], KAI)
    assert (again.operations, again.warnings) == ((), ())


def test_annotations_are_kais_own_unless_the_vocabulary_is_on() -> None:
    """KAI may be in the cluster: a setting decides whose pods are read."""
    asked, hamis = kai_pod({"gpu-fraction": "0.5"}), pod({"nvidia.com/gpumem": 8000})
    alone = TranslationSettings(vocabularies=("kai",))

    assert translate(asked, [FRACTIONS], TranslationSettings()).operations == ()
    assert translate(asked, [FRACTIONS], alone).operations
    assert translate(hamis, [FRACTIONS], alone).operations == ()


def test_a_limit_above_the_request_is_an_annotation_of_the_resource() -> None:
    """The pool decides about it; an instance, or two limits of one resource, have none."""
    request = {f"{OWN}gpu-memory.request": "4Gi", f"{OWN}gpu-memory.limit": "8Gi"}
    asked = kai_pod(request)
    outcome = translate(asked, [FRACTIONS], KAI)
    annotations = applied(asked, outcome.operations)["metadata"]["annotations"]
    assert annotations["gpu-mem-limit.cnvrg.io/metagpu"] == "8192Mi"
    assert any("allowAnnotations: [limit]" in warning for warning in outcome.warnings)

    assert any(
        "gpu-memory.limit has no" in warning
        for warning in translate(asked, [INSTANCES], KAI).warnings
    )
    both = pod({}, {}, annotations={**request, "nvidia.com/container.c1.gpu-memory.limit": "4Gi"})
    outcome = translate(both, [FRACTIONS], KAI)
    assert "gpu-mem-limit" not in str(outcome.operations)
    assert limits(both, outcome, 1) == {"cnvrg.io/metagpu": "11"}
    assert any("c0: gpu-memory.limit has no effect" in warning for warning in outcome.warnings)


def test_a_limit_does_not_change_that_of_another_container() -> None:
    """A container that names the resource itself keeps the limit of its own shares."""
    request = {f"{OWN}gpu-memory.request": "4Gi", f"{OWN}gpu-memory.limit": "8Gi"}
    asked = pod({}, {"cnvrg.io/metagpu": 60}, annotations=request)
    outcome = translate(asked, [FRACTIONS], KAI)

    assert limits(asked, outcome, 0) == {"cnvrg.io/metagpu": "11"}
    assert "gpu-mem-limit" not in str(outcome.operations)
    assert any("gpu-memory.limit has no effect" in warning for warning in outcome.warnings)


def test_a_pod_that_asks_in_another_vocabulary_keeps_its_scheduler() -> None:
    """KAI has the queue and the gang of a pod that asks for whole GPUs by their resource."""
    asked = pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8000}, schedulerName="kai-scheduler")
    for settings in (KAI, TranslationSettings()):
        outcome = translate(asked, [FRACTIONS], settings)
        assert applied(asked, outcome.operations)["spec"]["schedulerName"] == "kai-scheduler"
        assert not any("becomes default-scheduler" in warning for warning in outcome.warnings)


def test_a_container_may_lack_its_name() -> None:
    """A template, as of Knative, may leave it out; several GPUs, and claims, need it."""
    asked = kai_pod({"gpu-fraction": "0.5"})
    del asked["spec"]["containers"][0]["name"]
    outcome = translate(asked, [FRACTIONS], KAI)
    assert limits(asked, outcome, 0) == {"cnvrg.io/metagpu": "50"}
    assert not (claimed := claim_pod(asked, "gpus", [FRACTIONS], KAI, "gpu.metagpu.io")).template
    assert "give it a name" in str(claimed.outcome.impossible)

    asked["metadata"]["annotations"]["gpu-fraction-num-devices"] = "2"
    assert "give it a name" in str(translate(asked, [FRACTIONS], KAI).warnings)


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        ({"gpu-fraction": "1"}, "gpu-fraction: '1' is not a number above 0 and less than 1"),
        ({"gpu-fraction": "0"}, "is not a number above 0"),
        ({"gpu-fraction": "500m"}, "is not a number above 0"),
        ({"gpu-fraction": "nan"}, "is not a number above 0"),
        ({"gpu-fraction": ""}, "is not a number above 0"),
        ({"gpu-fraction": "9" * 100_000}, "is not a number above 0"),
        ({"gpu-memory": "2Gi"}, "gpu-memory: '2Gi' is not a whole number above 0"),
        ({"gpu-memory": "٣"}, "is not a whole number above 0"),
        ({"gpu-fraction": "0.5", "gpu-memory": "2000"}, "both say how much"),
        ({"gpu-fraction-num-devices": "2"}, "gpu-fraction-num-devices says no size"),
        ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "0"}, "is not a whole number above 0"),
        ({"gpu-memory": "5", "gpu-fraction-container-name": "x"}, "no container of the pod: 'x'"),
        ({"nvidia.com/container.x.gpu-memory.request": "1Gi"}, "no container of the pod: 'x'"),
        ({f"{OWN}gpu-memory.request": "1000"}, "is not an amount of 1Mi or more"),
        ({f"{OWN}gpu-memory.request": "2Gi", f"{OWN}gpu-memory.limit": "1Gi"}, "less than the req"),
        ({f"{OWN}gpu-memory.request": "1Gi", "gpu-fraction": "0.5"}, "ask by one"),
        ({f"{OWN}gpu-compute.portion": "0.5"}, "add nvidia.com/container.c0.gpu-memory.request"),
        ({f"{OWN}gpu-memory.request": "1Gi", f"{OWN}gpu-compute.portion": "50"}, "and 1 at most"),
        ({f"{OWN}gpu-memory.request": "1Gi", f"{OWN}gpu-compute.mode": ""}, "or sm-sharing"),
    ],
)  # fmt: skip
def test_what_kai_refuses_is_left_with_a_sentence(
    annotations: Mapping[str, str], sentence: str
) -> None:
    """One short sentence says which annotation is wrong, and the pod stays as it is."""
    outcome = translate(pod({}, annotations=annotations), [FRACTIONS], KAI)

    assert sentence in outcome.unreadable
    assert len(outcome.unreadable) < 400
    assert (outcome.operations, outcome.impossible) == ((), None)


def test_a_container_asks_in_one_way() -> None:
    """An annotation beside a resource of GPUs is refused, as KAI does, also where nodes have it."""
    whole = node("w", "a100-40gb", "whole", more="resource: nvidia.com/gpu")
    asked = pod({"nvidia.com/gpu": 1}, annotations={"gpu-fraction": "0.5"})

    assert "by gpu-fraction and by nvidia.com/gpu" in translate(asked, [whole], KAI).unreadable


def test_many_annotations_cost_little() -> None:
    """The annotations of a pod are a stranger's text of 256 KiB at most."""
    keys = {f"nvidia.com/container.{n}.gpu-memory.request": "1Gi" for n in range(5000)}
    took = []
    for _ in range(3):  # a virtual machine that stands still counts that as its processor's time
        started = process_time()
        outcome = translate(pod({}, annotations=keys), [FRACTIONS], KAI)
        took.append(process_time() - started)

    assert "names no container of the pod" in outcome.unreadable
    assert len(outcome.unreadable) < 200
    assert min(took) < 1


def test_claims_serve_them_too() -> None:
    """The claim has the alternatives, and the pod asks in no other way."""
    asked = kai_pod({"gpu-memory": "8000"})
    claimed = claim_pod(asked, "gpus", [INSTANCES, FRACTIONS], KAI, "gpu.metagpu.io")

    assert claimed.template is not None
    [request] = claimed.template["spec"]["spec"]["devices"]["requests"]
    assert request["firstAvailable"][0]["deviceClassName"] == "mig.metagpu.io"
    assert claimed.pod["spec"]["containers"][0]["resources"] == {
        "claims": [{"name": "gpus", "request": "c0"}]
    }
    assert "gpu-memory" not in claimed.pod["metadata"]["annotations"]


values: Final = st.sampled_from(("0.5", "0.125", "1", "2", "8Gi", "4096Mi", "2000", "x", ""))
modes: Final = st.sampled_from(("sm-sharing", "time-slicing", "x"))
asked_by: Final = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("gpu-fraction", "gpu-memory", "gpu-fraction-num-devices"), values),
        "gpu-fraction-container-name": st.sampled_from(("c0", "c1", "c9")),
        "kai.scheduler/gpu-compute-sharing-mode": modes,
        **{
            f"nvidia.com/container.{name}.gpu-{key}": values
            for name in ("c0", "c1")
            for key in ("memory.request", "memory.limit", "compute.portion")
        },
        f"{OWN}gpu-compute.mode": modes,
        "team": st.just("a"),
    },
)


@given(asked_by, st.lists(st.sampled_from((INSTANCES, FRACTIONS, MPS)), min_size=1))
def test_a_translated_pod_asks_for_resources_alone(
    annotations: dict[str, str], at: list[NodeOffer]
) -> None:
    """The pod translates to itself, has no annotation that asks, and keeps the others."""
    asked = pod({"cpu": 1}, {}, annotations=annotations)
    before = copy.deepcopy(asked)
    outcome = translate(asked, at, KAI)
    assert asked == before
    patched = applied(asked, outcome.operations)
    if not outcome.operations:
        return
    again = translate(patched, at, KAI)
    assert (again.operations, again.impossible, again.unreadable) == ((), None, "")
    assert patched["metadata"]["annotations"].get("team") == annotations.get("team")
    assert not [
        annotation
        for annotation in patched["metadata"]["annotations"]
        if annotation.startswith("gpu-fraction")
    ]
    served = [
        name
        for container in patched["spec"]["containers"]
        for name in container["resources"]["limits"]
        if "/" in name
    ]
    assert served
