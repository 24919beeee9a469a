"""The translation of requests in HAMi's terms, by cases."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from metagpu.translation.translate import explain, translate
from metagpu.translation.values import NodeOffer, TranslationSettings
from tests.translation.nodes import applied, limits, node, pod, required

HAMI = TranslationSettings()
SEED = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 8000}
"""The request of seed 004's example pods."""
HALF = {"nvidia.com/gpumem-percentage": 50}
THREADS = {"nvidia.com/gpumem": 8000, "nvidia.com/gpucores": 30}
MIG = {"nvidia.com/vgpu-mode": "mig"}
CORE = {"nvidia.com/vgpu-mode": "hami-core"}
PCIE = {"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"}

A30 = node("a30", "a30", "mig")
A100 = node("a100", "a100-pcie-40gb", "mig")
A100_80 = node("a100-80", "a100-80gb", "mig")
FRACTIONS = node("fractions", "a100-40gb")
FRACTIONS_80 = node("fractions-80", "a100-80gb")
MPS = node("mps", "a100-40gb", "mps")
WHOLE = node("whole", "a100-40gb", "whole", more="resource: example.com/gpu")
MIXED = msgspec.structs.replace(
    FRACTIONS, labels={**FRACTIONS.labels, "nvidia.com/gpu.memory": "81920"}
)
"""A node with one GPU of 40 GB among others of 80: its label has the memory of the least share."""
EXCLUSIVE = {"nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 100}
LARGE = {**EXCLUSIVE, "nvidia.com/gpumem": 70000}
"""HAMi gives such a pod a GPU that no other pod is on, and keeps others off it."""


@pytest.mark.parametrize(
    ("at", "annotations", "amounts", "expected"),
    [
        ((A100,), {}, SEED, {"nvidia.com/mig-2g.10gb": "2"}),
        ((A100,), MIG, SEED, {"nvidia.com/mig-2g.10gb": "2"}),
        ((A30,), MIG, SEED, {"nvidia.com/mig-2g.12gb": "2"}),
        ((A100_80,), MIG, SEED, {"nvidia.com/mig-1g.10gb": "2"}),
        # the least waste: 9728, 9856 and 12032 MiB or so for 8000
        ((A30, A100, A100_80), MIG, SEED, {"nvidia.com/mig-1g.10gb": "2"}),
        ((FRACTIONS,), {}, SEED, {"cnvrg.io/metagpu": "40"}),
        ((FRACTIONS,), CORE, SEED, {"cnvrg.io/metagpu": "40"}),
        ((FRACTIONS, A100), CORE, SEED, {"cnvrg.io/metagpu": "40"}),
        ((FRACTIONS, A100), {}, SEED, {"nvidia.com/mig-2g.10gb": "2"}),
        # a size without a number is one GPU
        ((FRACTIONS,), {}, {"nvidia.com/gpumem": 8000}, {"cnvrg.io/metagpu": "20"}),
        ((FRACTIONS,), {}, {"nvidia.com/gpumem-percentage": 50}, {"cnvrg.io/metagpu": "50"}),
        ((FRACTIONS,), {}, {"nvidia.com/gpumem": 40960}, {"cnvrg.io/metagpu": "100"}),
        # the whole of a GPU
        ((FRACTIONS,), {}, {"nvidia.com/gpu": 2}, {"cnvrg.io/metagpu": "200"}),
        ((FRACTIONS, WHOLE), {}, {"nvidia.com/gpu": 2}, {"example.com/gpu": "2"}),
        ((WHOLE,), {}, {"nvidia.com/gpumem-percentage": 100}, {"example.com/gpu": "1"}),
        ((A100,), {}, {"nvidia.com/gpumem": 0}, {"nvidia.com/mig-7g.40gb": "1"}),
        # percents of an instance are those of its slices: MIG keeps some of the memory
        ((A100,), {}, {"nvidia.com/gpumem-percentage": 50}, {"nvidia.com/mig-3g.20gb": "1"}),
        ((A100,), {}, {"nvidia.com/gpumem-percentage": 26}, {"nvidia.com/mig-3g.20gb": "1"}),
        ((A30,), {}, {"nvidia.com/gpumem-percentage": 25}, {"nvidia.com/mig-1g.6gb": "1"}),
        ((MPS,), {}, {"nvidia.com/gpumem-percentage": 50}, {"nvidia.com/gpu.mps": "50"}),
        # threads are units of MPS
        ((MPS,), {}, {"nvidia.com/gpumem": 8000}, {"nvidia.com/gpu.mps": "20"}),
        ((MPS,), {}, THREADS, {"nvidia.com/gpu.mps": "30"}),
        # amounts are quantities of Kubernetes
        ((MPS,), {}, {"nvidia.com/gpumem": "8k"}, {"nvidia.com/gpu.mps": "20"}),
        ((MPS,), {}, {"nvidia.com/gpumem": "8e3"}, {"nvidia.com/gpu.mps": "20"}),
        ((MPS,), {}, {"nvidia.com/gpumem": "8Ki"}, {"nvidia.com/gpu.mps": "21"}),
        # hami-core is fractions or units of MPS, and MPS alone limits threads
        ((MPS,), CORE, {"nvidia.com/gpumem": 8000}, {"nvidia.com/gpu.mps": "20"}),
        ((MPS, FRACTIONS), CORE, {"nvidia.com/gpumem": 8000}, {"cnvrg.io/metagpu": "20"}),
        ((FRACTIONS, MPS), CORE, THREADS, {"nvidia.com/gpu.mps": "30"}),
        ((FRACTIONS, MPS), {}, THREADS, {"nvidia.com/gpu.mps": "30"}),
        # all multiprocessors are a GPU of one's own, as in HAMi
        ((FRACTIONS,), {}, EXCLUSIVE, {"cnvrg.io/metagpu": "100"}),
        ((MPS,), {}, EXCLUSIVE, {"nvidia.com/gpu.mps": "100"}),
        ((A100,), {}, EXCLUSIVE, {"nvidia.com/mig-7g.40gb": "1"}),
        ((FRACTIONS, WHOLE), {}, EXCLUSIVE, {"example.com/gpu": "1"}),
        ((FRACTIONS,), {}, {**HALF, "nvidia.com/gpucores": 120}, {"cnvrg.io/metagpu": "100"}),
        ((FRACTIONS_80,), {}, LARGE, {"cnvrg.io/metagpu": "100"}),
        # a mode is meant for whole GPUs too
        ((WHOLE, A100), MIG, {"nvidia.com/gpu": 1}, {"nvidia.com/mig-7g.40gb": "1"}),
        ((WHOLE, FRACTIONS), CORE, {"nvidia.com/gpu": 1}, {"cnvrg.io/metagpu": "100"}),
        ((A100, WHOLE), {}, {"nvidia.com/gpu": 1}, {"example.com/gpu": "1"}),
    ],
)  # fmt: skip
def test_a_request_becomes_what_nodes_offer(
    at: tuple[NodeOffer, ...],
    annotations: Mapping[str, str],
    amounts: Mapping[str, object],
    expected: Mapping[str, str],
) -> None:
    """HAMi's names give way to the smallest shares of the nodes that are enough."""
    asked = pod(amounts, annotations=annotations)

    assert limits(asked, translate(asked, at, HAMI)) == expected


def test_the_order_is_meant_for_whole_gpus_too() -> None:
    """Whole GPUs have their place in an order that names them, for each request."""
    asked = pod({"nvidia.com/gpu": 1})
    mig_first = TranslationSettings(order=("mig", "whole"))

    assert limits(asked, translate(asked, [WHOLE, A100], mig_first)) == {
        "nvidia.com/mig-7g.40gb": "1"
    }


def test_each_way_of_a_node_is_explained_once() -> None:
    """Whole GPUs are one way, whatever the order has beside them."""
    ways = explain(pod({"nvidia.com/gpu": 2}), [WHOLE, FRACTIONS], HAMI)

    assert [(way.node, way.technique, way.text, way.chosen) for way in ways] == [
        ("whole", "whole", "2 of example.com/gpu", True),
        ("fractions", "fraction", "200 of cnvrg.io/metagpu", False),
    ]


def test_shares_of_several_gpus_name_their_number() -> None:
    """20 shares on each of two GPUs are 40 shares and an annotation; instances need none."""
    asked = pod(SEED)
    fractions = applied(asked, translate(asked, [FRACTIONS], HAMI).operations)
    instances = applied(asked, translate(asked, [A100], HAMI).operations)

    assert fractions["metadata"]["annotations"]["gpus.metagpu.io/c0"] == "2"
    assert [*instances["metadata"]["annotations"]] == ["metagpu.io/original-request"]


def test_the_original_request_stays_in_an_annotation() -> None:
    """The annotation has the amounts of each container as the pod had them."""
    asked = pod(SEED, {"cpu": 1}, annotations={"team": "a"})
    annotations = applied(asked, translate(asked, [A100], HAMI).operations)["metadata"][
        "annotations"
    ]

    assert json.loads(annotations["metagpu.io/original-request"]) == {
        "c0": {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8000"}
    }
    assert annotations["team"] == "a"


@pytest.mark.parametrize(
    "amounts",
    [
        {},
        {"cpu": "1"},
        {"cnvrg.io/metagpu": 20},
        {"nvidia.com/mig-2g.10gb": 1},
        {"nvidia.com/gpu": 2},  # offered by a node
        {"nvidia.com/gpu": 0},
    ],
)
def test_real_resources_pass_untouched(amounts: Mapping[str, object]) -> None:
    """A pod that names resources of nodes alone, or none, has no operations and no warnings."""
    whole = node("plain", "a100-40gb", "whole")
    asked = pod(amounts, annotations=MIG)
    outcome = translate(asked, [whole, FRACTIONS, A100], HAMI)

    assert (outcome.operations, outcome.warnings, outcome.impossible) == ((), (), None)


def test_only_the_containers_named_are_touched() -> None:
    """Every operation is about a container that asks, the annotations or the node affinity."""
    asked = pod({"cpu": 1}, {**SEED, "cpu": 2})
    asked["spec"]["containers"][1]["resources"]["requests"] = {"nvidia.com/gpumem": 8000, "cpu": 2}
    outcome = translate(asked, [FRACTIONS], HAMI)
    patched = applied(asked, outcome.operations)["spec"]["containers"]

    assert patched[0] == asked["spec"]["containers"][0]
    assert patched[1]["resources"] == {
        "limits": {"cpu": 2, "cnvrg.io/metagpu": "40"},
        "requests": {"cpu": 2, "cnvrg.io/metagpu": "40"},
    }


def _where(asked: Mapping[str, Any], at: Sequence[NodeOffer]) -> list[str]:
    """Return the required expressions of a translated pod, as text."""
    found = required(asked, translate(asked, at, HAMI))
    return [
        f"{document['key']} {document['operator']} {','.join(document['values'])}"
        for document in found
    ]


def test_shares_that_mean_different_memory_are_distinguished_by_a_label() -> None:
    """20 shares of an A100 of 40 GB are 8 GiB, and of one of 80 GB are 16: the pod goes to one."""
    asked = pod(SEED)
    outcome = translate(asked, [FRACTIONS, FRACTIONS_80], HAMI)

    assert limits(asked, outcome) == {"cnvrg.io/metagpu": "40"}
    assert _where(asked, [FRACTIONS, FRACTIONS_80]) == [
        "metagpu.io/cnvrg.io_metagpu.backend In fraction",
        "metagpu.io/cnvrg.io_metagpu.memory In 409",
        "metagpu.io/cnvrg.io_metagpu.replicas Gt 19",
        "metagpu.io/cnvrg.io_metagpu.gpus Gt 1",
    ]


@pytest.mark.parametrize(
    ("at", "annotations", "amounts", "expected"),
    [
        (FRACTIONS, {}, {"nvidia.com/gpumem": 8000}, ["memory In 409", "replicas Gt 19"]),
        # by as many units as percent: other numbers of them are other percents
        (FRACTIONS, {}, HALF, ["backend In fraction", "replicas In 100"]),
        (MPS, {}, THREADS, ["backend In mps", "memory In 408", "replicas In 100"]),
        # all shares are 60 MiB more than 100 times their rounded memory
        (FRACTIONS, {}, {"nvidia.com/gpumem": 40960}, ["memory In 409", "replicas In 100"]),
        (
            FRACTIONS,
            {"nvidia.com/use-gputype": "A100"},
            HALF,
            ["product In NVIDIA-A100-SXM4-40GB", "backend In fraction", "replicas In 100"],
        ),
        # a profile's name says how much memory there is at least, and percents are of a GPU
        (A100, {}, {"nvidia.com/gpumem": 8000}, []),
        (A100, {}, {"nvidia.com/gpumem": 9000}, ["memory Gt 8999"]),
        (A100, {}, HALF, ["memory Lt 40961"]),
        (WHOLE, {"nvidia.com/vgpu-mode": "whole"}, THREADS, ["memory Gt 7999"]),
        (WHOLE, {}, {"nvidia.com/gpu": 1}, []),
        (WHOLE, {}, EXCLUSIVE, ["memory Gt 2999"]),
        (FRACTIONS, {}, EXCLUSIVE, ["memory Gt 2999", "backend In fraction", "replicas In 100"]),
    ],
)
def test_what_a_number_of_shares_relies_on_is_required(
    at: NodeOffer,
    annotations: Mapping[str, str],
    amounts: Mapping[str, object],
    expected: list[str],
) -> None:
    """The affinity is there before a node is that would give the pod less."""
    asked = pod(amounts, annotations=annotations)

    assert [name.rpartition(".")[2] for name in _where(asked, [at])] == expected


def test_nodes_that_the_pod_excludes_itself_are_in_no_affinity() -> None:
    """A thousand other nodes do not make the pod larger."""
    others = [msgspec.structs.replace(FRACTIONS_80, name=f"other-{n}") for n in range(1000)]
    asked = pod(HALF, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"})

    assert _where(asked, [FRACTIONS, *others]) == _where(asked, [FRACTIONS])


def test_a_known_node_that_no_label_tells_apart_is_named() -> None:
    """Instances without a label of their memory are avoided by the product, or the name."""
    asked, counted = pod({"nvidia.com/gpumem": 8000}), {"nvidia.com/mig-2g.10gb": 3}
    bare, alike = NodeOffer("bare", {}, counted), NodeOffer("alike", dict(PCIE), counted)

    assert _where(asked, [A100, bare]) == ["nvidia.com/gpu.product In NVIDIA-A100-PCIE-40GB"]
    assert _where(asked, [A100, alike]) == ["kubernetes.io/hostname NotIn alike"]


def test_a_resource_name_that_says_all_needs_no_affinity() -> None:
    """Instances have the memory of their name: the pod's affinity stays as it is."""
    asked = pod(SEED)

    assert required(asked, translate(asked, [A30, A100, A100_80, FRACTIONS], HAMI)) == []


def test_an_affinity_is_added_to_each_term() -> None:
    """The terms of a required affinity are alternatives: each gets the expression."""
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    fields = {"key": "metadata.name", "operator": "NotIn", "values": ["x"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [fields]}]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }
    asked = pod({"nvidia.com/gpumem": 8000}, affinity=affinity)
    added = [
        "metagpu.io/cnvrg.io_metagpu.memory In 409",
        "metagpu.io/cnvrg.io_metagpu.replicas Gt 19",
    ]

    assert _where(asked, [FRACTIONS, FRACTIONS_80]) == ["zone In a", *added, *added]


def test_policies_choose_between_resources() -> None:
    """Bin packing takes the least waste, spread the nodes with the most room."""
    many = node("many", "a30", "mig", gpus=8)
    spread = {**MIG, "hami.io/node-scheduler-policy": "spread"}
    packed, spreading = pod(SEED, annotations=MIG), pod(SEED, annotations=spread)

    assert limits(packed, translate(packed, [many, A100], HAMI)) == {"nvidia.com/mig-2g.10gb": "2"}
    assert limits(spreading, translate(spreading, [many, A100], HAMI)) == {
        "nvidia.com/mig-2g.12gb": "2"
    }


def test_models_are_chosen_by_their_label() -> None:
    """A pod that names or refuses a model goes to nodes of the others alone."""
    for annotation in ({"nvidia.com/use-gputype": "80gb"}, {"nvidia.com/nouse-gputype": "40GB"}):
        asked = pod(SEED, annotations={**CORE, **annotation})
        outcome = translate(asked, [FRACTIONS, FRACTIONS_80], HAMI)

        assert limits(asked, outcome) == {"cnvrg.io/metagpu": "20"}
        assert _where(asked, [FRACTIONS, FRACTIONS_80])[0].endswith(" In NVIDIA-A100-SXM4-80GB")


def test_nodes_that_the_pod_refuses_are_not_its_offer() -> None:
    """A node selector leaves the nodes whose offer counts."""
    asked = pod(SEED, annotations=MIG, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-A30"})

    assert limits(asked, translate(asked, [A30, A100], HAMI)) == {"nvidia.com/mig-2g.12gb": "2"}


def test_a_resource_of_the_gpus_own_name_is_replaced_in_place() -> None:
    """Fractions named nvidia.com/gpu: the number becomes shares, and the size goes."""
    own = node("own", "a100-40gb", more="resource: nvidia.com/gpu")
    asked = pod(SEED)
    outcome = translate(asked, [own], HAMI)

    assert limits(asked, outcome) == {"nvidia.com/gpu": "40"}


@pytest.mark.parametrize(
    ("at", "annotations", "amounts", "sentence"),
    [
        ((), {}, SEED, "no Node has labels about GPUs that could serve it"),
        ((FRACTIONS,), MIG, SEED, "without the annotation nvidia.com/vgpu-mode it gets 40 of"),
        ((A100,), {}, {"nvidia.com/gpumem": 50000}, "ask for nvidia.com/gpumem: 40192 at most"),
        ((FRACTIONS,), {}, {"nvidia.com/gpumem": 50000}, "for nvidia.com/gpumem: 40960 at most"),
        ((MIXED,), {}, {"nvidia.com/gpumem": 70000}, "promises 40999 MiB of one GPU"),
        ((MIXED,), {}, {"nvidia.com/gpumem": 70000}, "make a pool of the larger GPUs"),
        ((FRACTIONS,), {}, LARGE, "a whole GPU of 70000 MiB"),
        ((MPS,), {}, {**HALF, "nvidia.com/gpu": 2}, "2 parts of 50 % are asked for"),
        ((FRACTIONS,), {}, {**SEED, "nvidia.com/gpu": 3}, "ask for nvidia.com/gpu: 2 at most"),
        ((A100,), {}, {**SEED, "nvidia.com/gpu": 9}, "ask for nvidia.com/gpu: 6 at most"),
        ((WHOLE,), {}, {"nvidia.com/gpu": 3}, "ask for nvidia.com/gpu: 2 at most"),
        ((MPS,), {}, SEED, "ask for nvidia.com/gpu: 1 at most"),
        ((A100,), {"nvidia.com/use-gputype": "H100"}, SEED, "nvidia.com/use-gputype: H100"),
    ],
)  # fmt: skip
def test_an_impossible_request_says_what_would_fit(
    at: tuple[NodeOffer, ...],
    annotations: Mapping[str, str],
    amounts: Mapping[str, object],
    sentence: str,
) -> None:
    """No node could serve it: the pod stays as it is, and a sentence names the nearest request."""
    outcome = translate(pod(amounts, annotations=annotations), at, HAMI)

    assert outcome.impossible is not None
    assert sentence in outcome.impossible
    assert outcome.operations == ()


def test_containers_that_fit_alone_and_not_together() -> None:
    """The containers of a pod are of one node."""
    outcome = translate(pod(SEED, SEED, SEED, SEED), [A100], HAMI)

    assert "together" in (outcome.impossible or "")


@pytest.mark.parametrize(
    ("percents", "fit"),
    [
        ((60, 60), True),
        ((60, 60, 60), False),  # 180 of 200, and two of them on no GPU
        ((60, 40, 60, 40), True),
        ((40, 40, 60, 60), True),
    ],
)
def test_containers_share_gpus_not_the_sum_of_them(
    percents: tuple[int, ...],
    fit: bool,  # noqa: FBT001 - the expected outcome
) -> None:
    """The parts of containers fit on GPUs, one by one: no part lies on two."""
    asked = pod(*({"nvidia.com/gpumem-percentage": percent} for percent in percents))
    outcome = translate(asked, [FRACTIONS], HAMI)

    assert (outcome.impossible is None) is fit


def test_a_sidecar_runs_beside_init_containers() -> None:
    """A sidecar has its shares while a later init container runs, and an earlier one is gone."""
    sixty = {"nvidia.com/gpumem-percentage": 60}
    asked = pod(sixty)
    first, sidecar, later = pod(sixty, sixty, {"nvidia.com/gpu": 2})["spec"]["containers"]
    sidecar["restartPolicy"] = "Always"
    asked["spec"]["initContainers"] = [later, sidecar]
    assert translate(asked, [FRACTIONS], HAMI).impossible is None

    asked["spec"]["initContainers"] = [sidecar, first]
    assert translate(asked, [FRACTIONS], HAMI).impossible is None

    asked["spec"]["initContainers"] = [sidecar, later]
    assert "together" in (translate(asked, [FRACTIONS], HAMI).impossible or "")


def test_percents_are_none_of_an_instance_that_stands_for_a_gpu() -> None:
    """Labels of strategy `single` describe the instance: none says what half a GPU is."""
    shares = "metagpu.io/nvidia.com_gpu"
    single = NodeOffer(
        "single",
        {
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb",
            "nvidia.com/gpu.memory": "19968",
            "nvidia.com/gpu.count": "4",
            f"{shares}.backend": "mig",
            f"{shares}.memory": "19968",
            f"{shares}.replicas": "2",
            f"{shares}.gpus": "2",
        },
        {"nvidia.com/gpu": 4},
    )
    asked = pod({"nvidia.com/gpumem": 16000})

    assert "50 % of one GPU" in (translate(pod(HALF), [single], HAMI).impossible or "")
    assert limits(asked, translate(asked, [single], HAMI)) == {"nvidia.com/gpu": "1"}
    assert _where(asked, [single]) == ["metagpu.io/nvidia.com_gpu.memory Gt 15999"]


def test_an_init_container_has_what_the_others_have_later() -> None:
    """An init container ends before the others start: its shares do not count beside theirs."""
    asked = pod({"nvidia.com/gpu": 2})
    asked["spec"]["initContainers"] = pod({"nvidia.com/gpu": 2})["spec"]["containers"]

    assert limits(asked, translate(asked, [WHOLE], HAMI)) == {"example.com/gpu": "2"}


@pytest.mark.parametrize(
    ("at", "annotations", "amounts", "sentence"),
    [
        (A100, {}, {**SEED, "nvidia.com/gpucores": 30}, "nvidia.com/gpucores: 30 has no effect"),
        (FRACTIONS, {}, {**HALF, "nvidia.com/gpucores": 30}, "shares of backend mps limit threads"),
        (FRACTIONS, {}, EXCLUSIVE, "gpucores: 100 keeps other pods off the GPU, as in HAMi"),
        (FRACTIONS, {}, SEED, "from 2 GPUs where the pool has `split: accept`"),
        (A100, {}, {**SEED, "nvidia.com/priority": 1}, "nvidia.com/priority has no effect"),
        (A100, {"nvidia.com/use-gpuuuid": "GPU-1"}, SEED, "no Node label has the uuids"),
        (A100, {"hami.io/node-scheduler-policy": "spread"}, SEED, "metagpu-spread"),
        (A100, {"hami.io/vulkan": "true"}, SEED, "no library between"),
        (A100, {"hami.io/node-scheduler-policy": "random"}, SEED, "known are binpack and spread"),
        (
            A100,
            {},
            {"nvidia.com/gpu": 0, "nvidia.com/gpumem": 8000},
            "0 is none: nvidia.com/gpumem",
        ),
    ],
)
def test_an_effect_that_is_missing_is_a_warning(
    at: NodeOffer, annotations: Mapping[str, str], amounts: Mapping[str, object], sentence: str
) -> None:
    """Each thing that a pod asks for and does not get has one warning, with the reason."""
    outcome = translate(pod(amounts, annotations=annotations), [at], HAMI)

    assert [sentence in warning for warning in outcome.warnings] == [True]
    assert outcome.impossible is None


@pytest.mark.parametrize(
    ("amounts", "sentence"),
    [
        ({"nvidia.com/gpumem": "8000MiB"}, "'8000MiB' is not a whole number"),
        ({"nvidia.com/gpumem": "1500m"}, "'1500m' is not a whole number"),
        ({"nvidia.com/gpumem-percentage": 101}, "101 is more than a GPU has"),
        ({**SEED, "nvidia.com/mig-2g.10gb": 1}, "ask for one of them"),
    ],
)
def test_what_cannot_be_read_is_left_as_it_is(amounts: Mapping[str, object], sentence: str) -> None:
    """The outcome is one of its own: neither a translation nor an untouched pod."""
    outcome = translate(pod(amounts), [A100], HAMI)

    assert [sentence in warning for warning in outcome.warnings] == [True]
    assert (bool(outcome.unreadable), outcome.operations, outcome.impossible) == (True, (), None)


@pytest.mark.parametrize(
    ("amounts", "left"),
    [
        ({"nvidia.com/priority": 1}, {}),
        ({"nvidia.com/priority": 1, "cnvrg.io/metagpu": 20}, {"cnvrg.io/metagpu": 20}),
        ({"nvidia.com/gpu": 0, "nvidia.com/gpumem": 8000, "cpu": 1}, {"cpu": 1}),
    ],
)
def test_names_that_ask_for_nothing_are_removed(
    amounts: Mapping[str, object], left: Mapping[str, object]
) -> None:
    """A pod would wait for ever for a priority, or for memory of no GPU."""
    asked = pod(amounts)
    outcome = translate(asked, [FRACTIONS], HAMI)

    assert limits(asked, outcome) == left
    assert len(outcome.warnings) == 1
    patched = applied(asked, outcome.operations)
    assert translate(patched, [FRACTIONS], HAMI).operations == ()


def test_a_resource_without_a_plugin_is_not_offered() -> None:
    """A kubelet goes on counting 0 of it, which is no reason to leave pods as they are."""
    gone = NodeOffer("gone", {}, {"nvidia.com/gpumem": 0, "nvidia.com/gpu": 0})
    unhealthy = msgspec.structs.replace(WHOLE, allocatable={"example.com/gpu": 0})
    names = TranslationSettings(gpu="example.com/gpu")

    assert limits(pod(SEED), translate(pod(SEED), [gone, A100], HAMI)) == {
        "nvidia.com/mig-2g.10gb": "2"
    }
    assert translate(pod({"example.com/gpu": 1}), [unhealthy, A100], names).operations == ()


def test_a_translated_pod_stays_as_it_is_where_its_node_is_unknown() -> None:
    """Shares with the name of GPUs are none for a replica that has not seen the node yet."""
    own = node("own", "a100-40gb", more="resource: nvidia.com/gpu")
    asked = pod({"nvidia.com/gpumem": 8000})
    patched = applied(asked, translate(asked, [own], HAMI).operations)

    assert patched["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "20"}
    assert translate(patched, [A100], HAMI).operations == ()


def test_a_node_without_another_resource_of_the_pod_is_no_candidate() -> None:
    """Instances of a node without the network card that the pod asks for are of no use."""
    cards = {**FRACTIONS.allocatable, "rdma.io/hca": 4}
    connected = msgspec.structs.replace(FRACTIONS, allocatable=cards)
    asked = pod({"nvidia.com/gpumem": 8000}, {"rdma.io/hca": 1})
    nowhere = pod({"nvidia.com/gpumem": 8000}, {"dra.io/of-a-device-class": 1})

    assert limits(asked, translate(asked, [A100, connected], HAMI)) == {"cnvrg.io/metagpu": "20"}
    assert "it has no rdma.io/hca" in {
        way.text.partition(": ")[2] for way in explain(asked, [A100, connected], HAMI)
    }
    assert limits(nowhere, translate(nowhere, [A100], HAMI)) == {"nvidia.com/mig-2g.10gb": "1"}


def test_amounts_are_those_of_the_api_server() -> None:
    """The API server writes 8000 as 8k and 1000 as 1k, in pods and in Nodes."""
    amounts = {"cpu": "8", "cnvrg.io/metagpu": "1k", "memory": "64Gi", "other.io/x": "10m"}
    read = NodeOffer.from_node(
        {
            "metadata": {"name": "n", "labels": {"a": "b"}},
            "status": {"allocatable": amounts},
        }
    )

    assert (read.name, read.labels) == ("n", {"a": "b"})
    assert read.allocatable == {"cnvrg.io/metagpu": 1000}


def test_names_are_those_of_the_settings() -> None:
    """HAMi lets an operator rename its resources; the settings do too."""
    asked = pod({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 8000})
    names = TranslationSettings(gpu="volcano.sh/vgpu-number", memory="volcano.sh/vgpu-memory")

    assert limits(asked, translate(asked, [FRACTIONS], names)) == {"cnvrg.io/metagpu": "20"}


def test_resources_that_a_node_counts_are_not_hamis() -> None:
    """A node that offers nvidia.com/gpumem itself, as by another plugin, has its own pods."""
    other = NodeOffer("other", {}, {"nvidia.com/gpumem": 100})

    assert translate(pod(SEED), [other, A100], HAMI).operations == ()
