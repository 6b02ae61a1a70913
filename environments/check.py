"""Checks an environment reference as a job gives it, down to a first question and episode.

A schema cannot tell everything: a file may be missing, a puzzle impossible to draw. So after the
schema, one question is drawn and one environment made, reset and closed.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from environments import registry
from environments.config import (
    EnvironmentConfig,
    EnvironmentId,
    InvalidConfig,
    Problem,
    Questions,
    parse_config,
)
from environments.protocol import EnvironmentType
from environments.registry import UnknownEnvironment, UnknownVersion


class Reference(EnvironmentConfig):
    """What a job says about its environment."""

    id: EnvironmentId
    """Name in the registry."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Version; null takes the newest."""
    max_turns: Annotated[int, Field(ge=1, le=256)] | None = None
    """Assistant turns of an episode; null takes the environment's own number."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A reference that can be used: the environment, and its config as a model."""

    type: EnvironmentType
    config: BaseModel


def check(reference: Mapping[str, Any]) -> Checked:
    """Checks `id`, `version`, `max_turns` and `config` of a reference, then tries them out.

    Raises:
        InvalidConfig: every problem found, with paths from the reference's own fields on.
    """
    asked = parse_config(Reference, reference)
    try:
        found = registry.get(asked.id, asked.version)
    except UnknownVersion as error:
        raise InvalidConfig([Problem(("version",), str(error))]) from error
    except UnknownEnvironment as error:
        raise InvalidConfig([Problem(("id",), str(error))]) from error
    try:
        config = parse_config(found.config_model, asked.config)
        _check_questions(config)
        _try_out(found, config, asked.max_turns)
    except InvalidConfig as error:
        raise error.under("config") from error
    return Checked(type=found, config=config)


def _check_questions(config: BaseModel) -> None:
    """Checks each inner environment that a config names, so that its faults get their own path."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Questions):
            try:
                check({"id": value.id, "version": value.version, "config": value.config})
            except InvalidConfig as error:
                raise error.under(name) from error


def _try_out(found: EnvironmentType, config: BaseModel, max_turns: int | None) -> None:
    try:
        items = found.items(config, seed=1, count=1)
        if not items:
            raise InvalidConfig([Problem((), "there is not one question")])
        asyncio.run(_play(found, config, max_turns, items[0]))
    except InvalidConfig:
        raise
    except Exception as error:  # anybody's environment: whatever it raises is its answer
        raise InvalidConfig([Problem((), f"{type(error).__name__}: {error}")]) from error


async def _play(
    found: EnvironmentType, config: BaseModel, max_turns: int | None, item: Mapping[str, Any]
) -> None:
    env = found.make(config, max_turns=max_turns)
    try:
        await env.reset(seed=1, item=item)
    finally:
        await env.close()
