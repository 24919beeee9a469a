"""HAMi's own example pods, and the page that says what they become."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from metagpu.translation.translate import translate
from metagpu.translation.values import NodeOffer, TranslationSettings
from tests.translation.nodes import limits, node, pod

PAGE: Final = Path(__file__).parents[2] / "docs" / "development" / "compat.md"
GPU, MEMORY, PERCENT, CORES = (
    f"nvidia.com/{key}" for key in ("gpu", "gpumem", "gpumem-percentage", "gpucores")
)
EXAMPLES: Final[Mapping[str, tuple[Mapping[str, int], Mapping[str, str]]]] = {
    "`default_use`": ({GPU: 2, MEMORY: 3000, CORES: 30}, {}),
    "`example` (a Deployment)": ({GPU: 1, MEMORY: 3000}, {}),
    "`dynamic_mig_example`": (
        {GPU: 2, MEMORY: 8000},
        {"nvidia.com/vgpu-mode": "mig", "hami.io/gpu-scheduler-policy": "binpack"},
    ),
    "`dynamic_mig_profile_preference`": (
        {GPU: 1, MEMORY: 20000},
        {"nvidia.com/vgpu-mode": "mig", "nvidia.com/mig-profile-preference": "4g"},
    ),
    "`mig_example`": ({"nvidia.com/mig-3g.20gb": 1}, {}),
    "`use_memory_fraction`": ({GPU: 2, PERCENT: 50, CORES: 30}, {}),
    "`use_sharing_card`, first pod": ({GPU: 1, PERCENT: 40, CORES: 60}, {}),
    "`use_sharing_card`, second pod": ({GPU: 1, PERCENT: 60, CORES: 40}, {}),
    "`use_exclusive_card`": ({GPU: 2, PERCENT: 100, CORES: 100}, {}),
    "`use_as_normal`": ({GPU: 2}, {}),
    "`specify_card_type_to_use`": ({GPU: 2}, {"nvidia.com/use-gputype": "A100,V100"}),
    "`specify_card_type_not_use`": ({GPU: 2}, {"nvidia.com/nouse-gputype": "1080,2080"}),
    "`specify_uuid_to_use`": ({GPU: 1}, {"nvidia.com/use-gpuuuid": "GPU-123456"}),
    "`specify_index_to_use`": ({GPU: 1}, {"nvidia.com/use-gpuindexes": "0,1"}),
    "`specify_uuid_not_use`": ({GPU: 2}, {"nvidia.com/nouse-gpuuuid": "GPU-123456"}),
    "`specify_index_not_use`": ({GPU: 2}, {"nvidia.com/nouse-gpuindexes": "0"}),
    "`default_use_legacy`": ({GPU: 2}, {}),
    "`vllm_cross_vgpu` (a Deployment)": ({GPU: 2, PERCENT: 30, CORES: 30}, {}),
    "`sglang_gpu_sharing` (a Deployment)": ({GPU: 1, MEMORY: 12000, CORES: 30}, {}),
    "`vulkan_example`": ({GPU: 1, MEMORY: 1024, CORES: 30}, {"hami.io/vulkan": "true"}),
    "`specify_scheduling_policy`": (
        {GPU: 1},
        {"hami.io/node-scheduler-policy": "spread", "hami.io/gpu-scheduler-policy": "binpack"},
    ),
}
"""Requests and annotations of the files in HAMi's `examples/nvidia`."""
FILES: Final = """
default_use default_use_legacy dynamic_mig_example dynamic_mig_profile_preference example
mig_example sglang_gpu_sharing specify_card_type_not_use specify_card_type_to_use
specify_index_not_use specify_index_to_use specify_scheduling_policy specify_uuid_not_use
specify_uuid_to_use use_as_normal use_exclusive_card use_memory_fraction use_sharing_card
vllm_cross_vgpu vulkan_example
"""
"""All files of that folder, by their names without `.yaml`, as of November 2026."""
INSTANCES: Final = node("mig", "a100-pcie-40gb", "mig")
FRACTIONS: Final = node("fractions", "a100-40gb")
MPS: Final = node("mps", "a100-40gb", "mps")


def becomes(example: str, offer: NodeOffer) -> str:
    """Return the cell of the page: what an example becomes on a node."""
    amounts, annotations = EXAMPLES[example]
    asked = pod(amounts, annotations=annotations)
    outcome = translate(asked, [offer], TranslationSettings())
    if outcome.impossible:
        return "impossible"
    if not outcome.operations:
        return "untouched"
    return ", ".join(f"`{name}: {count}`" for name, count in limits(asked, outcome).items())


def rows() -> Mapping[str, list[str]]:
    """Return the rows of the page's table, by example."""
    section = PAGE.read_text(encoding="utf-8").partition("## HAMi's pods")[2].partition("\n## ")[0]
    table = [
        word.strip("| ").split(" | ") for word in re.findall(r"^\| `.*$", section, re.MULTILINE)
    ]
    return {name: rest for name, *rest in table}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_page_says_what_an_example_becomes(example: str) -> None:
    """The row has the request, and the resources on nodes of three kinds."""
    amounts, annotations = EXAMPLES[example]
    asks, *cells = rows()[example]
    keys = re.findall(r"`([^`:]+): ([^`]+)`", asks)

    assert cells == [becomes(example, offer) for offer in (INSTANCES, FRACTIONS, MPS)]
    assert dict(keys) == {
        **{name.removeprefix("nvidia.com/"): str(count) for name, count in amounts.items()},
        **{name.partition("/")[2]: value for name, value in annotations.items()},
    }


def test_the_page_has_a_row_for_each_file() -> None:
    """The table has all of HAMi's examples and no other rows, and each is translated here."""
    files = [name.partition("`")[2].partition("`")[0] for name in rows()]

    assert set(files) == set(FILES.split())
    assert rows().keys() == EXAMPLES.keys()


if __name__ == "__main__":  # prints the cells, for whom changes the page
    for name in EXAMPLES:
        print(name, json.dumps([becomes(name, offer) for offer in (INSTANCES, FRACTIONS, MPS)]))  # noqa: T201
