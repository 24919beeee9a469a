"""Where a configuration comes from: files, directories of profiles, ConfigMaps."""

import os
from pathlib import Path
from typing import Final

import pytest
import yaml

from metagpu.compat.contract import Circumstances
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from metagpu.core.injection import Injection
from metagpu.core.layout import lay_out
from metagpu.core.profiles import Choice, Instruction
from metagpu.sources import Loaded, Source, written
from tests.build import BACKENDS, gpu, pool

SEEDS: Final = Path(__file__).parent / "compat" / "files"
SLICES: Final = SEEDS / "nvidia-time-slicing-config.yaml"
FOUR: Final = [gpu(n) for n in range(4)]


def profiles(folder: Path) -> Path:
    """Make a directory of profiles as a mounted ConfigMap has it: links by way of `..data`."""
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
    layout = lay_out(loaded.config, FOUR, Injection())
    return {r: sum(s.resource == r for s in layout.shares) for r in layout.backends}


def refusal(source: Source) -> str:
    """Give the sentence with which a source is refused."""
    with pytest.raises(ConfigError) as caught:
        source.load(BACKENDS)
    return str(caught.value)


def test_without_a_file_the_default_holds() -> None:
    """No path is the built-in default, which has a text like any other."""
    loaded = Source().load(BACKENDS)

    assert loaded.config.file == "<default>"
    assert offers(loaded) == {"cnvrg.io/metagpu": 400}
    assert Document(loaded.text, "f").data["version"] == "metagpu/v1"


def test_a_file_of_ours_is_read_as_it_is(tmp_path: Path) -> None:
    """Our own format keeps its text, name and lines."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool("sharesPerGpu: 3"), encoding="utf-8")
    loaded = Source((file,)).load(BACKENDS)

    assert (loaded.config.file, loaded.text) == (str(file), pool("sharesPerGpu: 3"))
    assert (loaded.formats, loaded.profiles, loaded.notes) == (("metagpu/v1",), (), ())
    assert offers(loaded) == {"cnvrg.io/metagpu": 12}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is an error that says so."""
    told = refusal(Source((tmp_path / "none.yaml",)))

    assert told == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    """A file that is no text is refused as such."""
    file = tmp_path / "metagpu.yaml"
    file.write_bytes(b"version: \xff\xfe")

    assert refusal(Source((file,))) == f"{file}: cannot be read: not a text in UTF-8"


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """A file that nobody can have meant is not read to its end."""
    file = tmp_path / "metagpu.yaml"
    with file.open("wb") as opened:
        opened.truncate(16 * 1024 * 1024 + 1)

    assert refusal(Source((file,))) == f"{file}: cannot be read: larger than 16 MiB"


@pytest.mark.parametrize("place", ["directory", "manifest"])
def test_a_profile_is_chosen(tmp_path: Path, place: str) -> None:
    """A directory as Kubernetes mounts it, and the manifest itself, have profiles by their keys."""
    path = profiles(tmp_path / "config") if place == "directory" else SLICES

    four = Source((path,), Choice("slice-4")).load(BACKENDS)
    ten = Source((path,), Choice(None, "slice-10")).load(BACKENDS)

    assert offers(four) == {"nvidia.com/gpu.shared": 16}
    assert offers(ten) == {"nvidia.com/gpu.shared": 40}
    assert (four.profiles, four.formats) == (("slice-4",), ("NVIDIA device plugin v1",))
    assert refusal(Source((path,))) == (
        f"{path}: no profile is chosen; give --profile or --default-profile; there are: slice-10, "
        "slice-4"
    )
    assert refusal(Source((path,), Choice("slice-5"))) == (
        f"{path}: there is no profile 'slice-5' (--profile); there are: slice-10, slice-4"
    )


def test_a_profile_that_is_not_chosen_may_be_broken(tmp_path: Path) -> None:
    """Only the chosen profile is read: another's mistake is another node's matter."""
    folder = profiles(tmp_path / "config")
    (folder / "broken").write_bytes(b"\xff")

    assert offers(Source((folder,), Choice("slice-4")).load(BACKENDS)) == {
        "nvidia.com/gpu.shared": 16
    }


@pytest.mark.parametrize("choice", [Choice("slice-4"), Choice(None, "slice-4")])
def test_a_profile_is_looked_for_where_there_are_some(tmp_path: Path, choice: Choice) -> None:
    """Of several places the one that has the profile gives it, and the other its only one."""
    folder = profiles(tmp_path / "config")
    layouts = SEEDS / "nvidia-mig-config.yaml"
    source = Source((folder, layouts), choice, Circumstances(mig_config="disabled"))
    loaded = source.load(BACKENDS)

    assert offers(loaded) == {"nvidia.com/gpu.shared": 16}
    assert loaded.profiles == ("slice-4", "config.yaml")


def test_a_profile_of_a_single_file_is_a_mistake(tmp_path: Path) -> None:
    """One file has no profiles to choose among."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool(), encoding="utf-8")

    assert refusal(Source((file,), Choice("slice-4"))) == (
        f"{file}: it has no profiles, and --profile wants 'slice-4'; a profile is chosen in a "
        "folder or a ConfigMap"
    )
    assert refusal(Source((), Choice("slice-4"))) == (
        "<default>: it has no profiles, and --profile wants 'slice-4'; a profile is chosen in a "
        "folder or a ConfigMap"
    )
    assert offers(Source((file,), Choice("slice-4", required=False)).load(BACKENDS))


HELD = {"a": pool(), "slice-4": pool("sharesPerGpu: 4"), "default": pool("sharesPerGpu: 3")}


@pytest.mark.parametrize(
    ("choice", "label", "held", "profiles_taken"),
    [
        (Choice("a"), "slice-4", HELD, ("a",)),
        (Choice(None, "a"), "slice-4", HELD, ("slice-4",)),
        (Choice(None, "a"), None, HELD, ("a",)),
        (Choice(), None, HELD, ("default",)),
        (Choice(), None, {"only": pool()}, ("only",)),
        (Choice(), None, {"one": pool(), "two": pool()}, ()),
        (Choice(), None, {}, ()),
        (Choice(), None, None, ()),
    ],
)
def test_what_is_said_here_comes_before_the_cluster(
    tmp_path: Path,
    choice: Choice,
    label: str | None,
    held: dict[str, str] | None,
    profiles_taken: tuple[str, ...],
) -> None:
    """A flag comes before the node's label, that before the default profile, that before files."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(pool("sharesPerGpu: 7"), encoding="utf-8")
    told = Instruction(label, "metagpu.io/config", None, "ConfigMap x/y", held)
    loaded = Source((file,), choice).told(told).load(BACKENDS)

    assert loaded.profiles == profiles_taken
    place = f"ConfigMap x/y: {profiles_taken[0]}" if profiles_taken else str(file)
    assert loaded.config.file == place


def test_a_label_that_names_no_profile_says_which_there_are(tmp_path: Path) -> None:
    """An unknown value is refused with the label's name, the place, and what it has."""
    told = Instruction("b", "metagpu.io/config", None, "ConfigMap x/y", {"a": pool()})
    assert refusal(Source().told(told)) == (
        "ConfigMap x/y: there is no profile 'b' (label metagpu.io/config); there are: a"
    )

    nowhere = Instruction("b", "metagpu.io/config")
    assert refusal(Source().told(nowhere)) == (
        "<default>: it has no profiles, and label metagpu.io/config wants 'b'; a profile is chosen "
        "in a folder or a ConfigMap"
    )
    assert refusal(Source((tmp_path,)).told(nowhere)).startswith(f"{tmp_path}: there is no profile")


def test_what_is_wrong_in_a_config_map_is_told_with_its_line() -> None:
    """A profile of a ConfigMap is read as strictly as a file."""
    bad = Instruction("a", "metagpu.io/config", None, "ConfigMap x/y", {"a": pool("shares: 3")})
    assert refusal(Source().told(bad)).startswith(
        "ConfigMap x/y: a: 5: pools[0].backends[0].shares: unknown key"
    )


def test_the_layout_of_a_label_is_taken_where_none_is_said_here() -> None:
    """mig-manager's label chooses among `mig-configs`, unless a flag does."""
    told = Instruction(mig_config="disabled")
    layouts = SEEDS / "nvidia-mig-config.yaml"
    here = Circumstances(mig_config="other")

    assert Source((layouts,)).told(told).situation.mig_config == "disabled"
    assert Source((layouts,), circumstances=here).told(told).situation.mig_config == "other"


def test_a_pipe_is_told(tmp_path: Path) -> None:
    """What can be read once only is no configuration, and nobody waits for who writes it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    assert refusal(Source((pipe,))) == (
        f"{pipe}: cannot be read: it is no file, and is read more than once; write what it says "
        "to a file"
    )


def test_an_empty_directory_is_told(tmp_path: Path) -> None:
    """A directory without profiles says that there are none."""
    assert refusal(Source((tmp_path,))).endswith(
        ": there is no profile in it; put a configuration there"
    )


@pytest.mark.parametrize(
    ("file", "circumstances", "choice"),
    [
        ("metagpu-config.yaml", Circumstances(), Choice()),
        ("nvidia-time-slicing-config.yaml", Circumstances(), Choice("slice-4")),
        ("nvidia-mig-config.yaml", Circumstances(mig_config="disabled"), Choice()),
        ("hami-device-config.yaml", Circumstances(node="nodeA"), Choice()),
    ],
)
def test_a_conversion_offers_the_same_as_what_was_converted(
    tmp_path: Path, file: str, circumstances: Circumstances, choice: Choice
) -> None:
    """What `--convert` prints is ours, and gives the same shares with the same ids."""
    theirs = Source((SEEDS / file,), choice, circumstances).load(BACKENDS)
    (tmp_path / "ours.yaml").write_text(theirs.text, encoding="utf-8")
    ours = Source((tmp_path / "ours.yaml",)).load(BACKENDS)

    assert ours.formats == ("metagpu/v1",)
    assert (
        lay_out(ours.config, FOUR, Injection()).shares
        == lay_out(theirs.config, FOUR, Injection()).shares
    )


def test_what_is_left_open_is_gone_through() -> None:
    """Profiles, layouts and nodes that nothing chooses are named one by one."""

    def names(file: str, source: Source | None = None) -> list[str]:
        return [name for name, _ in (source or Source((SEEDS / file,))).variants()]

    assert names("nvidia-time-slicing-config.yaml") == ["profile slice-4", "profile slice-10"]
    assert names("nvidia-mig-config.yaml") == ["layout disabled", "layout 2x2g.10gb-3x1g.5gb"]
    assert names("hami-device-config.yaml") == ["node nodeA", "node nodeB"]
    assert names("metagpu-config.yaml") == [""]
    assert names("", Source((SLICES,), Choice("slice-4"))) == [""]


def test_yaml_keeps_the_order_of_keys() -> None:
    """What is written begins with its version."""
    assert written({"version": "metagpu/v1", "pools": []}) == "version: metagpu/v1\npools: []\n"
