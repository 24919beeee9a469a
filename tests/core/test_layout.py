"""The configuration over the GPUs: which GPU is where, why, and what it offers."""

import pytest
from msgspec.structs import replace

from metagpu.backends.fraction import FractionBackend
from metagpu.core.config import parse
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import GpuId
from metagpu.core.injection import Injection
from metagpu.core.layout import Assignment, lay_out, rehearse
from tests.build import BACKENDS, METAGPU, config, gpu, laid_out, pool

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
    layout = laid_out(*gpus, text=TWO_POOLS)

    assert layout.assignments == (
        Assignment(gpus[0], "first", "matches index 0-1"),
        Assignment(gpus[1], "t4", "matches product *T4*"),
        Assignment(
            gpus[2],
            None,
            "no pool selects it (t4: NVIDIA A100-SXM4-40GB does not match *T4*; "
            "first: index 2 is not in 0-1)",
        ),
    )


def test_a_pool_of_all_says_so() -> None:
    """A pool without a selector takes every GPU."""
    assert laid_out(gpu(0)).assignments == (Assignment(gpu(0), "all", "all GPUs"),)


def test_a_gpu_in_no_pool_offers_nothing() -> None:
    """What no pool selects is not cut; the resource is on offer all the same."""
    layout = laid_out(gpu(2), text=TWO_POOLS)

    assert layout.shares == ()
    assert layout.offered.resources == (METAGPU,)


def test_a_gpu_of_which_nothing_is_cut_says_why() -> None:
    """A GPU that its pool cannot cut is in the pool all the same, and the reason is told."""
    mig = replace(gpu(0), mig_enabled=True)
    small = gpu(1, memory_mib=512)
    layout = laid_out(mig, small, text=pool("memoryUnit: 1Gi"))

    assert [assignment.why for assignment in layout.assignments] == [
        "all GPUs, but nothing is cut: MIG mode is on",
        "all GPUs, but nothing is cut: a share is 1024 MiB, and the GPU has 512",
    ]
    assert layout.shares == ()


def test_a_pool_without_backends_keeps_its_gpus() -> None:
    """A pool of no backends takes its GPUs from all others and offers them to nobody."""
    text = pool().replace(
        "- name: all", "- {name: kept, gpus: {index: 0}, backends: []}\n  - name: all"
    )
    layout = laid_out(gpu(0), gpu(1), text=text)

    assert {share.gpu for share in layout.shares} == {gpu(1).id}
    assert (
        layout.assignments[0].why == "matches index 0, but nothing is cut: the pool has no backends"
    )


def test_a_pool_without_backends_may_say_why() -> None:
    """The configuration's reason is what an operator reads of its GPUs."""
    kept = "- {name: kept, gpus: {index: 0}, backends: [], reason: it is on loan}\n  - name: all"
    layout = laid_out(gpu(0), gpu(1), text=pool().replace("- name: all", kept))

    assert layout.assignments[0].why == "matches index 0, but nothing is cut: it is on loan"


def test_pools_without_a_gpu_are_told() -> None:
    """A pool that selects nothing here says why, be it by a star that is missing."""
    text = pool().replace(
        "- name: all",
        "- {name: big, gpus: {product: A100}, backends: []}\n"
        "  - {name: far, gpus: {index: 7}, backends: []}\n"
        "  - {name: first, gpus: all, backends: []}\n"
        "  - name: all",
    )

    assert laid_out(gpu(0), gpu(1), text=text).unused == {
        "big": f"{gpu(0).name} does not match A100; *A100* would",
        "far": "index 0 is not in 7; index 1 is not in 7",
        "all": "a pool before it has the GPUs that it selects",
    }
    many = laid_out(*map(gpu, range(5)), text=text).unused
    assert (
        many["far"] == "index 0 is not in 7; index 1 is not in 7; index 2 is not in 7; and 2 more"
    )
    assert laid_out(gpu(0)).unused == laid_out().unused == {}


def test_what_is_wrong_on_any_node_is_told_without_one() -> None:
    """A rehearsal finds ids that would be offered twice before there is a GPU."""
    rehearse(config())
    with pytest.raises(ConfigError) as caught:
        rehearse(config(pool() + "      - {backend: fraction, resource: example.com/b}\n"))
    assert str(caught.value) == (
        "test.yaml: 6: pools[0].backends[1]: each GPU-UUID::m00 would be offered twice, again as "
        "example.com/b; use each backend once in a pool"
    )


def test_two_pools_of_one_resource_cut_as_each_says() -> None:
    """One name over two pools: every GPU is cut by its own pool, requests placed by the first."""
    gpus = [gpu(0), gpu(1, name=T4)]
    layout = laid_out(*gpus, text=TWO_POOLS)

    assert [(share.gpu, share.number) for share in layout.shares] == [
        *[(gpus[0].id, number) for number in range(3)],
        *[(gpus[1].id, number) for number in range(2)],
    ]
    assert [len(layout.backends[METAGPU].shares(gpu)) for gpu in gpus] == [2, 2]


def test_the_node_injects_as_configured() -> None:
    """What the host has and what the file says come together in the backends."""
    text = pool() + "passDeviceSpecs: false\n"
    layout = laid_out(gpu(0), text=text, injection=Injection(dev_root="/host"))

    backend = layout.backends[METAGPU]
    assert isinstance(backend, FractionBackend)
    assert backend.injection == Injection(pass_device_specs=False, dev_root="/host")


def test_ids_are_unique_and_short() -> None:
    """No id stands twice on a node, none is longer than 63 characters (case 27)."""
    layout = laid_out(*[gpu(index) for index in range(16)], text=pool("sharesPerGpu: 1000"))
    ids = [share.id for share in layout.shares]

    assert len(set(ids)) == 16_000
    assert max(map(len, ids)) == len(gpu(0).id) + len("::m999") <= 63


def test_ids_are_the_same_each_time() -> None:
    """The same GPUs in another order, with others beside them, have the same ids (case 27)."""
    one = {share.id for share in laid_out(gpu(3), gpu(1)).shares}
    two = {share.id for share in laid_out(gpu(1), gpu(2), gpu(3)).shares}

    assert one <= two


def test_an_id_too_long_is_refused() -> None:
    """An id that the kubelet's limit does not admit is named before anything is offered."""
    endless = replace(gpu(0), id=GpuId(gpu(0).id + "x" * 20))

    with pytest.raises(
        ConfigError, match=r"^test.yaml: the share id GPU-\S+::m00 has more than 63"
    ):
        laid_out(endless)


def test_an_id_twice_is_refused() -> None:
    """Two backends of one kind in a pool would offer each share twice."""
    text = pool() + "      - {backend: fraction, resource: example.com/b}\n"

    with pytest.raises(ConfigError) as caught:
        laid_out(gpu(0), text=text)
    assert str(caught.value) == (
        "test.yaml: each GPU-UUID::m00 would be offered twice, again as example.com/b; use each "
        "backend once in a pool"
    )


def test_no_gpu_is_a_layout_too() -> None:
    """A node without GPUs offers its resources with nothing in them."""
    layout = lay_out(parse(pool(), "f", BACKENDS), (), Injection())

    assert (layout.assignments, layout.shares) == ((), ())
    assert layout.offered.resources == (METAGPU,)
    assert config().options.keys() == {"all"}
