"""Sources of a configuration: files, directories of profiles, ConfigMaps."""

import os
from pathlib import Path
from typing import Final

import pytest
import yaml

from metagpu.agent.config_source import ConfigSource, Loaded, to_yaml
from metagpu.compat.contract import ConversionContext
from metagpu.core.config.document import MAX_TEXT, Document
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.profiles import ClusterChoice, ProfileChoice
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.xid_severity import Severity
from tests.rigs.build import BACKENDS, gpu, pool

SEEDS: Final = Path(__file__).parents[1] / "compat" / "files"
SLICES: Final = SEEDS / "nvidia-time-slicing-config.yaml"
FOUR: Final = [gpu(n) for n in range(4)]


def profiles(folder: Path) -> Path:
    """Write a directory of profiles as a mounted ConfigMap has it: links by way of `..data`."""
    data = folder / "..2026_11_21"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    texts = yaml.safe_load(SLICES.read_text(encoding="utf-8"))["data"]
    for name, text in texts.items():
        (data / name).write_text(text, encoding="utf-8")
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def offers(loaded: Loaded) -> dict[str, int]:
    """Count what four GPUs offer."""
    layout = build_layout(loaded.config, FOUR, Injection())
    return {r: sum(s.resource == r for s in layout.shares) for r in layout.backends}


def refusal(source: ConfigSource) -> str:
    """Return the error text with which a source is refused."""
    with pytest.raises(ConfigError) as caught:
        source.load(BACKENDS)
    return str(caught.value)


def test_without_a_file_the_default_holds() -> None:
    """Without a path the built-in default is in force, with a text like any other."""
    loaded = ConfigSource().load(BACKENDS)

    assert loaded.config.file == "<default>"
    assert offers(loaded) == {"cnvrg.io/metagpu": 400}
    assert Document(loaded.text, "f").data["version"] == "metagpu/v1"


def test_variables_change_the_default() -> None:
    """Without a file, NVIDIA's and MetaGPU's variables have their effect, or a note."""
    environment = {
        "DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri",
        "PASS_DEVICE_SPECS": "false",
        "DP_DISABLE_HEALTHCHECKS": "94",
        "METAGPU_DEVICE_PLUGIN_MEMORYENFORCER": "false",
        "MIG_STRATEGY": "single",
        "MOFED_ENABLED": "true",
    }
    loaded = ConfigSource(context=ConversionContext(environment=environment)).load(BACKENDS)
    root = loaded.config.root

    assert offers(loaded) == {"cnvrg.io/metagpu": 400}
    assert root.strategies == ("cdi-cri",)
    assert not root.pass_device_specs
    assert root.health.xids == {94: Severity.APPLICATION}
    assert root.pools[0].memory_enforcement.policy == "off"
    assert [note.path for note in loaded.notes] == [
        *("DEVICE_LIST_STRATEGY", "MIG_STRATEGY", "MOFED_ENABLED"),
    ]


def test_variables_beside_a_file_of_ours_have_notes(tmp_path: Path) -> None:
    """A file of metagpu says itself what variables of others would: each is a note."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool())
    environment = {"PASS_DEVICE_SPECS": "false", "METAGPU_DEVICE_PLUGIN_MEMORYENFORCER": "false"}
    source = ConfigSource((file,), context=ConversionContext(environment=environment))

    assert [str(note) for note in source.load(BACKENDS).notes] == [
        f"environment: {variable}: has no effect with a file in metagpu's own format; "
        "see docs/compat.md"
        for variable in environment
    ]


def test_a_manifest_of_several_objects_is_read(tmp_path: Path) -> None:
    """Of a stream of manifests the ConfigMap is the configuration; the rest has notes."""
    file = tmp_path / "static.yaml"
    file.write_text(
        "---\napiVersion: v1\nkind: ServiceAccount\n---\napiVersion: v1\nkind: ConfigMap\ndata:\n"
        "  config.yaml: |\n    resourceName: cnvrg.io/metagpu\n    accelerator: nvidia\n"
        "    autoReshare: true\n"
    )
    loaded = ConfigSource((file,)).load(BACKENDS)

    assert offers(loaded) == {"cnvrg.io/metagpu": 400}
    assert [str(note) for note in loaded.notes] == [
        f"{file}: 2: ServiceAccount is no ConfigMap, and is left out"
    ]


def test_a_text_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layouts a file has, each is loaded from one parse of its text."""
    parsed: list[str] = []
    compose = yaml.compose

    def counted(text: str, Loader: type) -> object:  # noqa: N803 - PyYAML's name
        parsed.append(text)
        return compose(text, Loader=Loader)

    monkeypatch.setattr(yaml, "compose", counted)
    layout = "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1}}]"
    text = "mig-configs:\n" + "".join(f"  layout-{n}: {layout}\n" for n in range(50))
    file = tmp_path / "config.yaml"
    file.write_text(text)

    assert len([source.load(BACKENDS) for _, source in ConfigSource((file,)).variants()]) == 50
    assert parsed.count(text) == 1


def test_a_file_of_ours_is_read_as_it_is(tmp_path: Path) -> None:
    """A file of metagpu's own format keeps its text, name and lines."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool("sharesPerGpu: 3"), encoding="utf-8")
    loaded = ConfigSource((file,)).load(BACKENDS)

    assert (loaded.config.file, loaded.text) == (str(file), pool("sharesPerGpu: 3"))
    assert (loaded.formats, loaded.profiles, loaded.notes) == (("metagpu/v1",), (), ())
    assert offers(loaded) == {"cnvrg.io/metagpu": 12}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("pools: [{name: a, backends: [{backend: nope}]}]", ["pools[0].backends[0].backend"]),
        (
            "pools: [{name: a, backends: [{backend: mps, replicas: x}]}, {name: 3}]\nother: 1",
            ["pools[0].backends[0].replicas", "pools[1].name", "other"],
        ),
        ("pools: [{name: a, backends: [{backend: whole}]}]\ndrab: 1\ndra: 3", ["drab", "dra"]),
        ("pools: 3", ["pools"]),
        ("version: v0", [""]),
    ],
)
def test_all_errors_are_found_but_those_that_follow_from_others(
    tmp_path: Path, text: str, paths: list[str]
) -> None:
    """A value that is wrong is missing afterwards, which is no error; a longer name is another."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(text if "version" in text else f"version: metagpu/v1\n{text}\n")
    errors = ConfigSource((file,)).check(BACKENDS).errors

    assert sorted(error.path for error in errors) == sorted(paths)


def test_each_file_has_its_own_errors(tmp_path: Path) -> None:
    """The same mistake in two files is two errors."""
    files = tmp_path / "plugin.yaml", tmp_path / "mig.yaml"
    files[0].write_text("version: v9\nflags: {migStrategy: none}\n")
    files[1].write_text("version: v9\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\n")
    errors = ConfigSource(files).check(BACKENDS).errors

    assert {(error.file, error.path) for error in errors} == {(str(f), "version") for f in files}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A missing file is an error that names the file."""
    cluster_choice = refusal(ConfigSource((tmp_path / "none.yaml",)))

    assert cluster_choice == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    """A file that is not text is refused, with that reason."""
    file = tmp_path / "metagpu.yaml"
    file.write_bytes(b"version: \xff\xfe")

    assert refusal(ConfigSource((file,))) == f"{file}: cannot be read: not UTF-8 text"


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """A file that is too large for a configuration is not read to its end."""
    file = tmp_path / "metagpu.yaml"
    with file.open("wb") as opened:
        opened.truncate(4 * MAX_TEXT + 1)

    assert refusal(ConfigSource((file,))) == f"{file}: cannot be read: more than 4194304 bytes"


@pytest.mark.parametrize("place", ["directory", "manifest"])
def test_a_profile_is_chosen(tmp_path: Path, place: str) -> None:
    """A profile is found by its key, in a mounted directory and in a manifest."""
    path = profiles(tmp_path / "config") if place == "directory" else SLICES

    four = ConfigSource((path,), ProfileChoice("slice-4")).load(BACKENDS)
    ten = ConfigSource((path,), ProfileChoice(None, "slice-10")).load(BACKENDS)

    assert offers(four) == {"nvidia.com/gpu.shared": 16}
    assert offers(ten) == {"nvidia.com/gpu.shared": 40}
    assert (four.profiles, four.formats) == (("slice-4",), ("NVIDIA device plugin v1",))
    assert refusal(ConfigSource((path,))) == (
        f"{path}: no profile is chosen; give --profile or --default-profile; there are: slice-10, "
        "slice-4"
    )
    assert refusal(ConfigSource((path,), ProfileChoice("slice-5"))) == (
        f"{path}: there is no profile 'slice-5' (--profile); there are: slice-10, slice-4"
    )


def test_a_profile_that_is_not_chosen_may_be_broken(tmp_path: Path) -> None:
    """A wrong profile that is not chosen does not matter, as only the chosen one is read."""
    folder = profiles(tmp_path / "config")
    (folder / "broken").write_bytes(b"\xff")

    assert offers(ConfigSource((folder,), ProfileChoice("slice-4")).load(BACKENDS)) == {
        "nvidia.com/gpu.shared": 16
    }


@pytest.mark.parametrize("choice", [ProfileChoice("slice-4"), ProfileChoice(None, "slice-4")])
def test_a_profile_is_searched_in_directories_only(tmp_path: Path, choice: ProfileChoice) -> None:
    """Of several paths, the directory gives the chosen profile and the file its only content."""
    folder = profiles(tmp_path / "config")
    layouts = SEEDS / "nvidia-mig-config.yaml"
    source = ConfigSource((folder, layouts), choice, ConversionContext(mig_config="disabled"))
    loaded = source.load(BACKENDS)

    assert offers(loaded) == {"nvidia.com/gpu.shared": 16}
    assert loaded.profiles == ("slice-4", "config.yaml")


def test_a_profile_of_a_single_file_is_a_mistake(tmp_path: Path) -> None:
    """Choosing a profile of one file is an error, as the file has no profiles."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool(), encoding="utf-8")

    assert refusal(ConfigSource((file,), ProfileChoice("slice-4"))) == (
        f"{file}: it has no profiles, and --profile wants 'slice-4'; a profile is chosen in a "
        "folder or a ConfigMap"
    )
    assert refusal(ConfigSource((), ProfileChoice("slice-4"))) == (
        "<default>: it has no profiles, and --profile wants 'slice-4'; a profile is chosen in a "
        "folder or a ConfigMap"
    )
    assert offers(ConfigSource((file,), ProfileChoice("slice-4", required=False)).load(BACKENDS))


HELD = {"a": pool(), "slice-4": pool("sharesPerGpu: 4"), "default": pool("sharesPerGpu: 3")}


@pytest.mark.parametrize(
    ("choice", "label", "held", "profiles_taken"),
    [
        (ProfileChoice("a"), "slice-4", HELD, ("a",)),
        (ProfileChoice(None, "a"), "slice-4", HELD, ("slice-4",)),
        (ProfileChoice(None, "a"), None, HELD, ("a",)),
        (ProfileChoice(), None, HELD, ("default",)),
        (ProfileChoice(), None, {"only": pool()}, ("only",)),
        (ProfileChoice(), None, {"one": pool(), "two": pool()}, ()),
        (ProfileChoice(), None, {}, ()),
        (ProfileChoice(), None, None, ()),
    ],
)
def test_flags_come_before_the_cluster(
    tmp_path: Path,
    choice: ProfileChoice,
    label: str | None,
    held: dict[str, str] | None,
    profiles_taken: tuple[str, ...],
) -> None:
    """A flag comes before the node's label, the label before the default profile, then files."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool("sharesPerGpu: 7"), encoding="utf-8")
    cluster_choice = ClusterChoice(label, "metagpu.io/config", None, "ConfigMap x/y", held)
    loaded = ConfigSource((file,), choice).with_cluster(cluster_choice).load(BACKENDS)

    assert loaded.profiles == profiles_taken
    place = f"ConfigMap x/y: {profiles_taken[0]}" if profiles_taken else str(file)
    assert loaded.config.file == place


def test_an_unknown_label_is_refused_with_the_known_profiles(tmp_path: Path) -> None:
    """An unknown value is refused with the label's name, the source and its profiles."""
    cluster_choice = ClusterChoice("b", "metagpu.io/config", None, "ConfigMap x/y", {"a": pool()})
    assert refusal(ConfigSource().with_cluster(cluster_choice)) == (
        "ConfigMap x/y: there is no profile 'b' (label metagpu.io/config); there are: a"
    )

    nowhere = ClusterChoice("b", "metagpu.io/config")
    assert refusal(ConfigSource().with_cluster(nowhere)) == (
        "<default>: it has no profiles, and label metagpu.io/config wants 'b'; a profile is chosen "
        "in a folder or a ConfigMap"
    )
    assert refusal(ConfigSource((tmp_path,)).with_cluster(nowhere)).startswith(
        f"{tmp_path}: there is no profile"
    )


def test_an_error_in_a_config_map_has_its_line() -> None:
    """A profile of a ConfigMap is read as strictly as a file."""
    bad = ClusterChoice("a", "metagpu.io/config", None, "ConfigMap x/y", {"a": pool("shares: 3")})
    assert refusal(ConfigSource().with_cluster(bad)).startswith(
        "ConfigMap x/y: a: 5: pools[0].backends[0].shares: unknown key"
    )


def test_the_layout_of_a_label_is_used_unless_a_flag_chooses() -> None:
    """mig-manager's label chooses among `mig-configs`, unless a flag does."""
    cluster_choice = ClusterChoice(mig_config="disabled")
    layouts = SEEDS / "nvidia-mig-config.yaml"
    here = ConversionContext(mig_config="other")

    assert (
        ConfigSource((layouts,)).with_cluster(cluster_choice).effective_context.mig_config
        == "disabled"
    )
    assert (
        ConfigSource((layouts,), context=here)
        .with_cluster(cluster_choice)
        .effective_context.mig_config
        == "other"
    )


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """A pipe is refused at once, as a configuration has to be readable again."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    assert refusal(ConfigSource((pipe,))) == (
        f"{pipe}: cannot be read: it is not a regular file, and it has to be read more than once; "
        "write its text to a file"
    )


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    """A directory without profiles is refused, with that reason."""
    assert refusal(ConfigSource((tmp_path,))).endswith(
        ": there is no profile in it; put a configuration there"
    )


@pytest.mark.parametrize(
    ("file", "context", "choice"),
    [
        ("metagpu-config.yaml", ConversionContext(), ProfileChoice()),
        ("nvidia-time-slicing-config.yaml", ConversionContext(), ProfileChoice("slice-4")),
        ("nvidia-mig-config.yaml", ConversionContext(mig_config="disabled"), ProfileChoice()),
        ("hami-device-config.yaml", ConversionContext(node="nodeA"), ProfileChoice()),
    ],
)
def test_a_conversion_offers_the_same_shares(
    tmp_path: Path, file: str, context: ConversionContext, choice: ProfileChoice
) -> None:
    """The output of `--convert` is our own format and gives the same shares with the same ids."""
    theirs = ConfigSource((SEEDS / file,), choice, context).load(BACKENDS)
    (tmp_path / "ours.yaml").write_text(theirs.text, encoding="utf-8")
    ours = ConfigSource((tmp_path / "ours.yaml",)).load(BACKENDS)

    assert ours.formats == ("metagpu/v1",)
    assert (
        build_layout(ours.config, FOUR, Injection()).shares
        == build_layout(theirs.config, FOUR, Injection()).shares
    )


def test_every_open_choice_is_listed() -> None:
    """Profiles, layouts and nodes that no setting chooses are listed one by one."""

    def names(file: str, source: ConfigSource | None = None) -> list[str]:
        return [name for name, _ in (source or ConfigSource((SEEDS / file,))).variants()]

    assert names("nvidia-time-slicing-config.yaml") == ["profile slice-4", "profile slice-10"]
    assert names("nvidia-mig-config.yaml") == ["layout disabled", "layout 2x2g.10gb-3x1g.5gb"]
    assert names("hami-device-config.yaml") == ["node nodeA", "node nodeB"]
    assert names("metagpu-config.yaml") == [""]
    assert names("", ConfigSource((SLICES,), ProfileChoice("slice-4"))) == [""]


def test_yaml_keeps_the_order_of_keys() -> None:
    """The output of `to_yaml` begins with its version."""
    assert to_yaml({"version": "metagpu/v1", "pools": []}) == "version: metagpu/v1\npools: []\n"
