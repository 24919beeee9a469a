"""Alert rules, by Prometheus' own test of rules: each one fires, and each one stays quiet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.prometheus import promtool, provide
from tests.test_alerts import ALERTS, CASES, RULES

LATER = ("MetagpuOrphanedLeases", "MetagpuIdleShares")
SHORT_M, LONG_M = 20, 420


@pytest.fixture(autouse=True, scope="module")
def promtool_there() -> None:
    """Skip where neither this machine nor Debian's archive has promtool."""
    try:
        provide("promtool")
    except RigError as error:
        pytest.skip(str(error))


def rule_tests() -> Iterator[dict[str, Any]]:
    """Yield two tests of each case of a rule, in promtool's form."""
    slow = ("MetagpuNvlinkErrors", "MetagpuPcieReplays")
    for alert, case in ((alert, case) for alert, cases in CASES.items() for case in cases):
        minutes = LONG_M if alert in LATER else 60 if alert in slow else SHORT_M
        for values, expected in ((case.firing, [{"labels": "{}", "value": 1}]), (case.quiet, [])):
            expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
            yield {
                "interval": "1m",
                "input_series": [{"series": case.series, "values": values}],
                "promql_expr_test": [
                    {"expr": expression, "eval_time": f"{minutes}m", "exp_samples": expected}
                ],
            }


def test_each_rule_fires_and_stays_quiet(tmp_path: Path) -> None:
    """Prometheus' own evaluation fires each alert for its cause, and not for a blip."""
    file = tmp_path / "test.yaml"
    text = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": list(rule_tests())}
    file.write_text(yaml.safe_dump(text))
    status, output = promtool("test", "rules", str(file))
    assert status == 0, output
    assert CASES.keys() == ALERTS.keys()


def test_the_rules_are_well_formed() -> None:
    """Promtool accepts the rules and the templates of their annotations."""
    status, output = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert status == 0, output
