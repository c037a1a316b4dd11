"""Watching a forward pass: whether it may stand for one pass per client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedrec.clients.generators import global_state, put_global_state
from fedrec.clients.state import ModuleState
from fedrec.executors.kinds import (
    CannotGroupError,
    Constant,
    Kind,
    Mean,
    Mixed,
    Operation,
    Rule,
    Samples,
    Sum,
    flat,
    rule_of,
)
from fedrec.executors.winners import Deferrals, is_deferred

__all__ = [
    "EscapeWatch",
    "SampleWatch",
    "refuse_custom_gradients",
    "refuse_hooks",
    "traceless",
]

_aten = torch.ops.aten


def refuse_hooks(module: nn.Module) -> None:
    """Raise `CannotGroupError` if a hook may change gradients, which bypass it here."""
    if global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks:
        raise CannotGroupError("there are backward hooks of all modules")
    for name, layer in module.named_modules():
        if layer._backward_hooks or layer._backward_pre_hooks:
            raise CannotGroupError(f"{name or 'it'} has a backward hook")
        if layer._compiled_call_impl is not None:
            raise CannotGroupError(f"{name or 'it'} is compiled")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotGroupError(f"{name} has a hook")


@contextmanager
def traceless(state: ModuleState) -> Iterator[None]:
    """Refuse what would be different if clients were computed one after another.

    That is what a module remembers, and what it draws from Python's and NumPy's random numbers, or
    how it seeds torch's (draws from those are watched by whoever computes). All are put back.

    Raises:
        CannotGroupError: If something has changed.
    """
    before, own = global_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        drew = global_state() != before
        if not torch.equal(torch.default_generator.get_state(), own):
            torch.default_generator.set_state(own)
            drew = True
        changed = state.changes() if state.has_changed else []
        if drew:
            put_global_state(before)
        if changed:
            state.restore()
    if drew:
        raise CannotGroupError("it draws random numbers")
    if changed:
        raise CannotGroupError(f"it changes {', '.join(changed[:3])}")


class EscapeWatch(TorchFunctionMode):
    """Refuses calls by which a value or a gradient leaves what is watched."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        why = _ESCAPES.get(func)
        if why is not None and any(self.is_watched(x) for x in flat(args)):
            raise CannotGroupError(why)
        creates = func in _CREATIONS
        if creates and any(self.is_watched(x) for x in _in_lists(args)):
            raise CannotGroupError(_READ)
        result = self.compute(func, args, kwargs or {})
        if creates and not isinstance(args[0], Tensor):
            self.created(result)
        return result

    def is_watched(self, value: Any) -> bool:
        """Whether it matters for an argument of such a call; here always."""
        return True

    def compute(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Make the call."""
        return func(*args, **kwargs)

    def created(self, value: Tensor) -> None:
        """Take note of a tensor that was made of anything but tensors."""


def _in_lists(args: Any) -> Any:
    """Yield tensors in lists, whose numbers are read: torch does not say so."""
    for values in args:
        if isinstance(values, (list, tuple)):
            yield from (x for x in tree_leaves(values) if isinstance(x, Tensor))


_CREATIONS = (
    *(torch.from_numpy, torch.frombuffer, torch.as_tensor, torch.asarray, torch.tensor),
    *(Tensor.new_tensor, Tensor.new),
)
_HOOK = "it hooks into a gradient"
_READ = "it reads the value of a tensor"
_GRADIENT = "it computes a gradient itself"
_ESCAPES: dict[Any, str] = {
    Tensor.register_hook: _HOOK,
    Tensor.register_post_accumulate_grad_hook: _HOOK,
    Tensor.numpy: _READ,
    Tensor.tolist: _READ,
    Tensor.__array__: _READ,
    Tensor.__repr__: _READ,  # torch turns off what watches
    Tensor.__reduce_ex__: _READ,
    Tensor.__deepcopy__: "it copies a tensor in a way that fedrec does not see",
    Tensor.__dlpack__: _READ,
    Tensor.data_ptr: _READ,
    Tensor.untyped_storage: _READ,
    Tensor.data.__set__: "it replaces the memory of a tensor",  # type: ignore[attr-defined]
    Tensor.backward: _GRADIENT,
    torch.autograd.grad: _GRADIENT,
}


class SampleWatch(TorchDispatchMode):
    """Follows the samples of a batch through a forward pass, see `fedrec.executors.kinds`.

    Args:
        batch: What the pass gets, the samples of all clients one after the other.
        num_samples: How many those are.
        deferrals: What has outputs of layers that are put off.

    Attributes:
        num_bytes: Size of all results, and once more of what goes into layers with weights, as much
            as the gradients that are kept: an upper limit of what the pass needs.
        loss_is_sum: Whether the loss is a sum over samples, and no mean.
        left_out: Labels that a loss would leave out, by which part of the batch they are in.

    Raises:
        CannotGroupError: In the pass, where the result would depend on how samples are grouped
            whatever becomes of it.
    """

    def __init__(self, batch: Any, num_samples: int, deferrals: Deferrals | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_samples = num_samples
        self.deferrals = deferrals
        self.num_bytes = 0
        # Kinds by memory, then by what part of it a tensor is.
        self._kinds: dict[int, dict[tuple[Any, ...], Kind | None]] = {}
        self._calls: Any = _Calls(self)
        self.left_out: dict[int, int] = {}
        self.loss_is_sum = False
        self._parts_of_batch: dict[tuple[Any, ...], int] = {}
        for i, x in enumerate(tree_leaves(batch)):
            if isinstance(x, Tensor):
                self._parts_of_batch[x.untyped_storage().data_ptr(), *_part(x)] = i
                whole = x.ndim > 0 and x.shape[0] == num_samples
                self._put(x, Samples(0) if whole else Mixed("a batch has parts of other sizes"))

    def note_labels(self, labels: Tensor, ignored: int) -> None:
        """Take note of the labels of a loss that would leave out those of one value."""
        part = self._parts_of_batch.get((labels.untyped_storage().data_ptr(), *_part(labels)))
        if part is not None:
            self.left_out[part] = ignored

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Compiled modules are refused before; torch would wrap each call to leave them alone.
        return False

    def __enter__(self) -> SampleWatch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._calls.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._calls.__exit__(*exception)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def kind(self, x: Any) -> Kind | None:
        """Return what a tensor is to the samples."""
        if not isinstance(x, Tensor) or not self._kinds:
            return None
        parts = self._kinds.get(x.untyped_storage().data_ptr())
        if parts is None:
            return None
        return parts.get(_part(x), _UNSEEN)

    def _put(self, x: Tensor, kind: Kind | None) -> None:
        """Note the kind of a tensor in memory of its own."""
        memory = x.untyped_storage().data_ptr()
        if kind is None:
            self._kinds.pop(memory, None)
        else:
            self._kinds[memory] = {_part(x): kind}

    def layer(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a layer with weights, which treats the first dimension as samples.

        Args:
            name: Of the layer, for an error.
            x: What goes in.
            compute: The layer.

        Raises:
            CannotGroupError: If the first dimension of `x` is not that of the samples.
        """
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if self.deferrals is not None:
                self.deferrals.settle(x)
            kind = self.kind(x)
            if not isinstance(kind, Samples) or kind.axis != 0:
                why = kind.reason if isinstance(kind, Mixed) else "its input is no batch of samples"
                raise CannotGroupError(f"{name} does not meet samples one by one: {why}")
            result = compute(x)
            self._put(result, Samples(0, result.shape[0] // self.num_samples))
            self.num_bytes += x.nbytes
            if not is_deferred(result):
                self.num_bytes += result.nbytes
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule, draws, reads, writes = _known(func)
        kinds: dict[int, Kind] = {}
        memories: set[int] = set()
        for x in flat((*args, *kwargs.values())):
            if isinstance(x, Tensor):
                if self.deferrals is not None and is_deferred(x):
                    raise CannotGroupError(_UNSEEN.reason)
                memory = x.untyped_storage().data_ptr()
                memories.add(memory)
                parts = self._kinds.get(memory)
                of_x = None if parts is None else parts.get(_part(x), _UNSEEN)
                if of_x is not None:
                    kinds[id(x)] = of_x
        if draws and not _draws_nothing(func, args, kwargs):
            raise CannotGroupError("it draws random numbers")
        reads = reads and (func is not _aten.index.Tensor or _by_mask(args[1]))
        if reads and any(not isinstance(k, Constant) for k in kinds.values()):
            raise CannotGroupError(_READ)
        result = func(*args, **kwargs)
        if func in _OF_LABELS:
            self.note_labels(args[1], args[4])
        kind = None
        if kinds or rule is _FACTORY:
            kind = rule(Operation(func, args, kwargs, kinds, self.num_samples, result))
        if writes:
            self._written(args[0] if "out" not in kwargs else kwargs["out"], kind)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.num_bytes += x.nbytes
                if x.untyped_storage().data_ptr() not in memories:
                    self._put(x, kind)
                elif not writes:
                    self._note_view(x, kind)
        return result

    def _note_view(self, x: Tensor, kind: Kind | None) -> None:
        parts = self._kinds.get(x.untyped_storage().data_ptr())
        if parts is not None:
            parts[_part(x)] = kind

    def _written(self, x: Tensor, kind: Kind | None) -> None:
        """Note the new kind of a tensor that was written to, and of what shares its memory."""
        memory = x.untyped_storage().data_ptr()
        parts = self._kinds.setdefault(memory, {}) if kind is not None else self._kinds.get(memory)
        if parts is None:
            return
        whole = x.numel() * x.element_size() == x.untyped_storage().nbytes()
        stays = whole or not isinstance(kind, (Mixed, Constant))
        if parts.get(_part(x), _UNSEEN) == kind and stays:
            return  # what it is a part of is still of the same kind
        for part in parts:
            parts[part] = _WRITTEN
        parts[_part(x)] = kind if whole else _WRITTEN

    def parts_of_mean(self, what: str, value: Any, count: int) -> int:
        """Return into how many equal parts of clients a value of all samples falls.

        Those are `count` for a sum over samples, and 1 for a mean over them, which is that of
        each client as well.

        Args:
            what: Names the value, for an error.
            value: A loss, or something logged.
            count: Number of clients, which have equally many samples.

        Raises:
            CannotGroupError: If it is neither, with the reason.
        """
        kind = self.kind(value)
        if isinstance(kind, Sum):
            return count
        if kind is None or isinstance(kind, (Mean, Constant)):
            return 1
        why = f" ({kind.reason})" if isinstance(kind, Mixed) else ""
        raise CannotGroupError(f"{what} is no mean over samples{why}")


class _Calls(EscapeWatch):
    """The calls that a `SampleWatch` sees before torch takes them apart.

    What is most often called has its rule here as well: it takes a tenth of the time of the same
    call's operators.
    """

    def __init__(self, watch: SampleWatch) -> None:
        super().__init__()
        self.watch = watch

    def is_watched(self, value: Any) -> bool:
        return self.watch.kind(value) is not None

    def created(self, value: Tensor) -> None:
        self.watch._put(value, None)

    def compute(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self.watch.deferrals is not None:
            result = self.watch.deferrals.call(func, args, kwargs)
            if result is not None:
                # An activation, or a pooling within images: samples stay what they are.
                self.watch._put(result, self.watch.kind(args[0]))
                return result
        shortcut = _SHORTCUTS.get(func)
        kind = None if shortcut is None else shortcut(self.watch, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        self.watch._put(result, kind)
        self.watch.num_bytes += result.nbytes
        return result


def _same_for_each(watch: SampleWatch, args: Any, kwargs: Mapping[str, Any]) -> Kind | None:
    """A function of single numbers that makes a new tensor."""
    if kwargs.get("inplace", False) or len(args) != 1:
        return None
    kind = watch.kind(args[0])
    return kind if isinstance(kind, Samples) else None


_USUAL = {
    "weight": None,
    "size_average": None,
    "ignore_index": None,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def _cross_entropy(watch: SampleWatch, args: Any, kwargs: Mapping[str, Any]) -> Kind | None:
    """The mean over labels as numbers, none of which is left out."""
    if len(args) != 2 or {**_USUAL, **kwargs, "ignore_index": None} != _USUAL:
        return None
    scores, labels = args
    kind = watch.kind(scores)
    fits = isinstance(kind, Samples) and kind.axis == 0 and watch.kind(labels) == kind
    if not fits or labels.is_floating_point() or labels.ndim != scores.ndim - 1:
        return None
    ignored = kwargs.get("ignore_index", -100)
    watch.note_labels(labels, ignored)
    with torch._C._DisableTorchDispatch():
        return None if bool((labels == ignored).any()) else Mean()


_SHORTCUTS: dict[Any, Callable[[SampleWatch, Any, Mapping[str, Any]], Kind | None]] = {
    functional.cross_entropy: _cross_entropy,
    **dict.fromkeys(
        (
            functional.relu,
            torch.relu,
            Tensor.relu,
            torch.tanh,
            Tensor.tanh,
            torch.sigmoid,
            Tensor.sigmoid,
            functional.gelu,
        ),
        _same_for_each,
    ),
}


_UNSEEN = Mixed("it looks at a tensor in a way that fedrec does not see")
_WRITTEN = Mixed("it writes into a part of a tensor")
_OF_LABELS = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_FACTORY: Rule = rule_of(_aten.zeros.default)
_functions: dict[Any, tuple[Rule, bool, bool, bool]] = {}


def _known(func: Any) -> tuple[Rule, bool, bool, bool]:
    """Return the rule of an operator, and whether it draws, reads values, and writes."""
    found = _functions.get(func)
    if found is None:
        tags = func.tags
        reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        aliases = [a.alias_info for a in func._schema.arguments]
        writes = any(a is not None and a.is_write for a in aliases)
        draws = torch.Tag.nondeterministic_seeded in tags
        found = _functions[func] = (rule_of(func), draws, reads, writes)
    return found


def _draws_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that can draw random numbers does not: attention without dropout."""
    attends = "scaled_dot_product" in func._schema.name
    return attends and Operation(func, args, kwargs, {}, 1, None).argument("dropout_p", 0.0) == 0


def _by_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _part(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype


def refuse_custom_gradients(loss: Tensor, known: Collection[Any]) -> None:
    """Refuse backward passes of the user's own, which may do anything to samples.

    Args:
        loss: What they lead to.
        known: Functions of fedrec's own.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = isinstance(node, BackwardCFunction)
        if own and type(node)._forward_cls not in known:  # type: ignore[attr-defined]
            raise CannotGroupError(f"it has a backward pass of its own ({node.name()})")
        waiting.extend(following for following, _ in node.next_functions)
