"""The table of GPU models."""

import pytest

from metagpu.sim.machine.gpu_models import CUBE_MESH, GPU_MODELS, GpuModel, NvlinkFabric


def test_the_usual_models_exist() -> None:
    """Models are found by the names that documentation uses."""
    assert set(GPU_MODELS) == {
        *("v100-16gb", "v100-32gb", "t4", "l40s", "a30"),
        *("a100-40gb", "a100-pcie-40gb", "a100-80gb", "h100-80gb", "h200", "b200"),
        *("h200-nvl", "gh200", "gb200", "b300", "gb300", "rtx-pro-4500", "rtx-pro-6000", "thor"),
        "dgx-display",
    }


def test_an_a100_has_forty_gibibytes() -> None:
    """The total is nvidia-smi's number, the base of slot counts."""
    assert GPU_MODELS["a100-40gb"].memory == 40960


@pytest.mark.parametrize("model", GPU_MODELS.values(), ids=GPU_MODELS)
def test_a_model_is_plausible(model: GpuModel) -> None:
    """Little is reserved, only models from Ampere on have MIG, and NVIDIA is the vendor."""
    assert 0 < model.reserved < model.memory / 10 or model.key == "thor"
    assert model.remaps_rows or not model.has_mig
    assert model.pci_device_id & 0xFFFF == 0x10DE
    assert model.pci_device_id >> 16 == model.device


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
        ("a100-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-pcie-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
        ("h200-nvl", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("gh200", "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"),
        ("gb200", "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb"),
        ("b300", "1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb"),
        ("gb300", "1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb"),
        ("rtx-pro-4500", "1g.16gb 1g.16gb+gfx 1g.16gb+me.all 1g.16gb-me 2g.32gb 2g.32gb+gfx"),
        ("thor", ""),
        ("t4", ""),
        ("l40s", ""),
        ("v100-16gb", ""),
    ],
)
def test_profiles_have_the_names_that_nvidia_prints(model: str, names: str) -> None:
    """Memory of model and profile together give the names of NVIDIA's MIG User Guide."""
    gpu_model = GPU_MODELS[model]

    assert [gpu_model.profile_name(profile) for profile in gpu_model.mig_profiles] == names.split()


@pytest.mark.parametrize(
    "model", [model for model in GPU_MODELS.values() if model.has_mig], ids=lambda value: value.key
)
def test_instances_have_no_more_than_their_model(model: GpuModel) -> None:
    """As many instances of a kind as there can be have its memory and engines at most."""
    whole = max(model.mig_profiles, key=lambda sim_profile: sim_profile.memory_slices)

    for profile in model.mig_profiles:
        assert profile.max_count * profile.memory <= model.memory
        assert profile.max_count * profile.compute_slices <= whole.compute_slices
        for own, total in zip(profile.engines, whole.engines, strict=True):
            assert profile.max_count * own <= total


def test_models_are_linked_as_in_real_machines() -> None:
    """Eight V100s are a mesh, later SXM models are on NVSwitches, the others have the PCI bus."""
    fabrics = {key: model.fabric for key, model in GPU_MODELS.items()}

    assert {key for key, fabric in fabrics.items() if fabric is NvlinkFabric.NONE} == {
        *("t4", "l40s", "a30", "a100-pcie-40gb", "h200-nvl", "gh200", "rtx-pro-4500"),
        *("rtx-pro-6000", "thor", "dgx-display"),
    }
    assert {key for key, fabric in fabrics.items() if fabric is NvlinkFabric.CUBE_MESH} == {
        *("v100-16gb", "v100-32gb")
    }


def test_the_mesh_uses_all_links_both_ways() -> None:
    """Each V100 has six NVLinks, and what one end has the other has too."""
    assert [sum(row) for row in CUBE_MESH] == [GPU_MODELS["v100-16gb"].nvlinks] * 8
    assert [list(column) for column in zip(*CUBE_MESH, strict=True)] == [*map(list, CUBE_MESH)]
