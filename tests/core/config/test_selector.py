"""The selection of a pool's GPUs."""

import pytest
from msgspec.structs import replace

from metagpu.core.config.errors import ConfigError
from metagpu.core.config.selector import GpuSelector
from metagpu.core.config.units import Bytes
from metagpu.core.grants.injection import Injection
from tests.core.config.config_texts import selecting
from tests.rigs.build import config, gpu


def test_no_index_is_too_large_to_be_read() -> None:
    """A range is not expanded: a typing error costs no memory."""
    selector = GpuSelector(index="0-99999999999999")

    assert selector.exclusion_reason(gpu(3)) is None


@pytest.mark.parametrize(
    "selector",
    [f'{{index: "{"1," * 9000}1"}}', f"{{product: [{'a100*, ' * 900}{'x' * 20_000}]}}"],
)
def test_a_very_long_selector_is_refused(selector: str) -> None:
    """A key of a selector that no node needs is refused: every GPU is compared with all of it."""
    with pytest.raises(ConfigError, match=r"`(index|product)` has \d+ characters; allowed: 16384"):
        config(selecting(selector))


OTHER = "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
THE_GPU = replace(gpu(2, memory_mib=40960), pci_bus_id="0000:af:00.0", pci_device=0x20B010DE)


@pytest.mark.parametrize(
    "selector",
    [
        GpuSelector(index=2),
        GpuSelector(index="2"),
        GpuSelector(index="0-3"),
        GpuSelector(index="0,2"),
        GpuSelector(index=" 1 - 2 , 7"),
        GpuSelector(index=(0, "2-4")),
        GpuSelector(uuid=THE_GPU.id),
        GpuSelector(uuid=(OTHER, THE_GPU.id)),
        GpuSelector(pci="0000:af:00.0"),
        GpuSelector(pci_device="0x20B010DE"),
        GpuSelector(pci_device=("0x20B210DE", 0x20B010DE)),
        GpuSelector(pci="0000:AF:00.0"),
        GpuSelector(pci="00000000:AF:00.0"),
        GpuSelector(pci=("0000:01:00.0", "0000:af:00.0")),
        GpuSelector(product="NVIDIA A100-SXM4-40GB"),
        GpuSelector(product="*a100*"),
        GpuSelector(product=("*T4*", "nvidia a?00-*")),
        GpuSelector(index=2, uuid=THE_GPU.id, pci="0000:af:00.0", product="*A100*"),
    ],
    ids=str,
)
def test_a_selector_takes_a_gpu_for_which_all_is_true(selector: GpuSelector) -> None:
    """A criterion holds if any of its values matches, in any case for products and bus ids."""
    assert selector.exclusion_reason(THE_GPU) is None


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        (GpuSelector(index="0-1,3"), "index 2 is not in 0-1,3"),
        (GpuSelector(index=(0, "3-5")), "index 2 is not in 0,3-5"),
        (GpuSelector(pci_device="0x20B210DE"), "PCI device id 0x20B010DE is not 0x20B210DE"),
        (
            GpuSelector(pci_device="0x20B010DE:0x134F10DE"),
            "PCI device id 0x20B010DE is not 0x20B010DE:0x134F10DE",
        ),
        (GpuSelector(uuid=OTHER), f"uuid {THE_GPU.id} is not listed"),
        (GpuSelector(pci="0000:01:00.0"), "PCI bus id 0000:af:00.0 is not listed"),
        (GpuSelector(product="*T4*"), "NVIDIA A100-SXM4-40GB does not match *T4*"),
        (GpuSelector(product="A100"), "NVIDIA A100-SXM4-40GB does not match A100; *A100* would"),
        (GpuSelector(index=2, product="*T4*"), "NVIDIA A100-SXM4-40GB does not match *T4*"),
    ],
    ids=str,
)
def test_a_selector_names_the_reason_of_a_refusal(selector: GpuSelector, reason: str) -> None:
    """One criterion that does not hold excludes the GPU, and is named."""
    assert selector.exclusion_reason(THE_GPU) == reason


@pytest.mark.parametrize(
    ("least", "refused"), [("39Gi", False), ("40Gi", False), ("41Gi", True), ("43G", True)]
)
def test_a_selector_wants_enough_memory(least: str, *, refused: bool) -> None:
    """`minMemory` is the least total memory, itself included."""
    read = config(selecting(f"{{minMemory: {least}}}"))
    [(pool, _)] = read.build_backends(Injection())

    assert (pool.exclusion_reason(THE_GPU) is not None) == refused


@pytest.mark.parametrize(
    ("least", "mib"),
    [("41Gi", "41984 MiB"), ("43G", "41007.996 MiB"), ("40G", "38146.973 MiB")],
)
def test_a_selector_reports_memory_as_tables_do(least: str, mib: str) -> None:
    """Too little memory is reported in MiB, with both numbers."""
    [(pool, _)] = config(selecting(f"{{minMemory: {least}}}")).build_backends(Injection())

    too_little = f"40960 MiB of memory are less than {mib}"
    assert pool.exclusion_reason(THE_GPU) in {None, too_little}
    assert (pool.exclusion_reason(THE_GPU) is None) == (least == "40G")
    assert str(pool.gpus) == f"minMemory {mib}"


def test_unknown_memory_is_below_every_minimum() -> None:
    """A GPU whose driver reports no memory is not selected by a minimum, and the reason says so."""
    selector = GpuSelector(min_memory=Bytes.parse("1Gi"))
    reason = selector.exclusion_reason(replace(THE_GPU, memory=None))
    assert reason == "the driver reports no memory"
