"""Cordons by annotations of the Node, beside those of the node's operator."""

import time
from pathlib import Path

from metagpu.core.model.shares import CordonSource
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned
from metagpu.plugins.cluster.settings import CORDON_PREFIX, Feature
from tests.plugins.cluster.rig import NODE, QUICK, Scene, cluster_at_work
from tests.rigs.build import gpu
from tests.rigs.waiting import becomes


def annotate(it: Scene, **values: str | None) -> None:
    """Write annotations of the Node, as a person does; `_` stands for `-`."""
    keys = {f"{CORDON_PREFIX}{key.removeprefix('n')}": value for key, value in values.items()}
    patch = {"metadata": {"annotations": keys}}
    it.server.store.merge(("nodes", "", NODE), patch, status=False, manager="kubectl")


def reasons(it: Scene) -> list[str | None]:
    """Return why each GPU is cordoned by the Node."""
    states = it.registry.snapshot.gpus.values()
    found = [state.cordons.get(CordonSource.NODE) for state in states]
    return [None if pause is None else pause.reason for pause in found]


async def test_annotations_cordon_gpus_and_their_removal_ends_that(tmp_path: Path) -> None:
    """A GPU is cordoned while its annotation is there; each source lifts its own cordon."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as it:
        it.offer()
        annotate(it, n1="replace  the fan", n7="no such GPU")
        await becomes(lambda: reasons(it) == [None, "replace the fan"])
        it.registry.apply(GpuCordoned(gpu(1).id, "mine", time.time()))
        annotate(it, n1="", n0="both")
        await becomes(lambda: reasons(it) == ["both", "no reason was given"])
        annotate(it, n1=None, n0=None)
        await becomes(lambda: reasons(it) == [None, None])
        assert [state.cordon is not None for state in it.registry.snapshot.gpus.values()] == [
            *(False, True)
        ]
        it.registry.apply(GpuUncordoned(gpu(1).id, time.time()))
        assert not any(state.cordon for state in it.registry.snapshot.gpus.values())


async def test_a_gpu_that_comes_later_is_cordoned_too(tmp_path: Path) -> None:
    """An annotation that is older than the GPU cordons it as soon as it is found."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as it:
        annotate(it, n0="early")
        it.offer()
        await becomes(lambda: reasons(it) == ["early", None])


async def test_without_the_feature_annotations_mean_nothing(tmp_path: Path) -> None:
    """A daemon without the feature follows no annotation."""
    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as it:
        annotate(it, n0="ignored")
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        assert reasons(it) == [None, None]
