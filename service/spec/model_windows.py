"""Sliding-window attention in a config: how wide, and in which layers."""

from typing import Literal

from service.spec.config_reader import ConfigReader, shown
from service.spec.model_families import FamilyRules

LayerType = Literal["full_attention", "sliding_attention"]
_LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")


def read_windows(
    reader: ConfigReader, rules: FamilyRules, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    """Size of the sliding window (None where there is none), and which layers have it."""
    window = _window(reader, rules)
    kinds: list[LayerType]
    if rules.windows in ("by_switch", "by_layer"):
        kinds = _layer_types(reader, rules, num_layers, windowed=window is not None)
    else:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
        given = reader.config.get("layer_types")
        if given is not None and given != kinds:
            message, fix = f"layer_types is {shown(given)}", f"only {kinds[0]} in all layers works"
            reader.refuse("layer_types", message, fix)
    if window is None and "sliding_attention" in kinds:
        message = "layers have sliding attention, but there is no sliding window"
        reader.refuse("layer_types", message, "give sliding_window, and use_sliding_window if any")
    return window, tuple(kinds)


def _window(reader: ConfigReader, rules: FamilyRules) -> int | None:
    on = rules.windows in ("everywhere", "by_layer")
    if rules.windows.startswith("by_switch"):
        on = reader.boolean("use_sliding_window", False)
    elif rules.windows == "never":
        reader.fixed("use_sliding_window", False, "this family has no sliding windows")
    if not on or reader.config.get("sliding_window", rules.window) is None:
        return None
    return reader.size("sliding_window", rules.window)


def _layer_types(
    reader: ConfigReader, rules: FamilyRules, num_layers: int, *, windowed: bool
) -> list[LayerType]:
    """Of each layer, as the config says or the family has them."""
    given = reader.config.get("layer_types")
    if given is None and rules.windows == "by_layer":
        every = reader.size("sliding_window_pattern", rules.window_pattern)
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        ]
    if given is None:
        first = reader.number("max_window_layers", 28, zero=True)
        return [
            "sliding_attention" if windowed and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    right = isinstance(given, list) and all(kind in _LAYER_TYPES for kind in given)
    if not right or len(given) != num_layers:
        message = f"layer_types is {shown(given)}"
        fix = f"give each of the {num_layers} layers one of {', '.join(_LAYER_TYPES)}"
        reader.refuse("layer_types", message, fix)
        return ["full_attention"] * num_layers
    return list(given)
