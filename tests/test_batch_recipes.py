"""Recipes for other schedulers in docs/batch.md and deploy/queues: fields of published schemas.

Kueue alone runs in a test, `tests/e2e/test_kueue.py`. The tables have the fields of their custom
resources as the projects publish them, as far as a recipe might use them. They were read at

- kubernetes-sigs/kueue 013c8f252cf1, and its CHANGELOG-0.15.md: 0.15 serves v1beta2 first;
- volcano-sh/volcano 038b64a8974a (Queue) and 233ca8bd15a2 (Job), which no release names;
- kai-scheduler/KAI-Scheduler 431c3a037b6e, and its CHANGELOG.md: 0.15.0 has the annotation
  `kai.scheduler/batch-min-member` first.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import yaml
from msgspec.structs import fields

from metagpu.backends.fraction.backend import FractionOptions
from metagpu.backends.mig.profiles import profile_resource
from metagpu.sim.machine.mig_profiles import MIG_PROFILES
from tests.backends.mig.gpus import mig_gpu

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
RECIPES: Final = PAGE.split("## Kueue, Volcano and KAI")[1]
FILES: Final = [file.read_text("utf-8") for file in (ROOT / "deploy" / "queues").iterdir()]
RELEASES: Final = ("kueue.yaml) 0.15", "kai.yaml) 0.15")
"""The first that have every field and annotation of their recipe."""

Schema: TypeAlias = Mapping[str, "Schema"] | list["Schema"] | None
"""The fields of an object, the schema of a list's items, or None: any value is good."""

AMOUNTS: Final[Schema] = {"quota": None, "limit": None, "overQuotaWeight": None}
POD_TEMPLATE: Final[Schema] = {
    "metadata": None,
    "spec": {
        "schedulerName": None,
        "restartPolicy": None,
        "priorityClassName": None,
        "containers": [{"name": None, "image": None, "args": None, "resources": None}],
    },
}
POLICIES: Final[Schema] = [
    {"action": None, "event": None, "events": None, "exitCode": None, "timeout": None}
]
QUOTAS: Final[Schema] = {
    "coveredResources": None,
    "flavors": [
        {
            "name": None,
            "resources": [
                {"name": None, "nominalQuota": None, "borrowingLimit": None, "lendingLimit": None}
            ],
        }
    ],
}
SCHEMAS: Final[Mapping[str, Schema]] = {
    # kubernetes-sigs/kueue, config/components/crd/bases
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": {
        **dict.fromkeys(("nodeLabels", "nodeTaints", "tolerations", "topologyName"))
    },
    "kueue.x-k8s.io/v1beta2 ClusterQueue": {
        **dict.fromkeys(("admissionScope", "cohortName", "concurrentAdmissionPolicy")),
        **dict.fromkeys(("admissionChecksStrategy", "namespaceSelector", "stopPolicy")),
        "queueingStrategy": None,
        "fairSharing": {"weight": None},
        "flavorFungibility": {"whenCanBorrow": None, "whenCanPreempt": None},
        "preemption": {
            **dict.fromkeys(("reclaimWithinCohort", "withinClusterQueue")),
            "borrowWithinCohort": {"maxPriorityThreshold": None, "policy": None},
        },
        "resourceGroups": [QUOTAS],
    },
    "kueue.x-k8s.io/v1beta2 LocalQueue": {**dict.fromkeys(("clusterQueue", "stopPolicy"))},
    # volcano-sh/volcano, config/crd/volcano/bases
    "scheduling.volcano.sh/v1beta1 Queue": {
        **dict.fromkeys(("affinity", "capability", "deserved", "extendClusters", "parent")),
        **dict.fromkeys(("priority", "reclaimable", "type", "weight")),
        "guarantee": {"resource": None},
    },
    "batch.volcano.sh/v1alpha1 Job": {
        **dict.fromkeys(("maxRetry", "minAvailable", "minSuccess", "networkTopology", "plugins")),
        **dict.fromkeys(("priorityClassName", "queue", "runningEstimate", "schedulerName")),
        "policies": POLICIES,
        "tasks": [
            {
                **dict.fromkeys(("dependsOn", "maxRetry", "minAvailable", "name")),
                **dict.fromkeys(("partitionPolicy", "replicas")),
                "policies": POLICIES,
                "template": POD_TEMPLATE,
            }
        ],
    },
    # kai-scheduler/KAI-Scheduler, deployments/kai-scheduler/crds
    "scheduling.run.ai/v2 Queue": {
        **dict.fromkeys(("displayName", "parentQueue", "preemptMinRuntime", "priority")),
        "reclaimMinRuntime": None,
        "resources": {"cpu": AMOUNTS, "gpu": AMOUNTS, "memory": AMOUNTS},
    },
    # Kubernetes
    "batch/v1 Job": {
        **dict.fromkeys(("backoffLimit", "backoffLimitPerIndex", "completionMode")),
        **dict.fromkeys(("completions", "parallelism", "podFailurePolicy", "suspend")),
        "template": POD_TEMPLATE,
    },
}
CONFIGURATION: Final[Schema] = {
    **dict.fromkeys(("apiVersion", "kind", "namespace", "featureGates", "waitForPodsReady")),
    "resources": {
        **dict.fromkeys(("excludeResourcePrefixes", "transformations")),
        "deviceClassMappings": [{"name": None, "deviceClassNames": None}],
    },
}
"""Kueue's own file, `Configuration` of config.kueue.x-k8s.io/v1beta2."""
ACTIONS: Final = {"reclaimWithinCohort": {"Never", "LowerPriority", "Any"}} | {
    "withinClusterQueue": {"Never", "LowerPriority", "LowerOrNewerEqualPriority"}
}


def objects() -> list[dict[str, Any]]:
    """Return the objects of all recipes."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", RECIPES, re.MULTILINE | re.DOTALL)
    blocks += FILES
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def of(kind: str) -> list[dict[str, Any]]:
    """Return the recipes' objects of an API version and kind."""
    return [entry for entry in objects() if f"{entry['apiVersion']} {entry['kind']}" == kind]


def unknown(value: object, schema: Schema, path: str) -> Iterator[str]:
    """Yield the fields of a value that its schema has not, and values of another form."""
    match schema:
        case None:
            return
        case list():
            if not isinstance(value, list):
                yield f"{path} is no list"
                return
            for number, item in enumerate(value):
                yield from unknown(item, schema[0], f"{path}[{number}]")
        case _:
            if not isinstance(value, dict):
                yield f"{path} is no object"
                return
            for key, item in value.items():
                if key in schema:
                    yield from unknown(item, schema[key], f"{path}.{key}")
                else:
                    yield f"{path}.{key}"


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_a_recipes_fields_are_published(kind: str) -> None:
    """Each kind of the tables is in a recipe, with fields of its schema alone."""
    found = of(kind)
    assert found
    for document in found:
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert list(unknown(document["spec"], SCHEMAS[kind], kind)) == []


def test_every_object_of_the_recipes_is_checked() -> None:
    """No recipe has a kind without a table; the section says for which releases, and what ran."""
    [configuration] = [entry for entry in objects() if entry["kind"] == "Configuration"]
    assert configuration["apiVersion"] == "config.kueue.x-k8s.io/v1beta2"
    assert list(unknown(configuration, CONFIGURATION, "configuration")) == []
    rest = [entry for entry in objects() if entry != configuration]
    assert {f"{document['apiVersion']} {document['kind']}" for document in rest} == SCHEMAS.keys()
    assert "Volcano and KAI were not run.**" in RECIPES.splitlines()[2]
    assert all(release in RECIPES for release in RELEASES)


def test_a_field_that_is_not_published_is_found() -> None:
    """The comparison sees an unknown field, also in a list, and a value of another form."""
    schema = SCHEMAS["kueue.x-k8s.io/v1beta2 ClusterQueue"]
    wrong = {"cohort": "gpus", "resourceGroups": [{"flavours": []}], "preemption": []}

    assert list(unknown(wrong, schema, "spec")) == [
        "spec.cohort",
        "spec.resourceGroups[0].flavours",
        "spec.preemption is no object",
    ]


def test_queues_of_kueue_are_consistent() -> None:
    """Flavors exist, cover the resources of their group in order, and borrow within a cohort."""
    flavors = {
        document["metadata"]["name"] for document in of("kueue.x-k8s.io/v1beta2 ResourceFlavor")
    }
    [queue] = of("kueue.x-k8s.io/v1beta2 ClusterQueue")
    [local] = of("kueue.x-k8s.io/v1beta2 LocalQueue")
    [mapping] = next(entry for entry in objects() if entry["kind"] == "Configuration")["resources"][
        "deviceClassMappings"
    ]
    groups = queue["spec"]["resourceGroups"]
    named = [other["name"] for group in groups for other in group["flavors"]]

    assert set(named) == flavors
    assert len(named) == len(set(named)), "a flavor is part of one group alone"
    for group in groups:
        for flavor in group["flavors"]:
            assert [resource["name"] for resource in flavor["resources"]] == group[
                "coveredResources"
            ]
    assert queue["spec"]["cohortName"]
    for field, values in ACTIONS.items():
        assert queue["spec"]["preemption"][field] in values
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert mapping["name"] in [name for group in groups for name in group["coveredResources"]]


def test_recipes_name_what_metagpu_offers() -> None:
    """Resources of the recipes are default names of backends, classes those of deploy/dra.yaml."""
    [shares] = [field.default for field in fields(FractionOptions) if field.name == "resource"]
    offered = {shares, *(profile_resource(name) for name in _profiles())}
    manifest = yaml.safe_load_all((ROOT / "deploy" / "dra.yaml").read_text(encoding="utf-8"))
    classes = {
        document["metadata"]["name"] for document in manifest if document["kind"] == "DeviceClass"
    }
    recipes = "\n".join((RECIPES, *FILES))
    text = re.findall(r"(?:cnvrg\.io|nvidia\.com)/(?:metagpu|mig-[\w.]+)", recipes)
    named = {document for document in text if "…" not in document and not document.endswith(".")}

    assert named == {shares, "nvidia.com/mig-3g.20gb"}
    assert named <= offered
    for word in re.findall(r"[a-z]+\.metagpu\.io", recipes):
        assert word in classes


def _profiles() -> set[str]:
    return {profile.name for model in MIG_PROFILES for profile in mig_gpu(0, model).mig_profiles}
