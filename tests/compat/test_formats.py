"""Formats: which a file has, which files go together, and files in a ConfigMap."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metagpu.compat import formats, manifest
from metagpu.compat.contract import Circumstances
from metagpu.compat.formats import Format
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from metagpu.sources import written
from tests.compat.rig import FILES, converted, refusal

FORMS = (
    "`version: metagpu/v1`, `deviceSharing` (MetaGPU), `flags`, `resources` or `sharing` (NVIDIA's "
    "device plugin), `mig-configs` (mig-parted), `nvidia` or `nodeconfig` (HAMi)"
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("version: metagpu/v1", Format.OURS),
        ("version: metagpu/v9\nflags: {}", Format.OURS),
        ("pools: []", Format.OURS),
        ("deviceSharing: []", Format.CNVRG),
        ("version: v1", Format.NVIDIA),
        ("sharing: {}", Format.NVIDIA),
        ("version: v1\nmig-configs: {}", Format.MIG_PARTED),
        ("nvidia: {}", Format.HAMI),
        ('{"nodeconfig": []}', Format.HAMI),
    ],
)
def test_the_format_is_recognised_by_its_keys(text: str, form: Format) -> None:
    """Nobody has to say which format a file has."""
    assert formats.recognise(Document(text, "f.yaml")) is form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: []", f"f.yaml: 1: the format is not recognised; a configuration has {FORMS}"),
        ("- 1", f"f.yaml: 1: no configuration; one has {FORMS}"),
        ("", f"f.yaml: no configuration; one has {FORMS}"),
    ],
)
def test_what_is_not_recognised_hears_what_is(text: str, message: str) -> None:
    """A file of no known format is answered with the keys that make one."""
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("version: v1", "deviceSharing: []"),
        ("mig-configs: {}", "nvidia: {}"),
        ("pools: []", "version: v1"),
        ("pools: []", "pools: []"),
        ("deviceSharing: []", "deviceSharing: []"),
    ],
)
def test_files_that_do_not_go_together(one: str, other: str) -> None:
    """Two programs' files, or two of ours, are no one configuration."""
    first, second = Document(one, "f.yaml"), Document(other, "g.yaml")
    with pytest.raises(ConfigError) as caught:
        formats.together([first, second])
    assert str(caught.value) == (
        f"g.yaml ({formats.recognise(second)}): f.yaml ({formats.recognise(first)}) is given too, "
        "and they make no one configuration; together go NVIDIA's device plugin with mig-parted, "
        "and HAMi's files"
    )


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.stem)
def test_what_people_have_today_is_recognised(file: Path) -> None:
    """Every file of the published examples is recognised, in its ConfigMap or alone."""
    whole = Document(file.read_text(encoding="utf-8"), str(file))
    parts = (
        [Document(text, str(file), line) for text, line in manifest.texts(whole).values()]
        if manifest.is_manifest(whole)
        else [whole]
    )

    assert Format.OURS not in map(formats.recognise, parts)


def test_a_part_of_a_config_map_keeps_its_lines() -> None:
    """A mistake in a ConfigMap's file names the line in the manifest."""
    text = """\
apiVersion: v1
kind: ConfigMap
data:
  short: "version: v2"
  long: |
    version: v1
    flags:
      migStrategy: some
"""
    parts = manifest.texts(Document(text, "f.yaml"))

    for name, said in (
        ("long", "f.yaml: 8: flags.migStrategy: 'some' is not known here"),
        ("short", "f.yaml: 4: version: 'v2' is not known here"),
    ):
        part, line = parts[name]
        with pytest.raises(ConfigError) as caught:
            formats.convert(
                formats.Recognised((Document(part, "f.yaml", line),), (Format.NVIDIA,)),
                Circumstances(),
            )
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "apiVersion: v1\nkind: ConfigMap",
            "f.yaml: 1: data: there is no file in this ConfigMap; each key of `data` is one",
        ),
        (
            "apiVersion: v1\ndata:\n  a.yaml:\n    version: v1",
            'f.yaml: 3: data["a.yaml"]: not a text; write `|` after the colon',
        ),
    ],
)
def test_a_config_map_without_files_is_refused(text: str, message: str) -> None:
    """A ConfigMap has texts by name; anything else is told with its line."""
    with pytest.raises(ConfigError) as caught:
        manifest.texts(Document(text, "f.yaml"))
    assert str(caught.value) == message


def test_other_manifests_are_no_config_maps() -> None:
    """A manifest of another kind is not taken for one."""
    assert not manifest.is_manifest(Document("apiVersion: v1\nkind: Pod", "f.yaml"))


_ROOTS = ("deviceSharing", "flags", "sharing", "resources", "mig-configs", "nvidia", "nodeconfig")
_KEYS = (
    *("version", "timeSlicing", "mps", "name", "replicas", "devices", "plugin", "uuid", "gpus"),
    *("mig-enabled", "mig-devices", "device-filter", "operatingmode", "filterdevices", "index"),
    *("resourceName", "metagpusPerGpu", "knownMigGeometries", "models", "profiles", "pattern"),
    *_ROOTS,
)
_scalars = st.none() | st.booleans() | st.integers(-2, 10) | st.sampled_from(["all", "1", "n", "*"])
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5)
    ),
    max_leaves=15,
)
_files = st.dictionaries(st.sampled_from(_ROOTS), _values, min_size=1, max_size=3)


@given(_files)
def test_whatever_a_file_says_it_is_taken_or_refused_in_words(file: dict[str, object]) -> None:
    """A file of whatever shape converts, or is refused with a sentence, and nothing else."""
    try:
        conversion = converted(yaml.safe_dump(file), node="n")
    except ConfigError as error:
        told = str(error)
    else:
        told = written(conversion.data).removeprefix("version: ")

        assert yaml.safe_load(f"version: {told}") == conversion.data

    assert told.startswith(("f.yaml: ", "metagpu/v1"))
