"""The messages that refuse a configuration."""

import pytest

from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError, ConfigReason
from tests.core.config.config_texts import HEAD, POOL, TWO_BACKENDS, backend, refusal, selecting
from tests.rigs.build import BACKENDS

ALLOWED = f"allowed: {', '.join(sorted(TWO_BACKENDS))}"

OF_FRACTIONS = (
    "allowed: backend, gpuMemory, memoryUnit, metagpuEnv, offer, placement, resource, "
    "sharesPerGpu, split"
)
HOLDS_ITSELF = "no usable YAML: a value contains itself, or values are nested too deeply"
OTHER = "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
OF_STRATEGIES = "allowed: cdi-annotations, cdi-cri, envvar, volume-mounts"


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
            ("1: version: 'metagpu/v2' is unknown; allowed: metagpu/v1; did you mean metagpu/v1?"),
        ),
        # the API
        (
            backend("{backend: fraction}") + "    fronts: [dra]\n",
            "6: pools[0].fronts: unknown key `fronts`; write `api: dra`",
        ),
        (
            backend("{backend: fraction}") + "    fronts: [device-plugin, dra]\n",
            (
                "6: pools[0].fronts: unknown key `fronts`; a pool has one API: make two pools, one "
                "with `api: device-plugin` and one with `api: dra`, each with GPUs of its own, "
                "such as `gpus: {index: 0-3}` and `gpus: {index: 4-7}`"
            ),
        ),
        (
            backend("{backend: fraction}") + "    api: both\n",
            "6: pools[0].api: 'both' is unknown; allowed: device-plugin, dra",
        ),
        (
            backend("{backend: fraction}")
            + "    api: dra\n"
            + "  - name: other\n    backends: [{backend: fraction}]\n",
            (
                "8: pools[1].backends[0].resource: cnvrg.io/metagpu is offered by a pool with "
                "`api: dra` already and cannot be offered with `api: device-plugin` too; give it "
                "another `resource`, or both pools the same `api`"
            ),
        ),
        (
            POOL + "dra: {driver: GPU.example}\n",
            (
                "6: dra: 'GPU.example' is not a name of a driver: it must be a lower-case DNS name "
                "of at most 63 characters"
            ),
        ),
        (HEAD + "pools: []\n", "2: pools: there is no pool; write at least one"),
        (HEAD + "pools: {a: 1}\n", "2: pools: expected a list, got a mapping"),
        # unknown keys
        (
            POOL + "helth: {}\n",
            (
                "6: helth: unknown key; allowed: cdiKind, deviceListStrategy, dra, "
                "health, mgctl, migStrategy, passDeviceSpecs, pools, startHook, version; "
                "did you mean health?"
            ),
        ),
        (
            POOL + "health:\n  quiet: 3s\n",
            (
                "7: health.quiet: unknown key; allowed: otherXids, quietPeriod, rescanPeriod, "
                "xids; did you mean quietPeriod?"
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
                "4: pools[0].gpus.indx: unknown key; allowed: index, mig, minMemory, pci, "
                "pciDevice, product, uuid; did you mean index?"
            ),
        ),
        (
            POOL + '"dotted.key[0]": 3\n',
            (
                "1: dotted.key[0]: unknown key; allowed: cdiKind, deviceListStrategy, dra, "
                "health, mgctl, migStrategy, passDeviceSpecs, pools, startHook, version"
            ),
        ),
        (POOL + "3: 4\n", "6: 3: the key: expected a text"),
        (
            backend("{3: 4}"),
            "5: pools[0].backends[0].3: the key: expected a text, got a whole number",
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
            (f"6: deviceListStrategy: 'envar' is unknown; {OF_STRATEGIES}; did you mean envvar?"),
        ),
        (
            POOL + "deviceListStrategy:\n  - envvar\n  - mounts\n",
            (
                f"8: deviceListStrategy[1]: 'mounts' is unknown; {OF_STRATEGIES}; did you "
                "mean volume-mounts?"
            ),
        ),
        (
            backend("{backend: fraction, placement: binpak}"),
            (
                "5: pools[0].backends[0].placement: 'binpak' is unknown; allowed: binpack, "
                "spread; did you mean binpack?"
            ),
        ),
        (
            selecting("alll"),
            "4: pools[0].gpus: 'alll' is unknown; allowed: all; did you mean all?",
        ),
        (
            POOL + "health:\n  xids: {79: deadly}\n",
            "7: health.xids.79: 'deadly' is unknown; allowed: application, fatal, notice",
        ),
        (
            POOL + "health:\n  xids: {bus: fatal}\n",
            "7: health.xids.bus: the key: expected a whole number, got a text",
        ),
        # units
        (
            POOL + "health: {quietPeriod: soon}\n",
            "6: health.quietPeriod: 'soon' is not a duration; write one like 250ms, 30s, 5m or 1h",
        ),
        (
            backend("{backend: fraction, memoryUnit: 1Gb}"),
            (
                "5: pools[0].backends[0].memoryUnit: '1Gb' is not an amount of memory; write one "
                "like 512Mi, 1Gi or 16G"
            ),
        ),
        (
            POOL + "health: {rescanPeriod: 0s}\n",
            "6: health.rescanPeriod: rescanPeriod must be longer than 0",
        ),
        # memory enforcement
        *(
            (
                selecting("all\n    memoryEnforcement: " + said),
                f"5: pools[0].memoryEnforcement{problem}",
            )
            for said, problem in [
                (
                    "{policy: shoot}",
                    ".policy: 'shoot' is unknown; allowed: kill, off, report, warn",
                ),
                (
                    "{allowAnnotations: [limits]}",
                    (
                        ".allowAnnotations[0]: 'limits' is unknown; allowed: limit, policy; "
                        "did you mean limit?"
                    ),
                ),
                ("{policy: on}", ".policy: policy is no switch; allowed: off, report, warn, kill"),
                ("{victims: some}", ".victims: 'some' is unknown; allowed: all, largest"),
                ("{period: 0s}", ".period: period must be 10 ms or more"),
                ("{period: 9.99ms}", ".period: period must be 10 ms or more"),
                *(
                    (
                        f"{{{policy}burst: {{}}}}",
                        (
                            f".burst: burst needs `policy: kill`: with `{name}` nobody gives "
                            "memory back; write `policy: kill`, or leave burst out"
                        ),
                    )
                    for policy, name in (("", "warn"), ("policy: off, ", "off"))
                ),
                (
                    "{policy: kill, burst: {reserve: 0}}",
                    ".burst.reserve: reserve must be more than 0: nobody would give memory back",
                ),
                (
                    "{policy: kill, burst: {limits: 1Gi}}",
                    (".burst.limits: unknown key; allowed: limit, reserve; did you mean limit?"),
                ),
                (
                    "{grace: soon}",
                    ".grace: 'soon' is not a duration; write one like 250ms, 30s, 5m or 1h",
                ),
                (
                    "{dryrun: true}",
                    (
                        ".dryrun: unknown key; allowed: allowAnnotations, burst, driverLimits, "
                        "dryRun, grace, headroom, period, policy, stopTimeout, victims; "
                        "did you mean dryRun?"
                    ),
                ),
            ]
        ),
        # compute enforcement
        *(
            (
                selecting("all\n    computeEnforcement: " + said),
                f"5: pools[0].computeEnforcement{problem}",
            )
            for said, problem in [
                ("{policy: kill}", ".policy: 'kill' is unknown; allowed: off, report"),
                ("{policy: on}", ".policy: policy is no switch; allowed: off, report"),
                ("{policy: report, window: 0s}", ".window: window must be longer than 0"),
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
                f"4: pools[0].gpus: {name!r} is not a PCI bus id; write one like 0000:07:00.0",
            )
            for name in ("af:00.0", "0000:af:00", "0000-af-00.0")
        ),
        *(
            (
                selecting(f"{{index: {index}}}"),
                f"4: pools[0].gpus: {shown} is not an index; write one like 3, 0-3 or 0-3,6",
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
            f"5: pools[0].backends[0].backend: 'fractions' is not a backend; {ALLOWED}",
        ),
        (
            backend("{backend: [fraction]}"),
            f"5: pools[0].backends[0].backend: ['fraction'] is not a backend; {ALLOWED}",
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
                (
                    f"5: pools[0].backends[0].sharesPerGpu: sharesPerGpu is {count}; allowed: 1 "
                    "to 70000"
                ),
            )
            for count in (0, -1, 70001)
        ),
        (
            backend("{backend: fraction, memoryUnit: 1023Ki}"),
            "5: pools[0].backends[0].memoryUnit: memoryUnit must be 1Mi or more",
        ),
        (
            backend("{backend: fraction, resource: metagpu}"),
            (
                "5: pools[0].backends[0].resource: invalid resource name 'metagpu': it needs a "
                "domain, one `/` and a name, as in cnvrg.io/metagpu"
            ),
        ),
        (
            POOL + "      - {backend: whole, resource: cnvrg.io/metagpu}\n",
            (
                "6: pools[0].backends[1].resource: cnvrg.io/metagpu is offered by backend fraction "
                "already and cannot be offered by whole too; give it another `resource`"
            ),
        ),
        # strategies that contradict each other
        (
            POOL + "deviceListStrategy: [cdi-cri, cdi-annotations]\n",
            "6: deviceListStrategy: cdi-cri and cdi-annotations inject twice; choose one of them",
        ),
        (
            POOL + "deviceListStrategy: []\n",
            "6: deviceListStrategy: there is no strategy; write at least one",
        ),
        # a kind that no CDI device can have
        *(
            (
                f'{POOL}cdiKind: "{kind}"\n',
                f"6: cdiKind: {kind!r} is not a vendor/class; write one like nvidia.com/gpu",
            )
            for kind in ("", "gpu", "/gpu", "nvidia.com/", "nvidia.com/gpu=0", "a/b/c", "a/b.c")
        ),
        # keys that stand twice
        (
            POOL + "health:\n  quietPeriod: 1s\n  quietPeriod: 2s\n",
            "8: health.quietPeriod: the key is there twice, first in line 7; keep one of them",
        ),
        (
            backend("{backend: fraction, split: accept, split: refuse}"),
            (
                "5: pools[0].backends[0].split: the key is there twice, first in line 5; keep one "
                "of them"
            ),
        ),
        (
            selecting("{uuid: GPU-5f2e}"),
            (
                "4: pools[0].gpus: 'GPU-5f2e' is not a uuid of a GPU; write one as "
                "`nvidia-smi -L` does"
            ),
        ),
        (
            selecting(f"{{uuid: {OTHER.upper()}}}"),
            (
                f"4: pools[0].gpus: '{OTHER.upper()}' is not a uuid of a GPU; write one as "
                "`nvidia-smi -L` does"
            ),
        ),
        (
            selecting('{product: ["*T4*", ""]}'),
            "4: pools[0].gpus: an empty `product` matches nothing; write a pattern like *A100*",
        ),
        (
            HEAD + "pools: [{name: ' ', backends: []}]\n",
            "2: pools[0]: a pool needs a name; messages about its GPUs show it",
        ),
        (
            POOL + "health: {xids: {-3: fatal}}\n",
            "6: health: -3 is not an XID; they are numbered from 1",
        ),
        # no YAML
        (
            HEAD + "pools: [\n",
            "3: no valid YAML: expected the node content, but found '<stream end>'",
        ),
        (
            HEAD + "\tpools: 1\n",
            (
                "2: no valid YAML: found character '\\t' that cannot start any token; indent with "
                "spaces, not with tabs"
            ),
        ),
        (
            "a: 1\n---\nb: 2\n",
            (
                "2: no valid YAML: found another document; keep one document in a file, without "
                "`---` between"
            ),
        ),
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
def test_a_mistake_is_reported_with_line_path_and_what_is_allowed(text: str, message: str) -> None:
    """Every refusal names the file, the line, the path, the problem and what is allowed."""
    assert refusal(text) == f"f.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", ConfigReason.NO_YAML),
        ("a: 1\na: 2", ConfigReason.GIVEN_TWICE),
        ("hello", ConfigReason.WRONG_TYPE),
        (HEAD, ConfigReason.MISSING),
        (POOL.replace("v1", "v2"), ConfigReason.UNKNOWN_VALUE),
        (POOL + "more: 1\n", ConfigReason.UNKNOWN_KEY),
        (backend("{backend: fraction}") + "    fronts: [dra]\n", ConfigReason.UNKNOWN_KEY),
        (backend("{backend: magic}"), ConfigReason.UNKNOWN_VALUE),
        (backend("{}"), ConfigReason.MISSING),
        (backend("{backend: fraction, resource: gpu}"), ConfigReason.INVALID_NAME),
        (
            backend("{backend: fraction, resource: a/b}")
            + "  - {name: b, backends: [{backend: timeslice, replicas: 4, resource: a/b}]}\n",
            ConfigReason.NAME_TAKEN,
        ),
        (
            selecting("all\n    memoryEnforcement: {policy: kill, burst: {}}").replace(
                "fraction", "whole"
            ),
            ConfigReason.CONFLICT,
        ),
    ],
)
def test_a_refusal_has_a_reason(text: str, reason: ConfigReason) -> None:
    """Programs read the kind of the problem from the error."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", BACKENDS)
    assert caught.value.reason is reason


def test_an_error_can_be_taken_apart() -> None:
    """Programs read file, line, path and problem from the error's fields."""
    with pytest.raises(ConfigError) as caught:
        parse(selecting("{}"), "f.yaml", BACKENDS)

    assert (caught.value.file, caught.value.line, caught.value.path) == (
        "f.yaml",
        4,
        "pools[0].gpus",
    )
    assert caught.value.problem == "an empty selector selects nothing; write `gpus: all`"
