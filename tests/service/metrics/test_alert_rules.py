"""The rules of deploy/prometheus: each alert fires and resolves, and asks for what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.metrics.deployed import (
    DEPLOY,
    RULES,
    asked,
    needs_promtool,
    promtool,
    rules,
    series,
)

ALERTS = rules("alerts.yml")
PROMETHEUS = DEPLOY / "prometheus"
CASES = PROMETHEUS / "tests" / "alerts.yml"


def cases() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]
    return tests


@needs_promtool
def test_the_rules_are_sound() -> None:
    said = promtool("check", "rules", *sorted(RULES.glob("*.yml")))
    assert said.returncode == 0, said.stdout + said.stderr


@needs_promtool
def test_every_alert_fires_and_resolves() -> None:
    said = promtool("test", "rules", CASES)
    assert said.returncode == 0, said.stdout + said.stderr


def test_every_alert_has_a_test_that_fires_and_resolves_it() -> None:
    fired, resolved = set(), set()
    for case in cases():
        first, last = case["promql_expr_test"]
        name = case["name"].split(":")[0]
        for asks in (first, last):
            assert asks["expr"] == f'ALERTS{{alertstate="firing", alertname="{name}"}}'
        if first["exp_samples"]:
            fired.add(name)
        if last["exp_samples"] == []:
            resolved.add(name)
    names = {alert["alert"] for alert in ALERTS}
    assert fired == names
    assert resolved == names


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_means_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    texts = alert["annotations"]
    assert texts.keys() == {"summary", "description", "runbook"}
    assert all(text.strip().endswith((".", "?")) for text in texts.values())
    assert f"`{alert['alert']}`" in (PROMETHEUS / "README.md").read_text()
    # A label in the text must be one that the alert has when it fires.
    fired = [
        sample["labels"]
        for case in cases()
        for sample in case["promql_expr_test"][0]["exp_samples"]
        if f'alertname="{alert["alert"]}"' in sample["labels"]
    ]
    for label in re.findall(r"\$labels\.(\w+)", str(texts)):
        assert all(re.search(rf'\b{label}="', labels) for labels in fired), label


@pytest.mark.parametrize(
    "rule", [*ALERTS, *rules("recording.yml")], ids=lambda rule: rule.get("alert") or rule["record"]
)
def test_a_rule_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    names = asked(rule["expr"])
    assert names
    assert names <= series()


@needs_promtool
@pytest.mark.parametrize("name", ["planish.yml", "kubernetes.yml"])
def test_the_configurations_are_sound(name: str, tmp_path: Path) -> None:
    document = yaml.safe_load((PROMETHEUS / name).read_text())
    document["rule_files"] = [str(RULES / "*.yml")]
    for job in document["scrape_configs"]:
        # Debian's promtool is built without it; all else of the job is checked.
        if job.pop("kubernetes_sd_configs", None):
            job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    config = tmp_path / name
    config.write_text(yaml.safe_dump(document))
    said = promtool("check", "config", config)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "planish" in {job["job_name"] for job in document["scrape_configs"]}
