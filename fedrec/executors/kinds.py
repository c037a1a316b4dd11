"""What a tensor is to the samples of a batch, and what operations make of that.

One forward pass over the samples of many clients gives every client's own gradient if each sample
is computed by itself until one mean over all samples is taken, and the loss is linear in that mean.
Every tensor of a pass is therefore of one of these kinds, and every operation has a rule that says
of which kind its result is. An operation without a rule gives a `Mixed` tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CannotGroupError",
    "Constant",
    "Count",
    "Kind",
    "Mean",
    "Mixed",
    "Operation",
    "Samples",
    "Sum",
    "rule_of",
]


class CannotGroupError(Exception):
    """Clients cannot be computed together; the message says why."""


@dataclass(frozen=True)
class Kind:
    """What a tensor is to the samples."""


@dataclass(frozen=True)
class Constant(Kind):
    """It does not depend on the samples, and neither position nor number of samples shows in it.

    A tensor of no kind (`None`) does not depend on the samples either, but may have other values at
    other positions.
    """


@dataclass(frozen=True)
class Samples(Kind):
    """Each sample has its own slices of it.

    Args:
        axis: The dimension along which samples follow each other.
        each: Entries of one sample along it, one after the other.
    """

    axis: int
    each: int = 1


@dataclass(frozen=True)
class Mean(Kind):
    """It is linear in a mean over all samples."""


@dataclass(frozen=True)
class Sum(Kind):
    """It is linear in a sum over all samples.

    Args:
        sizes: What to divide it by for a mean: samples, entries of them, entries in all.
    """

    sizes: frozenset[int]


@dataclass(frozen=True)
class Count(Kind):
    """A number of samples or of their entries."""


@dataclass(frozen=True)
class Mixed(Kind):
    """Samples meet in it in any other way.

    Args:
        reason: How, for people.
    """

    reason: str


@dataclass(slots=True, eq=False)
class Operation:
    """One call of an operator of torch.

    Args:
        function: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        kinds: Kinds of its tensor arguments by identity, where they have one.
        num_samples: Samples in the batch.
        result: What it returned.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    kinds: Mapping[int, Kind]
    num_samples: int
    result: Any

    @property
    def name(self) -> str:
        """Name of the operator, without variants."""
        return _name(self.function)

    def kind(self, value: Any) -> Kind | None:
        """Return the kind of an argument."""
        return self.kinds.get(id(value))

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name."""
        if name in self.kwargs:
            return self.kwargs[name]
        for i, argument in enumerate(self.function._schema.arguments):
            if argument.name == name:
                if i < len(self.args):
                    return self.args[i]
                return argument.default_value if argument.has_default_value() else default
        return default

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [x for x in flat((*self.args, *self.kwargs.values())) if isinstance(x, Tensor)]


Rule = Callable[[Operation], "Kind | None"]


def flat(values: Iterable[Any]) -> Iterable[Any]:
    """Yield values, those in lists and tuples one by one."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def rule_of(function: Any) -> Rule:
    """Return the rule for an operator."""
    rule = _RULES.get(_name(function))
    if rule is not None:
        return rule
    return _elementwise if torch.Tag.pointwise in function.tags else _unknown


def _name(function: Any) -> str:
    name: str = function._schema.name.removeprefix("aten::")
    return name if name.startswith("_") and name.endswith("__") else name.rstrip("_")


def _unknown(op: Operation) -> Kind | None:
    if all(isinstance(kind, Constant) for kind in op.kinds.values()):
        return None
    return Mixed(f"fedrec has no rule for what `{op.name}` makes of samples")


def _mixed_in(op: Operation) -> Mixed | None:
    return next((k for k in op.kinds.values() if isinstance(k, Mixed)), None)


def is_even(x: Tensor, axis: int, kind: Kind | None) -> bool:
    """Whether a tensor of no samples looks alike at all positions along a dimension."""
    if axis < 0 or isinstance(kind, Constant):
        return True
    return x.shape[axis] == 1 or x.stride(axis) == 0


# -- operations on single entries ------------------------------------------------------------------

_LINEAR_IN_ALL = {"add", "sub", "rsub"}
_COPIES = {"neg", "positive", "clone", "_to_copy", "copy"}


def _elementwise(op: Operation) -> Kind | None:
    tensors = op.tensors
    if len(tensors) == 1:  # most often
        kind = op.kind(tensors[0])
        if isinstance(kind, Samples | Mixed):
            return kind
    return _combined(op, tensors)


def _combined(op: Operation, tensors: Sequence[Tensor]) -> Kind | None:
    """Return the kind of a result in which these tensors meet entry by entry, broadcast."""
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    kinds = [op.kind(x) for x in tensors]
    if all(k is None or isinstance(k, Constant) for k in kinds):
        even = all(
            isinstance(k, Constant) or x.numel() == 1 for k, x in zip(kinds, tensors, strict=True)
        )
        return Constant() if even else None
    if any(isinstance(k, Samples) for k in kinds):
        return _samples_combined(op, tensors, kinds)
    return _linear(op, kinds)


def _samples_combined(
    op: Operation, tensors: Sequence[Tensor], kinds: Sequence[Kind | None]
) -> Kind:
    ndim = max(x.ndim for x in tensors)
    places = set()
    for x, kind in zip(tensors, kinds, strict=True):
        if isinstance(kind, Samples):
            places.add((kind.axis + ndim - x.ndim, kind.each))
        elif isinstance(kind, (Mean, Sum, Count)):
            return Mixed(f"`{op.name}` lets a value of the whole batch change single samples")
    if len(places) > 1:
        return Mixed(f"`{op.name}` lets samples meet")
    axis, each = places.pop()
    for x, kind in zip(tensors, kinds, strict=True):
        if not isinstance(kind, Samples) and not is_even(x, axis - (ndim - x.ndim), kind):
            return Mixed(f"`{op.name}` tells samples apart by their position in the batch")
    return Samples(axis, each)


def _linear(op: Operation, kinds: Sequence[Kind | None]) -> Kind:
    """Return the kind of a result of means or sums, and of constants."""
    reduced = [k for k in kinds if k is not None and not isinstance(k, Constant)]
    first, name = reduced[0], op.name
    if name in _COPIES:
        return first
    if isinstance(first, Count) or any(isinstance(k, Count) for k in reduced[1:]):
        if name == "div" and isinstance(first, Sum) and len(reduced) == 2 and kinds[0] is first:
            mean = _divided(first, op)
            if isinstance(mean, Mean):
                return mean
        return Mixed(f"`{name}` of a number of samples is not what it is for one client")
    if name in _LINEAR_IN_ALL and len(set(reduced)) == 1:
        return first
    if len(reduced) == 1:
        if name == "mul":
            return first
        divides = name == "div" and op.argument("rounding_mode") is None
        if divides and kinds[0] is first:
            return _divided(first, op) if isinstance(first, Sum) else first
    return Mixed(f"`{name}` of a value of the whole batch is not linear in it")


def _divided(kind: Sum, op: Operation) -> Kind:
    divisor = op.argument("other")
    if isinstance(divisor, Tensor):
        divisor = float(divisor) if divisor.numel() == 1 else math.nan
    return Mean() if divisor in kind.sizes else kind


# -- other shapes ----------------------------------------------------------------------------------


def _viewed(op: Operation) -> Kind | None:
    """Another shape of the same entries in the same order."""
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    outer, left = math.prod(x.shape[: kind.axis]), 1
    for axis, size in enumerate(op.result.shape):
        if left == outer and size % op.num_samples == 0 and (size > 1 or op.num_samples == 1):
            return Samples(axis, size // op.num_samples)
        left *= size
    return Mixed(f"`{op.name}` joins samples with another dimension")


def _restrided(op: Operation) -> Kind | None:
    """`as_strided`, with which torch names the strides of single entries otherwise."""
    x, kind = op.args[0], op.kind(op.args[0])
    same = x.shape == op.result.shape and x.storage_offset() == op.result.storage_offset()
    strides = zip(x.shape, x.stride(), op.result.stride(), strict=False)
    if same and all(size == 1 or a == b for size, a, b in strides):
        return kind
    return _unknown(op)


def _permuted(op: Operation) -> Kind | None:
    kind = op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    ndim = op.args[0].ndim
    if op.name == "permute":
        order = [d % ndim for d in op.argument("dims")]
    else:
        order = list(range(ndim))
        swap = (0, 1) if op.name == "t" else (op.argument("dim0"), op.argument("dim1"))
        if ndim > 1:
            a, b = (d % ndim for d in swap)
            order[a], order[b] = order[b], order[a]
    return Samples(order.index(kind.axis), kind.each)


def _expanded(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    axis = kind.axis + op.result.ndim - x.ndim
    if op.result.shape[axis] != x.shape[kind.axis]:
        return Mixed(f"`{op.name}` repeats samples")
    return Samples(axis, kind.each)


def _unsqueezed(op: Operation) -> Kind | None:
    kind = op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    dim = op.argument("dim") % op.result.ndim
    return Samples(kind.axis + (dim <= kind.axis), kind.each)


def _squeezed(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    dims = op.argument("dim")
    if dims is None:
        dims = range(x.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    gone = {d % x.ndim for d in dims if x.shape[d] == 1}
    if kind.axis in gone:
        return Mixed("`squeeze` takes the samples' dimension away")
    return Samples(kind.axis - sum(d < kind.axis for d in gone), kind.each)


def _selected(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    dim = op.argument("dim", 0) % x.ndim
    if dim == kind.axis:
        return Mixed(f"`{op.name}` picks samples by their position in the batch")
    return Samples(kind.axis - (dim < kind.axis), kind.each)


def _sliced(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if isinstance(kind, Samples) and op.result.shape[kind.axis] != x.shape[kind.axis]:
        return Mixed("`slice` picks samples by their position in the batch")
    return kind


def _split(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if isinstance(kind, Samples) and op.argument("dim", 0) % x.ndim == kind.axis:
        return Mixed(f"`{op.name}` picks samples by their position in the batch")
    return kind


def _repeated(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return kind
    repeats = op.argument("repeats")
    axis = kind.axis + len(repeats) - x.ndim
    return Samples(axis, kind.each) if repeats[axis] == 1 else Mixed("`repeat` repeats samples")


def _joined(op: Operation) -> Kind | None:
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    tensors, new = op.args[0], op.name == "stack"
    kinds = {op.kind(x) for x in tensors if x.numel()}
    samples = {k for k in kinds if isinstance(k, Samples)}
    if kinds <= {None, Constant()}:
        return None  # ones beside zeros are no longer alike at all positions
    if not samples:
        return kinds.pop() if len(kinds) == 1 else Mixed(f"`{op.name}` joins different things")
    if len(samples) > 1:
        return Mixed(f"`{op.name}` lets samples meet")
    kind = samples.pop()
    ndim = tensors[0].ndim + new
    dim = op.argument("dim", 0) % ndim
    if not new and dim == kind.axis:
        return Mixed("`cat` puts more than the samples into their dimension")
    for x in tensors:
        other = op.kind(x)
        if isinstance(other, (Mean, Sum, Count)):
            return Mixed(f"`{op.name}` puts a value of the whole batch beside single samples")
        if not isinstance(other, Samples) and not is_even(x, kind.axis, other):
            return Mixed(f"`{op.name}` tells samples apart by their position in the batch")
    return Samples(kind.axis + (new and dim <= kind.axis), kind.each)


# -- along dimensions ------------------------------------------------------------------------------


def _dims(op: Operation, ndim: int, name: str = "dim") -> set[int]:
    """Return the dimensions that an operation goes over; all if none is named."""
    dims = op.argument(name)
    if dims is None or (isinstance(dims, (list, tuple)) and len(dims) == 0):
        return set(range(ndim))
    if isinstance(dims, int):
        dims = [dims]
    return {d % max(ndim, 1) for d in dims}


def _along(op: Operation) -> Kind | None:
    """What is done along a dimension, which stays."""
    x, kind = op.args[0], op.kind(op.args[0])
    if kind is None or isinstance(kind, Mixed):
        return kind
    if isinstance(kind, Samples):
        name = "dims" if op.name in ("flip", "roll") else "dim"
        over = kind.axis in _dims(op, x.ndim, name)
        return Mixed(f"`{op.name}` goes over the samples") if over else kind
    return None if isinstance(kind, Constant) else Mixed(f"`{op.name}` is not linear")


def _reduced(op: Operation) -> Kind | None:
    """What takes dimensions away."""
    x, kind = op.args[0], op.kind(op.args[0])
    if kind is None or isinstance(kind, Mixed):
        return kind
    dims = _dims(op, x.ndim)
    if isinstance(kind, Constant):
        counts = op.name not in ("mean", "amax", "amin", "any", "all") and op.num_samples > 1
        counts = counts and any(x.shape[d] % op.num_samples == 0 for d in dims if x.ndim)
        return Count() if counts else Constant()
    if not isinstance(kind, Samples):
        return kind if op.name in ("sum", "mean") else Mixed(f"`{op.name}` is not linear")
    if kind.axis not in dims:
        keeps = bool(op.argument("keepdim", False))
        return Samples(kind.axis - (0 if keeps else sum(d < kind.axis for d in dims)), kind.each)
    if op.name == "mean":
        return Mean()
    if x.dtype == torch.bool and op.name in ("sum", "any", "all"):
        # Where it holds for all samples or for none, it does for those of every client.
        if not bool(x.any()):
            return Constant()
        if bool(x.all()):
            return Count() if op.name == "sum" else Constant()
    if op.name == "sum":
        return _sum_over(x, op.num_samples, kind.each)
    return Mixed(f"`{op.name}` goes over the samples")


def _sum_over(x: Tensor, num_samples: int, each: int) -> Sum:
    return Sum(frozenset({num_samples, num_samples * each, x.numel()}))


def _normalized(op: Operation) -> Kind | None:
    """LayerNorm and RMSNorm."""
    x, kind = op.args[0], op.kind(op.args[0])
    if not isinstance(kind, Samples):
        return _elementwise(op)
    if kind.axis >= x.ndim - len(op.argument("normalized_shape")):
        return Mixed(f"`{op.name}` goes over the samples")
    return kind


def _triangle(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if isinstance(kind, Samples) and kind.axis >= x.ndim - 2:
        return Mixed(f"`{op.name}` tells samples apart by their position in the batch")
    return None if isinstance(kind, Constant) else kind


# -- images and sequences --------------------------------------------------------------------------


def _leading(op: Operation) -> Kind | None:
    """What treats the first dimension of its input as samples."""
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    kinds = {k for k in op.kinds.values() if not isinstance(k, Constant)}
    if not kinds:
        return None
    kind = op.kind(op.args[0])
    if len(kinds) == 1 and isinstance(kind, Samples) and kind.axis == 0:
        return kind
    return Mixed(f"`{op.name}` meets samples in another place than first")


def _convolved(op: Operation) -> Kind | None:
    if isinstance(op.kind(op.args[0]), Samples) and op.args[0].ndim < op.args[1].ndim:
        return Mixed("a convolution takes samples for channels")
    return _leading(op)


def _batch_normalized(op: Operation) -> Kind | None:
    if op.argument("training", False):
        return Mixed("a layer normalizes over the samples")
    return _leading(op)


def _padded(op: Operation) -> Kind | None:
    x, kind = op.args[0], op.kind(op.args[0])
    if isinstance(kind, Samples) and kind.axis >= x.ndim - len(op.argument("pad")) // 2:
        return Mixed("`pad` puts more than the samples into their dimension")
    return None if isinstance(kind, Constant) else kind


def _attended(op: Operation) -> Kind | None:
    constants = [x for x in op.tensors if op.kind(x) is None]
    if any(x.ndim > 0 and not is_even(x, 0, None) for x in constants) and op.kinds:
        return Mixed("attention tells samples apart by their position in the batch")
    return _leading(op)


# -- products --------------------------------------------------------------------------------------


def _product(op: Operation) -> Kind | None:
    """mm, mv, bmm, and those that add something."""
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    adds = op.name in ("addmm", "addmv", "baddbmm")
    a, b = op.args[1:3] if adds else op.args[:2]
    kind = _product_of(op, a, b)
    if not adds:
        return kind
    added = op.kind(op.args[0])
    if kind is None or isinstance(kind, Mixed):
        return kind if added in (None, Constant()) else Mixed(f"`{op.name}` lets samples meet")
    if isinstance(kind, Samples):
        if isinstance(added, Samples):
            return kind if added == kind else Mixed(f"`{op.name}` lets samples meet")
        axis = kind.axis - (op.result.ndim - op.args[0].ndim)
        even = added in (None, Constant()) and is_even(op.args[0], axis, added)
        return kind if even else Mixed(f"`{op.name}` tells samples apart by their position")
    return kind if added in (None, Constant(), kind) else Mixed(f"`{op.name}` is not linear")


def _product_of(op: Operation, a: Tensor, b: Tensor) -> Kind | None:
    left, right = op.kind(a), op.kind(b)
    left = None if isinstance(left, Constant) else left
    right = None if isinstance(right, Constant) else right
    if left is None and right is None:
        return None
    mixed = Mixed(f"`{op.name}` lets samples meet")
    reduced = [k for k in (left, right) if not isinstance(k, Samples) and k is not None]
    if reduced:
        return reduced[0] if None in (left, right) and not isinstance(reduced[0], Count) else mixed
    batched = a.ndim == 3
    if isinstance(left, Samples) and isinstance(right, Samples):
        return left if batched and left == right and left.axis == 0 else mixed
    of_left = isinstance(left, Samples)
    kind, other = (left, b) if of_left else (right, a)
    summed = a.ndim - 1 if of_left else int(batched)  # the dimension that is summed over
    if not isinstance(kind, Samples) or kind.axis == summed:
        return mixed
    if batched and kind.axis == 0 and not is_even(other, 0, op.kind(other)):
        return Mixed(f"`{op.name}` tells samples apart by their position in the batch")
    return kind


# -- look-ups --------------------------------------------------------------------------------------


def _embedded(op: Operation) -> Kind | None:
    table, index = op.args[:2]
    if op.kind(table) in (None, Constant()):
        return op.kind(index)
    return Mixed("`embedding` looks up samples by number")


def _gathered(op: Operation) -> Kind | None:
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    x, index = op.args[0], op.argument("index")
    kind, where = op.kind(x), op.kind(index)
    dim = op.argument("dim") % max(x.ndim, 1)
    if isinstance(kind, Samples):
        even = where == kind or (where in (None, Constant()) and is_even(index, kind.axis, where))
        if even and dim != kind.axis and index.shape[kind.axis] == x.shape[kind.axis]:
            return kind
        return Mixed("`gather` lets samples meet")
    if isinstance(where, Samples) and kind in (None, Constant()):
        if dim == where.axis or is_even(x, where.axis, kind):
            return where
        return Mixed("`gather` tells samples apart by their position in the batch")
    return None if not op.kinds else Mixed("`gather` of a value of the whole batch")


def _index_selected(op: Operation) -> Kind | None:
    x, index = op.args[0], op.argument("index")
    kind, where, dim = op.kind(x), op.kind(index), op.argument("dim") % max(op.args[0].ndim, 1)
    if isinstance(kind, Samples) and where in (None, Constant()) and dim != kind.axis:
        return kind
    if kind in (None, Constant()) and isinstance(where, Samples):
        return Samples(dim, where.each)
    return _mixed_in(op) or Mixed("`index_select` picks samples by number")


def _indexed(op: Operation) -> Kind | None:
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    x, indices = op.args[0], op.args[1]
    kind = op.kind(x)
    there = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(there) == 1 and there[0][1].dtype not in (torch.bool, torch.uint8):
        place, index = there[0]
        where = op.kind(index)
        if kind in (None, Constant()) and isinstance(where, Samples):
            return Samples(place + where.axis, where.each)
        if isinstance(kind, Samples) and where in (None, Constant()) and place != kind.axis:
            return Samples(kind.axis + (index.ndim - 1 if place < kind.axis else 0), kind.each)
    return Mixed("it picks samples by number")


def _scattered(op: Operation) -> Kind | None:
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    x, index, source = op.args[0], op.argument("index"), op.argument("src")
    kind, where = op.kind(x), op.kind(index)
    if not isinstance(where, Samples) or op.argument("dim") % x.ndim == where.axis:
        return Mixed("`scatter` picks samples by number")
    fits = kind == where or isinstance(kind, Constant)
    if isinstance(source, Tensor):
        of_source = op.kind(source)
        fits = fits and (of_source == where or isinstance(of_source, Constant))
    return where if fits else Mixed("`scatter` lets samples meet")


# -- losses ----------------------------------------------------------------------------------------


def _negative_log_likelihood(op: Operation) -> Kind | None:
    scores, labels, weight, reduction, ignored = op.args[:5]
    kind, of_labels = op.kind(scores), op.kind(labels)
    mixed = _mixed_in(op)
    if mixed is not None:
        return mixed
    if kind is None and of_labels is None:
        return None
    if not isinstance(kind, Samples) or kind.axis != 0 or of_labels != kind:
        return Mixed("its loss compares samples with labels that are not theirs")
    if reduction == 0:
        return kind
    if reduction == 2:
        return _sum_over(labels, op.num_samples, kind.each)
    if weight is not None:
        return Mixed("its loss divides by the weights of the classes that a batch has")
    if bool((labels == ignored).any()):
        return Mixed(f"its loss leaves out samples with label {ignored}")
    return Mean()


def _loss(op: Operation) -> Kind | None:
    """Losses that compare entry by entry, then reduce."""
    tensors = op.tensors
    kind = _combined(op, tensors)
    reduction = op.argument("reduction", 1)
    if not isinstance(kind, Samples):
        return kind if kind is None or isinstance(kind, Mixed) else None
    if reduction == 0:
        return kind
    if reduction == 1:
        return Mean()
    return _sum_over(max(tensors, key=Tensor.numel), op.num_samples, kind.each)


def _factory(op: Operation) -> Kind | None:
    return Constant()


def _same(op: Operation) -> Kind | None:
    return op.kind(op.args[0])


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("masked_fill", "fill", "zero", "_to_copy", "copy", "clone", "where", "lerp"), _elementwise
    ),
    **dict.fromkeys(("detach", "alias", "lift_fresh", "contiguous"), _same),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), _viewed
    ),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    "as_strided": _restrided,
    "expand": _expanded,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "select": _selected,
    "unbind": _selected,
    "slice": _sliced,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"), _split),
    "repeat": _repeated,
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(
        (
            "_softmax",
            "_log_softmax",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "sort",
            "topk",
            "argsort",
            "flip",
            "roll",
            "glu",
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "var",
            "std",
            "var_mean",
            "std_mean",
            "logsumexp",
            "linalg_vector_norm",
            "norm",
            "prod",
            "any",
            "all",
            "count_nonzero",
            "median",
            "kthvalue",
            "aminmax",
        ),
        _reduced,
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(
        (
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "avg_pool2d",
            "avg_pool3d",
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d",
            "adaptive_max_pool2d",
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_linear1d",
            "upsample_bicubic2d",
            "pixel_shuffle",
            "pixel_unshuffle",
            "im2col",
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
            "native_group_norm",
            "native_channel_shuffle",
        ),
        _leading,
    ),
    "convolution": _convolved,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _batch_normalized
    ),
    "_native_batch_norm_legit_no_training": _leading,
    "constant_pad_nd": _padded,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        ),
        _attended,
    ),
    **dict.fromkeys(("mm", "mv", "bmm", "addmm", "addmv", "baddbmm"), _product),
    "embedding": _embedded,
    "gather": _gathered,
    "index_select": _index_selected,
    "index": _indexed,
    "scatter": _scattered,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _negative_log_likelihood),
    **dict.fromkeys(
        (
            "mse_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "soft_margin_loss",
        ),
        _loss,
    ),
    **dict.fromkeys(
        (
            "zeros",
            "ones",
            "full",
            "empty",
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "scalar_tensor",
        ),
        _factory,
    ),
}
