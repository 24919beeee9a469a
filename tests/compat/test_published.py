"""The default files that each project publishes, in every case that they allow."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from metagpu.agent.config_source import ConfigSource, Loaded
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.gpu import Gpu
from tests.backends.mig.gpus import mig_gpu
from tests.compat import published
from tests.compat.nvidia_texts import FOUR
from tests.rigs.build import BACKENDS, gpu


def loaded(tmp_path: Path, text: str) -> Mapping[str, Loaded]:
    """Load a file in every case that it allows, by the case's name."""
    file = tmp_path / "published.yaml"
    file.write_text(text)
    return {name: source.load(BACKENDS) for name, source in ConfigSource((file,)).variants()}


def offers(live_loaded: Loaded, *gpus: Gpu) -> dict[str, int]:
    """Count the shares of some GPUs by resource name."""
    layout = build_layout(live_loaded.config, gpus, Injection())
    return {
        resource: sum(share.resource == resource for share in layout.shares)
        for resource in layout.backends
    }


def a100(number: int) -> Gpu:
    """Return an A100 of 40 GB with its PCI id."""
    return replace(mig_gpu(number), pci_device=0x20B010DE)


T4 = replace(gpu(8, name="Tesla T4", memory_mib=15360), pci_device=0x1EB810DE)


def test_every_layout_of_the_gpu_operator_is_read(tmp_path: Path) -> None:
    """All layouts of the operator's default file are usable, without a warning."""
    found = loaded(tmp_path, published.OPERATOR)

    assert [name.removeprefix("layout ") for name in found] == [*published.OPERATOR_LAYOUTS]
    assert {note for other in found.values() for note in other.notes} == set()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("all-disabled", {"nvidia.com/gpu": 1}),
        ("all-enabled", {"nvidia.com/gpu": 1}),
        ("all-1g.5gb", {"nvidia.com/mig-1g.5gb": 14, "nvidia.com/gpu": 1}),
        ("all-1g.5gb.me", {"nvidia.com/mig-1g.5gb.me": 2, "nvidia.com/gpu": 1}),
        ("all-1g.10gb", {"nvidia.com/mig-1g.10gb": 8, "nvidia.com/gpu": 1}),
        (
            "all-balanced",
            {
                "nvidia.com/mig-1g.5gb": 4,
                "nvidia.com/mig-2g.10gb": 2,
                "nvidia.com/mig-3g.20gb": 2,
                "nvidia.com/gpu": 1,
            },
        ),
    ],
)
def test_a_layout_offers_what_the_node_has(
    tmp_path: Path, layout: str, expected: dict[str, int]
) -> None:
    """Two A100 and a T4 offer the layout's instances and the T4; no resource stands at 0.

    A100 in MIG mode are whole GPUs once they have left it.
    """
    found = loaded(tmp_path, published.OPERATOR)[f"layout {layout}"]

    assert offers(found, a100(0), a100(1), T4) == expected


def test_every_layout_of_mig_parteds_example_is_read(tmp_path: Path) -> None:
    """The example's layouts have their numbers of instances on eight A100."""
    found = loaded(tmp_path, published.MIG_PARTED)
    off = [replace(a100(n), mig_enabled=n > 3) for n in range(8)]

    assert offers(found["layout custom-config"], *off) == {
        "nvidia.com/gpu": 4,
        "nvidia.com/mig-1g.5gb": 9,
        "nvidia.com/mig-2g.10gb": 4,
        "nvidia.com/mig-3g.20gb": 3,
    }
    assert {note for other in found.values() for note in other.notes} == set()


def test_metagpus_manifest_is_read(tmp_path: Path) -> None:
    """MetaGPU's manifest of eight objects gives 100 shares of each GPU; notes name the rest."""
    [found] = loaded(tmp_path, published.METAGPU).values()

    assert offers(found, *FOUR) == {"cnvrg.io/metagpu": 400}
    assert sum("is no ConfigMap, and is left out" in note.text for note in found.notes) == 3
    assert found.config.root.pools[0].memory_enforcement.policy == "kill"


def test_hamis_settings_are_read(tmp_path: Path) -> None:
    """HAMi's default settings give ten parts of each GPU; each number beside them has a note."""
    [found] = loaded(tmp_path, published.HAMI).values()

    assert offers(found, *FOUR) == {"nvidia.com/gpu": 40}
    assert not [note for note in found.notes if "unknown key" in note.text]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("default", {"nvidia.com/gpu": 4}),
        ("flags", {"nvidia.com/gpu": 4}),
        ("slices", {"nvidia.com/gpu": 40}),
        ("mps", {"nvidia.com/gpu": 40}),
    ],
)
def test_the_examples_of_nvidias_plugin_are_read(
    tmp_path: Path, example: str, expected: dict[str, int]
) -> None:
    """The README's examples have the numbers of shares that the plugin gives, and no warning."""
    [found] = loaded(tmp_path, yaml.safe_dump(dict(published.NVIDIA[example]))).values()

    assert offers(found, *FOUR) == expected
    assert found.notes == ()
