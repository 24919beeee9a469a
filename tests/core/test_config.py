"""The configuration: what is taken, and in which words anything else is refused."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.fraction import FractionBackend, FractionOptions, Split
from metagpu.backends.placement import Placement
from metagpu.core.backend import Backend, Options
from metagpu.core.config import DEFAULT, Config, Health, parse
from metagpu.core.enforcement import Annotation, Enforcement, Policy, Victims
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import Gpu
from metagpu.core.grant import Grant
from metagpu.core.injection import DeviceListStrategy, Injection
from metagpu.core.model import ResourceName, Share
from metagpu.core.selector import Selector
from metagpu.core.snapshot import Snapshot
from metagpu.core.units import Bytes, Duration
from metagpu.core.xid import Severity
from tests.build import BACKENDS, config, gpu, pool


class WholeBackend(Backend):
    """A second backend, so that tests can have two."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = FractionOptions

    def __init__(self, resource: str) -> None:
        self.resource = ResourceName(resource)

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "WholeBackend":  # noqa: ARG003
        """Take the resource's name and nothing else."""
        assert isinstance(options, FractionOptions)
        return cls(options.resource)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource."""
        return (self.resource,)

    def shares(self, gpu: Gpu) -> Sequence[Share]:  # noqa: ARG002
        """Cut nothing."""
        return ()

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:  # noqa: ARG002
        """Give nothing."""
        return Grant()


TWO_BACKENDS: dict[str, type[Backend]] = {**BACKENDS, "whole": WholeBackend}
ALLOWED = f"allowed: {', '.join(sorted(TWO_BACKENDS))}"


def refusal(text: str) -> str:
    """Give the message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", TWO_BACKENDS)
    return str(caught.value)


# --- what is taken --------------------------------------------------------------------------------


def fractions(read: Config) -> FractionOptions:
    """Give what the first pool says to its first backend."""
    options = next(iter(read.options.values()))[0]
    assert isinstance(options, FractionOptions)
    return options


def test_without_a_file_metagpu_behaves_like_metagpu() -> None:
    """The default gives every GPU 100 shares under MetaGPU's name, refusing splits."""
    read = parse(DEFAULT, "<default>", BACKENDS)
    [(only, [backend])] = read.pools(Injection())

    assert only.gpus == "all"
    assert isinstance(backend, FractionBackend)
    assert backend.resources == ("cnvrg.io/metagpu",)
    assert len(backend.shares(gpu(0))) == 100
    assert fractions(read).split is Split.REFUSE


def test_every_default_is_what_a_short_file_gets() -> None:
    """A file that names only the backend gets what the default file says, and these settings."""
    read = parse(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]", "f", BACKENDS
    )
    [(_, [backend])] = read.pools(Injection())

    assert [len(backend.shares(gpu(0))), *backend.resources] == [100, "cnvrg.io/metagpu"]
    assert fractions(read) == FractionOptions(
        backend="fraction", placement=Placement.BINPACK, split=Split.REFUSE, metagpu_env=True
    )
    assert read.envelope.health == Health(Duration(60), Duration(30), {})
    assert read.envelope.injection(Injection()) == Injection()


@pytest.mark.parametrize(
    ("said", "pod_dir", "command"),
    [
        ("{}", "/pod", "/usr/local/bin/mgctl"),
        ("{path: /opt/x/mgctl}", "/pod", "/opt/x/mgctl"),
        ("{path: null}", "/pod", ""),
        ("{inPods: false}", "", ""),
    ],
)
def test_mgctl_is_in_containers_as_wanted(said: str, pod_dir: str, command: str) -> None:
    """By default it is; where else, and whether at all, can be said."""
    read = config("mgctl: " + said + "\n" + pool())
    injection = read.envelope.injection(Injection(pod_dir="/pod"))

    assert (injection.pod_dir, injection.command) == (pod_dir, command)
    assert read.envelope.injection(Injection()) == Injection()


@pytest.mark.parametrize(
    "path",
    ["mgctl", "", "/", "//x", "/a/../b", "/a//b", "/a/", "/a:b", '"/a\\nb"', "/run/metagpu"],
)
def test_a_place_where_no_program_can_be_is_refused(path: str) -> None:
    """Container runtimes take such paths for something else, or the folder's own."""
    shown = path.strip('"').replace("\\\\", "\\")
    assert refusal(f"mgctl: {{path: {path or repr(path)}}}\n{pool()}") == (
        f"f.yaml: 1: mgctl: path '{shown}' is no place for a program; write one like "
        "/usr/local/bin/mgctl, or null"
    )


def test_everything_that_can_be_said_is_read() -> None:
    """Each key of the file arrives as what it means."""
    read = config("""\
version: metagpu/v1
deviceListStrategy: [envvar, cdi-cri]
passDeviceSpecs: false
cdiKind: example.com/gpu
health:
  quietPeriod: 5m
  rescanPeriod: 10s
  xids: {79: notice, 13: fatal}
pools:
  - name: big
    gpus: {index: "0-3,6", product: "*A100*", minMemory: 40Gi}
    backends:
      - {backend: fraction, resource: example.com/slice, memoryUnit: 1Gi, placement: spread,
         split: accept, metagpuEnv: false}
  - name: rest
    gpus: all
    backends: [{backend: fraction, sharesPerGpu: 4}]
""")

    assert read.envelope.health == Health(
        Duration(300), Duration(10), {79: Severity.NOTICE, 13: Severity.FATAL}
    )
    assert fractions(read) == FractionOptions(
        backend="fraction",
        resource="example.com/slice",
        memory_unit=Bytes(2**30),
        placement=Placement.SPREAD,
        split=Split.ACCEPT,
        metagpu_env=False,
    )
    assert [pool.name for pool, _ in read.pools(Injection())] == ["big", "rest"]
    assert read.envelope.injection(Injection(dev_root="/host", present=frozenset({"/dev/x"}))) == (
        Injection(
            strategies=frozenset({DeviceListStrategy.ENVVAR, DeviceListStrategy.CDI_CRI}),
            pass_device_specs=False,
            cdi_kind="example.com/gpu",
            dev_root="/host",
            present=frozenset({"/dev/x"}),
        )
    )


def test_each_pool_says_how_memory_is_enforced() -> None:
    """What a pool says of memory is its own; one that says nothing has the defaults."""
    read = config("""
version: metagpu/v1
pools:
  - name: strict
    gpus: {index: 0}
    memoryEnforcement:
      {policy: kill, headroom: 1Gi, grace: 5s, stopTimeout: 10s, victims: all, period: 1s,
       dryRun: true, driverLimits: false, allowAnnotations: [limit, policy]}
    backends: [{backend: fraction}]
  - name: rest
    backends: [{backend: fraction}]
  - name: never
    memoryEnforcement: {policy: off}
    backends: [{backend: fraction}]
""")
    strict, rest, never = (pool.memory_enforcement for pool in read.envelope.pools)

    assert strict == Enforcement(
        policy=Policy.KILL,
        headroom=Bytes(2**30),
        grace=Duration(5),
        stop_timeout=Duration(10),
        victims=Victims.ALL,
        period=Duration(1),
        dry_run=True,
        driver_limits=False,
        allow_annotations=(Annotation.LIMIT, Annotation.POLICY),
    )
    assert rest == Enforcement()
    assert never.policy is Policy.OFF


def test_json_is_yaml() -> None:
    """A configuration may be written as JSON."""
    text = (
        '{"version": "metagpu/v1", "pools": [{"name": "a", "backends": [{"backend": "fraction"}]}]}'
    )

    assert list(parse(text, "f.json", BACKENDS).options) == ["a"]


def test_two_pools_may_offer_one_resource_by_one_backend() -> None:
    """T4s in 15 shares and A100s in 40 can go by the same name."""
    read = config("""\
version: metagpu/v1
pools:
  - {name: t4, gpus: {product: "*T4*"}, backends: [{backend: fraction, sharesPerGpu: 15}]}
  - {name: a100, backends: [{backend: fraction, sharesPerGpu: 40}]}
""")

    assert [
        len(backend.shares(gpu(0)))
        for _, backends in read.pools(Injection())
        for backend in backends
    ] == [15, 40]


# --- mistakes: line, path and words ---------------------------------------------------------------

HEAD = "version: metagpu/v1\n"
POOL = pool("sharesPerGpu: 10")

OF_FRACTIONS = "allowed: backend, memoryUnit, metagpuEnv, placement, resource, sharesPerGpu, split"
HOLDS_ITSELF = "no usable YAML: a value holds itself, or too many others in each other"
OF_STRATEGIES = "allowed: cdi-annotations, cdi-cri, envvar, volume-mounts"


def backend(options: str) -> str:
    """Write a pool whose backend says this, from line 5 on."""
    return f"{HEAD}pools:\n  - name: a\n    backends:\n      - {options}\n"


def selecting(gpus: str) -> str:
    """Write a pool that selects GPUs so, in line 4."""
    return f"{HEAD}pools:\n  - name: a\n    gpus: {gpus}\n    backends: [{{backend: fraction}}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # the document
        ("", "expected a mapping, got nothing"),
        ("hello", "1: expected a mapping, got a text"),
        ("- a\n- b\n", "1: expected a mapping, got a list"),
        (HEAD, "1: missing key `pools`"),
        (POOL.replace(HEAD, ""), "1: missing key `version`"),
        (
            POOL.replace("v1", "v2"),
            (
                "1: version: 'metagpu/v2' is not known here; allowed: metagpu/v1; did you mean "
                "metagpu/v1?"
            ),
        ),
        (HEAD + "pools: []\n", "2: pools: there is no pool; give at least one"),
        (HEAD + "pools: {a: 1}\n", "2: pools: expected a list, got a mapping"),
        # unknown keys
        (
            POOL + "helth: {}\n",
            (
                "6: helth: unknown key; allowed: cdiKind, deviceListStrategy, health, "
                "mgctl, passDeviceSpecs, pools, version; did you mean health?"
            ),
        ),
        (
            POOL + "health:\n  quiet: 3s\n",
            (
                "7: health.quiet: unknown key; allowed: quietPeriod, rescanPeriod, xids; did you "
                "mean quietPeriod?"
            ),
        ),
        (
            backend("{backend: fraction, sharesPerGPU: 3}"),
            (
                f"5: pools[0].backends[0].sharesPerGPU: unknown key; {OF_FRACTIONS}; did you mean "
                "sharesPerGpu?"
            ),
        ),
        (
            selecting("{indx: 3}"),
            (
                "4: pools[0].gpus.indx: unknown key; allowed: index, minMemory, pci, pciDevice, "
                "product, uuid; did you mean index?"
            ),
        ),
        (
            POOL + '"dotted.key[0]": 3\n',
            (
                "1: dotted.key[0]: unknown key; allowed: cdiKind, deviceListStrategy, health, "
                "mgctl, passDeviceSpecs, pools, version"
            ),
        ),
        (POOL + "3: 4\n", "1: one of its keys: expected a text"),
        (
            backend("{3: 4}"),
            "5: pools[0].backends[0]: one of its keys: expected a text, got a whole number",
        ),
        # wrong types
        (
            POOL + "passDeviceSpecs: 3\n",
            "6: passDeviceSpecs: expected true or false, got a whole number",
        ),
        (
            HEAD + "pools:\n  - name: 3\n    backends: []\n",
            "3: pools[0].name: expected a text, got a whole number",
        ),
        (
            backend("{backend: fraction, sharesPerGpu: '3'}"),
            "5: pools[0].backends[0].sharesPerGpu: expected a whole number or nothing, got a text",
        ),
        (selecting("3"), "4: pools[0].gpus: expected a text or a mapping, got a whole number"),
        (
            selecting("{index: [[0]]}"),
            "4: pools[0].gpus.index[0]: expected a whole number or a text, got a list",
        ),
        (POOL + "cdiKind: 2001-01-01\n", "6: cdiKind: expected a text, got `date`"),
        # values out of a list
        (
            POOL + "deviceListStrategy: envar\n",
            (
                f"6: deviceListStrategy: 'envar' is not known here; {OF_STRATEGIES}; did you mean "
                "envvar?"
            ),
        ),
        (
            POOL + "deviceListStrategy:\n  - envvar\n  - mounts\n",
            f"8: deviceListStrategy[1]: 'mounts' is not known here; {OF_STRATEGIES}",
        ),
        (
            backend("{backend: fraction, placement: binpak}"),
            (
                "5: pools[0].backends[0].placement: 'binpak' is not known here; allowed: binpack, "
                "spread; did you mean binpack?"
            ),
        ),
        (
            selecting("alll"),
            "4: pools[0].gpus: 'alll' is not known here; allowed: all; did you mean all?",
        ),
        (
            POOL + "health:\n  xids: {79: deadly}\n",
            "7: health.xids: 'deadly' is not known here; allowed: application, fatal, notice",
        ),
        (
            POOL + "health:\n  xids: {bus: fatal}\n",
            "7: health.xids: one of its keys: expected a whole number, got a text",
        ),
        # units
        (
            POOL + "health: {quietPeriod: soon}\n",
            "6: health.quietPeriod: 'soon' is no duration; write one like 250ms, 30s, 5m or 1h",
        ),
        (
            backend("{backend: fraction, memoryUnit: 1Gb}"),
            (
                "5: pools[0].backends[0].memoryUnit: '1Gb' is no amount of memory; write one like "
                "512Mi, 1Gi or 16G"
            ),
        ),
        (POOL + "health: {rescanPeriod: 0s}\n", "6: health: rescanPeriod must be longer than 0"),
        # memory enforcement
        *(
            (
                selecting("all\n    memoryEnforcement: " + said),
                f"5: pools[0].memoryEnforcement{problem}",
            )
            for said, problem in [
                (
                    "{policy: shoot}",
                    ".policy: 'shoot' is not known here; allowed: kill, off, report, warn",
                ),
                (
                    "{allowAnnotations: [limits]}",
                    (
                        ".allowAnnotations[0]: 'limits' is not known here; allowed: limit, policy; "
                        "did you mean limit?"
                    ),
                ),
                ("{policy: on}", ": policy is no switch; allowed: off, report, warn, kill"),
                ("{victims: some}", ".victims: 'some' is not known here; allowed: all, largest"),
                ("{period: 0s}", ": period must be longer than 0"),
                (
                    "{grace: soon}",
                    ".grace: 'soon' is no duration; write one like 250ms, 30s, 5m or 1h",
                ),
                (
                    "{dryrun: true}",
                    (
                        ".dryrun: unknown key; allowed: allowAnnotations, driverLimits, dryRun, "
                        "grace, headroom, period, policy, stopTimeout, victims; "
                        "did you mean dryRun?"
                    ),
                ),
            ]
        ),
        # selectors
        (selecting("{}"), "4: pools[0].gpus: an empty selector selects nothing; write `gpus: all`"),
        *(
            (
                selecting(f"{{{key}: []}}"),
                f"4: pools[0].gpus: the list `{key}` is empty and selects nothing; leave it out",
            )
            for key in ("index", "uuid", "pci", "product")
        ),
        *(
            (
                selecting(f"{{pci: {name}}}"),
                f"4: pools[0].gpus: {name!r} is no PCI bus id; write one like 0000:07:00.0",
            )
            for name in ("af:00.0", "0000:af:00", "0000-af-00.0")
        ),
        *(
            (
                selecting(f"{{index: {index}}}"),
                f"4: pools[0].gpus: {shown} is no index; write one like 3, 0-3 or 0-3,6",
            )
            for index, shown in [
                ("3-1", "'3-1'"),
                ("-1", "-1"),
                ("0-", "'0-'"),
                ("one", "'one'"),
                ("''", "''"),
                ("'0,,1'", "'0,,1'"),
                ("[0, 2-x]", "'2-x'"),
            ]
        ),
        # pools
        (
            POOL + "  - {name: all, backends: [{backend: fraction}]}\n",
            "6: pools[1].name: 'all' is taken; name each pool once",
        ),
        (HEAD + "pools:\n  - name: a\n", "3: pools[0]: missing key `backends`"),
        # backends
        (
            backend("{backend: fractions}"),
            f"5: pools[0].backends[0].backend: 'fractions' is no backend; {ALLOWED}",
        ),
        (
            backend("{backend: [fraction]}"),
            f"5: pools[0].backends[0].backend: ['fraction'] is no backend; {ALLOWED}",
        ),
        (
            backend("{sharesPerGpu: 3}"),
            f"5: pools[0].backends[0].backend: missing key `backend`; {ALLOWED}",
        ),
        (
            backend("{backend: fraction, sharesPerGpu: 3, memoryUnit: 1Gi}"),
            (
                "5: pools[0].backends[0]: sharesPerGpu and memoryUnit contradict each other; give "
                "one of them"
            ),
        ),
        *(
            (
                backend(f"{{backend: fraction, sharesPerGpu: {count}}}"),
                f"5: pools[0].backends[0]: sharesPerGpu is {count}; allowed: 1 to 100000",
            )
            for count in (0, -1, 100001)
        ),
        (
            backend("{backend: fraction, memoryUnit: 1023Ki}"),
            "5: pools[0].backends[0]: memoryUnit must be 1Mi or more",
        ),
        (
            backend("{backend: fraction, resource: metagpu}"),
            (
                "5: pools[0].backends[0]: 'metagpu' is no resource name: it needs a domain, one "
                "`/` and a name, as in cnvrg.io/metagpu"
            ),
        ),
        (
            POOL + "      - {backend: whole, resource: cnvrg.io/metagpu}\n",
            (
                "6: pools[0].backends[1]: cnvrg.io/metagpu is offered by backend fraction already "
                "and cannot be offered by whole too; give it another `resource`"
            ),
        ),
        # strategies that contradict each other
        (
            POOL + "deviceListStrategy: [cdi-cri, cdi-annotations]\n",
            "6: deviceListStrategy: cdi-cri and cdi-annotations inject twice; choose one of them",
        ),
        (
            POOL + "deviceListStrategy: []\n",
            "6: deviceListStrategy: there is no strategy; give at least one",
        ),
        # a kind that no CDI device can have
        *(
            (
                f'{POOL}cdiKind: "{kind}"\n',
                f"6: cdiKind: {kind!r} is no vendor/class; write one like nvidia.com/gpu",
            )
            for kind in ("", "gpu", "/gpu", "nvidia.com/", "nvidia.com/gpu=0", "a/b/c", "a/b.c")
        ),
        # keys that stand twice
        (
            POOL + "health:\n  quietPeriod: 1s\n  quietPeriod: 2s\n",
            "8: health.quietPeriod: the key stands twice, first in line 7; keep one of them",
        ),
        (
            backend("{backend: fraction, split: accept, split: refuse}"),
            (
                "5: pools[0].backends[0].split: the key stands twice, first in line 5; keep one "
                "of them"
            ),
        ),
        # no YAML
        (
            HEAD + "pools: [\n",
            "3: no valid YAML: expected the node content, but found '<stream end>'",
        ),
        (
            HEAD + "\tpools: 1\n",
            "2: no valid YAML: found character '\\t' that cannot start any token",
        ),
        ("a: 1\n---\nb: 2\n", "2: no valid YAML: but found another document"),
        ("? [a]\n: 3\n", "1: no valid YAML: found unhashable key"),
        ("a: 2001-02-31\n", "no valid YAML: day is out of range for month"),
        (
            "a: \0",
            (
                "no valid YAML: unacceptable character #x0000: special characters are not allowed "
                'in "<unicode string>", position 3'
            ),
        ),
        ("a: &a [*a]\n", HOLDS_ITSELF),
        ("[" * 2000, HOLDS_ITSELF),
    ],
)
def test_a_mistake_is_told_with_line_path_and_what_is_allowed(text: str, message: str) -> None:
    """Every refusal names the file, the line and the path, what is wrong and what would do."""
    assert refusal(text) == f"f.yaml: {message}"


def test_an_error_can_be_taken_apart() -> None:
    """Programs find file, line, path and problem each on its own."""
    with pytest.raises(ConfigError) as caught:
        parse(selecting("{}"), "f.yaml", BACKENDS)

    assert (caught.value.file, caught.value.line, caught.value.path) == (
        "f.yaml",
        4,
        "pools[0].gpus",
    )
    assert caught.value.problem == "an empty selector selects nothing; write `gpus: all`"


def test_no_index_is_too_large_to_be_read() -> None:
    """A range is not counted out: a typing error costs no memory."""
    selector = Selector(index="0-99999999999999")

    assert selector.refusal(gpu(3)) is None


# --- selectors ------------------------------------------------------------------------------------

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
        Selector(uuid=("GPU-other", THE_GPU.id)),
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
        (Selector(uuid="GPU-other"), f"uuid {THE_GPU.id} is not listed"),
        (Selector(pci="0000:01:00.0"), "PCI bus id 0000:af:00.0 is not listed"),
        (Selector(product="*T4*"), "NVIDIA A100-SXM4-40GB does not match *T4*"),
        (Selector(product="A100"), "NVIDIA A100-SXM4-40GB does not match A100"),
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


# --- nothing but a Config or a ConfigError --------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**25)
    | st.floats()
    | st.dates()
    | st.text(max_size=8)
    | st.sampled_from(["all", "fraction", "envvar", "cdi-cri", "metagpu/v1", "1Gi", "30s", "0-3"])
)
KEYS = st.sampled_from(
    [
        *["version", "pools", "health", "deviceListStrategy", "passDeviceSpecs", "cdiKind"],
        *["name", "gpus", "backends", "index", "uuid", "pci", "product", "minMemory"],
        *["quietPeriod", "rescanPeriod", "xids", "backend", "resource", "sharesPerGpu"],
        *["memoryUnit", "placement", "split", "metagpuEnv"],
    ]
)
ODD_KEYS = KEYS | st.integers(0, 100) | st.text(max_size=4) | st.none() | st.booleans()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_KEYS, inner, max_size=4),
)


def almost(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Make mappings with the right keys, whose values are mostly of the right kind."""
    return st.fixed_dictionaries({}, optional={k: v | ANYTHING for k, v in keys.items()})


TEXTS = st.sampled_from(["0-3", "*A100*", "GPU-x", "1Gi", "nothing"])
A_BACKEND = almost(
    backend=st.just("fraction"),
    resource=st.sampled_from(["cnvrg.io/metagpu", "a.b/c", "d"]),
    sharesPerGpu=st.integers(-1, 200),
    memoryUnit=st.sampled_from(["1Gi", "1Ki", 2**30]),
    placement=st.sampled_from(["binpack", "spread", "pack"]),
    split=st.sampled_from(["refuse", "accept", "ask"]),
    metagpuEnv=st.booleans(),
)
A_POOL = almost(
    name=st.sampled_from(["a", "b"]),
    backends=st.lists(A_BACKEND, max_size=2),
    gpus=st.just("all")
    | almost(index=TEXTS, uuid=TEXTS, pci=TEXTS, product=TEXTS, minMemory=TEXTS),
)
DOCUMENTS = almost(
    version=st.just("metagpu/v1"),
    pools=st.lists(A_POOL, max_size=3),
    health=almost(
        quietPeriod=st.sampled_from(["30s", "1d", 3]),
        rescanPeriod=st.sampled_from(["30s", "1d", 3]),
        xids=st.dictionaries(st.integers(0, 200), st.sampled_from(list(Severity))),
    ),
    deviceListStrategy=st.sampled_from(list(DeviceListStrategy)).map(str),
    passDeviceSpecs=st.booleans(),
    cdiKind=st.sampled_from(["nvidia.com/gpu"]),
)


def ends_well(text: str) -> None:
    """Read a text; anything but a Config or a ConfigError of one file is raised."""
    try:
        read = parse(text, "f.yaml", TWO_BACKENDS)
    except ConfigError as error:
        assert str(error).startswith("f.yaml: ")  # noqa: PT017 - either end is a good one
    else:
        assert read.pools(Injection())


@given(DOCUMENTS | ANYTHING)
def test_any_mapping_is_a_config_or_a_config_error(document: object) -> None:
    """Whatever a file holds, reading it ends in a Config or in a ConfigError."""
    ends_well(yaml.dump(document, allow_unicode=True))


TOKENS = st.sampled_from(
    [
        *":-[]{},&*!|>'\"#%@`\n\t a0?~=.+_\\",
        *["<<", "---", "...", ": ", "- "],
        *["\n  ", "&a ", "*a ", "!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary "],
        *[
            "!!set ",
            "!!omap ",
            "2001-02-31",
            "0x_",
            "0b_",
            ".inf",
            "1:99",
            "\ud800",
            "\0",
            "\ufeff",
        ],
        *["version: metagpu/v1\n", "pools:\n", "  - name: a\n", "    backends: ", "xids: "],
    ]
)


@given(st.lists(TOKENS, max_size=30).map("".join))
@example("!!float ''")
@example("!!bool maybe")
@example("!!timestamp never")
@example("!!set {a, b}")
@example("pools: !!set {a, b}\nversion: metagpu/v1")
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    """Whatever a file is made of, reading it ends in a Config or in a ConfigError."""
    ends_well(text)


MUTATIONS: list[Callable[[str, int], str]] = [
    lambda text, at: text[:at],
    lambda text, at: text[:at] + text[at + 1 :],
    lambda text, at: text[:at] + ":" + text[at:],
    lambda text, at: text[:at] + "\n" + text[at:],
    lambda text, at: text[:at] + "7" + text[at + 1 :],
]


@pytest.mark.parametrize("mutation", range(len(MUTATIONS)))
def test_any_slip_of_the_default_is_a_config_or_a_config_error(mutation: int) -> None:
    """The default with one slip at any place is still read, or refused in our words."""
    for at in range(len(DEFAULT)):
        ends_well(MUTATIONS[mutation](DEFAULT, at))
