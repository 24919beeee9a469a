"""deploy/scheduler: both files have the same profiles, with every resource of metagpu."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import fields

from metagpu.backends.fraction.backend import FractionOptions
from metagpu.backends.mig.profiles import profile_resource
from metagpu.backends.mps.backend import MpsOptions
from metagpu.backends.timeslice.backend import TimesliceOptions
from metagpu.backends.whole.backend import WholeOptions
from metagpu.sim.machine.mig_profiles import MIG_PROFILES
from tests.backends.mig.gpus import mig_gpu

FOLDER: Final = Path(__file__).parents[1] / "deploy" / "scheduler"
OBJECTS: Final = list(yaml.safe_load_all((FOLDER / "scheduler.yaml").read_text(encoding="utf-8")))
STOCK: Final = yaml.safe_load((FOLDER / "profiles.yaml").read_text(encoding="utf-8"))
STRATEGIES: Final = {"metagpu-binpack": "MostAllocated", "metagpu-spread": "LeastAllocated"}


def one(kind: str) -> dict[str, Any]:
    """Return the one object of a kind of scheduler.yaml."""
    [found] = [entry for entry in OBJECTS if entry["kind"] == kind]
    return dict(found)


def test_both_files_have_the_same_profiles() -> None:
    """The stock scheduler keeps its default profile, and the own one has only the two."""
    own = yaml.safe_load(one("ConfigMap")["data"]["config.yaml"])

    assert [STOCK["profiles"][0], *own["profiles"]] == STOCK["profiles"]
    assert STOCK["profiles"][0] == {"schedulerName": "default-scheduler"}
    assert (STOCK["kind"], STOCK["apiVersion"]) == (own["kind"], own["apiVersion"])


@pytest.mark.parametrize(
    "profile", STOCK["profiles"][1:], ids=lambda document: document["schedulerName"]
)
def test_every_resource_is_weighed(profile: Mapping[str, Any]) -> None:
    """Default names of backends and names of all known MIG profiles weigh alike, above CPU."""
    [args] = [
        document["args"]
        for document in profile["pluginConfig"]
        if document["name"] == "NodeResourcesFit"
    ]
    strategy = args["scoringStrategy"]
    weights = {resource["name"]: resource["weight"] for resource in strategy["resources"]}
    backends = (FractionOptions, MpsOptions, TimesliceOptions, WholeOptions)
    gpus = [mig_gpu(0, model) for model in MIG_PROFILES]
    names = {
        str(field.default)
        for each in backends
        for field in fields(each)
        if field.name == "resource"
    }
    names |= {
        profile_resource(mig_profile.name) for gpu in gpus for mig_profile in gpu.mig_profiles
    }

    assert strategy["type"] == STRATEGIES[profile["schedulerName"]]
    assert (weights.pop("cpu"), weights.pop("memory")) == (1, 1)
    assert weights == dict.fromkeys(names, 8)
    assert len(strategy["resources"]) == len(names) + 2


def test_the_scheduler_reads_the_configuration_with_its_account() -> None:
    """Account, bindings, mounted ConfigMap and the Deployment name each other."""
    account = one("ServiceAccount")["metadata"]
    bindings = [entry for entry in OBJECTS if entry["kind"] == "ClusterRoleBinding"]
    spec = one("Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]

    assert spec["serviceAccountName"] == account["name"]
    assert [binding["subjects"] for binding in bindings] == [
        [{"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}]
    ] * len(bindings)
    assert [volume["configMap"]["name"] for volume in spec["volumes"]] == [
        one("ConfigMap")["metadata"]["name"]
    ]
    [mount] = container["volumeMounts"]
    assert f"--config={mount['mountPath']}/config.yaml" in container["command"]
