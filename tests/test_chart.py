"""The chart in deploy/chart: its values, and what it renders."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import metagpu
from metagpu.cli.arguments import parser
from metagpu.cli.options import Variable
from metagpu.plugins.cluster.settings import ALL_FEATURES, STATUS_ROLE, VIEWER, Feature
from tests.e2e.rig.tools import Tools
from tests.rigs.driver_layouts import HOST_FOLDERS

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
OPEN = "networkPolicy.enabled=false"
"""What a monitor needs, or the place of Prometheus."""
REVIEWS = ("tokenreviews", "subjectaccessreviews")
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
    # Its import compiles 38 grammars for three seconds, which only one worker needs.
    import jsonschema  # type: ignore[import-untyped] # noqa: PLC0415 - its stubs are one more package

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
    assert VALUES["features"] == {str(feature): feature in ALL_FEATURES for feature in Feature}


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
        (
            "privileges.mps=true",
            ["KILL", "SYS_ADMIN", "SYS_PTRACE", "SYS_CHROOT", "DAC_OVERRIDE", "FOWNER"],
        ),
        ("privileges.devices=true", None),
        ("privileges.devices=true,privileges.mps=true", None),
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


def test_mps_is_not_confined_by_apparmor(helm: str) -> None:
    """Mounts of MPS are not refused by the runtime's profile, before and after Kubernetes 1.30."""
    assert _container(helm, "privileges.mps=true")["securityContext"]["appArmorProfile"] == {
        "type": "Unconfined"
    }
    assert "appArmorProfile" not in _container(helm, "simulate=t4:1")["securityContext"]

    older = script.render(helm, "--set=privileges.mps=true", "--kube-version=1.29.0")
    [template] = [
        document["spec"]["template"]
        for document in yaml.safe_load_all(older)
        if document["kind"] == "DaemonSet"
    ]
    name = "container.apparmor.security.beta.kubernetes.io/metagpu"
    assert template["metadata"]["annotations"][name] == "unconfined"
    [container] = template["spec"]["containers"]
    assert "appArmorProfile" not in container["securityContext"]


def test_named_fields_replace_those_of_the_privileges(helm: str) -> None:
    """A field that `securityContext` sets to false is false."""
    security = _container(helm, "securityContext.readOnlyRootFilesystem=false")["securityContext"]
    assert security["readOnlyRootFilesystem"] is False
    assert security["runAsUser"] == 0


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ("cdi.enabled=true", ["/host/run/cdi"]),
        ("deviceListStrategy=cdi-cri,cdi.dir=/etc/cdi", ["/host/etc/cdi"]),
        ("privileges.mps=true", []),
        ("privileges.devices=true", []),
        ("devCharLinks=true", ["/host/dev/char"]),
        ("nvidiaDriverRoot=/", []),
        ("cdi.enabled=true,nvidiaDriverRoot=/run/nvidia/driver", ["/host/run/cdi"]),
        ("nvidiaDevRoot=/", []),
        ("nvidiaDevRoot=/run/nvidia/driver", []),
        ("nvidiaDevRoot=/opt/gpus,nvidiaDriverRoot=/opt/gpus", []),
        ("nvidiaDevRoot=/opt/gpus", ["/host/opt/gpus/dev"]),
    ],
)
def test_only_folders_without_the_hosts_sockets_are_mounted(
    helm: str, values: str, more: list[str]
) -> None:
    """The pod sees the host's programs, libraries and devices, and never the host's root."""
    spec = _pod(helm, values)
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in spec["volumes"]
        if "hostPath" in volume
    }
    assert not {"/", "/run", "/var", "/var/run", "/etc"} & set(paths.values())
    mounts = {
        volume_mount["mountPath"]: volume_mount
        for volume_mount in spec["containers"][0]["volumeMounts"]
    }
    below = {path: document for path, document in mounts.items() if path.startswith("/host/")}
    assert sorted(below) == sorted([*(f"/host/{folder}" for folder in HOST_FOLDERS), *more])
    for path, mount in below.items():
        assert paths[mount["name"]].removeprefix("/var") == path.removeprefix("/host")
        assert mount.get("readOnly", False) is (path != "/host/dev/char")
    # A recursive mount sees no later mounts: the driver container's come when they come.
    assert {path for path, value in below.items() if value.get("recursiveReadOnly")} == {
        f"/host/{name}" for name in ("usr", "lib", "dev")
    }


def test_without_a_reason_nothing_of_the_host_is_mounted(helm: str) -> None:
    """NVIDIA's runtime brings driver and devices: the pod needs no folder for them."""
    mounts = {
        mount["mountPath"] for mount in _pod(helm, "simulate=")["containers"][0]["volumeMounts"]
    }
    assert not [mount for mount in mounts if mount.startswith(("/host", "/driver-root"))]


@pytest.mark.parametrize("page", ["deploy/chart/README.md", "docs/upgrade.md"])
def test_an_upgrade_takes_the_new_charts_defaults(page: str) -> None:
    """With --reuse-values helm ignores the defaults of values that a new chart adds."""
    text = (ROOT / page).read_text()
    assert "helm upgrade metagpu deploy/chart" in text
    assert " --reuse-values" not in text


def test_the_notes_name_the_quota_of_gke() -> None:
    """GKE admits critical priorities outside of kube-system by a ResourceQuota alone."""
    assert "ResourceQuota" in (CHART / "templates" / "NOTES.txt").read_text()
    page = (ROOT / "docs" / "distributions.md").read_text()
    [quota] = re.findall(r"```yaml\n(apiVersion: v1\nkind: ResourceQuota\n.*?)```", page, re.DOTALL)
    [scope] = yaml.safe_load(quota)["spec"]["scopeSelector"]["matchExpressions"]
    assert scope["scopeName"] == "PriorityClass"
    priorities = [document["priorityClassName"] for document in (VALUES, VALUES["webhook"])]
    assert scope["values"] == priorities


def test_a_digest_names_the_image_in_place_of_the_tag(helm: str) -> None:
    """The image is the one with the digest, whatever a tag leads to by then."""
    digest = f"sha256:{'0' * 64}"
    image = _container(helm, f"image.repository=a/b,image.tag=one,image.digest={digest}")["image"]
    assert image == f"a/b@{digest}"


@pytest.mark.parametrize(
    ("options", "runtime"),
    [
        (("--api-versions=nvidia.com/v1/ClusterPolicy",), "nvidia"),
        (("--set=runtimeClassName=other",), "other"),
        (("--set=runtimeClassName=nvidia,cdi.enabled=true",), ""),
        ((), ""),
    ],
)
def test_the_pod_to_try_names_the_runtime_that_it_needs(
    helm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    runtime: str,
) -> None:
    """Beside the GPU operator, or where metagpu itself names a runtime, pods do without CDI."""
    shown = _notes(helm, tmp_path, monkeypatch, *options)
    [pod] = re.findall(r"^apiVersion: v1\nkind: Pod\n.*?^EOF$", shown, re.DOTALL | re.MULTILINE)
    found = yaml.safe_load(pod.removesuffix("EOF"))["spec"].get("runtimeClassName", "")
    assert (found, "Pods need runtimeClassName" in shown) == (runtime, bool(runtime))
    assert "networkPolicy.from opens them to Prometheus" in shown
    assert "brings a warning and ends nothing" in shown
    assert ("gpu.deploy.device-plugin=false" in shown) == ("ClusterPolicy" in "".join(options))


def test_the_notes_name_other_programs_that_share_the_gpus(
    helm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's plugin is named where GPUs are real, and DeviceClasses where the chart has them."""
    shown = _notes(helm, tmp_path / "a", monkeypatch, "--set=dra.enabled=true")
    assert "Where NVIDIA's device plugin or DRA driver runs too" in shown
    assert "Only pools with api: dra serve them." in shown
    pools = json.dumps({"version": "metagpu/v1", "pools": [{"name": "a", "api": "dra"}]})
    options = ("--set=dra.enabled=true,simulate=t4", f"--set-json=config.inline={pools}")
    shown = _notes(helm, tmp_path / "b", monkeypatch, *options)
    assert "NVIDIA's device plugin" not in shown
    assert "ResourceClaims name the DeviceClasses" in shown
    assert "Only pools" not in shown


def _notes(helm: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Return what `helm install` prints with these options."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    notes = chart / "templates" / "NOTES.txt"
    (chart / "templates" / "_notes.tpl").write_text(
        f'{{{{ define "notes" }}}}{notes.read_text()}{{{{ end }}}}'
    )
    (chart / "templates" / "notes.yaml").write_text(
        '{kind: N, n: {{ include "notes" . | toJson }}}'
    )
    with monkeypatch.context() as patch:
        patch.setattr(script, "CHART", chart)
        text = script.render(helm, "--show-only=templates/notes.yaml", *options)
    shown: str = yaml.safe_load(text)["n"]
    return shown


def test_helm_lints_the_chart(helm: str) -> None:
    """`helm lint` has neither an error nor a warning."""
    command = [helm, "lint", "--strict", str(CHART), "--kube-version", script.KUBERNETES]
    command += ["--set", f"image.repository={script.IMAGE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - as render.py
    assert done.returncode == 0, done.stdout


def test_every_folder_of_the_host_has_its_reason(helm: str) -> None:
    """The page about permissions lists each host path of a pod with all privileges."""
    on = "cdi.enabled=true,devCharLinks=true,privileges.devices=true,privileges.mps=true"
    volumes = _pod(helm, on, "config.map.default=a", "config.default=default")["volumes"]
    mounted = {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
    page = (ROOT / "docs" / "permissions.md").read_text()
    files = page.partition("### Files")[2].partition("### Programs")[0]
    assert len(mounted) > 10
    assert {path for path in mounted if f"`{path}`" not in files} == set()


def test_an_upgrade_of_the_driver_and_a_label_are_passed_on(helm: str) -> None:
    """The daemon gets the option, and its container the label of SELinux; none by default."""
    plain, asked = (
        _container(helm),
        _container(helm, "drainOnDriverUpgrade=true,seLinuxOptions.type=spc_t"),
    )
    assert _variables(asked)["METAGPU_DRAIN_ON_DRIVER_UPGRADE"] == "true"
    assert asked["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert "METAGPU_DRAIN_ON_DRIVER_UPGRADE" not in _variables(plain)
    assert "seLinuxOptions" not in plain["securityContext"]


@pytest.mark.parametrize("values", ["enabled=true", "kubeletRoot=/k", "global.a=b"])
def test_what_fits_is_accepted(helm: str, values: str) -> None:
    """The schema refuses neither a short path nor what helm and other charts set."""
    assert _render(helm, values)


@pytest.mark.parametrize("feature", list(Feature))
def test_a_feature_alone_has_its_rights_alone(helm: str, feature: Feature) -> None:
    """Each feature brings the rights that docs/permissions.md lists for it."""
    needed = {
        Feature.JANITOR: {Feature.PODS, Feature.POD_EVENTS},
        Feature.JANITOR_DRY_RUN: {Feature.PODS, Feature.POD_EVENTS},
        Feature.FREE_LABELS: {Feature.LABELS},
    }
    on = {feature, *needed.get(feature, ())}
    values = ",".join(f"features.{other}={str(other in on).lower()}" for other in Feature)
    values += ",statusApi.port=0"
    rights = {
        (resource, verb)
        for document in _render(helm, values, "config.map.default=a")
        if document["kind"].endswith("Role")
        for rule in document["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    expected = {("nodes", "list"), ("nodes", "watch")}
    for value in on:
        expected |= _RIGHTS[value]
    assert rights == expected


def test_the_status_api_brings_its_rights_and_opens_its_port_alone(helm: str) -> None:
    """The account reviews viewers, who are bound by nobody; the metrics stay closed."""
    documents = _render(helm, "fullnameOverride=mine")
    by_name = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    account = by_name["ClusterRole", "mine"]["rules"]
    for review in REVIEWS:
        assert [document["verbs"] for document in account if review in document["resources"]] == [
            ["create"]
        ]
    roles = [
        document["roleRef"]["name"]
        for document in documents
        if document["kind"].endswith("RoleBinding")
    ]
    assert "mine-viewer" not in roles
    viewer = {rule["resources"][0]: rule for rule in by_name["Role", "mine-viewer"]["rules"]}
    assert viewer.keys() == {"pods", "pods/proxy", "serviceaccounts/token"}
    assert viewer["serviceaccounts/token"]["resourceNames"] == [VIEWER]
    assert by_name["ServiceAccount", VIEWER]["automountServiceAccountToken"] is False
    [rule] = by_name["NetworkPolicy", "mine"]["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": "status-api"}]}

    readers = by_name["ClusterRoleBinding", "mine-node-status"]
    assert readers["roleRef"]["name"] == f"mine{STATUS_ROLE.removeprefix('metagpu')}"
    assert [subject["name"] for subject in readers["subjects"]] == [VIEWER]
    assert by_name["ClusterRole", "mine-node-status"]["rules"] == [
        {"apiGroups": ["metagpu.io"], "resources": ["nodestatuses"], "verbs": ["get"]}
    ]

    without = _render(helm, "statusApi.port=0")
    assert not [other for other in REVIEWS if other in str(without)]
    assert not [document for document in without if VIEWER in document["metadata"]["name"]]
    assert "METAGPU_STATUS_API" not in _variables(_container(helm, "statusApi.port=0"))


def test_the_page_is_off_and_for_viewers_alone(helm: str) -> None:
    """With a port of its own the page is open to who has a token; the metrics stay closed."""
    assert "METAGPU_WEB" not in _variables(_container(helm, "statusApi.port=0"))
    values = "fullnameOverride=mine,web.port=9450,statusApi.port=0"
    container = _container(helm, values)
    assert _variables(container)["METAGPU_WEB"] == ":9450"
    assert {"name": "web", "containerPort": 9450} in container["ports"]
    documents = _render(helm, values)
    by_name = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    account = by_name["ClusterRole", "mine"]["rules"]
    for review in REVIEWS:
        assert [document["verbs"] for document in account if review in document["resources"]] == [
            ["create"]
        ]
    [rule] = by_name["NetworkPolicy", "mine"]["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": "web"}]}
    assert by_name["ServiceAccount", VIEWER]["automountServiceAccountToken"] is False


def test_dra_brings_its_classes_rights_and_folders(helm: str) -> None:
    """Without it there is none of them; a driver of another name is in classes and rights."""
    values = "fullnameOverride=mine,dra.enabled=true,dra.driver=gpu.example.com"
    documents = _render(helm, f"{values},kubeletRoot=/data/kubelet")
    by_name = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    classes = [document for document in documents if document["kind"] == "DeviceClass"]
    assert {device_class["metadata"]["name"].partition(".")[0] for device_class in classes} == {
        *("gpu", "fraction", "timeslice", "mps", "mig", "monitor")
    }
    [selector] = by_name["DeviceClass", "mps.metagpu.io"]["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        "device.driver == 'gpu.example.com' && device.attributes['gpu.example.com'].type == 'mps'"
    )
    rules = {
        rule["resources"][0]: rule["verbs"] for rule in by_name["ClusterRole", "mine-dra"]["rules"]
    }
    assert rules["resourceslices"] == ["list", "watch", "create", "update", "delete"]
    assert (rules["resourceclaims"], rules["pods"]) == (["get"], ["list", "patch"])
    assert rules["resourceclaims/status"] == ["patch"]
    assert rules["resourceclaims/driver"] == ["associated-node:patch"]
    [driver] = [
        rule for rule in by_name["ClusterRole", "mine-dra"]["rules"] if "resourceNames" in rule
    ]
    assert driver["resourceNames"] == ["gpu.example.com"]
    for policy in ("mine-slices", "mine-claims", "mine-claim-status"):
        assert ("ValidatingAdmissionPolicyBinding", policy) in by_name
    assert "== 'gpu.example.com' && (d.pool" in str(
        by_name["ValidatingAdmissionPolicy", "mine-claim-status"]
    )

    container = _container(helm, f"{values},kubeletRoot=/data/kubelet")
    writable = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert {"/data/kubelet/plugins", "/data/kubelet/plugins_registry", "/var/run/cdi"} <= writable
    assert _variables(container)["METAGPU_KUBELET_ROOT"] == "/data/kubelet"
    without = _render(helm, "fullnameOverride=mine")
    viewer = [document for document in without if document["metadata"]["name"].endswith("-viewer")]
    assert "resource.k8s.io" not in str(
        [document for document in without if document not in viewer]
    )


def test_nvidias_driver_name_brings_nvidias_classes(helm: str) -> None:
    """Claims that name NVIDIA's DeviceClasses work where its own chart is not installed."""
    documents = _render(helm, "dra.enabled=true,dra.driver=gpu.nvidia.com")
    classes = {
        document["metadata"]["name"]: document
        for document in documents
        if document["kind"] == "DeviceClass"
    }
    for kind in ("gpu", "mig"):
        [selector] = classes[f"{kind}.nvidia.com"]["spec"]["selectors"]
        assert selector == classes[f"{kind}.metagpu.io"]["spec"]["selectors"][0]


def test_nvidias_class_may_have_shares(helm: str) -> None:
    """For manifests of NVIDIA's consumable shares, the class selects fractions."""
    values = "dra.enabled=true,dra.driver=gpu.nvidia.com,dra.nvidiaGpuType=fraction"
    classes = {
        document["metadata"]["name"]: document.get("spec") or {}
        for document in _render(helm, values)
    }
    # Without a name in `limits`: `nvidia.com/gpu: 1` would be one of a hundred shares.
    assert classes["gpu.nvidia.com"] == classes["fraction.metagpu.io"]
    assert classes["gpu.metagpu.io"] != classes["fraction.metagpu.io"]


@pytest.mark.parametrize(
    ("values", "served"),
    [
        ("", {"gpu.nvidia.com"}),
        (",dra.nvidiaGpuResource=", set()),
        (",dra.extendedResources={nvidia.com/gpu}", {"gpu.nvidia.com.metagpu.io"}),
    ],
)
def test_one_class_serves_nvidias_name_in_limits(helm: str, values: str, served: set[str]) -> None:
    """NVIDIA's own, as in its chart, or the one that is asked for."""
    documents = _render(helm, f"dra.enabled=true,dra.driver=gpu.nvidia.com{values}")
    found = {
        document["metadata"]["name"]
        for document in documents
        if document["kind"] == "DeviceClass"
        and document["spec"].get("extendedResourceName") == "nvidia.com/gpu"
    }
    assert found == served


def test_each_extended_resource_has_a_class(helm: str) -> None:
    """The class selects the devices of this resource; names may have letters that it has not."""
    names = "{nvidia.com/gpu,nvidia.com/mig-1g.5gb,example.com/My_GPU}"
    documents = _render(helm, f"dra.enabled=true,dra.extendedResources={names}")
    classes = {
        document["spec"]["extendedResourceName"]: document
        for document in documents
        if document["kind"] == "DeviceClass" and "extendedResourceName" in document["spec"]
    }
    assert {name: document["metadata"]["name"] for name, document in classes.items()} == {
        "nvidia.com/gpu": "gpu.nvidia.com.metagpu.io",
        "nvidia.com/mig-1g.5gb": "mig-1g.5gb.nvidia.com.metagpu.io",
        "example.com/My_GPU": "my-gpu.example.com.metagpu.io",
    }
    [selector] = classes["nvidia.com/gpu"]["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        "device.driver == 'gpu.metagpu.io' "
        "&& device.attributes['gpu.metagpu.io'].?resource.orValue('') == 'nvidia.com/gpu'"
    )


_PATCH_NODES = {("nodes", "patch")}
_PATCH_STATUS = {("nodes/status", "patch")}
_WRITE_EVENTS = {("events", "create"), ("events", "patch")}
_RIGHTS: Mapping[Feature, set[tuple[str, str]]] = {
    Feature.CONFIG: {("configmaps", "list"), ("configmaps", "watch")},
    Feature.LABELS: _PATCH_NODES,
    Feature.FREE_LABELS: set(),
    Feature.NODE_FEATURE: {("nodefeatures", verb) for verb in ("get", "create", "patch", "delete")},
    Feature.TAINT: _PATCH_NODES,
    Feature.CONDITION: _PATCH_STATUS,
    Feature.ALLOCATABLE: _PATCH_STATUS,
    Feature.EVENTS: _WRITE_EVENTS,
    Feature.PODS: {("pods", "list"), ("pods", "watch")},
    Feature.POD_EVENTS: _WRITE_EVENTS,
    Feature.COMPETING_PLUGINS: set(),
    Feature.CORDON: set(),
    Feature.JANITOR: {("pods", "delete")},
    Feature.JANITOR_DRY_RUN: {("pods", "delete")},
}


def test_without_features_there_is_no_token(helm: str) -> None:
    """A daemon that uses no API server has no right and no token."""
    off = ",".join(f"features.{feature}=false" for feature in Feature)
    documents = _render(helm, off)
    assert not [
        document for document in documents if document["kind"].endswith(("Role", "RoleBinding"))
    ]
    spec = next(document for document in documents if document["kind"] == "DaemonSet")["spec"][
        "template"
    ]["spec"]
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
        ("features.free-labels=true,features.labels=false", "set labels too"),
        ("features.janitor=true,features.pods=false", "the janitor needs pods"),
        ("features.janitor=true,admissionPolicies=false", "the janitor needs pods"),
        ("features.janitor=true,features.janitor-dry-run=true", "set one of them"),
        (
            ",".join(
                ["drainOnDriverUpgrade=true", *(f"features.{feature}=false" for feature in Feature)]
            ),
            "labels are read from the API server",
        ),
        ("seLinuxOptions.typ=spc_t", "/seLinuxOptions"),
        ("metrics.port=0", "maxSurge waits for the probe"),
        ("metrics.port=9440", "statusApi.port: the metrics have this port"),
        ("web.port=9440", "web.port: the metrics or the status have this port"),
        (
            ",".join(["web.port=9450", *(f"features.{feature}=false" for feature in Feature)]),
            "web.port: the API server reviews the tokens",
        ),
        (
            ",".join(["dra.enabled=true", *(f"features.{feature}=false" for feature in Feature)]),
            "dra.enabled: ResourceSlices and ResourceClaims are at the API server",
        ),
        ("dra.extendedResources={nvidia.com/gpu}", "devices of DRA; set dra.enabled=true"),
        ("dra.enabled=true,dra.extendedResources={gpu}", "/dra/extendedResources/0"),
        (
            "metrics.port=0,metrics.serviceMonitor.enabled=true,updateStrategy.type=OnDelete",
            "metrics.serviceMonitor: there are no metrics",
        ),
        (
            "metrics.port=0,metrics.podMonitor.enabled=true,updateStrategy.type=OnDelete",
            "metrics.podMonitor: there are no metrics",
        ),
        ("metrics.podMonitor.enabled=true", "networkPolicy.from: with a monitor, name Prometheus"),
        ("image.repository=", "image.repository is not set: name the image in a registry of yours"),
        ("image.digest=sha256:1", "/image/digest"),
        ("updateStrategy.rollingUpdate.maxSurge=0", "one of maxSurge and maxUnavailable is 0"),
        ("updateStrategy.rollingUpdate.maxUnavailable=1", "one of maxSurge and maxUnavailable"),
        ("cdi.dir=", "/cdi/dir"),
        ("config.map.a b=c", "invalid propertyName 'a b'"),
        ("kubeletRoot=/", "/kubeletRoot"),
        ("privileges.root=true", "additional properties 'root' not allowed"),
        ("kubeletRoot=var/lib/kubelet", "/kubeletRoot"),
        ("config.inline.version=v1", "missing property 'pools'"),
    ],
)
def test_what_does_not_fit_is_refused(helm: str, values: str, problem: str) -> None:
    """A wrong value ends with its name and the fix, before anything is installed."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        _render(helm, values)


@cache
def _rendered(helm: str, *options: str) -> str:
    """Return what helm renders; several tests look at one rendering."""
    text: str = script.render(helm, *options)
    return text


def _render(helm: str, *values: str) -> list[dict[str, Any]]:
    options = [part for value in values for part in ("--set", value)]
    return [value for value in yaml.load_all(_rendered(helm, *options), LOADER) if value]


def _pod(helm: str, *values: str) -> dict[str, Any]:
    documents = _render(helm, *values)
    daemon_set = next(document for document in documents if document["kind"] == "DaemonSet")
    spec: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return spec


def _container(helm: str, *values: str) -> dict[str, Any]:
    container: dict[str, Any] = _pod(helm, *values)["containers"][0]
    return container


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {document["name"]: document.get("value", "") for document in container["env"]}


def _schema_keys(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each value of the schema, and whether its own keys are open."""
    for name, inner in schema.get("properties", {}).items():
        here = SCHEMA["definitions"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        if (whole := f"{path}{name}") in {"global", "enabled"}:  # helm's own
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


def test_the_alerts_are_a_prometheus_rule(helm: str) -> None:
    """The PrometheusRule has the rules of deploy/monitoring, with links below a given address."""
    rules = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())
    for values, links in (
        ("", "docs/"),
        (",metrics.prometheusRule.runbooks=https://a/b/", "https://a/b/docs/"),
    ):
        documents = _render(helm, f"metrics.prometheusRule.enabled=true{values}")
        [document] = [other for other in documents if other["kind"] == "PrometheusRule"]
        text = json.dumps(rules).replace('"runbook_url": "docs/', f'"runbook_url": "{links}')
        assert document["spec"] == json.loads(text)
    assert not [entry for entry in _render(helm) if entry["kind"] == "PrometheusRule"]


def test_several_config_maps_belong_together(helm: str) -> None:
    """Each is mounted, all are given to the daemon in order, and no watch follows one of them."""
    spec = _pod(helm, "config.name={plugin,layouts}")
    [container] = spec["containers"]
    values = _variables(container)
    assert values["METAGPU_CONFIG"] == "/etc/metagpu/profiles:/etc/metagpu/profiles-1"
    assert "METAGPU_CONFIG_MAP" not in values
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    maps = {
        mounted[volume["name"]]: volume["configMap"]["name"]
        for volume in spec["volumes"]
        if "configMap" in volume
    }
    assert maps == {"/etc/metagpu/profiles": "plugin", "/etc/metagpu/profiles-1": "layouts"}


def test_dashboards_are_config_maps(helm: str) -> None:
    """Each dashboard is a ConfigMap with the label of Grafana's sidecar."""
    documents = _render(helm, "metrics.dashboards.enabled=true,metrics.dashboards.annotations.a=b")
    maps = [document for document in documents if "-dashboard-" in document["metadata"]["name"]]
    files = sorted((DEPLOY / "monitoring" / "dashboards").glob("*.json"))
    assert files
    texts = {name: text for candidate in maps for name, text in candidate["data"].items()}
    assert {name: json.loads(text) for name, text in texts.items()} == {
        f"metagpu-{file.name}": json.loads(file.read_text()) for file in files
    }
    for other in maps:
        assert other["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert other["metadata"]["annotations"] == {"a": "b"}
    assert not [
        document for document in _render(helm) if "-dashboard-" in document["metadata"]["name"]
    ]


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
@pytest.mark.parametrize("dcgm", [False, True])
def test_monitors_label_targets_by_node(helm: str, kind: str, dcgm: bool) -> None:  # noqa: FBT001
    """A target has the label `node`; DCGM's names are a second endpoint where they are asked.

    The labels of its pods are renamed to `exported_pod`, as by dcgm-exporter's own chart.
    """
    name = kind[0].lower() + kind[1:]
    documents = _render(
        helm, f"{OPEN},metrics.{name}.enabled=true,metrics.dcgm.enabled={str(dcgm).lower()}"
    )
    [spec] = [document["spec"] for document in documents if document["kind"] == kind]
    endpoints = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert [other["path"] for other in endpoints] == ["/metrics", *(["/dcgm"] if dcgm else [])]
    for endpoint in endpoints:
        assert endpoint["honorLabels"] is (endpoint["path"] == "/metrics")
        assert endpoint["relabelings"] == [
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
        ]
    documents = _render(
        helm,
        f"{OPEN},metrics.{name}.enabled=true,metrics.dcgm.enabled=true,metrics.dcgm.honorLabels=true",
    )
    assert str(documents).count("'honorLabels': True") == 2
