"""What pods say of their GPU memory by annotations: taken where they may, refused in words."""

from collections.abc import Mapping
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.enforcement import Annotation, Enforcement, Policy
from metagpu.core.facts import GpusFound, LeasesObserved, PodsTold
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder
from metagpu.core.pods import KnownPod
from metagpu.core.snapshot import Snapshot
from metagpu.core.usage import Usage
from metagpu.core.wishes import LONGEST, MOST, Settled, settle, wishes_in
from tests.build import after, gpu, laid_out, pool

A, B = (replace(gpu(number), reserved=620 * MIB) for number in (0, 1))
ALICE: Final = Holder("team", "alice", "main")
KEY: Final = "gpu-mem-limit.cnvrg.io/metagpu"
POLICY: Final = "metagpu.io/memory-policy"
ALL: Final = Enforcement(policy=Policy.KILL, allow_annotations=tuple(Annotation))
PERCENT: Final = 40340 / 100
"""MiB that programs can have of a GPU, for each of its 100 shares."""


def ground(wishes: Mapping[str, str], of_a: int = 25, of_b: int = 0) -> tuple[Snapshot, Usage]:
    """Let alice, with these annotations, hold shares of two GPUs; give her use of the first."""
    layout = laid_out(A, B, text=pool("sharesPerGpu: 100"))
    held = [[s for s in layout.shares if s.gpu == it.id] for it in (A, B)]
    shares = [*held[0][:of_a], *held[1][:of_b]]
    pod = KnownPod("uid", "team", "alice", "Running", wishes=wishes)
    snapshot = after(
        GpusFound((A, B), at=0),
        layout.offered,
        LeasesObserved({share.id: ALICE for share in shares}, at=1),
        PodsTold((pod,)),
    )
    return snapshot, Usage(A.id, ALICE, "uid", tuple(held[0][:of_a]))


def settled(wishes: Mapping[str, str], terms: Enforcement = ALL, **shares: int) -> Settled:
    """Say what holds for alice."""
    snapshot, usage = ground(wishes, **shares)
    return settle(usage, snapshot, terms)


def limit(wish: str, **shares: int) -> int:
    """Give alice's limit in MiB, with this wish."""
    found = settled({KEY: wish}, ALL, **shares)
    assert not found.refused
    assert found.limit is not None
    return found.limit // MIB


def test_a_number_is_a_number_of_shares() -> None:
    """As MetaGPU's users write it: 25 are requested, and the memory of 50 may be used, or of 10."""
    assert limit("50") == int(50 * PERCENT) + 512
    assert limit("10") == int(10 * PERCENT) + 512
    assert limit("25") == int(25 * PERCENT) + 512


def test_an_amount_is_for_each_gpu() -> None:
    """An amount of memory stands for the share itself; part and headroom are as of any share."""
    assert limit("16Gi") == 16 * 1024 * 40340 // 40960 + 512


def test_on_several_gpus_each_part_grows_alike() -> None:
    """A container with 100 shares here and 50 there that wishes 75 has half of each part."""
    assert limit("75", of_a=100, of_b=50) == int(50 * PERCENT) + 512


@given(st.integers(1, 10**9))
def test_no_limit_passes_the_gpus_memory(shares: int) -> None:
    """Whatever a pod wishes, it may not use more than there is."""
    assert limit(str(shares)) <= 40960


@pytest.mark.parametrize(
    "wish",
    ["0", "5O", "-5", "0Gi", "16 GiB", "", "1e3", "\u00b2", pytest.param("9" * 5000, id="digits")],
)
def test_a_wrong_amount_is_refused_in_words(wish: str) -> None:
    """What nobody can follow changes nothing, and says what could be followed."""
    found = settled({KEY: wish})
    assert found.limit == settled({}).limit
    [why] = found.refused
    assert why == (
        f"{KEY}: {wish!r} is neither a number of shares such as 50 nor an amount of memory "
        "such as 16Gi; the limit of its shares stays"
    )


def test_a_pod_chooses_its_policy() -> None:
    """Its own policy takes the place of its pool's; `off` takes the limit away."""
    assert settled({POLICY: "warn"}).terms.policy is Policy.WARN
    assert settled({POLICY: "off"}).limit is None
    off = replace_policy(ALL, Policy.OFF)
    assert settled({POLICY: "kill"}, off).limit == settled({}).limit


def replace_policy(terms: Enforcement, policy: Policy) -> Enforcement:
    """Give the same terms with another policy."""
    return Enforcement(policy=policy, allow_annotations=terms.allow_annotations)


def test_a_wrong_policy_is_refused_in_words() -> None:
    """A policy that is none leaves the pool's."""
    found = settled({POLICY: "shoot"})
    assert found.terms.policy is Policy.KILL
    [why] = found.refused
    assert why == (
        f"{POLICY}: 'shoot' is no policy; allowed: off, report, warn, kill; "
        "the policy of its pool stays"
    )


def test_what_the_operator_does_not_allow_is_refused() -> None:
    """By default no pod says anything, and is told so."""
    found = settled({KEY: "50", POLICY: "off"}, Enforcement(policy=Policy.KILL))
    assert (found.terms.policy, found.limit) == (Policy.KILL, settled({}).limit)
    policy, limit = found.refused
    assert policy == (
        f"{POLICY}: its pool lets no pod say so (`allowAnnotations: [policy]`); "
        "the policy of its pool stays"
    )
    assert limit == (
        f"{KEY}: its pool lets no pod say so (`allowAnnotations: [limit]`); "
        "the limit of its shares stays"
    )


def test_one_may_be_allowed_without_the_other() -> None:
    """Each wish is allowed by its own word."""
    terms = Enforcement(policy=Policy.KILL, allow_annotations=(Annotation.LIMIT,))
    found = settled({KEY: "50", POLICY: "off"}, terms)
    assert found.limit == settled({KEY: "50"}).limit
    assert len(found.refused) == 1


def test_a_share_that_nobody_knows_has_no_limit() -> None:
    """An annotation makes no limit for who holds what nobody knows: nobody is ended on it."""
    snapshot, usage = ground({KEY: "16Gi"})
    unknown = replace(usage, shares=(replace(usage.shares[0], memory=0),))
    assert settle(unknown, snapshot, ALL).limit is None


def test_another_pod_of_the_name_wishes_for_itself() -> None:
    """A pod's predecessor is known by its uid, and does not have the successor's limit."""
    snapshot, usage = ground({KEY: "50"})
    assert settle(replace(usage, pod_uid="before"), snapshot, ALL).limit == settled({}).limit


def test_wishes_are_known_by_their_names() -> None:
    """Of a pod's annotations only those about GPU memory are kept."""
    wishes = {KEY: "50", POLICY: "warn"}
    assert wishes_in({**wishes, "metagpu.io/config": "x", "other": "y"}) == wishes


def test_a_pod_cannot_make_us_keep_or_tell_much() -> None:
    """Of very many wishes a few are kept, the policy among them; of a long one its beginning."""
    many = {f"gpu-mem-limit.example.com/r{number}": "5" for number in range(1000)}
    kept = wishes_in({POLICY: "warn", **many})
    assert len(kept) == MOST
    assert kept[POLICY] == "warn"

    cut = wishes_in({KEY: "9" * 5000})[KEY]
    assert len(cut) == LONGEST
    [why] = settled({KEY: cut}).refused
    assert "is neither a number of shares" in why
