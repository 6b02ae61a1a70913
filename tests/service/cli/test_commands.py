"""The command line against a real service, as a user calls it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from service.cli import main as entry
from service.cli.main import app
from service.jobs import JobState
from tests.service.api.test_exports import FILES, write_export
from tests.service.model_folders import write_reward_model
from tests.service.running_service import KEY, ROW, RunningService
from tests.service.validation.test_submit import online

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    """Runs `planish ARGS`; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, on: RunningService | None = service) -> tuple[int, str, str]:
        if on is not None:
            monkeypatch.setenv("PLANISH_URL", on.url)
            monkeypatch.setenv("PLANISH_API_KEY", KEY)
        monkeypatch.setattr("sys.argv", ["planish", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            entry()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def job_file(tmp_path: Path, service: RunningService, **parts: object) -> str:
    path = tmp_path / "job.yaml"
    text = yaml.safe_dump(service.job_document(**parts), sort_keys=False)
    path.write_text(text + "optimizer: {learning_rate: 1e-5}\n")
    return str(path)


def test_submit_show_list_cancel(run: Run, service: RunningService, tmp_path: Path) -> None:
    code, out, err = run("submit", job_file(tmp_path, service, name="by-cli"))
    job = out.strip()
    assert (code, re.fullmatch(r"job-[a-z0-9]{16}", job) is not None) == (0, True)
    assert f"planish watch {job}" in err
    assert service.store.jobs.get(job).context().spec.optimizer.learning_rate == 1e-5
    _, out, _ = run("show", "by-cli")
    assert job in out
    assert "QUEUED" in out or "PENDING" in out
    _, out, _ = run("show", job, "--json")
    assert json.loads(out)["spec"]["name"] == "by-cli"
    _, out, _ = run("list", "--name", "by-cli")
    assert job in out
    _, out, _ = run("list", "--limit", "1", "--json")
    assert len(json.loads(out)) == 1
    code, _, err = run("cancel", job)
    assert (code, "is being cancelled" in err) == (0, True)
    service.wait_for(job, JobState.CANCELLED)
    code, _, err = run("cancel", job)
    assert (code, "has ended already: CANCELLED" in err) == (0, True)


def test_a_key_makes_a_second_submit_the_first(
    run: Run, service: RunningService, tmp_path: Path
) -> None:
    file = job_file(tmp_path, service)
    first = run("submit", file, "--idempotency-key", "cli-once")
    assert run("submit", file, "--idempotency-key", "cli-once")[1] == first[1]


def test_plan_shows_layout_and_memory(run: Run, service: RunningService, tmp_path: Path) -> None:
    file = job_file(tmp_path, service, parallel={"tp": 2, "pp": 2})
    code, out, _ = run("plan", file)
    assert code == 0
    assert "tp2 pp2 dp1: 4 ranks on local" in out
    assert "optimizer" in out
    assert "activations" in out
    assert "KV cache" not in out  # nothing is sampled
    code, out, _ = run("plan", file, "--gpu-memory", "80", "--gpus-per-node", "4")
    assert code == 0
    assert "Layouts that fit" in out
    assert "of the usable memory" in out
    _, out, _ = run("plan", file, "--json")
    assert json.loads(out)["layout"]["world_size"] == 4


def test_plan_shows_the_models_with_ranks_of_their_own(
    run: Run, service: RunningService, model_root: Path, tmp_path: Path
) -> None:
    write_reward_model(model_root / "rewards")
    frozen = {"source": {"path": "rewards"}, "layout": {"tp": 2, "pp": 2}}
    document = online(service) | {"reward": {"model": frozen}, "algorithm": {"type": "ppo"}}
    # The environment is asked once, with more patience than a command has on a busy machine.
    assert service.http.post("/v1/jobs:plan", json=document).status_code == 200
    path = tmp_path / "ppo.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    code, out, err = run("plan", str(path))
    assert code == 0, err
    assert "critic" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "parameters on 4 ranks of its own, tp2 pp2 dp1" in out
    assert "Memory of its rank (reward)" in out
    _, out, _ = run("plan", str(path), "--json")
    (group,) = json.loads(out)["groups"]
    assert (group["role"], group["world_size"]) == ("reward", 4)
    assert [rank["pp_rank"] for rank in group["memory_per_rank"]] == [0, 1]
    for rank in group["memory_per_rank"]:
        assert rank["total"] == rank["weights"] + rank["activations"] + rank["logits"] > 0
    layers = 4 * (64 * 16 * 8 + 2 * 8 * 4 * 64 + 3 * 64 * 96 + 2 * 64 + 64 + 2 * 32)
    assert group["parameters"] == layers + 40 * 64 + 64 + 64


def test_algorithms_are_listed_and_shown(run: Run) -> None:
    code, out, _ = run("algorithms")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("kto "))
    assert "label rows" in line
    assert "its own episodes" in next(one for one in out.splitlines() if one.startswith("ppo "))
    code, out, _ = run("algorithms", "dapo")
    assert code == 0
    assert "docs/algorithms/dapo.md" in out
    assert re.search(r"clip_high +0\.28 +The ratio is clipped above", out)
    _, out, _ = run("algorithms", "distillation")
    assert re.search(r"teacher_model +needed", out)
    _, out, _ = run("algorithms", "reward_model", "--json")
    assert json.loads(out)["head"] == "value"
    code, _, err = run("algorithms", "a2c")
    assert (code, "GET /v1/algorithms lists them" in err) == (2, True)


def test_what_is_refused_is_shown_field_by_field(
    run: Run, service: RunningService, tmp_path: Path
) -> None:
    file = job_file(tmp_path, service, parallel={"vpp": 8}, model={"path": "[red]../x"})
    code, out, err = run("submit", file)
    assert (code, out) == (2, "")
    assert "model.path: '[red]../x' is not under one of" in err or "[red]../x" in err
    assert "-> " in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("show", "nobody"), 2, "there is no job"),
        (("show", "../../healthz"), 2, "nothing is here"),
        (("submit", "missing.yaml"), 2, "No such file"),
        (("files", "upload", "missing.jsonl"), 2, "No such file"),
        (("list", "--state", "gone"), 2, "state"),
        (("frobnicate",), 2, "No such command"),
        (("--url", "http://127.0.0.1:9", "list"), 3, "planish serve starts one"),
        (("--key", "planish_wrong", "list"), 2, "unknown or was revoked"),
        (("--key", "planish_é", "list"), 2, "characters that no key has"),
        (("--key", "planish_a\nb", "list"), 2, "characters that no key has"),
        (("show", ""), 2, "nothing is here"),
    ],
)
def test_errors_have_exit_codes_and_say_what_to_do(
    run: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert says in err


def test_a_narrow_terminal_cuts_no_id(
    run: Run, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "long-" + "x" * 58
    job = service.submit(name=name)["id"]
    file = service.upload()
    listed = run("list", "--limit", "1")[1]
    assert job in listed
    assert name in listed
    assert file in run("files", "list", "--limit", "1")[1]


def test_without_a_service_it_says_how_to_start_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLANISH_URL", raising=False)
    monkeypatch.delenv("PLANISH_API_KEY", raising=False)
    code, _, err = run("list", on=None)
    assert (code, "planish serve --data-dir DIR" in err) == (2, True)


def test_files(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ROW * 3)
    code, out, _ = run("files", "upload", str(rows))
    assert code == 0
    _, listed, _ = run("files", "list", "--limit", "1")
    assert out.strip() in listed
    rows.write_bytes(ROW + b"{")
    code, out, err = run("files", "upload", str(rows))
    assert (code, out) == (2, "")
    assert "line 2: not JSON" in err


def test_export(run: Run, service: RunningService, tmp_path: Path) -> None:
    job = service.submit()["id"]
    to = tmp_path / "model"
    assert run("export", job, "--to", str(to))[0] == 2
    assert not to.exists()
    write_export(service, job, 5)
    code, out, _ = run("export", job, "--to", str(to))
    assert (code, out.strip()) == (0, str(to))
    assert (to / "config.json").read_bytes() == FILES["config.json"]
    code, _, err = run("export", job, "--to", str(to))
    assert (code, "empty folder" in err) == (2, True)


def test_watch_and_logs_of_a_job_that_ends_well(
    run: Run, new_service: Callable[..., RunningService], tmp_path: Path
) -> None:
    service = new_service(behaviours=("print-environment", "succeed"), capacity=1)
    code, out, err = run("submit", job_file(tmp_path, service), "--watch", on=service)
    assert code == 0
    assert "RUNNING -> SUCCEEDED" in err
    assert "planish export" in err
    job = out.strip()
    for arguments in (("logs", job), ("logs", job, "-f"), ("logs", job, "--attempt", "1")):
        code, out, _ = run(*arguments, on=service)
        assert (code, "PLANISH" in out) == (0, True)


def test_watch_of_a_job_that_fails(run: Run, new_service: Callable[..., RunningService]) -> None:
    service = new_service(behaviours=("fail=USER_ERROR",), capacity=1)
    job = service.submit()["id"]
    code, _, err = run("watch", job, on=service)
    assert code == 1
    assert "USER_ERROR" in err
    assert "it went wrong" in err
    assert f"planish logs {job}" in err


def help_of(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--help"])


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    commands = [command.name for command in app.registered_commands]
    assert {"serve", "submit", "list", "show", "watch", "logs", "cancel", "plan", "export"} <= {
        *commands
    }
    for name in commands:
        assert f"planish {name}" in page
        shown = help_of(str(name))
        assert shown.exit_code == 0
        for option in set(re.findall(r"--[a-z][a-z-]+", shown.output)) - {"--help"}:
            if not option.startswith("--no-"):
                assert option in page, f"{option} of planish {name} is not in docs/cli.md"


def test_the_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.startswith("planish ")) == (0, True)
    assert os.environ.get("PLANISH_URL")
