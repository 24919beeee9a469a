"""The chart in deploy/chart: its values, and what it renders."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema  # type: ignore[import-untyped] # its stubs are one more package
import pytest
import yaml

import metagpu
from metagpu.cli.arguments import parser
from metagpu.cli.options import Variable
from metagpu.plugins.cluster.settings import ALL_FEATURES, Feature
from tests.e2e.rig.tools import Tools

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_render", DEPLOY / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


@pytest.fixture(scope="module")
def helm() -> str:
    """Return the helm at hand, or that of the end-to-end tests; skip without one."""
    built = Tools.cached().path("helm")
    found = script.find_helm() or (built if os.access(built, os.X_OK) else None)
    if found is None:
        pytest.skip("no helm in PATH, none named by HELM, and none built for the end-to-end tests")
    return str(found)


def test_the_defaults_satisfy_the_schema() -> None:
    """values.yaml is valid by values.schema.json."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


def test_the_schema_names_every_value_and_no_other() -> None:
    """A mistyped value is refused, and so is none that values.yaml has."""
    assert dict(_schema_keys(SCHEMA)) == dict(_value_keys(VALUES, SCHEMA))


def test_the_table_of_values_is_that_of_the_comments() -> None:
    """README.md lists every value with the comment of values.yaml; `make chart` writes it."""
    assert (CHART / "README.md").read_text() == script.readme()


def test_features_are_those_of_the_option() -> None:
    """Each feature of --cluster is a value, on by default where `all` includes it."""
    assert VALUES["features"] == {str(it): it in ALL_FEATURES for it in Feature}


def test_versions_are_those_of_the_package() -> None:
    """The chart installs the image of its own version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == metagpu.__version__


def test_every_variable_of_the_chart_is_one_of_an_option() -> None:
    """The daemon reads each variable that the DaemonSet sets."""
    run = parser().parse_args(["run"])
    read = {
        name for value in vars(run).values() if isinstance(value, Variable) for name in value.names
    }
    template = (CHART / "templates" / "daemonset.yaml").read_text()
    written = set(re.findall(r"name: (METAGPU_\w+)", template))
    assert written
    assert written <= read


def test_manifests_are_those_of_the_chart(helm: str) -> None:
    """deploy/*.yaml are what `make chart` renders."""
    for name in script.MANIFESTS:
        assert (DEPLOY / f"{name}.yaml").read_text() == script.manifest(helm, name), name


@pytest.mark.parametrize(
    ("values", "capabilities"),
    [
        ("privileges.memoryEnforcement=false", []),
        ("simulate=t4:1", ["KILL"]),
        ("privileges.mig=true", ["KILL", "SYS_ADMIN"]),
        ("privileges.timeSlice=true,privileges.memoryEnforcement=false", ["SYS_ADMIN"]),
        ("privileges.driverLimits=true", ["KILL", "SYS_ADMIN"]),
        ("privileges.mps=true", None),
        ("privileges.devices=true", None),
    ],
)
def test_privileges_are_those_of_the_features(
    helm: str, values: str, capabilities: list[str] | None
) -> None:
    """The container has the capabilities that a feature needs, and is privileged for few."""
    security = _container(helm, values)["securityContext"]
    assert security["readOnlyRootFilesystem"]
    if capabilities is None:
        assert security["privileged"]
        return
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["capabilities"].get("add", []) == capabilities
    assert security["allowPrivilegeEscalation"] is False
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "privileged" not in security


@pytest.mark.parametrize("feature", list(Feature))
def test_a_feature_alone_has_its_rights_alone(helm: str, feature: Feature) -> None:
    """Each feature brings the rights that docs/permissions.md lists for it."""
    needed = {Feature.PODS, Feature.POD_EVENTS} if feature.startswith("janitor") else set()
    on = {feature, *needed}
    values = ",".join(f"features.{it}={str(it in on).lower()}" for it in Feature)
    rights = {
        (resource, verb)
        for document in _render(helm, values, "config.map.default=a")
        if document["kind"].endswith("Role")
        for rule in document["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    expected = {("nodes", "list"), ("nodes", "watch")}
    for it in on:
        expected |= _RIGHTS[it]
    assert rights == expected


_PATCH_NODES = {("nodes", "patch")}
_PATCH_STATUS = {("nodes/status", "patch")}
_WRITE_EVENTS = {("events", "create"), ("events", "patch")}
_RIGHTS: Mapping[Feature, set[tuple[str, str]]] = {
    Feature.CONFIG: {("configmaps", "list"), ("configmaps", "watch")},
    Feature.LABELS: _PATCH_NODES,
    Feature.NODE_FEATURE: {("nodefeatures", verb) for verb in ("get", "create", "patch", "delete")},
    Feature.TAINT: _PATCH_NODES,
    Feature.CONDITION: _PATCH_STATUS,
    Feature.ALLOCATABLE: _PATCH_STATUS,
    Feature.EVENTS: _WRITE_EVENTS,
    Feature.PODS: {("pods", "list"), ("pods", "watch")},
    Feature.POD_EVENTS: _WRITE_EVENTS,
    Feature.COMPETING_PLUGINS: set(),
    Feature.JANITOR: {("pods", "delete")},
    Feature.JANITOR_DRY_RUN: {("pods", "delete")},
}


def test_without_features_there_is_no_token(helm: str) -> None:
    """A daemon that uses no API server has no right and no token."""
    off = ",".join(f"features.{it}=false" for it in Feature)
    documents = _render(helm, off)
    assert not [it for it in documents if it["kind"].endswith(("Role", "RoleBinding"))]
    spec = next(it for it in documents if it["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert _variables(spec["containers"][0])["METAGPU_CLUSTER"] == "none"


def test_a_surge_takes_over(helm: str) -> None:
    """Only a daemon that starts beside another one takes the node over; both have probes."""
    surging = _container(helm, "metrics.port=9401")
    assert _variables(surging)["METAGPU_TAKE_OVER"] == "true"
    assert surging["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert surging["readinessProbe"]["httpGet"]["path"] == "/readyz"

    rolling = "updateStrategy.rollingUpdate"
    replaced = _container(helm, f"{rolling}.maxSurge=0,{rolling}.maxUnavailable=1")
    assert "METAGPU_TAKE_OVER" not in _variables(replaced)
    assert replaced["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("config.name=a,config.map.b=c", "set one of them"),
        ("config.map.a=b,config.default=c", 'has no profile "c"'),
        ("features.janitor=true,features.pods=false", "the janitor needs pods"),
        ("features.janitor=true,admissionPolicies=false", "the janitor needs pods"),
        ("features.janitor=true,features.janitor-dry-run=true", "set one of them"),
        ("metrics.port=0", "maxSurge waits for the probe"),
        ("privileges.root=true", "additional properties 'root' not allowed"),
        ("kubeletRoot=var/lib/kubelet", "/kubeletRoot"),
        ("config.inline.version=v1", "missing property 'pools'"),
    ],
)
def test_what_does_not_fit_is_refused(helm: str, values: str, problem: str) -> None:
    """A wrong value ends with its name and the fix, before anything is installed."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        _render(helm, values)


def _render(helm: str, *values: str) -> list[dict[str, Any]]:
    options = [part for value in values for part in ("--set", value)]
    return [it for it in yaml.safe_load_all(script.render(helm, *options)) if it]


def _container(helm: str, *values: str) -> dict[str, Any]:
    documents = _render(helm, *values)
    spec = next(it for it in documents if it["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    container: dict[str, Any] = spec["containers"][0]
    return container


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {it["name"]: it.get("value", "") for it in container["env"]}


def _schema_keys(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each value of the schema, and whether its own keys are open."""
    for name, inner in schema.get("properties", {}).items():
        here = SCHEMA["definitions"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        if (whole := f"{path}{name}") == "global":  # helm's own
            continue
        closed = here.get("additionalProperties") is False
        yield whole, not closed
        if closed:
            yield from _schema_keys(here, f"{whole}.")


def _value_keys(
    values: Mapping[str, Any], schema: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, bool]]:
    open_keys = dict(_schema_keys(SCHEMA))
    for name, value in values.items():
        whole = f"{path}{name}"
        is_open = open_keys.get(whole, True)
        yield whole, is_open
        if not is_open:
            yield from _value_keys(value, schema, f"{whole}.")
