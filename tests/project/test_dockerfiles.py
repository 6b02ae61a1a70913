"""The images' recipes, read as text: what can be known of them without building.

NVIDIA's form of the worker cannot be built where there is no access to its registry, so what makes
an image fit for a cluster is checked on the instructions. tests/cluster/image builds the others.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
RECIPES = ("service", "worker")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL|AUTH", re.I)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined."""

    word: str
    rest: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Dockerfile: what stands before the first FROM, and the stages."""

    arguments: tuple[Instruction, ...]
    stages: tuple[tuple[Instruction, ...], ...]

    @property
    def all(self) -> list[Instruction]:
        return [*self.arguments, *(one for stage in self.stages for one in stage)]

    @property
    def last(self) -> tuple[Instruction, ...]:
        return self.stages[-1]

    def given(self, word: str, *, last: bool = False) -> list[str]:
        """What follows each instruction of this word, of all stages or of the last alone."""
        return [one.rest for one in (self.last if last else self.all) if one.word == word]


def read(text: str) -> Recipe:
    """Parses a Dockerfile without heredocs and parser directives, which ours have not."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    before: list[Instruction] = []
    stages: list[list[Instruction]] = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        instruction = Instruction(word, " ".join(rest.split()))
        if word == "FROM":
            stages.append([])
        (stages[-1] if stages else before).append(instruction)
    return Recipe(tuple(before), tuple(map(tuple, stages)))


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return read((DOCKER / f"{request.param}.Dockerfile").read_text())


def test_every_stage_stands_on_the_one_base_that_can_be_given(recipe: Recipe) -> None:
    assert [one.word for one in recipe.arguments] == ["ARG"]
    assert recipe.arguments[0].rest.startswith("BASE=")
    known = {"${BASE}"}
    for rest in recipe.given("FROM"):
        source, _, name = rest.partition(" AS ")
        assert source in known
        known.add(name)
    assert recipe.last[0].rest == "${BASE}"


def test_bases_are_pinned_and_of_the_project_s_python() -> None:
    service, worker = (
        read((DOCKER / f"{name}.Dockerfile").read_text()).arguments[0].rest for name in RECIPES
    )
    assert service == "BASE=python:3.12-slim"
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert asked == ">=3.12,<3.13"
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3@sha256:[0-9a-f]{64}", worker)


def test_it_runs_as_a_numbered_user_who_is_not_root(recipe: Recipe) -> None:
    words = [one.word for one in recipe.last]
    assert recipe.given("USER") == ["10001:10001"]
    assert "USER" in words
    assert not {"RUN", "COPY"} & set(words[words.index("USER") :])


def test_nothing_comes_from_an_address_or_unchecked(recipe: Recipe) -> None:
    assert recipe.given("ADD") == []
    assert not [
        rest for rest in recipe.given("RUN") if re.search(r"\bcurl\b|wget +-|https?:", rest)
    ]
    for command in recipe.given("RUN"):
        for install in re.findall(r"pip install ([^&;]*)", command):
            by_hash = "--require-hashes" in install and ".lock" in install
            ours = "--no-deps" in install and install.split()[-1] == "./source"
            assert by_hash or ours, install


def test_the_image_gets_only_what_is_named(recipe: Recipe) -> None:
    for rest in recipe.given("COPY", last=True):
        assert re.match(r"--from=[a-z]+ /opt/(planish|code) /opt/planish$", rest) or re.match(
            r"deploy/docker/\w+\.py ", rest
        )
    assert not [rest for rest in recipe.given("RUN", last=True) if "--mount" in rest]


def test_no_secret_stands_in_an_argument_or_a_variable(recipe: Recipe) -> None:
    given = [*recipe.given("ARG"), *recipe.given("ENV"), *recipe.given("LABEL")]
    assert not [rest for rest in given if SECRET.search(rest)]
    arguments = {rest.partition("=")[0] for rest in recipe.given("ARG")}
    assert arguments <= {"BASE", "PACKAGES", "DEBIAN_PACKAGES"}
    mounts = {m for rest in recipe.given("RUN") for m in re.findall(r"--mount=(\S+)", rest)}
    assert mounts == {"type=secret,id=pip.conf,target=/etc/pip.conf", "type=secret,id=ca"}


def test_debian_s_lists_and_archives_are_left_out(recipe: Recipe) -> None:
    installs = [rest for rest in recipe.given("RUN") if "apt-get install" in rest]
    assert installs
    for command in installs:
        assert command.index("apt-get update") < command.index("apt-get install")
        assert "--no-install-recommends" in command
        assert "rm -rf /var/lib/apt/lists/*" in command
        if command in recipe.given("RUN", last=True):
            assert "apt-get clean" in command
    compilers = [rest for rest in recipe.given("RUN", last=True) if re.search(r"\bgcc\b", rest)]
    assert compilers == []


def test_programs_are_started_without_a_shell(recipe: Recipe) -> None:
    for word in ("ENTRYPOINT", "CMD"):
        (rest,) = recipe.given(word)
        assert all(isinstance(part, str) for part in json.loads(rest))
    (check,) = recipe.given("HEALTHCHECK")
    assert check == "NONE" or json.loads(check[check.index("CMD ") + 4 :])[0] == "python"


def test_what_builds_are_given_begins_with_nothing() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    kept = {rule for rule in rules if rule.startswith("!")}
    # Every other folder of the project stays out; test_context.py builds, and looks.
    assert {rule.removeprefix("!").partition("/")[0] for rule in kept} == {
        "LICENSE",
        "README.md",
        "algorithms",
        "deploy",
        "environments",
        "megatron_backend",
        "pyproject.toml",
        "service",
    }
    assert rules.index("**/.*") > max(rules.index(rule) for rule in kept)
