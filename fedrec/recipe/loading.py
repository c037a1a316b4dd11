"""Reading a recipe: YAML, `extends`, overrides, interpolation. Nothing is instantiated here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from fedrec.exceptions import RecipeError, expected

__all__ = ["UNUSABLE", "is_usable", "merge", "parse_value", "read_recipe"]


class _Unusable:
    """Stands in place of a value that could not be read, so that its mistake is reported once."""

    def __repr__(self) -> str:
        return "UNUSABLE"


UNUSABLE = _Unusable()


def is_usable(value: Any) -> bool:
    """Return whether no part of a value is `UNUSABLE`."""
    if isinstance(value, Mapping):
        return all(is_usable(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_usable(v) for v in value)
    return value is not UNUSABLE


_NAME = re.compile(r"[\w.-]{1,100}")
_PLAIN = re.compile(r"\$\{([A-Za-z_][\w.-]*)\}")

# A few lines of YAML can stand for gigabytes (values that repeat values that repeat values).
_MOST_VALUES = 10_000
_LONGEST_TEXT = 10_000


def read_recipe(path: str | Path, overrides: Iterable[str], errors: list[str]) -> dict[str, Any]:
    """Read a recipe file into plain dicts, lists and scalars.

    Args:
        path: The YAML file.
        overrides: `key=value` texts, applied in order after everything the recipe extends.
        errors: A list that mistakes are appended to. A value with a mistake becomes `UNUSABLE`.

    Returns:
        The recipe with `extends` merged in, overrides applied and interpolation resolved.

    Raises:
        RecipeError: If the file cannot be read as a recipe.
    """
    path = Path(path)
    raw = _read_file(path, str(path), errors, ())
    if raw is None:
        raise RecipeError(errors)
    raw.setdefault("name", path.stem)
    for text in overrides:
        _override(raw, text, errors)
    return _Interpolation(raw, errors).resolve()


def parse_value(key: str, text: str) -> Any:
    """Read the YAML value of an override.

    Args:
        key: The dotted key, for the error.
        text: The value's text.

    Raises:
        RecipeError: If the text is no YAML.

    Examples:
        >>> parse_value("record.server_lr", "1e-3"), parse_value("data.hidden", "[8, 8]")
        (0.001, [8, 8])
    """
    try:
        dotlist = OmegaConf.from_dotlist([f"value={text}"])
        return cast("dict[str, Any]", OmegaConf.to_container(dotlist, resolve=False))["value"]
    except (YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(
            f"{key}: Expected a YAML value, but got {text!r}: {_reason(error)}."
        ) from error


def merge(base: Any, over: Any) -> Any:
    """Lay one value over another: mappings key by key, everything else as a whole.

    If `over` names another class than `base`, the arguments of `base` are dropped.

    Examples:
        >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
        {'a': {'x': 1, 'y': 3}}
        >>> merge({"class_path": "TrimmedMean", "init_args": {"trim": 2}}, "Median")
        {'class_path': 'Median'}
    """
    if isinstance(over, str) and isinstance(base, dict) and "class_path" in base:
        over = {"class_path": over}
    if isinstance(base, str) and isinstance(over, dict) and over.keys() & _COMPONENT_KEYS:
        base = {"class_path": base}
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    if over.get("class_path", base.get("class_path")) != base.get("class_path"):
        return over
    return {
        key: merge(base[key], over[key]) if key in base and key in over else {**base, **over}[key]
        for key in {**base, **over}
    }


_COMPONENT_KEYS = {"class_path", "init_args"}


def _read_file(
    path: Path, key: str, errors: list[str], readers: tuple[Path, ...]
) -> dict[str, Any] | None:
    """Read a file with the files it extends merged in; `None` if it cannot be read.

    `readers` are the files that extend it, directly or by way of others.
    """
    here = path.resolve()
    if here in readers:
        chain = " -> ".join(f.name for f in [*readers[readers.index(here) :], here])
        errors.append(
            f"{key}: Expected `extends` to end somewhere, but it runs in a circle: {chain}."
        )
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        errors.append(f"{key}: Expected a YAML file in UTF-8, but `{path}` is not text.")
        return None
    except OSError as error:
        siblings = (
            sorted(str(f) for f in path.parent.glob("[!.]*.yaml")) if path.parent.is_dir() else []
        )
        reason = (error.strerror or "cannot be read").lower()
        inside = path / "recipe.yaml"
        hint = f"`{inside}` is that of this run." if inside.is_file() else None
        known = None if hint else siblings or None
        text = expected("recipe", "a file that can be read", str(path), known=known, hint=hint)
        errors.append(f"{key}: {text} ({reason})")
        return None
    config = _parse(text, str(path), errors)
    if config is None:
        return None
    bases = config.pop("extends", None) or []
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str):
            text = expected("extends", "a path or a list of paths", base)
            errors.append(f"{path}: extends: {text}")
            continue
        part = _read_file(path.parent / base, f"{path}: extends", errors, (*readers, here))
        merged = merge(merged, part or {})
    # A name is not inherited: two recipes that extend the same base must not share a run folder.
    merged.pop("name", None)
    return dict(merge(merged, config))


def _parse(text: str, source: str, errors: list[str]) -> dict[str, Any] | None:
    try:
        config = OmegaConf.create(text)
        plain = OmegaConf.to_container(config, resolve=False) if config is not None else None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        hint = " HINT: indent with spaces." if re.search(r"^ *\t", text, re.MULTILINE) else ""
        errors.append(f"{source}{_where(error)}: Expected YAML, but {_reason(error)}.{hint}")
        return None
    except RecursionError:
        errors.append(f"{source}: Expected YAML, but its values lie too deep in each other.")
        return None
    if not isinstance(plain, dict):
        errors.append(f"{source}: Expected keys with values, but got a list.")
        return None
    if not all(_NAME.fullmatch(str(key)) for key in plain):
        # The error shows nothing of the file: it is no recipe, and may hold anything.
        errors.append(f"{source}: Expected keys with values, but got other text.")
        return None
    return {str(key): value for key, value in plain.items()}


def _where(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    return f", line {mark.line + 1}" if mark is not None else ""


def _reason(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem:
        return str(error.problem)
    return str(error).splitlines()[0].rstrip(".")


def _override(config: dict[str, Any], text: str, errors: list[str]) -> None:
    key, separator, raw = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        errors.append(f"{text}: Expected an override of the form `key=value`, but got {text!r}.")
        return
    if key == "extends":
        text = expected(key, "in the recipe's file", raw, hint="write a recipe that extends both.")
        errors.append(f"{key}: {text}")
        return
    try:
        value = parse_value(key, raw)
    except RecipeError as error:
        errors += error.errors
        return
    problem = _set(config, key.split("."), value)
    if problem:
        errors.append(f"{key}: {problem}")


def _set(node: Any, parts: list[str], value: Any) -> str | None:
    """Set the value at a dotted key in place; return the mistake, if there is one."""
    part, rest = parts[0], parts[1:]
    if isinstance(node, list):
        if not part.isdecimal() or int(part) >= len(node):
            return expected("index", f"an index below {len(node)}", part)
        slot: Any = int(part)
        child = node[slot]
    elif isinstance(node, dict):
        slot = part
        child = node.get(part)
    else:
        what = f"Expected a section to set `{part}` in, but got the value {node!r}."
        is_name = isinstance(node, str)  # of a component, most likely
        return f"{what} HINT: `init_args.{part}` sets an argument." if is_name else what
    if not rest:
        if slot == "class_path" and child not in (None, value):
            node.pop("init_args", None)
        node[slot] = merge(child, value)
        return None
    if child is None:
        child = {}
    elif isinstance(child, str) and rest[0] in _COMPONENT_KEYS:
        child = {"class_path": child}
    node[slot] = child
    return _set(child, rest, value)


class _Interpolation:
    """Resolves `${key}`. Resolvers with arguments, the environment among them, are refused.

    OmegaConf's own interpolation would run any registered resolver, and has no limit on how far
    values can multiply.
    """

    def __init__(self, raw: dict[str, Any], errors: list[str]) -> None:
        self.raw = raw
        self.errors = errors
        self.left = _MOST_VALUES

    def resolve(self) -> dict[str, Any]:
        resolved = {key: self._value(value, key, ()) for key, value in self.raw.items()}
        if self.left < 0:
            raise RecipeError(
                f"recipe: Expected at most {_MOST_VALUES} values, but `${{...}}` makes it more. "
                "HINT: keys that repeat keys that repeat keys multiply."
            )
        return resolved

    def _value(self, node: Any, key: str, seen: tuple[str, ...]) -> Any:
        self.left -= 1
        if self.left < 0:
            return UNUSABLE
        if isinstance(node, Mapping):
            return {str(k): self._value(v, f"{key}.{k}", seen) for k, v in node.items()}
        if isinstance(node, list):
            return [self._value(v, f"{key}.{i}", seen) for i, v in enumerate(node)]
        if isinstance(node, float) and not math.isfinite(node):
            return self._mistake(f"{key}: Expected a finite number, but got {node!r}.")
        if node == "???":
            hint = f"HINT: give it on the command line: `{key}=...`."
            return self._mistake(
                f"{key}: Expected a value, but it is still missing (`???`). {hint}"
            )
        if isinstance(node, str) and "${" in node:
            return self._text(node, key, seen)
        return node

    def _text(self, text: str, key: str, seen: tuple[str, ...]) -> Any:
        if "${" in _PLAIN.sub("", text):
            return self._mistake(
                f"{key}: Expected interpolation of the form `${{key}}`, but got {text!r}. "
                "Environment variables and other resolvers are off in recipes. "
                f"HINT: give the value on the command line: `{key}=...`."
            )
        whole = _PLAIN.fullmatch(text)
        if whole:
            return self._look_up(whole[1], key, seen)
        values = {m: self._look_up(m, key, seen) for m in dict.fromkeys(_PLAIN.findall(text))}
        if UNUSABLE in values.values():
            return UNUSABLE
        joined = _PLAIN.sub(lambda match: str(values[match[1]]), text)
        if len(joined) > _LONGEST_TEXT:
            return self._mistake(
                f"{key}: Expected text of at most {_LONGEST_TEXT} characters, but `${{...}}` makes "
                f"it {len(joined)}."
            )
        return joined

    def _look_up(self, target: str, key: str, seen: tuple[str, ...]) -> Any:
        if target in seen:
            circle = " -> ".join([*seen[seen.index(target) :], target])
            return self._mistake(
                f"{key}: Expected `${{...}}` to end, but it runs in a circle: {circle}."
            )
        node: Any = self.raw
        for part in target.split("."):
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                known = [str(k) for k in node] if isinstance(node, dict) else None
                text = expected(f"${{{target}}}", "a key of the recipe", part, known=known)
                return self._mistake(f"{key}: {text}")
        return self._value(node, key, (*seen, target))

    def _mistake(self, text: str) -> Any:
        if text not in self.errors:
            self.errors.append(text)
        return UNUSABLE
