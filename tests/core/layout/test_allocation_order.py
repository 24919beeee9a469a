"""The order of MIG devices: the scheduler's first fit fills a GPU as the planner would."""

import pytest

from metagpu.core.availability.conflict import conflicts_of
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import Api
from metagpu.core.state.facts import GpusFound, SharesClaimed
from tests.backends.mig.gpus import instance, mig_gpu
from tests.rigs.build import after, config, gpu, layout_of, offered

TEXT = """\
version: metagpu/v1
pools:
  - name: all
    api: {}
    backends: [{{backend: mig, profiles: [1g.5gb, 3g.20gb, 2g.10gb]}}]
"""


def test_places_come_as_the_planner_would_fill_an_idle_gpu() -> None:
    """First fit takes what the planner takes, one after the other; profiles keep their order."""
    of, text = mig_gpu(0), TEXT.format("dra")
    layout, snapshot = offered(of, text=text)
    plain = layout_of(of, text=TEXT.format("device-plugin")).shares
    assert sorted(map(str, layout.shares)) == sorted(map(str, plain))
    profiles = list(dict.fromkeys(profile_of(it.id) for it in layout.shares))
    assert profiles == ["1g.5gb", "2g.10gb", "3g.20gb"], "from small to large"

    backend = layout.backends[layout.shares[0].resource]
    places = [it for it in layout.shares if profile_of(it.id) == "1g.5gb"]
    for number, place in enumerate(places):
        unavailable = conflicts_of(snapshot.gpus[of.id]).all
        free = [it for it in plain if it in places[number:] and it.id not in unavailable]
        assert backend.prefer(free, (), 1, snapshot) == [place]
        snapshot = after(SharesClaimed((place,), at=0), since=snapshot)
    assert places[0].id.endswith("1g.5gb@3")


EXISTING = """\
version: metagpu/v1
pools:
  - {name: a, gpus: {index: 0}, api: dra, backends: [{backend: mig, existing: true}]}
  - {name: b, backends: [{backend: mig, existing: true}]}
"""


def test_the_resources_of_existing_instances_have_the_api_of_their_pool() -> None:
    """Their names follow from the instances; one name by both APIs is refused."""
    gpus = (mig_gpu(0), mig_gpu(1))
    made = {gpus[0].id: [instance(gpus[0], "2g.10gb@0")]}
    layout = build_layout(config(EXISTING), gpus, Injection(), made)
    snapshot = after(GpusFound(gpus, at=0), layout.offer_fact)
    assert snapshot.gpus[gpus[0].id].api is Api.DRA

    made[gpus[1].id] = [instance(gpus[1], "2g.10gb@2")]
    with pytest.raises(ConfigError, match="would be offered by pools of both APIs"):
        build_layout(config(EXISTING), gpus, Injection(), made)


def test_a_gpu_without_mig_keeps_its_order() -> None:
    """Equal shares need no order."""
    text = TEXT.format("dra").replace("mig, profiles: [1g.5gb, 3g.20gb, 2g.10gb]", "fraction")
    assert [it.number for it in layout_of(gpu(0), text=text).shares] == list(range(100))
