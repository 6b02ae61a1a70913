"""Reading a Hugging Face config strictly: every value is checked, and all faults are collected.

A setting that changes the maths and that nobody here knows must be refused by name. A model that is
a little different from what its config says trains without an error, and is wrong.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SIZE = 2**31 - 1
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """What is wrong with one setting of a model's config.

    Attributes:
        name: the setting, as `rope_scaling.factor`.
        message: what is wrong.
        fix: what would be right.
    """

    name: str
    message: str
    fix: str


class UnsupportedModel(ValueError):
    """A config that no model can be built from, with everything that is wrong about it."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__(
            "the model config cannot be used: "
            + "; ".join(f"{p.name}: {p.message} ({p.fix})" for p in problems)
        )
        self.problems = tuple(problems)


class ConfigReader:
    """Reads values of a config, and notes what is wrong with them.

    A value that is wrong reads as a harmless one, so that one pass finds all faults.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[ConfigProblem] = []

    def refuse(self, name: str, message: str, fix: str) -> None:
        """Notes a fault."""
        self.problems.append(ConfigProblem(name=name, message=message, fix=fix))

    def size(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive integer; null and absent are `default`, or a fault where there is none."""
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        fix = f"give a whole number from 1 to {most}"
        self.refuse(name, f"{name} is {shown(value)}", fix)
        return 1

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        within: Mapping[str, Any] | None = None,
        path: str | None = None,
        zero: bool = False,
    ) -> float:
        """A positive number that a float can hold.

        Args:
            name: the setting.
            default: where it is absent or null; None makes that a fault.
            within: the object that has it; None is the config itself.
            path: what to call it; None is its name.
            zero: whether 0 is also right.
        """
        value = (self.config if within is None else within).get(name)
        if value is None:
            value = default
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (value >= 0 if zero else value > 0)
            and value <= sys.float_info.max
        ):
            return float(value)
        kind = "a number from 0" if zero else "a positive number"
        self.refuse(path or name, f"{name} is {shown(value)}", f"give {kind}")
        return 1.0

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; null and absent are `default`."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"{name} is {shown(value)}, which is no boolean", "true or false")
        return value is True

    def fixed(self, name: str, only: Any, why: str) -> None:
        """A setting that may have one value only, or be null or absent."""
        value = self.config.get(name)
        if value is None or (value == only and isinstance(value, bool) == isinstance(only, bool)):
            return
        self.refuse(name, f"{name} is {shown(value)}: {why}", f"only {name} = {only!r} works")


def shown(value: Any) -> str:
    """A value for a message: cut where it is long, `missing` where there is none."""
    if value is None:
        return "missing"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "out of any range"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
