"""Formats: their recognition, files that belong together, and files in a ConfigMap."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metagpu.agent.config_source import to_yaml
from metagpu.compat import formats
from metagpu.compat.contract import ConversionContext
from metagpu.compat.formats import ConfigFormat
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError
from tests.compat.rig import FILES, converted, notes, offered, refusal
from tests.rigs.build import gpu

FORMS = (
    "`version: metagpu/v1`, `deviceSharing` (MetaGPU), `flags`, `resources` or `sharing` (NVIDIA's "
    "device plugin), `mig-configs` (mig-parted), `nvidia` or `nodeconfig` (HAMi)"
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("version: metagpu/v1", ConfigFormat.OURS),
        ("version: metagpu/v9\nflags: {}", ConfigFormat.OURS),
        ("pools: []", ConfigFormat.OURS),
        ("deviceSharing: []", ConfigFormat.CNVRG),
        ("version: v1", ConfigFormat.NVIDIA),
        ("resources: {gpus: [{pattern: '*', name: gpu}]}", ConfigFormat.NVIDIA),
        ("sharing: {}", ConfigFormat.NVIDIA),
        ("version: v1\nmig-configs: {}", ConfigFormat.MIG_PARTED),
        ("nvidia: {}", ConfigFormat.HAMI),
        ('{"nodeconfig": []}', ConfigFormat.HAMI),
    ],
)
def test_the_format_is_recognised_by_its_keys(text: str, form: ConfigFormat) -> None:
    """A file needs no statement of its format."""
    assert formats.recognize(Document(text, "f.yaml")) is form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: []", "f.yaml: 1: pool: no format has this key at the top; did you mean pools?"),
        ("x: []", f"f.yaml: 1: the format is not recognized; a configuration has {FORMS}"),
        ("- 1", f"f.yaml: 1: not a configuration; a configuration has {FORMS}"),
        ("", f"f.yaml: not a configuration; a configuration has {FORMS}"),
    ],
)
def test_an_unknown_format_is_refused_with_the_known_keys(text: str, message: str) -> None:
    """The error for an unknown format has the keys of the known formats."""
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
    """Files of two programs, and two files of ours, are refused."""
    first, second = Document(one, "f.yaml"), Document(other, "g.yaml")
    with pytest.raises(ConfigError) as caught:
        formats.recognize_files([first, second])
    assert str(caught.value) == (
        f"g.yaml ({formats.recognize(second)}): f.yaml ({formats.recognize(first)}) is given too, "
        "and the two cannot be combined; NVIDIA's device plugin combines with mig-parted, "
        "and HAMi's files with each other"
    )


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.stem)
def test_published_examples_are_recognised(file: Path) -> None:
    """Every file of the published examples is recognised, in its ConfigMap or alone."""
    whole = Document(file.read_text(encoding="utf-8"), str(file))
    found = formats.read_manifest([whole])
    parts = (
        [Document(text, str(file), line) for text, line in found.texts.values()]
        if found
        else [whole]
    )

    assert ConfigFormat.OURS not in map(formats.recognize, parts)


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
    found = formats.read_manifest([Document(text, "f.yaml")])
    assert found is not None

    for name, said in (
        ("long", "f.yaml: 8: flags.migStrategy: 'some' is unknown"),
        ("short", "f.yaml: 4: version: 'v2' is unknown"),
    ):
        part, line = found.texts[name]
        with pytest.raises(ConfigError) as caught:
            formats.convert(
                formats.RecognizedFiles((Document(part, "f.yaml", line),), (ConfigFormat.NVIDIA,)),
                ConversionContext(),
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
    """A ConfigMap without texts by name is refused with its line."""
    with pytest.raises(ConfigError) as caught:
        formats.read_manifest([Document(text, "f.yaml")])
    assert str(caught.value) == message


def test_the_config_maps_of_a_stream_are_read_and_the_rest_is_named() -> None:
    """Of several documents and lists, ConfigMaps with configurations count; notes name the rest."""
    text = """\
# of a chart
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: plugin}
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: ConfigMap
  data:
    config.yaml: |
      accelerator: nvidia
- apiVersion: v1
  kind: ConfigMap
  data: {enabled: "true"}
"""
    parts = formats.split_documents(text)
    found = formats.read_manifest([Document(part, "f.yaml", line) for part, line in parts])

    assert found is not None
    assert found.texts == {"config.yaml": ("accelerator: nvidia\n", 14)}
    assert list(map(str, found.rest)) == [
        "f.yaml: 3: ServiceAccount plugin is no ConfigMap, and is left out",
        "f.yaml: 17: items[1].data.enabled: is no configuration, and is left out",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "apiVersion: v1\nkind: Pod",
            "f.yaml: 1: there is no ConfigMap in this manifest; add one",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n"
            + "- {apiVersion: v1, data: {a: 'accelerator: nvidia'}}\n" * 2,
            (
                "f.yaml: 5: items[1].data.a: another ConfigMap of this manifest has a too; keep "
                "one of them"
            ),
        ),
    ],
)
def test_a_manifest_without_one_meaning_is_refused(text: str, message: str) -> None:
    """A manifest without a ConfigMap, or with two files of one name, is refused."""
    with pytest.raises(ConfigError) as caught:
        formats.read_manifest([Document(text, "f.yaml")])
    assert str(caught.value) == message


def test_very_many_documents_cost_no_time() -> None:
    """A stream of more documents than any manifest has is not split."""
    text = "---\na: 1\n" * 100_000

    assert formats.split_documents(text) == [(text, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: v1\nmig-config: {a: []}",
            "f.yaml: 2: mig-config: no format has this key at the top; did you mean mig-configs?",
        ),
        ("resources: [deployment.yaml]\nnamespace: a", "f.yaml: 1: the format is not recognized; "),
        (
            "version: v1\nsharin: {}",
            "f.yaml: 2: sharin: no format has this key at the top; did you mean sharing?",
        ),
    ],
)
def test_a_misspelt_file_is_not_taken_for_another(text: str, message: str) -> None:
    """A `version: v1` beside unknown keys is no file of NVIDIA's plugin, which offers all GPUs."""
    assert refusal(text).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Version: v1\nsharing:\n  timeslicing:\n    resources: [{name: gpu, replicas: 4}]",
            {"nvidia.com/gpu": 16},
        ),
        ("{}", {"nvidia.com/gpu": 4}),
        ("devicesharing: [{resourcename: a.b/c, UUID: ['*'], metagpuspergpu: 3}]", {"a.b/c": 12}),
        ('{"nvidia": {"DeviceSplitCount": 3}}', {"nvidia.com/gpu": 12}),
        ("nvidia: {DeviceSplitCount: 3}", {"nvidia.com/gpu": 40}),
    ],
)
def test_keys_are_read_in_the_case_that_their_program_takes(
    text: str, expected: dict[str, int]
) -> None:
    """Go's JSON and viper take keys in any case; the YAML of HAMi does not."""
    assert offered(converted(text), *(gpu(n) for n in range(4))) == expected


def test_below_sharing_nvidias_keys_count_in_their_own_case() -> None:
    """NVIDIA's plugin ignores `renamebydefault`, and misses `Resources`; the message says so."""
    text = "sharing: {timeSlicing: {renamebydefault: true, resources: [{name: gpu, replicas: 2}]}}"

    assert offered(converted(text), gpu(0)) == {"nvidia.com/gpu": 2}
    assert notes(text) == [
        (
            "f.yaml: 1: sharing.timeSlicing.renamebydefault: has no effect: the program takes this "
            "key in one case alone: renameByDefault"
        )
    ]
    for key in ("resources", "replicas"):
        assert refusal(text.replace(key, key.title())).endswith(f"missing key `{key}`")


def test_an_error_under_a_folded_key_has_its_line() -> None:
    """An error below a key in another case names the line of that key."""
    assert refusal("version: v1\nflags: {}\nsharing:\n  timeslicing:\n    resources: []") == (
        "f.yaml: 5: sharing.timeSlicing.resources: there is no resource; give at least one"
    )


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
def test_any_file_is_converted_or_refused_with_a_message(file: dict[str, object]) -> None:
    """Any file is converted, or refused with a message."""
    try:
        conversion = converted(yaml.safe_dump(file), node="n")
    except ConfigError as error:
        result = str(error)
    else:
        result = to_yaml(conversion.data).removeprefix("version: ")

        assert yaml.safe_load(f"version: {result}") == conversion.data

    assert result.startswith(("f.yaml: ", "metagpu/v1"))
