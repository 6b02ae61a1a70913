"""docs/environments.md says everything that there is, and its example works."""

import asyncio
import re
import types
from pathlib import Path

import pytest

from environments.calculator import CalculatorConfig
from environments.config import InvalidConfig, parse_config
from environments.gsm8k import Gsm8kConfig
from environments.protocol import AssistantTurn
from environments.reasoning_gym_config import DatasetConfig
from environments.reasoning_gym_datasets import LEFT_OUT
from environments.registry import Registry

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


@pytest.mark.parametrize("model", [CalculatorConfig, Gsm8kConfig, DatasetConfig])
def test_every_setting_is_documented_with_its_default(model: type[CalculatorConfig]) -> None:
    for name, field in model.model_fields.items():
        row = re.search(rf"^\| `{name}` \|([^|]*)\|", PAGE, re.M)
        assert row, name
        default = "" if field.is_required() else field.default
        written = row[1].strip("` ").replace("empty", "")
        assert written == (f"{default:g}" if isinstance(default, float) else default)


def test_what_is_left_out_is_documented() -> None:
    assert all(f"`{name}`" in PAGE for name in LEFT_OUT)


def test_the_example_works() -> None:
    source = re.search(r'```python\n("""acme.*?)```', PAGE, re.S)
    assert source
    module = types.ModuleType("acme_environments")
    exec(source[1], module.__dict__)  # our own page
    backwards = Registry(module.environments).get("acme/backwards")
    with pytest.raises(InvalidConfig, match=r"partial_credit: .* less than or equal to 1"):
        parse_config(backwards.config_model, {"partial_credit": 2})
    config = parse_config(backwards.config_model, {"partial_credit": 0.5})
    item = {"word": "anvil"}
    assert backwards.items(config, seed=1, count=9)[:3] == backwards.items(config, seed=1, count=3)

    async def play(text: str) -> float | None:
        env = backwards.make(config)
        await env.reset(seed=1, item=item)
        return (await env.step(AssistantTurn(text=text))).reward

    assert [asyncio.run(play(text)) for text in ("livna", "anvil", "x")] == [1.0, 0.5, 0.0]
