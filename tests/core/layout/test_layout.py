"""The configuration applied to GPUs: pools, their reasons, and offers."""

import tracemalloc
from collections.abc import Sequence
from typing import ClassVar

import pytest
from msgspec.structs import replace

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.checks import check_layout
from metagpu.core.layout.layout import PoolAssignment, build_layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import Api, RequestRule
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.state.facts import GpusFound, SharesClaimed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.device_plugin import DeviceList
from metagpu.plugins.kubelet.messages import check_list_size
from tests.backends.mig.gpus import instance, mig_gpu
from tests.rigs.build import BACKENDS, METAGPU, after, config, gpu, layout_of, offered, pool

T4 = "Tesla T4"
TWO_POOLS = """\
version: metagpu/v1
pools:
  - {name: t4, gpus: {product: "*T4*"}, backends: [{backend: fraction, sharesPerGpu: 2}]}
  - {name: first, gpus: {index: 0-1}, backends: [{backend: fraction, sharesPerGpu: 3}]}
"""


def test_a_gpu_is_in_the_first_pool_that_selects_it() -> None:
    """Each GPU is assigned once, in the order of pools, and the assignment says why."""
    gpus = [gpu(0), gpu(1, name=T4), gpu(2)]
    layout = layout_of(*gpus, text=TWO_POOLS)

    assert layout.pool_assignments == (
        PoolAssignment(gpus[0], "first", "matches index 0-1"),
        PoolAssignment(gpus[1], "t4", "matches product *T4*"),
        PoolAssignment(
            gpus[2],
            None,
            "no pool selects it (t4: NVIDIA A100-SXM4-40GB does not match *T4*; "
            "first: index 2 is not in 0-1)",
        ),
    )


class _CountedFraction(FractionBackend):
    """Fractions that count how often the shares of a GPU were made."""

    made: ClassVar[int] = 0

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Make the shares, and count."""
        type(self).made += 1
        return super().shares(gpu)


@pytest.mark.parametrize(
    ("size", "count"), [("sharesPerGpu: 70000", 140000), ("memoryUnit: 1Mi", 70001)]
)
def test_too_many_shares_are_refused_before_they_are_made(size: str, count: int) -> None:
    """The GPUs' shares are counted, and none is made: thousands would stay in the heap."""
    _CountedFraction.made = 0
    large = [gpu(n, memory_mib=300_000) for n in range(8)]
    read = parse(pool(size), "f", {"fraction": _CountedFraction})

    check_layout(read)
    with pytest.raises(ConfigError, match=f"would have {count} shares or more; the kubelet"):
        build_layout(read, large, Injection())
    assert _CountedFraction.made == 0


def test_the_shares_of_all_resources_are_limited() -> None:
    """Many resources of many shares each are refused as a whole."""
    backends = "".join(
        f"      - {{backend: fraction, resource: a.b/c{n}, sharesPerGpu: 60000}}\n"
        for n in range(6)
    )
    text = f"version: metagpu/v1\npools:\n  - name: all\n    backends:\n{backends}"

    with pytest.raises(ConfigError, match="the node would have more than 280000 shares"):
        layout_of(gpu(0), text=text)


def test_a_pool_of_all_gpus_has_its_reason() -> None:
    """A pool without a selector takes every GPU."""
    assert layout_of(gpu(0)).pool_assignments == (PoolAssignment(gpu(0), "all", "all GPUs"),)


@pytest.mark.parametrize("name", ["DGX Display", "NVIDIA DGX Display"])
def test_a_display_card_is_in_no_pool(name: str) -> None:
    """A card that drives the screen of a DGX Station offers nothing, whatever a pool selects."""
    text = pool().replace(
        "- name: all", "- {name: own, gpus: {index: 1}, backends: []}\n  - name: all"
    )
    layout = layout_of(gpu(0), card := gpu(1, name=name, memory_mib=4096), text=text)

    assert {share.gpu for share in layout.shares} == {gpu(0).id}
    assert layout.pool_assignments[1] == PoolAssignment(
        card, None, "no pool selects it (own: it is a display card; all: it is a display card)"
    )
    assert layout.unused_pools == {"own": "index 0 is not in 1; it is a display card"}


def test_a_gpu_in_no_pool_offers_nothing() -> None:
    """A GPU outside all pools has no shares, and no resource is on offer for it."""
    layout = layout_of(gpu(2), text=TWO_POOLS)

    assert layout.shares == ()
    assert layout.offer_fact.resources == ()


def test_the_resources_of_pools_with_gpus_are_on_offer() -> None:
    """A pool without a GPU offers no resource at 0; without any GPU known, all pools do."""
    text = TWO_POOLS.replace("sharesPerGpu: 2", "sharesPerGpu: 2, resource: a.b/t4")

    assert layout_of(gpu(0), text=text).offer_fact.resources == (METAGPU,)
    assert layout_of(gpu(0), gpu(1, name=T4), text=text).offer_fact.resources == ("a.b/t4", METAGPU)
    assert layout_of(text=text).offer_fact.resources == ("a.b/t4", METAGPU)


def test_a_gpu_without_shares_has_a_reason() -> None:
    """A GPU without shares is in its pool all the same, with the reason."""
    mig = replace(gpu(0), mig_enabled=True)
    small = gpu(1, memory_mib=512)
    layout = layout_of(mig, small, text=pool("memoryUnit: 1Gi"))

    assert [assignment.reason for assignment in layout.pool_assignments] == [
        "all GPUs, but no shares: MIG mode is on",
        "all GPUs, but no shares: a share is 1024 MiB, and the GPU has 512",
    ]
    assert layout.shares == ()


def test_a_pool_without_backends_keeps_its_gpus() -> None:
    """GPUs of a pool without backends are in no other pool, and have no shares."""
    text = pool().replace(
        "- name: all", "- {name: kept, gpus: {index: 0}, backends: []}\n  - name: all"
    )
    layout = layout_of(gpu(0), gpu(1), text=text)

    assert {share.gpu for share in layout.shares} == {gpu(1).id}
    assert (
        layout.pool_assignments[0].reason
        == "matches index 0, but no shares: the pool has no backends"
    )


def test_a_pool_without_backends_may_have_a_reason() -> None:
    """An operator reads the configuration's reason at the pool's GPUs."""
    kept = "- {name: kept, gpus: {index: 0}, backends: [], reason: it is on loan}\n  - name: all"
    layout = layout_of(gpu(0), gpu(1), text=pool().replace("- name: all", kept))

    assert layout.pool_assignments[0].reason == "matches index 0, but no shares: it is on loan"


def test_pools_without_a_gpu_are_reported() -> None:
    """A pool that selects no GPU is reported with the reason, such as a missing star."""
    text = pool().replace(
        "- name: all",
        "- {name: big, gpus: {product: A100}, backends: []}\n"
        "  - {name: far, gpus: {index: 7}, backends: []}\n"
        "  - {name: first, gpus: all, backends: []}\n"
        "  - name: all",
    )

    assert layout_of(gpu(0), gpu(1), text=text).unused_pools == {
        "big": f"{gpu(0).name} does not match A100; *A100* would",
        "far": "index 0 is not in 7; index 1 is not in 7",
        "all": "a pool before it has the GPUs that it selects",
    }
    many = layout_of(*map(gpu, range(5)), text=text).unused_pools
    assert (
        many["far"] == "index 0 is not in 7; index 1 is not in 7; index 2 is not in 7; and 2 more"
    )
    assert layout_of(gpu(0)).unused_pools == layout_of().unused_pools == {}


def test_duplicate_ids_are_found_without_a_gpu() -> None:
    """A rehearsal finds ids that would be offered twice before there is a GPU."""
    check_layout(config())
    with pytest.raises(ConfigError) as caught:
        check_layout(config(pool() + "      - {backend: fraction, resource: example.com/b}\n"))
    assert str(caught.value) == (
        "test.yaml: 6: pools[0].backends[1]: each GPU-UUID::m00 would be offered twice, again as "
        "example.com/b; use each backend once in a pool"
    )


def test_two_pools_of_one_resource_share_gpus_in_their_own_way() -> None:
    """Each pool shares its own GPUs; the first pool's backend places requests."""
    gpus = [gpu(0), gpu(1, name=T4)]
    layout = layout_of(*gpus, text=TWO_POOLS)

    assert [(share.gpu, share.number) for share in layout.shares] == [
        *[(gpus[0].id, number) for number in range(3)],
        *[(gpus[1].id, number) for number in range(2)],
    ]
    assert [len(layout.backends[METAGPU].shares(gpu)) for gpu in gpus] == [2, 2]


def test_the_node_injects_as_configured() -> None:
    """The backends get the host's device nodes and the configured strategies."""
    text = pool() + "passDeviceSpecs: false\n"
    layout = layout_of(gpu(0), text=text, injection=Injection(dev_root="/host"))

    backend = layout.backends[METAGPU]
    assert isinstance(backend, FractionBackend)
    assert backend.injection == Injection(pass_device_specs=False, dev_root="/host")


def test_ids_are_unique_and_short() -> None:
    """No id stands twice on a node, none is longer than 63 characters (case 27)."""
    layout = layout_of(*[gpu(index) for index in range(16)], text=pool("sharesPerGpu: 1000"))
    ids = [share.id for share in layout.shares]

    assert len(set(ids)) == 16_000
    assert max(map(len, ids)) == len(gpu(0).id) + len("::m999") <= 63


def test_ids_are_the_same_each_time() -> None:
    """The same GPUs in another order, with others beside them, have the same ids (case 27)."""
    one = {share.id for share in layout_of(gpu(3), gpu(1)).shares}
    two = {share.id for share in layout_of(gpu(1), gpu(2), gpu(3)).shares}

    assert one <= two


def test_an_id_too_long_is_refused() -> None:
    """An id that the kubelet's limit does not admit is named before anything is offered."""
    endless = replace(gpu(0), id=GpuId(gpu(0).id + "x" * 20))

    with pytest.raises(
        ConfigError, match=r"^test.yaml: the share id GPU-\S+::m00 has more than 63"
    ):
        layout_of(endless)


def test_an_id_twice_is_refused() -> None:
    """Two backends of one kind in a pool would offer each share twice."""
    text = pool() + "      - {backend: fraction, resource: example.com/b}\n"

    with pytest.raises(ConfigError) as caught:
        layout_of(gpu(0), text=text)
    assert str(caught.value) == (
        "test.yaml: each GPU-UUID::m00 would be offered twice, again as example.com/b; use each "
        "backend once in a pool"
    )


def test_no_gpu_is_a_layout_too() -> None:
    """A node without GPUs offers its resources with nothing in them."""
    layout = build_layout(parse(pool(), "f", BACKENDS), (), Injection())

    assert (layout.pool_assignments, layout.shares) == ((), ())
    assert layout.offer_fact.resources == (METAGPU,)
    assert config().options.keys() == {"all"}


MIG_AND_REST = """\
version: metagpu/v1
pools:
  - {name: mig, gpus: {index: 0-1}, backends: [{backend: mig, layout: {1g.5gb: 7}}]}
  - {name: rest, backends: [{backend: fraction, memoryUnit: 30Gi}]}
"""


def test_a_pool_that_none_of_its_gpus_can_have_is_a_misfit() -> None:
    """The misfit names GPUs and reason once; a pool that one GPU can have is no complete one."""
    a100, h100 = mig_gpu(0), mig_gpu(1, "h100-80gb")

    [some] = layout_of(a100, h100, text=MIG_AND_REST).misfits
    assert (some.pool, some.gpus, some.complete) == (0, (h100,), False)
    assert str(some).startswith("GPU 1: the layout 7x1g.5gb does not fit: the GPU has no profile 1")

    [none] = layout_of(h100, text=MIG_AND_REST).misfits
    assert (none.gpus, none.complete) == ((h100,), True)
    [small] = layout_of(gpu(2, memory_mib=16_000), text=MIG_AND_REST).misfits
    assert str(small) == "GPU 2: a share is 30720 MiB, and the GPU has 16000"


def test_a_backend_that_serves_makes_up_for_one_that_does_not_fit() -> None:
    """A pool of several backends is a misfit only where none of them has a share."""
    text = MIG_AND_REST.replace("7}}]", "7}}, {backend: fraction}]")

    assert layout_of(mig_gpu(0, "h100-80gb"), text=text).misfits == ()


def test_nothing_of_a_pool_with_dra_is_held_back_or_taken_in_turns() -> None:
    """The scheduler counts by GPU, and counters keep backends apart: every share is on offer."""
    text = """\
version: metagpu/v1
pools:
  - name: claims
    gpus: {index: 0}
    api: dra
    backends:
      - {backend: mps, resource: example.com/mps, maxClients: 3}
      - {backend: timeslice, replicas: 2}
  - {name: pods, backends: [{backend: mps}]}
"""
    layout = layout_of(gpu(0), gpu(1), text=text)
    offers = after(GpusFound((gpu(0), gpu(1)), at=0), layout.offer_fact)

    assert layout.gpus_in_turns(config(text)) == [[gpu(1).id]]
    assert {name: (offer.api, offer.rule.requests) for name, offer in offers.offers.items()} == {
        "example.com/mps": (Api.DRA, RequestRule.ANY),
        "nvidia.com/gpu.shared": (Api.DRA, RequestRule.ANY),
        "nvidia.com/gpu.mps": (Api.DEVICE_PLUGIN, RequestRule.ONE_GPU),
    }
    assert offers.offers[ResourceName("example.com/mps")].rule.max_containers == {gpu(0).id: 3}
    assert [state.api for state in offers.gpus.values()] == [Api.DRA, Api.DEVICE_PLUGIN]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("backend: whole", "resource: example.com/it"),
        ("backend: fraction", "resource: example.com/it"),
        ("backend: timeslice, replicas: 2", "resource: example.com/it"),
        ("backend: mps", "resource: example.com/it"),
        ("backend: mig, profiles: [2g.10gb]", "resource: example.com/it"),
        (
            "backend: mig, profiles: [1g.5gb, 2g.10gb]",
            "resource: {1g.5gb: example.com/one, 2g.10gb: example.com/it}",
        ),
        ("backend: mig, layout: {2g.10gb: 3}", "resource: example.com/it"),
        ("backend: mig, existing: true", "resource: {2g.10gb: example.com/it}"),
        ("backend: mig, existing: true", "resource: {1g.5gb: a.b/c, 2g.10gb: example.com/it}"),
    ],
)
def test_a_node_has_each_backend_by_both_apis(options: str, named: str) -> None:
    """A resource has one API, and every backend takes the other name that the refusal asks for."""
    text = """\
version: metagpu/v1
pools:
  - {{name: limits, gpus: {{index: 0}}, backends: [{{{options}}}]}}
  - {{name: claims, api: dra, backends: [{{{options}{named}}}]}}
"""
    gpus = (mig_gpu(0), mig_gpu(1)) if "mig" in options else (gpu(0), gpu(1))
    made = (
        {other.id: [instance(other, "2g.10gb@0")] for other in gpus}
        if "existing" in options
        else {}
    )
    with pytest.raises(ConfigError, match="another `resource`"):
        build_layout(config(text.format(options=options, named="")), gpus, Injection(), made)

    both = config(text.format(options=options, named=f", {named}"))
    layout = build_layout(both, gpus, Injection(), made)
    snapshot = after(GpusFound(gpus, at=0), layout.offer_fact)
    assert [state.api for state in snapshot.gpus.values()] == [Api.DEVICE_PLUGIN, Api.DRA]
    assert all(state.shares for state in snapshot.gpus.values())
    assert snapshot.offers[ResourceName("example.com/it")].api is Api.DRA


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
    profiles = list(dict.fromkeys(profile_of(share.id) for share in layout.shares))
    assert profiles == ["1g.5gb", "2g.10gb", "3g.20gb"], "from small to large"

    backend = layout.backends[layout.shares[0].resource]
    places = [share for share in layout.shares if profile_of(share.id) == "1g.5gb"]
    for number, place in enumerate(places):
        unavailable = conflicting_shares(snapshot.gpus[of.id])
        free = [
            share for share in plain if share in places[number:] and share.id not in unavailable
        ]
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
    with pytest.raises(ConfigError, match="would have both APIs"):
        build_layout(config(EXISTING), gpus, Injection(), made)


def test_a_gpu_without_mig_keeps_its_order() -> None:
    """Equal shares need no order."""
    text = TEXT.format("dra").replace("mig, profiles: [1g.5gb, 3g.20gb, 2g.10gb]", "fraction")
    assert [share.number for share in layout_of(gpu(0), text=text).shares] == list(range(100))


def test_thousands_of_shares_take_memory_once_and_leave_none() -> None:
    """A reload takes little more than what is in force before and after, and then that is free."""
    gpus, registry, lists = [gpu(0), gpu(1)], Registry(), DeviceList(METAGPU)
    registry.apply(GpusFound(tuple(gpus), at=0))

    def reload(shares: int) -> tuple[int, int]:
        """Put so many shares of each GPU in force; return the bytes taken now and at most."""
        tracemalloc.reset_peak()
        wanted = config(pool(f"sharesPerGpu: {shares}"))
        check_layout(wanted)
        layout = build_layout(wanted, gpus, Injection())
        check_list_size(layout, "")
        registry.apply(layout.offer_fact)
        lists.encode(lists.view(registry.snapshot))
        del layout, wanted
        return tracemalloc.get_traced_memory()

    reload(5000)
    tracemalloc.start()
    try:
        reload(10)
        few, _ = reload(10)
        many, peak = reload(5000)
        assert peak - few < 1.3 * (many - few)
        left, peak = reload(10)
        assert peak - few < 1.1 * (many - few)
        assert left - few < 0.02 * (many - few)
    finally:
        tracemalloc.stop()
