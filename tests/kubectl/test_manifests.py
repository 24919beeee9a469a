"""Files with objects of Kubernetes: `kubectl metagpu` and `metagpu` read them alike."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from metagpu.cli.metagpu import main as metagpu
from metagpu.kubectl.program import main as kubectl_metagpu

POD = "{kind: Pod, metadata: {name: a}, spec: {containers: [{name: a}]}}"
CONFIG = """
version: metagpu/v1
pools: [{name: all, api: dra, backends: [{backend: whole}]}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with what the commands need beside a manifest."""
    (tmp_path / "metagpu.yaml").write_text(CONFIG)
    nodes = {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": []}
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))
    return tmp_path


def explain(folder: Path, manifest: str) -> int:
    """Run the command of `metagpu` that reads manifests."""
    config = str(folder / "metagpu.yaml")
    return metagpu(
        ["explain", "--config", config, "--simulate", "a100-40gb:1", "--claim", manifest]
    )


def translate(folder: Path, manifest: str) -> int:
    """Run a command of `kubectl metagpu` that reads manifests."""
    return kubectl_metagpu(["translate", "-f", manifest, "--nodes", str(folder / "nodes.json")])


Command = Callable[[Path, str], int]
both = pytest.mark.parametrize("command", [explain, translate])


@both
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no objects of Kubernetes; write each with apiVersion and kind"),
        ("# nothing\n---\n", "no objects of Kubernetes; write each with apiVersion and kind"),
        ("[]", "document 1: no object of Kubernetes; write it with apiVersion and kind"),
        ("kind: ''", "1: document 1: no object of Kubernetes; write it with apiVersion and kind"),
        ("kind: [a]", "1: document 1: no object of Kubernetes; write it with apiVersion and kind"),
        ("5:30", "1: document 1: no object of Kubernetes; write it with apiVersion and kind"),
        (f"{POD}\n---\n---\na: b", "4: document 3: no object of Kubernetes; write it with "),
        (
            f"{POD}\n---\n{{kind: PodList, items: [{POD}, {{kind: List, items: [1]}}]}}",
            "3: document 2, items[1], items[0]: no object of Kubernetes; write it with ",
        ),
        (
            f"{POD}\n---\n{{kind: A, metadata: [a]}}",
            "3: document 2: A: its metadata is not an object ",
        ),
        (
            '{"kind": "A", "metadata": 1}',
            "document 1: A: its metadata is not an object with a name",
        ),
        (
            "{kind: A, metadata: 2020-01-01}",
            "1: document 1: A: its metadata is not an object with a ",
        ),
        (f"{POD}\n---\n{{", "3: no YAML: expected the node content, but found '<stream end>'"),
        ("a: b: c", "1: no YAML: mapping values are not allowed here"),
        ("a:\n  b: \a", "2: no YAML: it has the control character #x0007"),
        (f"{POD}\n---\n!!bool maybe", "document 2: no YAML: 'maybe'"),
        ("!!timestamp maybe", "document 1: no YAML: "),
        ("!!int ''", "document 1: no YAML: "),
        ("[" * 2000, "no YAML: it is nested too deep"),
        ('{"a":' * 100_000, "no YAML: it is nested too deep"),
        ("&a\nkind: List\nitems: [*a]\n", "1: no YAML: a value contains itself"),
        ("kind: Pod\nspec: &a\n  b: *a\n", "2: no YAML: a value contains itself"),
    ],
)
def test_a_wrong_file_has_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], command: Command, text: str, error: str
) -> None:
    """The line names the file and the document, in the same words in both programs."""
    manifest = folder / "manifest.yaml"
    manifest.write_text(text)
    assert command(folder, str(manifest)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.partition(": ")[2].startswith(f"{manifest}: {error}")


@both
def test_a_file_that_cannot_be_read_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    """The line has the cause alone; the name of the file is there once."""
    (folder / "latin.yaml").write_bytes(b"kind: \xe4")
    for name, cause in (
        ("none.yaml", "No such file or directory"),
        ("", "Is a directory"),
        ("latin.yaml", "not UTF-8 text"),
    ):
        manifest = folder / name
        assert command(folder, str(manifest)) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.partition(": ")[2] == f"{manifest}: cannot be read: {cause}"


@both
@pytest.mark.parametrize(
    "text",
    [
        POD,
        f"---\n{POD}\n---\n",
        f"{{kind: List, items: [{POD}]}}",
        f"{{kind: PodList, items: [{{kind: List, items: [{POD}]}}]}}",
        f"{{kind: ConfigMapList, items: null}}\n---\n{POD}",
        json.dumps(
            {"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "a"}]}}
        ),
        "\ufeff" + POD,
    ],
)
def test_files_and_stdin_are_read(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    text: str,
) -> None:
    """YAML and JSON, Lists, empty documents: from a file and from `-`."""
    manifest = folder / "manifest.yaml"
    manifest.write_text(text, encoding="utf-8")
    assert command(folder, str(manifest)) == 0
    of_file = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert command(folder, "-") == 0
    assert capsys.readouterr() == of_file
    assert of_file.err == ""


@both
def test_a_list_without_objects_is_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    """`kubectl get -o yaml` writes such a list where there is nothing."""
    assert command(folder, str(folder / "nodes.json")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["{kind: List, items: []}", "{kind: Service, spec: {}}"])
def test_fit_needs_a_pod(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A manifest without one is refused before the cluster is asked, which is not there."""
    settings = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(json.dumps(settings))
    manifest = folder / "manifest.yaml"
    manifest.write_text(text)
    connection = ["--kubeconfig", str(folder / "kubeconfig")]
    assert kubectl_metagpu(["fit", "-f", str(manifest), *connection]) == 1
    assert f"{manifest}: no pod in it; give a Pod, or a workload" in capsys.readouterr().err
