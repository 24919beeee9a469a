"""The promises of a translation, for any pod and any nodes."""

import copy
from collections.abc import Mapping
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from metagpu.translation.translate import translate
from metagpu.translation.values import NodeOffer, TranslationSettings
from tests.translation.nodes import applied, node, pod

HAMI: Final = TranslationSettings()
NODES: Final = (
    {
        (name := f"{backend}-{model}-{gpus}"): node(name, model, backend, gpus=gpus)
        for model in ("a30", "a100-40gb", "a100-80gb")
        for backend in ("mig", "fraction", "mps", "whole")
        for gpus in (1, 4)
    }
    | {
        # the same resource with other shares, and with none of its own memory
        (name := f"{shares}-{model}"): node(name, model, more=shares)
        for model in ("a30", "a100-40gb", "a100-80gb")
        for shares in ("memoryUnit: 1Gi", "sharesPerGpu: 10")
    }
    | {
        "timeslice": node(
            "timeslice", "a30", "timeslice", more="resource: cnvrg.io/metagpu, replicas: 100"
        )
    }
)
names = st.lists(st.sampled_from(sorted(NODES)), unique=True, min_size=1, max_size=6)
amounts = st.fixed_dictionaries(
    {},
    optional={
        "nvidia.com/gpu": st.sampled_from((1, 1, 2, 2, 0, 5)),
        "nvidia.com/gpumem": st.integers(0, 20000) | st.integers(20000, 90000),
        "nvidia.com/gpumem-percentage": st.integers(0, 100),
        "nvidia.com/gpucores": st.integers(0, 120),
        "nvidia.com/priority": st.integers(0, 1),
        "cpu": st.just("1"),
    },
)
annotations = st.just({"team": "a"}) | st.fixed_dictionaries(
    {"team": st.just("a")},
    optional={
        "nvidia.com/vgpu-mode": st.sampled_from(("mig", "hami-core", "mps", "other")),
        "hami.io/node-scheduler-policy": st.sampled_from(("binpack", "spread")),
        "nvidia.com/use-gputype": st.sampled_from(("A30", "A100", "80GB", "H100")),
        "nvidia.com/nouse-gputype": st.sampled_from(("A30", "40GB")),
    },
)
terms: st.SearchStrategy[list[dict[str, Any]] | None] = st.sampled_from(
    (None, None, [{"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}], [{}])
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a pod that may ask in HAMi's terms."""
    asked = pod(*draw(st.lists(amounts, min_size=1, max_size=2)), annotations=draw(annotations))
    if draw(st.booleans()):  # as the API server has it: requests follow limits
        for container in asked["spec"]["containers"]:
            container["resources"]["requests"] = dict(container["resources"]["limits"])
    if (chosen := draw(terms)) is not None:
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": chosen}}
        asked["spec"]["affinity"] = {"nodeAffinity": affinity}
    return asked


@given(pods(), names)
def test_a_translated_pod_translates_to_itself(asked: dict[str, Any], at: list[str]) -> None:
    """The second translation has no operations, and the first changes no argument."""
    before = copy.deepcopy(asked)
    offers = [NODES[text] for text in at]
    first = translate(asked, offers, HAMI)
    assert asked == before
    patched = applied(asked, first.operations)

    if first.operations:
        again = translate(patched, offers, HAMI)
        assert (again.operations, again.impossible) == ((), None)


@given(pods(), names)
def test_other_fields_are_never_touched(asked: dict[str, Any], at: list[str]) -> None:
    """Without resources, our annotations and the affinity the pod is what it was."""
    patched = applied(asked, translate(asked, [NODES[text] for text in at], HAMI).operations)

    for each in (asked, patched):
        for key in list(each["metadata"]["annotations"]):
            if "metagpu.io/" in key:
                del each["metadata"]["annotations"][key]
        each["spec"].pop("affinity", None)
        for container in each["spec"]["containers"]:
            for where in ("limits", "requests"):
                present = container["resources"].get(where, {})
                container["resources"][where] = {
                    key: value for key, value in present.items() if "/" not in key
                }
    assert patched == asked


@given(pods(), names, names)
def test_every_node_that_may_get_the_pod_gives_enough(
    asked: dict[str, Any], at: list[str], later: list[str]
) -> None:
    """Wherever the resource and the affinity lead, each GPU's part has the memory asked for.

    That holds for nodes which come later too.
    """
    outcome = translate(asked, [NODES[text] for text in at], HAMI)
    if not outcome.operations:
        return
    patched = applied(asked, outcome.operations)
    for before, after in zip(
        asked["spec"]["containers"], patched["spec"]["containers"], strict=True
    ):
        limits = before["resources"]["limits"]
        asks = any("gpu" in key for key in limits) and limits.get("nvidia.com/gpu") != 0
        if not asks or before == after:
            continue
        [(resource, count)] = [
            limit for limit in after["resources"]["limits"].items() if "/" in limit[0]
        ]
        offers = [NODES[text] for text in {*at, *later}]
        for offer in offers:
            if resource in offer.allocatable and _admits(patched, offer):
                assert _refusing(asked, offer) == ""
                _check_enough(limits, resource, int(count), offer)


def _refusing(asked: dict[str, Any], offer: NodeOffer) -> str:
    """Return the annotation that refuses a node's model: an oracle of its own."""
    product, annotations = offer.labels["nvidia.com/gpu.product"], asked["metadata"]["annotations"]
    for key, found in (("nvidia.com/use-gputype", False), ("nvidia.com/nouse-gputype", True)):
        if key in annotations and (annotations[key] in product) is found:
            return key
    return ""


def _check_enough(limits: Mapping[str, Any], resource: str, count: int, offer: NodeOffer) -> None:
    label = f"metagpu.io/{resource.replace('/', '_')}"
    backend, gpus = offer.labels[f"{label}.backend"], limits.get("nvidia.com/gpu", 1)
    share = int(offer.labels[f"{label}.memory"]) + 1  # rounded down; time-slices have none
    each, rest = divmod(count, gpus)
    assert rest == 0
    if backend in ("fraction", "mps"):
        assert each <= int(offer.labels[f"{label}.replicas"])
        assert gpus <= (int(offer.labels[f"{label}.gpus"]) if backend == "fraction" else 1)
    if memory := limits.get("nvidia.com/gpumem"):
        assert each * share >= memory
        return
    percentage = limits.get("nvidia.com/gpumem-percentage") or 100
    of_gpu = int(offer.labels["nvidia.com/gpu.memory"])
    if backend in ("fraction", "mps"):
        assert 100 * each >= percentage * int(offer.labels[f"{label}.replicas"])
    else:  # MIG keeps some memory of the GPU
        assert each * share >= percentage * of_gpu * 0.95 / 100


def _admits(asked: dict[str, Any], offer: NodeOffer) -> bool:
    """Return whether each expression of some term holds: an oracle of its own."""
    affinity = asked["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    labels = {"kubernetes.io/hostname": offer.name, **offer.labels}
    return any(
        term.get("matchExpressions")
        and all(_holds(expression, labels) for expression in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def _holds(document: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(document["key"]), document.get("values", [])
    if document["operator"] in ("Gt", "Lt"):
        [bound] = values
        difference = int(value or bound) - int(bound)
        return difference > 0 if document["operator"] == "Gt" else difference < 0
    return {
        "In": value in values,
        "NotIn": value not in values,
        "DoesNotExist": value is None,
    }[document["operator"]]
