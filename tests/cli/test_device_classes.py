"""`metagpu validate --device-classes`: names that the scheduler would take for another API."""

import io
import json
from pathlib import Path

import pytest

from metagpu.cli.metagpu import main

CONFIG = """\
version: metagpu/v1
pools:
  - {{name: others, gpus: {{index: 0}}, api: {others}, backends: [{{backend: whole}}]}}
  - name: halves
    api: {api}
    backends: [{{backend: fraction, resource: example.com/half, sharesPerGpu: 2}}]
"""
CLASS = """\
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {name}}}
spec:
  extendedResourceName: example.com/half
  selectors: [{{cel: {{expression: "device.driver == '{driver}'"}}}}]
"""
OURS = CLASS.format(name="halves", driver="gpu.metagpu.io")
OTHERS = CLASS.format(name="theirs", driver="gpu.example.com")
LISTED = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": "halves"},
                "spec": {
                    "extendedResourceName": "example.com/half",
                    "selectors": [{"cel": {"expression": "device.driver == 'gpu.metagpu.io'"}}],
                },
            }
        ],
    }
)


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> tuple[Path, Path]:
    """Return a configuration of both APIs, and a class with the name of its fractions."""
    config, classes = tmp_path / "metagpu.yaml", tmp_path / "classes.yaml"
    config.write_text(CONFIG.format(others="dra", api="device-plugin"))
    classes.write_text(OURS)
    return config, classes


def test_a_name_of_a_device_class_is_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names both places, and what to change."""
    config, classes = files
    assert main(["validate", str(config)]) == 0
    capsys.readouterr()

    assert main(["validate", str(config), "--device-classes", str(classes)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{config}: 6: pools[1].backends[0].resource: example.com/half is ")
    assert f"DeviceClass halves ({classes})" in line
    assert "give it another `resource`" in line


def test_the_reason_is_in_the_report(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A program reads the reason and the place."""
    config, classes = files
    assert main(["validate", str(config), "--device-classes", str(classes), "-o", "json"]) == 1
    [report] = json.loads(capsys.readouterr().out)
    [error] = report["errors"]
    assert (error["reason"], error["line"]) == ("name_taken", 6)


def test_the_classes_of_metagpu_itself_take_no_name(files: tuple[Path, Path]) -> None:
    """The names of the chart's classes have dots, and each name in limits is a class of its own."""
    rendered = Path(__file__).parents[2] / "deploy" / "dra.yaml"
    assert main(["validate", str(files[0]), "--device-classes", str(rendered)]) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("[]\n", "document 1: no object of Kubernetes", id="no object"),
        pytest.param(
            OURS.replace("[{cel", "{a: [{cel").replace("}}]", "}}]}"), "selectors", id="selectors"
        ),
        pytest.param(OURS.replace("example.com/half", "[a]"), "extendedResourceName", id="a list"),
        pytest.param(OURS.replace("example.com/half", "7"), "extendedResourceName", id="a number"),
        pytest.param(OURS.replace("halves", "a..b"), "a..b", id="a class that cannot be"),
    ],
)
def test_a_wrong_file_has_one_line(
    files: tuple[Path, Path], text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file and what is wrong; nothing was checked."""
    files[1].write_text(text)
    assert main(["validate", str(files[0]), "--device-classes", str(files[1])]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert str(files[1]) in line
    assert problem in line


def test_a_conversion_checks_no_class(files: tuple[Path, Path]) -> None:
    """The two options together are refused: nothing would be checked."""
    given = ["validate", str(files[0]), "--convert", "--device-classes", str(files[1])]
    with pytest.raises(SystemExit, match="2"):
        main(given)


def test_kubectls_list_is_read_from_stdin(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl get deviceclasses -o json | metagpu validate …` checks a cluster's classes."""
    monkeypatch.setattr("sys.stdin", io.StringIO(LISTED))
    assert main(["validate", str(files[0]), "--device-classes", "-"]) == 1


@pytest.mark.parametrize(
    ("others", "api", "classes"),
    [
        ("dra", "dra", OURS),
        ("device-plugin", "device-plugin", OURS),
        ("dra", "device-plugin", OTHERS),
    ],
    ids=["by claims alone", "by limits alone", "another driver's class"],
)
def test_a_name_of_one_api_is_good(
    files: tuple[Path, Path], others: str, api: str, classes: str
) -> None:
    """A node that publishes nothing of the class serves the name by the device plugin alone."""
    files[0].write_text(CONFIG.format(others=others, api=api))
    files[1].write_text(classes)
    assert main(["validate", str(files[0]), "--device-classes", str(files[1])]) == 0


def test_the_driver_is_that_of_the_configuration(files: tuple[Path, Path]) -> None:
    """With another `dra.driver` the class of that name counts."""
    config, classes = files
    config.write_text(config.read_text() + "dra: {driver: gpu.example.com}\n")
    given = ["validate", str(config), "--device-classes", str(classes)]
    assert main(given) == 0
    classes.write_text(OTHERS)
    assert main(given) == 1


def test_a_cluster_without_classes_takes_each_name(files: tuple[Path, Path]) -> None:
    """The API server sends an empty list where there are none."""
    files[1].write_text("{apiVersion: v1, kind: List, items: []}\n")
    assert main(["validate", str(files[0]), "--device-classes", str(files[1])]) == 0
