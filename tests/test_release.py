"""The files of a release: images, chart, the plugin of kubectl, and its papers."""

import ast
import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.image import layer
from deploy.release import documents, images, plugin
from deploy.release.__main__ import replacing
from metagpu import __version__
from tests.test_chart import helm as helm  # noqa: PLC0414 - a fixture
from tests.test_image import folder_with
from tests.test_image import write as write_image

REGISTRY = "registry.example.com/team"
SECTION = f"# Changelog\n\n## [Unreleased]\n\n## [{__version__}] - 2026-01-01\n\n"
NOTES = documents.Changelog.read(
    f"{SECTION}### Added\n\n- **A way** in the [page](docs/a.md) ([docs](docs/b.md)).\n"
)


def test_the_images_are_one_index_by_digest(tmp_path: Path) -> None:
    """Images of both processors are below one digest; each blob is what its name says."""
    folder = folder_with(tmp_path / "layer", "exit 0", seconds=5, mode=0o755)
    built = dict.fromkeys(("amd64", "arm64"), write_image(tmp_path, folder))
    digest, again = (
        images.write(tmp_path / file, f"{REGISTRY}/metagpu:1", built, 1_000) for file in "ab"
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert digest == again

    with tarfile.open(tmp_path / "a") as tar:
        blobs = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    for name, content in blobs.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"

    def blob(descriptor: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a document
        return json.loads(blobs[f"blobs/{descriptor['digest'].replace(':', '/')}"])

    [top] = json.loads(blobs["index.json"])["manifests"]
    assert top["digest"] == digest
    assert top["annotations"]["io.containerd.image.name"] == f"{REGISTRY}/metagpu:1"
    index = blob(top)
    assert [one["platform"]["architecture"] for one in index["manifests"]] == ["amd64", "arm64"]
    manifest = blob(index["manifests"][0])
    for annotations in (index["annotations"], manifest["annotations"]):
        assert annotations["org.opencontainers.image.version"] == "1.2.3"
        assert annotations["org.opencontainers.image.created"] == "1970-01-01T00:16:40+00:00"
    [packed] = manifest["layers"]
    plain = gzip.decompress(blobs[f"blobs/{packed['digest'].replace(':', '/')}"])
    diff = f"sha256:{hashlib.sha256(plain).hexdigest()}"
    assert blob(manifest["config"])["rootfs"]["diff_ids"] == [diff]
    assert images.read(built["amd64"], "bin/program") == b"exit 0"


def test_a_release_replaces_one_when_it_is_complete(tmp_path: Path) -> None:
    """The release of before stays until the new one is whole; a failure leaves nothing else."""
    target = tmp_path / "dist" / "v1"
    for text in ("1", "2"):
        with replacing(target) as folder:
            (folder / documents.SUMS).write_text(text)
    assert (target / documents.SUMS).read_text() == "2"
    with pytest.raises(OSError, match="disk"), replacing(target):
        raise OSError("disk full")
    assert [path.name for path in target.iterdir()] == [documents.SUMS]
    assert list(target.parent.iterdir()) == [target]


def test_a_release_takes_no_folder_of_others(tmp_path: Path) -> None:
    """A folder with other files, or a file, is named and stays as it is."""
    (tmp_path / "thesis.tex").write_text("x")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(SystemExit, match="not a release: name another"), replacing(target):
            pytest.fail("the release is written")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.fixture(params=[True, False], ids=["addresses", "no-addresses"])
def urls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the addresses of a project that is published, or of this one, which is not."""
    names = ("Homepage", "Source", "Releases") if request.param else ()
    found = {name: f"https://example.com/{name}" for name in names}
    for module in (documents, plugin):
        monkeypatch.setattr(module, "addresses", lambda: found)
    return found


def test_no_address_is_invented() -> None:
    """The project has none yet, and its files say none."""
    assert documents.addresses() == {}


def test_the_notes_are_the_section_of_the_version(tmp_path: Path, urls: dict[str, str]) -> None:
    """Links lead to the pages of this version; what is left above the section stops a release."""
    NOTES.write(tmp_path / "notes")
    base = f"{urls['Source']}/blob/v{__version__}/" if urls else ""
    assert f"]({base}docs/a.md)" in (tmp_path / "notes").read_text()
    assert NOTES.changes() == [{"kind": "added", "description": "A way in the page."}]
    with pytest.raises(SystemExit, match=r"\[Unreleased\] is not empty; move it to .*: - a"):
        documents.Changelog.read(SECTION.replace("[Unreleased]\n", "[Unreleased]\n\n- a\n"))
    with pytest.raises(SystemExit, match=r"has no section \[.*\]: move what stands under"):
        documents.Changelog.read("## [Unreleased]\n\n- a\n")


@pytest.mark.parametrize("registry", ["", REGISTRY])
def test_the_chart_names_the_image_of_the_registry(
    tmp_path: Path, helm: str, registry: str, urls: dict[str, str]
) -> None:
    """A chart with a registry needs no value, another makes helm ask; its bytes stay the same."""
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        documents.write_chart(folder, registry, NOTES, 1_000)
        found.append(folder / f"metagpu-{__version__}.tgz")
    assert found[0].read_bytes() == found[1].read_bytes()

    command = [helm, "template", "metagpu", str(found[0]), "--kube-version=1.36.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - helm
    named = f'image: "{REGISTRY}/metagpu:{__version__}"' in done.stdout
    assert (named, "image.repository is not set" in done.stderr) == (bool(registry), not registry)
    shown = subprocess.check_output([helm, "show", "chart", str(found[0])], text=True)  # noqa: S603
    annotations = yaml.safe_load(shown)["annotations"]
    assert yaml.safe_load(shown).get("home") == urls.get("Homepage")
    links = yaml.safe_load(annotations.get("artifacthub.io/links", "[]"))
    assert [link["url"] for link in links] == [*urls.values()]
    assert annotations["artifacthub.io/category"] == "ai-machine-learning"
    assert yaml.safe_load(annotations["artifacthub.io/changes"]) == NOTES.changes()
    listed = yaml.safe_load(annotations.get("artifacthub.io/images", "[]"))
    assert [image["image"] for image in listed] == (
        [f"{REGISTRY}/metagpu:{__version__}"] if registry else []
    )


def test_the_plugin_has_the_modules_that_it_imports() -> None:
    """Nothing of the daemon goes into the plugin, and all libraries are in the lock."""
    files = [str(file.relative_to(layer.REPOSITORY)) for file in plugin.closure(MODULE)]
    assert "metagpu/kubectl/viewer.py" in files
    imported = {
        name.partition(".")[0]
        for file in plugin.closure(MODULE)
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            *([node.module] if isinstance(node, ast.ImportFrom) and node.module else ()),
            *((alias.name for alias in node.names) if isinstance(node, ast.Import) else ()),
        )
    }
    patched = {"h2", "hyperframe", "pynvml"}  # by functions that the daemon alone calls
    packages = packages_distributions()
    assert {
        packages[name][0].lower()
        for name in imported - sys.stdlib_module_names - patched - {"metagpu", "__future__"}
    } <= {name.replace("kubernetes-asyncio", "kubernetes_asyncio") for name in plugin.LIBRARIES}
    daemons = ("metagpu/backends/", "metagpu/nvml/", "metagpu/sim/", "metagpu/plugins/kubelet/")
    assert not [file for file in files if file.startswith(daemons)]
    assert len(plugin.lock_of(plugin.LIBRARIES).splitlines()) == len(plugin.LIBRARIES)
    with pytest.raises(SystemExit, match="lacks nothing-of-this"):
        plugin.lock_of(["nothing-of-this"])


MODULE = "metagpu.kubectl.program"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a plugin whose modules print their folder, and take msgspec's place."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    text = "import msgspec\ndef main(): print('main', msgspec.__file__)\ndef complete(): print('c')"
    content = {
        "__main__.py": (layer.REPOSITORY / "deploy/release/bootstrap.py").read_bytes(),
        "lib/metagpu/kubectl/program.py": text.encode(),
        "lib/msgspec/__init__.py": b"",
        f"native/{os.uname().machine}/msgspec/_core{suffix}": b"",
    }
    file = tmp_path / "kubectl-metagpu"
    file.write_bytes(plugin.pack(content, 1_000))
    return file


def run(file: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a plugin with a folder for its modules."""
    command, variables = [sys.executable, "-S", str(file)], {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)  # noqa: S603 - ours


def test_the_plugin_unpacks_itself_once(program: Path, tmp_path: Path) -> None:
    """The second start takes the folder of the first; another name of the file completes words."""
    cache = tmp_path / "cache"
    first, second = run(program, cache), run(program, cache)
    assert first.stdout == second.stdout
    assert first.stdout.startswith(f"main {cache}/kubectl-metagpu/"), first.stderr
    assert len(list((cache / "kubectl-metagpu").iterdir())) == 1
    completion = tmp_path / "kubectl_complete-metagpu"
    completion.symlink_to(program)
    assert run(completion, cache).stdout == "c\n"


def test_the_plugin_runs_where_nothing_can_be_kept(program: Path, tmp_path: Path) -> None:
    """A cache that cannot be a folder costs the time of unpacking, and leaves nothing."""
    cache = tmp_path / "cache"
    cache.write_text("a file")
    done = run(program, cache)
    assert done.stdout.startswith("main "), done.stderr
    assert not Path(done.stdout.split()[1]).exists()


def test_the_plugin_names_the_python_that_it_lacks(program: Path, tmp_path: Path) -> None:
    """A Python that nothing is compiled for ends with one line, which says how to go on."""
    other = plugin.pack({"__main__.py": (layer.REPOSITORY / BOOTSTRAP).read_bytes()}, 1_000)
    program.write_bytes(other)
    done = run(program, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kubectl metagpu: nothing is compiled here for Python 3.")
    assert done.stderr.count("\n") == 1


BOOTSTRAP = "deploy/release/bootstrap.py"


def test_krews_manifest_has_the_documented_fields(tmp_path: Path, urls: dict[str, str]) -> None:
    """The manifest names the archive below the address of releases, with its digest."""
    archive = tmp_path / f"kubectl-metagpu-{__version__}.tar.gz"
    archive.write_bytes(b"content")
    document = yaml.safe_load(plugin.manifest(archive))
    assert (document["apiVersion"], document["kind"]) == (
        "krew.googlecontainertools.github.com/v1alpha2",
        "Plugin",
    )
    [platform] = document["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256(b"content").hexdigest()
    folder = f"{urls['Releases']}/v{__version__}/" if urls else ""
    assert platform["uri"] == f"{folder}{archive.name}"
    assert document["spec"].get("homepage") == urls.get("Homepage")
    assert len(document["spec"]["shortDescription"]) <= 50


def test_the_provenance_names_every_file_and_its_sources(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    """The statement has each file by digest, the image, the commit, the locks and the base."""
    (tmp_path / "a").write_text("a")
    documents.write_provenance(tmp_path, "sha256:12", REGISTRY, "abc", {"amd64": [("dash", "1")]})
    statement = json.loads((tmp_path / f"metagpu-{__version__}-provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    digest = hashlib.sha256(b"a").hexdigest()
    assert subjects == {"a": digest, f"{REGISTRY}/metagpu": "12"}
    builder = statement["predicate"]["runDetails"]["builder"]["id"]
    assert builder.startswith(urls.get("Source", "pkg:generic/metagpu@"))
    made_of = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert made_of[0]["digest"] == {"gitCommit": "abc"}
    assert {"uri": "pkg:deb/debian/dash@1?arch=amd64"} in made_of
    documents.write_checksums(tmp_path)
    command = ["sha256sum", "--check", "--strict", documents.SUMS]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)  # noqa: S603 - coreutils
