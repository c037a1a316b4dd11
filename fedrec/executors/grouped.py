"""One pass with shared weights that gives every client's gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from fedrec.clients.local import LogMeans
from fedrec.clients.step import training_step
from fedrec.executors.cohort import Cohort
from fedrec.executors.kinds import CannotGroupError, Sum
from fedrec.executors.watch import SampleWatch, refuse_custom_gradients
from fedrec.executors.winners import Deferrals, Output, WinnersFunction

__all__ = ["refuse_shared_parameters", "train_grouped"]

_aten = torch.ops.aten
# A matrix product into rows that are not aligned takes up to twice as long; from this many
# numbers on it pays to go through memory that is.
_LARGE_WEIGHT = 1 << 16


def train_grouped(
    cohort: Cohort,
    updates: Tensor,
    logs: LogMeans,
    watches: list[SampleWatch] | None = None,
    is_sum: bool | None = None,
    winners: Collection[str] | None = (),
) -> None:
    r"""Compute one step of plain SGD for all clients in one forward and backward pass.

    The batches of all $c$ clients go through the module as one batch. The backward pass stops at
    the outputs of the layers. From their gradients and what went into a layer, the gradients of its
    weights are summed over the samples of one client at a time, into the row of that client. With a
    loss that is a sum over samples these are the clients' own gradients; with a mean, once they are
    multiplied by $c$. Whether it is one is followed through every pass, see `SampleWatch`.

    Args:
        cohort: The clients.
        updates: Shape $(c, d)$, written in place.
        logs: Gets what was logged.
        watches: Gets what has watched the pass.
        is_sum: Whether the loss was a sum over samples when it was tried, and no mean. A divisor
            that is the number of samples in a pass by chance alone would make a mean of it.
        winners: Names of convolutions that are computed by their winners where max-pooling follows;
            `None` for all.

    Raises:
        CannotGroupError: If a trainable parameter belongs to no supported layer, or to one that is
            not used exactly once in a pass, or samples meet in any other way than in one mean.
    """
    cohort.load()
    module, layout, count = cohort.module, cohort.ctx.layout, len(cohort.clients)
    rows = layout.unflatten(updates)
    batch = next(cohort.steps())
    deferrals = None if winners == () else Deferrals(winners)
    watch = SampleWatch(batch, sum(len(steps[0]) for steps in cohort.batches), deferrals)
    with (
        cohort.clients[0]
        .local_trainer(module, cohort.ctx)
        .hiding_optimizers()
        .attached() as logged,
        _sinks(module, rows, watch) as sinks,
        torch.enable_grad(),
    ):
        with watch, cohort.ctx.autocast():
            loss = training_step(module, batch, 0)
        if loss is None:
            raise CannotGroupError("training_step returned None")
        refuse_custom_gradients(loss, (WinnersFunction, GroupNormFunction))
        parts = watch.parts_of_mean("its loss", loss, count)
        watch.loss_is_sum = isinstance(watch.kind(loss), Sum)
        if is_sum is not None and watch.loss_is_sum is not is_sum:
            raise CannotGroupError("its loss is a sum over samples once, and a mean another time")
        for name, value in logged.items():
            if watch.parts_of_mean(f"what it logs as {name!r}", value, count) > 1:
                logged[name] = value / count
        if watches is not None:
            watches.append(watch)
        used = [sink for sink in sinks if sink.output is not None]
        parameters = {n: p for sink in sinks for n, p in sink.parameters.items()}
        found = torch.autograd.grad(
            loss,
            [*(sink.output for sink in used), *parameters.values()],
            torch.full_like(loss, count // parts),
            allow_unused=True,
        )
        logs.add(logged, count)
    if deferrals is not None:
        watch.num_bytes += deferrals.num_bytes
    cohort.refuse_other_weights()
    of_outputs, others = dict(zip(used, found, strict=False)), found[len(used) :]
    del found  # each gradient is let go when it has been used
    for name, gradient in zip(parameters, others, strict=True):
        if gradient is not None:
            raise CannotGroupError(f"{name} is used outside of its layer")
    with torch.no_grad():
        for sink in sinks:
            sink.fill(of_outputs.pop(sink, None), count)
    for name, row in rows.items():
        scale = cohort.scale.get(name, 0.0)  # a parameter without one does not change in training
        if scale != 1.0:
            row.mul_(scale)


def refuse_shared_parameters(module: nn.Module) -> None:
    """Raise `CannotGroupError` if a parameter is in a module twice."""
    trainable = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    if len(trainable) > len(set(trainable)):
        raise CannotGroupError("layers share a parameter")


Backward = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Sink:
    """Where a layer's gradients go: the parameter's slice of every client's row, or `None`.

    Attributes:
        parameters: The layer's trainable parameters by name.
        inputs: What the layer's weight met in the forward pass.
        output: Where the gradient of the layer's output is found.
        backward: Computes the gradients of weight and bias of each of so many clients from inputs
            and gradient, where what was computed was more than the layer.
    """

    name: str
    layer: nn.Module
    watch: SampleWatch
    parameters: dict[str, Any] = field(default_factory=dict)
    weight: Tensor | None = None
    bias: Tensor | None = None
    inputs: Tensor | None = None
    output: GradientEdge | None = None
    backward: Backward | None = None

    @property
    def count(self) -> int:
        """Number of clients."""
        rows = self.bias if self.weight is None else self.weight
        return 0 if rows is None else len(rows)

    def enter(self, inputs: Tensor) -> Tensor:
        """Keep what the weight meets; what comes out of the layer needs a gradient."""
        if self.inputs is not None:
            raise CannotGroupError(f"{self.name} is used more than once")
        self.inputs = inputs.detach()
        return inputs if inputs.requires_grad else self.inputs.requires_grad_()

    def leave(self, output: Tensor, backward: Backward | None = None) -> Tensor:
        """Note where the gradient of the output is found, whatever is done to it in place."""
        if output.requires_grad:
            self.output = get_gradient_edge(output)
        self.backward = backward
        return output

    def fill(self, gradient: Tensor | None, count: int) -> None:
        """Write the gradients of weight and bias of each of so many clients."""
        inputs, self.inputs = self.inputs, None
        if gradient is None or inputs is None:
            for rows in (self.weight, self.bias):
                if rows is not None:
                    rows.zero_()
            return
        if self.backward is None:
            _BACKWARDS[type(self.layer)](self, inputs.to(gradient.dtype), gradient, count)
            return
        for rows, values in zip(
            (self.weight, self.bias), self.backward(inputs, gradient, count), strict=True
        ):
            if rows is not None:
                rows.copy_(values.reshape(rows.shape))


@contextmanager
def _sinks(
    module: nn.Module, rows: Mapping[str, Tensor], watch: SampleWatch
) -> Iterator[list[_Sink]]:
    """Make the layers write their gradients to these rows instead of to their parameters."""
    sinks: dict[str, _Sink] = {}
    for name in rows:
        owner, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            raise CannotGroupError(f"{name} is the weight or bias of no layer")
        if owner not in sinks:
            sinks[owner] = _Sink(owner, module.get_submodule(owner), watch)
        sink = sinks[owner]
        setattr(sink, kind, rows[name])
        sink.parameters[name] = getattr(sink.layer, kind)
    patched: list[nn.Module] = []
    try:
        for owner, sink in sinks.items():
            forward = _forward_of(sink.layer, owner)
            vars(sink.layer)["forward"] = partial(_computed, forward, sink)
            patched.append(sink.layer)
        yield list(sinks.values())
    finally:
        for layer in patched:
            del vars(layer)["forward"]


def _forward_of(layer: nn.Module, name: str) -> Callable[..., Tensor]:
    found = _FORWARDS.get(type(layer))
    plain = not isinstance(layer, nn.Conv1d | nn.Conv2d) or (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )
    if found is None or not plain or "forward" in vars(layer):
        raise CannotGroupError(f"{name or 'it'} is a {type(layer).__name__} of an unsupported kind")
    return found


def _computed(forward: Callable[..., Tensor], sink: _Sink, input: Tensor) -> Tensor:
    """Compute a layer whose gradients go to a sink; `input` is what layers of torch call it."""
    layer: Any = sink.layer
    least = 2
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        least += len(layer.kernel_size)
    elif isinstance(layer, nn.LayerNorm):
        least = 1 + len(layer.normalized_shape)
    if input.ndim < least:
        raise CannotGroupError(f"{sink.name} takes samples for something else")
    return sink.watch.layer(sink.name, input, partial(forward, layer, sink))


# The layers compute with weights that need no gradient: autograd would add up those of all clients.
def _detached(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _linear(layer: nn.Linear, sink: _Sink, x: Tensor) -> Tensor:
    return sink.leave(functional.linear(sink.enter(x), *_detached(layer)))


def _convolution(layer: nn.Conv1d | nn.Conv2d, sink: _Sink, x: Tensor) -> Tensor:
    function = functional.conv1d if isinstance(layer, nn.Conv1d) else functional.conv2d
    how: Any = (layer.stride, layer.padding, layer.dilation)

    def compute() -> Tensor:
        return sink.leave(function(sink.enter(x), *_detached(layer), *how))

    deferrals = sink.watch.deferrals
    waiting = None if deferrals is None else deferrals.put_off(Output(sink, x, compute))
    return compute() if waiting is None else waiting


def _layer_norm(layer: nn.LayerNorm, sink: _Sink, x: Tensor) -> Tensor:
    return _affine(
        layer, sink, functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    )


def _group_norm(layer: nn.GroupNorm, sink: _Sink, x: Tensor) -> Tensor:
    weight, bias = _detached(layer)
    if weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
        x = functional.group_norm(x, layer.num_groups, None, None, layer.eps)
        # Channels last, as the features of a LayerNorm are.
        return _affine(layer, sink, x.movedim(1, -1)).movedim(-1, 1)
    entered = sink.enter(x).contiguous(memory_format=suggest_memory_format(x))
    how = _GroupNorm(weight, bias, layer.num_groups, layer.eps, sink.count)
    result: Tensor = GroupNormFunction.apply(entered, how)  # type: ignore[no-untyped-call]
    return sink.leave(result, how.gradients)


def _affine(layer: nn.LayerNorm | nn.GroupNorm, sink: _Sink, x: Tensor) -> Tensor:
    weight, bias = _detached(layer)
    x = sink.enter(x) * weight
    return sink.leave(x if bias is None else x + bias)


class _GroupNorm:
    """One GroupNorm in one pass, whose gradients are computed client by client."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, num_groups: int, eps: float, count: int
    ) -> None:
        self.weight, self.bias, self.num_groups, self.eps = weight, bias, num_groups, eps
        self.count = count
        self.moments: tuple[Tensor, ...] = ()
        self.found: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute it, and keep means and scales."""
        sizes = (len(x), x.shape[1], x[0, 0].numel(), self.num_groups)
        result, *moments = torch.native_group_norm(x, self.weight, self.bias, *sizes, self.eps)
        self.moments = tuple(moments)
        return result

    def backward(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient of the input; those of weight and bias come with it."""
        g = g.contiguous(memory_format=suggest_memory_format(x))
        parts = zip(*(t.chunk(self.count) for t in (g, x, *self.moments)), strict=True)
        sizes = (len(x) // self.count, x.shape[1], x[0, 0].numel(), self.num_groups)
        # All three at a time: torch takes as long for the affine ones as for all.
        needs = (True, True, True)
        found = [
            _aten.native_group_norm_backward(*part, self.weight, *sizes, needs) for part in parts
        ]
        inputs, weights, biases = zip(*found, strict=True)
        self.found = torch.stack(weights), torch.stack(biases)
        return inputs[0] if self.count == 1 else torch.cat(inputs)

    def gradients(self, x: Tensor, g: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return those of weight and bias of each client."""
        if self.found is None:  # no gradient of the input was asked for
            self.backward(x.contiguous(memory_format=suggest_memory_format(x)), g)
        found, self.found = self.found, None
        if found is None:
            raise RuntimeError("a backward pass leaves gradients")
        return found


class GroupNormFunction(Function):
    """A `_GroupNorm` for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _GroupNorm) -> Tensor:
        """Compute it."""
        ctx.save_for_backward(x)
        ctx.how = how
        return how.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of what went in."""
        return ctx.how.backward(*ctx.saved_tensors, gradient), None


_FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}


def _linear_backward(sink: _Sink, x: Tensor, g: Tensor, count: int) -> None:
    by_client = g.reshape(count, -1, g.shape[-1])
    if sink.weight is not None:
        _sum_of_outer_products(by_client, x.reshape(count, -1, x.shape[-1]), sink.weight)
    if sink.bias is not None:
        _sum(by_client, (1,), sink.bias)


def _convolution_backward(sink: _Sink, x: Tensor, g: Tensor, count: int) -> None:
    layer: Any = sink.layer
    if g.device.type == "cpu":
        weight = layer.weight.to(g.dtype)
        how = (layer.stride, layer.padding, layer.dilation, False, [0] * len(layer.kernel_size), 1)
        need = (False, sink.weight is not None, sink.bias is not None)
        sizes = [weight.shape[0]]
        for i, (one, other) in enumerate(zip(g.chunk(count), x.chunk(count), strict=True)):
            found = _aten.convolution_backward(one, other, weight, sizes, *how, need)
            for rows, gradient in ((sink.weight, found[1]), (sink.bias, found[2])):
                if rows is not None:
                    rows[i].copy_(gradient)
        return
    columns = _unfold(x, layer)
    columns = columns.reshape(count, -1, *columns.shape[1:])
    pixels = g.reshape(count, -1, g.shape[1], columns.shape[-1])
    if sink.weight is not None:
        products = torch.einsum("cbol,cbil->coi", pixels, columns)
        sink.weight.copy_(products.reshape(sink.weight.shape))
    if sink.bias is not None:
        _sum(pixels, (1, 3), sink.bias)


def _affine_backward(sink: _Sink, x: Tensor, g: Tensor, count: int) -> None:
    for rows, values in ((sink.weight, g * x), (sink.bias, g)):
        if rows is not None:
            _sum(values.reshape(count, -1, *rows.shape[1:]), (1,), rows)


_BACKWARDS: dict[type[nn.Module], Callable[[_Sink, Tensor, Tensor, int], None]] = {
    nn.Linear: _linear_backward,
    nn.Conv1d: _convolution_backward,
    nn.Conv2d: _convolution_backward,
    nn.LayerNorm: _affine_backward,
    nn.GroupNorm: _affine_backward,
}


def _unfold(x: Tensor, layer: Any) -> Tensor:
    """Return the patches that a kernel sees, shape (samples, kernel entries, positions)."""
    sizes: tuple[Any, ...] = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    if isinstance(layer, nn.Conv1d):  # an image of height 1
        neutral = (1, 1, 0, 1)
        x = x.unsqueeze(2)
        sizes = tuple((n, *s) for n, s in zip(neutral, sizes, strict=True))
    return functional.unfold(x, *sizes)


def _sum_of_outer_products(g: Tensor, x: Tensor, rows: Tensor) -> None:
    """Write g^T x of each client to its row; shapes (c, k, o), (c, k, i) and (c, o, i)."""
    if g.device.type == "cpu" and g.dtype == rows.dtype and rows[0].numel() >= _LARGE_WEIGHT:
        aligned = rows.new_empty(rows.shape[1:])
        for one, other, row in zip(g, x, rows, strict=True):
            row.copy_(torch.mm(one.t(), other, out=aligned))
    else:  # straight into the rows, which lie apart, it takes three times as long
        rows.copy_(torch.bmm(g.transpose(1, 2), x))


def _sum(values: Tensor, dims: tuple[int, ...], rows: Tensor) -> None:
    """Write the sum over these dimensions, in the type of the rows."""
    torch.sum(values, dims, dtype=rows.dtype, out=rows)
