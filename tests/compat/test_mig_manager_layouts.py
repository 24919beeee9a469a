"""Layouts that the MIG manager makes from the GPUs of a node without a file.

The expected ones are those of mig-parted 0.15 (`pkg/mig/builder`, read 2026-11-29): its table of
real GPUs, and what it builds of them.
"""

from typing import Any

import pytest

from metagpu.compat.mig_parted import make_layouts
from metagpu.core.model.gpu import Gpu, mig_models
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import gpu

PROFILES: dict[str, dict[str, int]] = {
    "a30": {"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1},
    "a100-40gb": {
        "1g.5gb": 7,
        "1g.5gb+me": 1,
        "1g.10gb": 4,
        "2g.10gb": 3,
        "3g.20gb": 2,
        "4g.20gb": 1,
        "7g.40gb": 1,
    },
    "a100-80gb": {
        "1g.10gb": 7,
        "1g.10gb+me": 1,
        "1g.20gb": 4,
        "2g.20gb": 3,
        "3g.40gb": 2,
        "4g.40gb": 1,
        "7g.80gb": 1,
    },
    "h100-80gb": {
        "1g.10gb": 7,
        "1g.10gb+me": 1,
        "1g.20gb": 4,
        "2g.20gb": 3,
        "3g.40gb": 2,
        "4g.40gb": 1,
        "7g.80gb": 1,
    },
    "h200": {
        "1g.18gb": 7,
        "1g.18gb+me": 1,
        "1g.35gb": 4,
        "2g.35gb": 3,
        "3g.71gb": 2,
        "4g.71gb": 1,
        "7g.141gb": 1,
    },
    "b200": {
        "1g.23gb": 7,
        "1g.23gb+me": 1,
        "1g.45gb": 4,
        "2g.45gb": 3,
        "3g.90gb": 2,
        "4g.90gb": 1,
        "7g.180gb": 1,
    },
    "rtx-pro-6000": {
        "1g.24gb": 4,
        "1g.24gb+me": 1,
        "1g.24gb+gfx": 4,
        "1g.24gb+me.all": 1,
        "1g.24gb-me": 4,
        "2g.48gb": 2,
        "2g.48gb+gfx": 2,
        "2g.48gb+me.all": 1,
        "2g.48gb-me": 2,
        "4g.96gb": 1,
        "4g.96gb+gfx": 1,
    },
}
"""The number of instances that fit on a GPU, by profile."""
BALANCED: dict[str, dict[str, int]] = {
    "a30": {"1g.6gb": 2, "2g.12gb": 1},
    "a100-40gb": {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
    "a100-80gb": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    "h100-80gb": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    "h200": {"1g.18gb": 2, "2g.35gb": 1, "3g.71gb": 1},
    "b200": {"1g.23gb": 2, "2g.45gb": 1, "3g.90gb": 1},
    "rtx-pro-6000": {"1g.24gb": 2, "2g.48gb": 1},
}


def layouts(*gpus: Gpu) -> dict[str, Any]:
    """Return the layouts of a node with these GPUs."""
    found: dict[str, Any] = make_layouts(mig_models(gpus)).data["mig-configs"]
    return found


def on(instances: dict[str, int], *filters: str) -> dict[str, Any]:
    """Return an entry with instances, for all GPUs or those of some PCI ids."""
    named = {"device-filter": [*filters]} if filters else {}
    return {**named, "devices": "all", "mig-enabled": True, "mig-devices": instances}


@pytest.mark.parametrize("model", PROFILES)
def test_layouts_of_one_model(model: str) -> None:
    """Each profile has a layout with as many instances as fit, `+` being `.` in its name."""
    assert layouts(mig_gpu(0, model), mig_gpu(1, model), gpu(2)) == {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        "all-enabled": [on({})],
        "all-balanced": [on(BALANCED[model])],
        **{f"all-{name.replace('+', '.')}": [on({name: n})] for name, n in PROFILES[model].items()},
    }


def test_layouts_of_several_models() -> None:
    """An entry names its models; models with as many instances of a profile share one."""
    a100, h100, a30 = "0x20B210DE", "0x233010DE", "0x20B710DE"
    found = layouts(mig_gpu(0, "h100-80gb"), mig_gpu(1, "a100-80gb"), mig_gpu(2, "a30"))

    assert found["all-1g.10gb"] == [on({"1g.10gb": 7}, a100, h100)]
    assert found["all-1g.6gb.me"] == [on({"1g.6gb+me": 1}, a30)]
    assert found["all-balanced"] == [
        on(BALANCED["a100-80gb"], a100),
        on(BALANCED["a30"], a30),
        on(BALANCED["h100-80gb"], h100),
    ]
    forty = layouts(mig_gpu(0, "a100-40gb"), mig_gpu(1, "a100-80gb"))
    assert forty["all-1g.10gb"] == [
        on({"1g.10gb": 4}, "0x20B010DE"),
        on({"1g.10gb": 7}, "0x20B210DE"),
    ]


def test_a_node_without_mig_has_nothing_to_choose() -> None:
    """Without a GPU that supports MIG, MIG mode can only be off."""
    assert layouts(gpu(0)).keys() == {"all-disabled"}
