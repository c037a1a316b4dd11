"""The grid of a sweep: reading keys and values, combining them, writing them as text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedrec._checks import as_float, is_integer
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recipe.loading import parse_value

__all__ = ["grid_points", "json_text", "parse_grid", "short_keys", "split_values", "value_text"]

_PAIRS = {"[": "]", "{": "}", "(": ")"}


def split_values(text: str) -> list[str]:
    """Split at the commas that are not inside brackets or quotes.

    Examples:
        >>> split_values("Median,{class_path: TrimmedMean, init_args: {trim: 0.2}},[1,2],'a,b'")
        ['Median', '{class_path: TrimmedMean, init_args: {trim: 0.2}}', '[1,2]', "'a,b'"]
    """
    values, begin, closing, quote = [], 0, [], ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and text[begin:i].rstrip()[-1:] in ("", ",", ":", *_PAIRS):
            quote = char  # an apostrophe inside a word opens no quote
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            values.append(text[begin:i].strip())
            begin = i + 1
    return [*values, text[begin:].strip()]


def parse_grid(texts: Iterable[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Read a grid from `key=v1,v2` texts.

    Args:
        texts: The texts; keys are dotted, values are YAML.

    Returns:
        The values of every key that has several, and the texts of the keys with one value, which
        are overrides of the recipe.

    Raises:
        ConfigurationError: If a text has no key or an empty value, or a key comes twice.

    Examples:
        >>> parse_grid(["aggregator=FedAvg,Median", "seed=3", "model.init_args.hidden=[8],[8,8]"])
        ({'aggregator': ['FedAvg', 'Median'], 'model.init_args.hidden': [[8], [8, 8]]}, ['seed=3'])
    """
    grid: dict[str, list[Any]] = {}
    fixed: dict[str, str] = {}
    for text in texts:
        key, separator, raw = text.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise ConfigurationError(
                expected("grid", "of the form `key=value,value`", text, hint=_QUOTE)
            )
        if key in grid or key in fixed:
            raise ConfigurationError(
                f"Expected every key once, but `{key}` comes twice. HINT: list all of its values "
                f"at once: `{key}=value,value`."
            )
        values = split_values(raw)
        if "" in values:
            hint = f"`{key}=null` and `{key}=''` say none and the empty text; {_QUOTE}"
            raise ConfigurationError(expected(key, "values with a comma between", raw, hint=hint))
        if len(values) == 1:
            fixed[key] = text
        else:
            grid[key] = [parse_value(key, value) for value in values]
    return grid, list(fixed.values())


_FIXED = {
    "name": "names the folder of the sweep.",
    "extends": "is part of the file.",
    "seed": "varies over repeats. HINT: `--repeats 3` takes the recipe's seed and the next two.",
}
_QUOTE = "quote what the shell would take apart: `'key=[1, 2],[3]'`."


def grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of values; the last key changes fastest.

    Args:
        grid: Values by key.

    Raises:
        ConfigurationError: If a key has no values, has a value twice, or cannot be swept.

    Examples:
        >>> grid_points({"a": [1, 2], "b": ["x"]})
        [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    for key, values in grid.items():
        if key in _FIXED:
            raise ConfigurationError(f"Expected keys that can vary, but `{key}` {_FIXED[key]}")
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or not values:
            raise ConfigurationError(expected(key, "a list of one or more values", values))
        texts = [value_text(value) for value in values]
        repeated = sorted({text for text in texts if texts.count(text) > 1})
        if repeated:
            raise ConfigurationError(f"Expected values that differ, but `{key}` has {repeated}.")
    combinations = itertools.product(*grid.values())
    return [dict(zip(grid, values, strict=True)) for values in combinations]


def value_text(value: Any) -> str:
    """Return a value as tables and figures show it.

    Examples:
        >>> value_text({"class_path": "TrimmedMean", "init_args": {"trim": 0.2}})
        'TrimmedMean(trim=0.2)'
        >>> [value_text(value) for value in (None, True, 1e-3, "Median", [1, 2])]
        ['null', 'true', '0.001', 'Median', '[1, 2]']
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "class_path" in value:
        given = {**(value.get("init_args") or {})}
        arguments = ", ".join(f"{name}={value_text(v)}" for name, v in given.items())
        return f"{value['class_path']}({arguments})" if given else str(value["class_path"])
    return json_text(value)


def json_text(value: Any) -> str:
    """Return a value as JSON; numbers of NumPy become numbers of Python.

    Examples:
        >>> import numpy as np
        >>> json_text([np.int64(3), np.float32(0.1), None])
        '[3, 0.1, null]'
    """
    return json.dumps(value, default=lambda x: int(x) if is_integer(x) else as_float(x))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of every dotted key that no other key has, by key.

    Examples:
        >>> short_keys(["aggregator", "recoverers.0.init_args.warmup_rounds"])
        {'aggregator': 'aggregator', 'recoverers.0.init_args.warmup_rounds': 'warmup_rounds'}
        >>> short_keys(["recoverers.0.label", "recoverers.1.label"])
        {'recoverers.0.label': 'recoverers.0.label', 'recoverers.1.label': 'recoverers.1.label'}
        >>> short_keys(["attack.class_path", "record.server_lr"])
        {'attack.class_path': 'attack', 'record.server_lr': 'server_lr'}
    """
    parts = {
        key: [p for p in key.split(".") if p not in ("init_args", "class_path")] for key in keys
    }
    short = {}
    for key, own in parts.items():
        others = [other for k, other in parts.items() if k != key]
        size = 1
        while size < len(own) and (
            own[-size].isdecimal() or any(other[-size:] == own[-size:] for other in others)
        ):
            size += 1
        short[key] = ".".join(own[-size:])
    return short
