"""Scalars and documents mean in NVIDIA's files what they mean to NVIDIA's programs.

`go-yaml-answers.jsonl.gz` has files of the device plugin (`kind` dp) and of mig-parted (mp), each
with what `api/config/v1` of k8s-device-plugin 0.20 and `api/spec/v1` of mig-parted, by
sigs.k8s.io/yaml 1.6.0, read in it: `value`, null where they refuse the file. Asked on 2026-11-29.
What the plugin's program checks later of a text, such as the name of a strategy, is left out.
"""

import gzip
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from metagpu.compat import formats, mig_parted, nvidia_file
from metagpu.compat.contract import ConversionContext
from metagpu.compat.keys import fold_case
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError
from tests.compat.rig import converted, offered


class Answer(msgspec.Struct, frozen=True):
    """A file, and what Go's code reads in it."""

    kind: str
    case: str
    text: str
    value: Mapping[str, Any] | None


class Deviation(NamedTuple):
    """A kind of file that is read in another way on purpose; docs/compat.md has its row."""

    there: str
    here: str
    applies: Callable[[Answer], bool]


_FILE: Final = Path(__file__).with_name("go-yaml-answers.jsonl.gz")
ANSWERS: Final = [
    msgspec.json.decode(line, type=Answer)
    for line in gzip.decompress(_FILE.read_bytes()).splitlines()
]


_KEYS: Final = ("intkey", "boolkey", "floatkey", "set")
"""Cases of keys that no program knows."""


def _of(*cases: str, taken: bool | None = None) -> Callable[[Answer], bool]:
    return lambda answer: answer.case in cases and taken in (None, answer.value is not None)


def _ends(case: str, *ends: str) -> Callable[[Answer], bool]:
    return lambda answer: answer.case == case and answer.text.rstrip("\n").endswith(ends)


def _is_slip(answer: Answer) -> bool:
    """Return whether mig-parted takes a null, or an entry that can name no GPU."""
    if answer.kind != "mp" or not answer.value:
        return False
    nulls = r"(devices: \[(~|null|-4|)\]|mig-enabled: (~|null|))\n"
    [first, *_], *_ = answer.value.values()
    no_filter = answer.case == "filter" and first[2] != ""
    found = re.search(nulls, answer.text, re.IGNORECASE) is not None
    return found or no_filter or answer.case == "mneg"


DEVIATIONS: Final = (
    Deviation(
        "`replicas: 1` is refused",
        "a GPU is offered once",
        _ends("replicas", " 1.", " 1_", " 1e0"),
    ),
    Deviation(
        "any number of replicas is taken",
        "70000 at most",
        _ends("replicas", "775807", "1000000", "00000.0"),
    ),
    Deviation(
        "a wrong value of a key without effect here, or a wrong `rename`, is refused",
        "a warning at most",
        _of("init", taken=False),
    ),
    Deviation(
        "a key given twice: the last counts; of several YAML documents, the first",
        "refused with the line, as a slip",
        _of("dup", "two", "mtwo"),
    ),
    Deviation(
        "`timeSlicing: null` is refused, `mps: null` is not", "no sharing by either", _of("tsnull")
    ),
    Deviation(
        "a resource with a capital letter, such as `nvidia.com/GPU`, is refused",
        "a warning: no GPU has this name",
        _of("name", "uppername", "uppername2", taken=False),
    ),
    Deviation(
        "a file that is empty, or has unknown keys alone, means defaults",
        "refused: it may be of any program",
        _of("empty", "comment", "nulldoc", "mempty", "mnull", *_KEYS),
    ),
    Deviation(
        "`mig-enabled: null` is false; an entry that names no GPU, as by -1, is taken",
        "refused, as slips",
        _is_slip,
    ),
    Deviation(
        "a number as `device-filter` is refused",
        "the GPUs of this PCI device",
        _of("filter", taken=False),
    ),
    Deviation(
        "mig-parted's file without `version`, or a layout without entries, is refused",
        "`v1`; no GPU is in the layout",
        _of("mnover", "mentryempty"),
    ),
    Deviation(
        "tags such as `!foo` or `!!binary`, and `=` or `<<` as a value, are texts",
        "refused",
        lambda answer: (
            answer.case in ("unknowntag", "binary")
            or re.search(r": (=|<<)\n", answer.text) is not None
        ),
    ),
    Deviation(
        "`%YAML 1.2`, and numbers from 2^63 on, are refused",
        "taken where the number is possible",
        lambda answer: answer.case == "directive2" or "9223372036854775808" in answer.text,
    ),
)


def read(answer: Answer) -> Mapping[str, Any] | None:
    """Return what metagpu reads in a file, `None` where it is refused."""
    try:
        document = Document(answer.text, "f.yaml")
        files = formats.recognize_files([document])
        layout = next(iter(formats.layout_names(files)), None)
        offered(formats.convert(files, ConversionContext(mig_config=layout)))
        if answer.kind == "mp":
            configs = document.decode(mig_parted.MigPartedFile).mig_configs
            return {
                name: [
                    [
                        entry.devices if isinstance(entry.devices, str) else list(entry.devices),
                        entry.mig_enabled,
                        _filter(entry.device_filter, answer),
                        entry.mig_devices or {},
                    ]
                    for entry in entries
                ]
                for name, entries in configs.items()
            }
        exact = (nvidia_file.NvidiaReplication, nvidia_file.PatternName)
        fold_case(document, nvidia_file.NvidiaFile, nvidia_file.IGNORED_KEYS, exact)
        return _plugin(nvidia_file.read(document))
    except ConfigError:
        return None


def _filter(found: object, answer: Answer) -> object:
    """Return a device filter; Go's text is empty for `null`."""
    return "" if found is None and answer.case == "filter" else found


def _plugin(file: nvidia_file.NvidiaFile) -> Mapping[str, Any]:
    flags = file.flags or nvidia_file.NvidiaFlags()
    plugin = flags.plugin or nvidia_file.NvidiaPluginFlags()
    shared = file.sharing.time_slicing if file.sharing else None
    strategies = plugin.device_list_strategy
    return {
        "migStrategy": flags.mig_strategy,
        "passDeviceSpecs": plugin.pass_device_specs,
        "deviceListStrategy": [strategies] if isinstance(strategies, str) else strategies,
        "policy": plugin.shared_devices_allocation_policy,
        "rename": bool(shared and shared.rename_by_default),
        "fail": shared and shared.fail_requests_greater_than_one,
        "resources": [
            [f"nvidia.com/{each.name.removeprefix('nvidia.com/')}", each.replicas]
            for each in (shared.resources if shared else ())
        ],
    }


def test_files_mean_what_they_mean_to_nvidias_programs() -> None:
    """Each file is taken with the same values, refused alike, or of a kind that is documented."""
    different = [
        (answer.case, answer.text, answer.value, here)
        for answer in ANSWERS
        if not any(deviation.applies(answer) for deviation in DEVIATIONS)
        if (here := read(answer)) != answer.value
    ]
    assert different == []


def test_every_deviation_is_in_the_documentation() -> None:
    """docs/compat.md has its row."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    for deviation in DEVIATIONS:
        assert f"| {deviation.there} | {deviation.here} |" in page


def test_several_strategies_in_one_text_are_all_taken() -> None:
    """As in the variable DEVICE_LIST_STRATEGY, and not as in NVIDIA's file."""
    text = "version: v1\nflags: {plugin: {deviceListStrategy: 'envvar,volume-mounts'}}\n"
    assert converted(text).data["deviceListStrategy"] == ["envvar", "volume-mounts"]
