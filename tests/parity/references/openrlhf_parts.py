"""OpenRLHF's losses and advantages, without the training framework that stands around them.

Its packages import DeepSpeed, Ray actors and vLLM as they are imported; the formulas need none of
them. So empty packages stand in for those on the way, and the methods that compute advantages are
taken out of their class.
"""

import ast
import itertools
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_METHODS = (
    "compute_advantages_and_returns",
    "get_advantages_and_returns",
    "get_cumulative_returns",
)


def _stand_in(name: str, folder: Path | None) -> None:
    module = ModuleType(name)
    if folder is not None:
        module.__path__ = [str(folder)]
    sys.modules[name] = module


def _folder() -> Path:
    spec = find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


FOLDER = _folder()
_stand_in("deepspeed", None)
for _name in ("", "models", "trainer", "trainer/ppo_utils", "utils"):
    _stand_in(".".join(["openrlhf", *_name.split("/")]).rstrip("."), FOLDER / _name)

loss = import_module("openrlhf.models.loss")
utils = import_module("openrlhf.models.utils")
kl_controller = import_module("openrlhf.trainer.ppo_utils.kl_controller")
length_penalty = import_module("openrlhf.trainer.ppo_utils.length_penalty")
# Others ask whether DeepSpeed is installed, and it is not.
del sys.modules["deepspeed"]


def _advantage_methods() -> type:
    """A class with only the methods that compute advantages, as they stand in the package."""
    source = (FOLDER / "trainer" / "ppo_utils" / "experience_maker.py").read_text()
    methods = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in _METHODS
    ]
    assert len(methods) == len(_METHODS), "the package's methods have other names now"
    body = ast.Module([ast.ClassDef("Maker", [], [], methods, [], type_params=[])], [])
    scope: dict[str, Any] = {
        "torch": torch,
        "itertools": itertools,
        "List": list,
        "Tuple": tuple,
        "Experience": SimpleNamespace,
        "compute_reward": utils.compute_reward,
        "apply_length_penalties": lambda *_: None,
    }
    exec(compile(ast.fix_missing_locations(body), "experience_maker.py", "exec"), scope)
    found: type = scope["Maker"]
    return found


Maker = _advantage_methods()
