"""`metagpu explain --claim`: which claims of a manifest fit on the idle node."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from metagpu.cli.metagpu import main

CONFIG = """
version: metagpu/v1
{dra}
pools: [{{name: all, api: dra, backends: [{{backend: fraction}}, {{backend: whole}}]}}]
"""
MANIFEST = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: half}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: fraction.metagpu.io
            capacity: {requests: {shares: "50"}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: three}
spec: {devices: {requests: [{name: gpus, exactly: {deviceClassName: own, count: 3}}]}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: own}
spec: {selectors: [{cel: {expression: "device.attributes['gpu.metagpu.io'].type == 'gpu'"}}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  template:
    spec:
      containers: [{name: main}]
      resourceClaims:
        - {name: a, resourceClaimTemplateName: half}
        - {name: b, resourceClaimTemplateName: half}
---
apiVersion: v1
kind: Pod
metadata: {name: lost}
spec:
  containers: [{name: main}]
  resourceClaims: [{name: a, resourceClaimName: gone}]
"""


def of_request(fields: str) -> str:
    """Return a ResourceClaim of whole GPUs with more fields in its request."""
    wanted = f"{{deviceClassName: gpu.metagpu.io, {fields}}}"
    devices = f"{{requests: [{{name: gpu, exactly: {wanted}}}]}}"
    return f"{{kind: ResourceClaim, metadata: {{name: a}}, spec: {{devices: {devices}}}}}"


def with_claims(claims: str) -> str:
    """Return a Deployment whose pods have these `resourceClaims`."""
    spec = f"{{template: {{spec: {{containers: [{{name: a}}], resourceClaims: {claims}}}}}}}"
    return f"{{kind: Deployment, metadata: {{name: web}}, spec: {spec}}}"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return the arguments of `explain` on a node of two GPUs, for the manifest above."""
    (tmp_path / "metagpu.yaml").write_text(CONFIG.format(dra=""))
    (tmp_path / "claims.yaml").write_text(MANIFEST)
    files = ["--config", str(tmp_path / "metagpu.yaml"), "--claim", str(tmp_path / "claims.yaml")]
    return ["explain", "--simulate", "a100-40gb:2", *files]


def explained(options: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the claims of `explain` as data."""
    assert main([*options, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["claims"]
    return found


def test_each_claim_has_its_devices_or_a_reason(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims of a pod come together, also those of a Deployment; others come alone."""
    first, second, gone, three = explained(options, capsys)
    assert (first["pod"], first["claim"]) == ("Deployment web", "ResourceClaimTemplate half")
    assert [document["fits"] for document in (first, second, gone, three)] == [
        True,
        True,
        False,
        False,
    ]
    (device,) = first["devices"]
    assert second["devices"] == [device]  # both halves of one GPU
    assert device["consumed"] == {"shares": "50"}
    assert device["device"].endswith("-fraction")
    assert (device["class"], device["gpu"] in {0, 1}) == ("fraction.metagpu.io", True)
    assert gone["problem"] == {"request": None, "reason": "the file has no ResourceClaim gone"}
    reason = "3 devices are requested, and 2 of own fit"
    assert three["problem"] == {"request": "gpus", "reason": reason}


def test_the_table_has_a_line_for_each_claim(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdin is a file too."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stdin", io.StringIO(MANIFEST))
    assert main([*options[:-1], "-"]) == 0
    shown = capsys.readouterr().out
    assert "gpu: fraction.metagpu.io (50 shares) of GPU" in shown
    assert "request gpus: 3 devices are requested, and 2 of own fit" in shown


def test_under_nvidias_driver_name_its_classes_are_there(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chart brings them under that name alone, and who looks at GPUs holds none."""
    claim = """
    kind: ResourceClaim
    metadata: {name: whole}
    spec:
      devices:
        requests:
          - {name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}
          - name: looking
            exactly: {deviceClassName: monitor.metagpu.io, adminAccess: true, allocationMode: All}
    """
    (tmp_path / "claims.yaml").write_text(claim)
    (whole,) = explained(options, capsys)
    assert whole["problem"]["reason"] == "device class gpu.nvidia.com does not exist"
    (tmp_path / "metagpu.yaml").write_text(CONFIG.format(dra="dra: {driver: gpu.nvidia.com}"))
    (whole,) = explained(options, capsys)
    assert [device["request"] for device in whole["devices"]] == ["gpu", "looking", "looking"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("kind: ResourceClaim\nmetadata: {name: a}\nspec: {devices: 3}", "the ResourceClaim a"),
        ("a: b", "write it with apiVersion and kind"),
        ("kind: ResourceClaim\nmetadata: {name: [a]}", "Expected `str`"),
        (of_request("count: -1"), "the ResourceClaim a: Expected `int` >= 0"),
        (with_claims("[foo]"), "the pod of the Deployment web: Expected `object`, got `str`"),
        (with_claims("{a: b}"), "the pod of the Deployment web: Expected `array | null`"),
        (with_claims("5"), "the pod of the Deployment web: Expected `array | null`, got `int`"),
        (with_claims("[{name: a, resourceClaimName: [b]}]"), "Expected `str | null`"),
    ],
)
def test_what_is_no_claim_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    """The line says where and what, without a traceback."""
    (tmp_path / "claims.yaml").write_text(text)
    assert main(options) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "claims.yaml: 1: document 1: " in line
    assert error in line


@pytest.mark.parametrize("kind", ["Job", "Pod"])
def test_a_pod_without_a_name_is_shown_by_what_its_name_begins_with(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The API server makes the name of an object with `generateName`."""
    claims = "{containers: [{name: a}], resourceClaims: [{name: a, resourceClaimName: b}]}"
    spec = claims if kind == "Pod" else f"{{template: {{spec: {claims}}}}}"
    text = f"kind: {kind}\nmetadata: {{generateName: j-}}\nspec: {spec}"
    (tmp_path / "claims.yaml").write_text(text)
    (row,) = explained(options, capsys)
    assert row["pod"] == f"{kind} j-"
    assert row["problem"]["reason"] == "the file has no ResourceClaim b"


@pytest.mark.parametrize(
    "fields", ["count: 0", "selectors: ~, tolerations: ~", "allocationMode: ~, capacity: ~"]
)
def test_a_field_that_is_null_or_0_is_as_left_out(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: str
) -> None:
    """The API server takes such fields for their defaults."""
    (tmp_path / "claims.yaml").write_text(of_request(fields))
    (row,) = explained(options, capsys)
    assert (row["fits"], len(row["devices"])) == (True, 1)


def test_without_dra_no_claim_fits(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node whose pools serve the device plugin API alone publishes nothing."""
    text = CONFIG.format(dra="").replace("api: dra, ", "")
    (tmp_path / "metagpu.yaml").write_text(text)
    first, *_ = explained(options, capsys)
    reason = "no device is of the class fraction.metagpu.io"
    assert first["problem"] == {"request": "gpu", "reason": reason}


def selected_by(expression: str) -> str:
    """Return a ResourceClaim of a whole GPU with a selector."""
    selectors = json.dumps([{"cel": {"expression": expression}}])
    return of_request(f"selectors: {selectors}")


OURS = "device.attributes['gpu.metagpu.io']"


@pytest.mark.parametrize(
    ("expression", "answer", "status", "reason"),
    [
        (f"{OURS}.cudaComputeCapability.major() == 8", "yes", 0, None),
        (f"cel.bind(g, {OURS}, g.architecture == 'Ampere' && g.brand == 'Nvidia')", "yes", 0, None),
        (f"{OURS}.?addressingMode.orValue('None') == 'None'", "yes", 0, None),
        (f"{OURS}.brand == 'AMD'", "no", 0, "no device of gpu.metagpu.io fulfils"),
        (f"{OURS}.driverVersion.compareTo(semver('550.127.08')) >= 0", "error", 1, "leading zeros"),
        (f"{OURS}.brand == 'Nvidia' and true", "error", 1, "Syntax error"),
        (f"{OURS}.productName.find('A100') != ''", "unknown", 3, "find() is not evaluated"),
    ],
)
def test_a_selector_that_is_not_evaluated_is_unknown_and_one_that_fails_an_error(
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    expression: str,
    answer: str,
    status: int,
    reason: str | None,
) -> None:
    """Table, JSON and exit status say which of the four it is."""
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "claims.yaml").write_text(selected_by(expression))
    assert main([*options, "--json"]) == status
    [row] = json.loads(capsys.readouterr().out)["claims"]
    assert row["answer"] == answer
    assert row["fits"] is {"yes": True, "unknown": None}.get(answer, False)
    assert (reason or "") in (row["problem"] or {"reason": ""})["reason"]
    assert main(options) == status
    [line] = [other for other in capsys.readouterr().out.splitlines() if "ResourceClaim a" in other]
    assert line.split()[3] == answer


def test_the_other_claims_of_a_pod_are_as_unknown(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are allocated together."""
    unknown = selected_by("'a'.find('a') == 'a'").replace("name: a}", "name: b}", 1)
    claims = "[{name: a, resourceClaimName: a}, {name: b, resourceClaimName: b}]"
    files = [of_request("count: 1"), unknown, with_claims(claims)]
    (tmp_path / "claims.yaml").write_text("\n---\n".join(files))
    assert main([*options, "--json"]) == 3
    rows = json.loads(capsys.readouterr().out)["claims"]
    assert [row["answer"] for row in rows] == ["unknown", "unknown"]
    assert rows[0]["problem"]["reason"] == "nobody knows about the pod's ResourceClaim b"


FLAT = "{requests: [{name: gpu, deviceClassName: gpu.metagpu.io, count: 2}]}"


@pytest.mark.parametrize(
    "manifest",
    [
        f"kind: ResourceClaim\nmetadata: {{name: a}}\nspec: {{devices: {FLAT}}}",
        f"kind: ResourceClaimTemplate\nmetadata: {{name: a}}\nspec: {{spec: {{devices: {FLAT}}}}}",
    ],
)
def test_claims_of_v1beta1_are_read(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: str
) -> None:
    """There a request has its fields without `exactly`."""
    (tmp_path / "claims.yaml").write_text(f"apiVersion: resource.k8s.io/v1beta1\n{manifest}")
    [row] = explained(options, capsys)
    assert [device["request"] for device in row["devices"]] == ["gpu", "gpu"]


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3"])
def test_a_version_that_no_cluster_serves_is_an_error(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    """The line says what to write; no claim fits without a device."""
    spec = "spec: {resourceClassName: gpu.nvidia.com}"
    text = f"kind: ResourceClaim\nmetadata: {{name: old}}\n{spec}"
    (tmp_path / "claims.yaml").write_text(f"apiVersion: resource.k8s.io/{version}\n{text}")
    assert main(options) == 1
    assert f"{version}: write apiVersion: resource.k8s.io/v1" in capsys.readouterr().err
    (tmp_path / "claims.yaml").write_text(text)
    [row] = explained(options, capsys)
    assert row["problem"]["reason"].startswith("it requests no device")


@pytest.mark.parametrize(
    ("option", "asked", "consumed"),
    [
        ("sharesPerGpu: 4", "", {"shares": "1"}),
        ("sharesPerGpu: 4", "shares: 2", {"shares": "2"}),
        ("memoryUnit: 1Gi", "memory: 4Gi", {"memory": "4Gi"}),
    ],
)
def test_nvidias_consumable_shares_are_fractions_of_its_class(
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    option: str,
    asked: str,
    consumed: dict[str, str],
) -> None:
    """A claim of its demos gets a part of a GPU where the class selects fractions."""
    backend = f"{{backend: fraction, {option}}}"
    pools = f"pools: [{{name: a, api: dra, backends: [{backend}]}}]"
    config = f"version: metagpu/v1\ndra: {{driver: gpu.nvidia.com}}\n{pools}"
    selector = "device.attributes['gpu.nvidia.com'].type == 'fraction'"
    chosen = json.dumps([{"cel": {"expression": selector}}])
    named = "kind: DeviceClass\nmetadata: {name: gpu.nvidia.com}"
    claim = of_request(f"capacity: {{requests: {{{asked}}}}}")
    claim = claim.replace("gpu.metagpu.io", "gpu.nvidia.com")
    (tmp_path / "metagpu.yaml").write_text(config)
    (tmp_path / "claims.yaml").write_text(f"{named}\nspec: {{selectors: {chosen}}}\n---\n{claim}")
    [row] = explained(options, capsys)
    assert [device["consumed"] for device in row["devices"]] == [consumed]
