"""The evidence for the CNCF's AI conformance says what ran, and nothing more."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from tests.e2e.conformance import ROOT, TABLE, evidence, main, outcomes

REQUIREMENTS = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["requirements"]
CHECKLIST = """
driver_runtime_management gpu_sharing virtualized_accelerator ai_inference
advanced_inference_ingress high_performance_networking disaggregated_inference gang_scheduling
cluster_autoscaling pod_autoscaling accelerator_metrics ai_service_metrics
secure_accelerator_access workload_sandboxing robust_controller
"""
"""The ids of AIConformance-1.37.yaml in cncf/k8s-ai-conformance, November 2026."""
GANGS = "tests/e2e/test_gangs.py::"
RUN = """<testsuites><testsuite><properties>
<property name="kubernetes" value="1.36.3"/><property name="commit" value="0a1b2c3"/>
</properties>
<testcase classname="tests.e2e.test_gangs" name="test_a"/>
<testcase classname="tests.e2e.test_gangs" name="test_b[one]"/>
<testcase classname="tests.e2e.test_gangs" name="test_b[two]"><failure message="no"/></testcase>
<testcase classname="tests.e2e.test_gangs" name="test_c"><skipped message="no root"/></testcase>
</testsuite></testsuites>"""


def test_the_table_has_each_requirement_and_each_test() -> None:
    """The rows are those of the checklist; each names tests that exist, or says why not."""
    assert set(REQUIREMENTS) == set(CHECKLIST.split())
    for name, row in REQUIREMENTS.items():
        assert row.get("tests") or row["says"], name
        for test in row.get("tests", ()):
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), test


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (["test_a"], "passed"),
        (["test_a", "test_b"], "failed"),
        (["test_a", "test_c"], "not run"),
        (["test_a", "test_gone"], "not run"),
        ([], "no tests"),
    ],
)
def test_an_outcome_is_that_of_the_worst_test(tests: list[str], outcome: str) -> None:
    """A test that was skipped, or is not in the run, is no evidence; nor is no test."""
    row = {"level": "MUST", "asks": "x", "says": "", "tests": [GANGS + name for name in tests]}
    run = ET.fromstring(RUN)  # noqa: S314 - ours
    [found] = evidence({"requirements": {"gang_scheduling": row}}, outcomes(run))
    assert found["outcome"] == outcome


def test_both_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names what ran; a run of other tests, or none, fails and says what to do."""
    assert main(["--junit", str(tmp_path / "none.xml"), "--output", str(tmp_path)]) == 1
    assert "run `make e2e` first" in capsys.readouterr().err

    (tmp_path / "e2e.xml").write_text(RUN[:-20])
    assert main(["--junit", str(tmp_path / "e2e.xml"), "--output", str(tmp_path)]) == 1
    assert "e2e.xml is incomplete: run `make e2e` again" in capsys.readouterr().err

    (tmp_path / "e2e.xml").write_text(RUN)
    assert main(["--junit", str(tmp_path / "e2e.xml"), "--output", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "conformance.json").read_text())
    assert {row["outcome"] for row in found["requirements"]} == {"not run", "no tests"}
    assert found["run"] == {"kubernetes": "1.36.3", "commit": "0a1b2c3"}
    page = (tmp_path / "conformance.md").read_text()
    assert "The tests ran on Kubernetes 1.36.3, at commit 0a1b2c3." in page
    assert "| `gang_scheduling` | MUST |" in page


def test_a_run_of_all_tests_succeeds(tmp_path: Path) -> None:
    """Rows without tests fail nothing; a run that does not name its versions says so."""
    tests = [test.partition("::") for row in REQUIREMENTS.values() for test in row.get("tests", ())]
    cases = "".join(
        f'<testcase classname="{file[:-3].replace("/", ".")}" name="{name}"/>'
        for file, _, name in tests
    )
    (tmp_path / "e2e.xml").write_text(f"<testsuite>{cases}</testsuite>")
    assert main(["--junit", str(tmp_path / "e2e.xml"), "--output", str(tmp_path)]) == 0
    page = (tmp_path / "conformance.md").read_text()
    assert "The tests ran on Kubernetes unknown, at commit unknown." in page
