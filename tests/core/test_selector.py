"""Which GPUs a pool takes."""

import pytest
from msgspec.structs import replace

from metagpu.core.injection import Injection
from metagpu.core.selector import Selector
from tests.build import config, gpu
from tests.core.config_texts import selecting


def test_no_index_is_too_large_to_be_read() -> None:
    """A range is not counted out: a typing error costs no memory."""
    selector = Selector(index="0-99999999999999")

    assert selector.refusal(gpu(3)) is None


OTHER = "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
THE_GPU = replace(gpu(2, memory_mib=40960), pci_bus_id="0000:af:00.0", pci_device=0x20B010DE)


@pytest.mark.parametrize(
    "selector",
    [
        Selector(index=2),
        Selector(index="2"),
        Selector(index="0-3"),
        Selector(index="0,2"),
        Selector(index=" 1 - 2 , 7"),
        Selector(index=(0, "2-4")),
        Selector(uuid=THE_GPU.id),
        Selector(uuid=(OTHER, THE_GPU.id)),
        Selector(pci="0000:af:00.0"),
        Selector(pci_device="0x20B010DE"),
        Selector(pci_device=("0x20B210DE", 0x20B010DE)),
        Selector(pci="0000:AF:00.0"),
        Selector(pci="00000000:AF:00.0"),
        Selector(pci=("0000:01:00.0", "0000:af:00.0")),
        Selector(product="NVIDIA A100-SXM4-40GB"),
        Selector(product="*a100*"),
        Selector(product=("*T4*", "nvidia a?00-*")),
        Selector(index=2, uuid=THE_GPU.id, pci="0000:af:00.0", product="*A100*"),
    ],
    ids=str,
)
def test_a_selector_takes_a_gpu_for_which_all_is_true(selector: Selector) -> None:
    """A criterion holds if any of its values does, in any case for products and bus ids."""
    assert selector.refusal(THE_GPU) is None


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        (Selector(index="0-1,3"), "index 2 is not in 0-1,3"),
        (Selector(index=(0, "3-5")), "index 2 is not in 0,3-5"),
        (Selector(pci_device="0x20B210DE"), "PCI device id 0x20B010DE is not 0x20B210DE"),
        (Selector(uuid=OTHER), f"uuid {THE_GPU.id} is not listed"),
        (Selector(pci="0000:01:00.0"), "PCI bus id 0000:af:00.0 is not listed"),
        (Selector(product="*T4*"), "NVIDIA A100-SXM4-40GB does not match *T4*"),
        (Selector(product="A100"), "NVIDIA A100-SXM4-40GB does not match A100; *A100* would"),
        (Selector(index=2, product="*T4*"), "NVIDIA A100-SXM4-40GB does not match *T4*"),
    ],
    ids=str,
)
def test_a_selector_says_why_it_refuses(selector: Selector, reason: str) -> None:
    """One criterion that does not hold is enough, and is named."""
    assert selector.refusal(THE_GPU) == reason


@pytest.mark.parametrize(
    ("least", "refused"), [("39Gi", False), ("40Gi", False), ("41Gi", True), ("43G", True)]
)
def test_a_selector_wants_enough_memory(least: str, *, refused: bool) -> None:
    """`minMemory` is the least total memory, itself included."""
    read = config(selecting(f"{{minMemory: {least}}}"))
    [(pool, _)] = read.pools(Injection())

    assert (pool.refusal(THE_GPU) is not None) == refused


@pytest.mark.parametrize(
    ("least", "told"), [("41Gi", "41984 MiB"), ("43G", "41007.996 MiB"), ("40G", "38146.973 MiB")]
)
def test_a_selector_tells_memory_as_tables_do(least: str, told: str) -> None:
    """Too little memory is told in MiB, both numbers, and so is what a GPU has enough of."""
    [(pool, _)] = config(selecting(f"{{minMemory: {least}}}")).pools(Injection())

    too_little = f"40960 MiB of memory are less than {told}"
    assert pool.refusal(THE_GPU) in {None, too_little}
    assert (pool.refusal(THE_GPU) is None) == (least == "40G")
    assert str(pool.gpus) == f"minMemory {told}"
