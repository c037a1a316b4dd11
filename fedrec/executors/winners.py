"""Convolutions that max-pooling follows, computed by the positions that win.

Only those carry a gradient: a quarter of the outputs, of which a ReLU leaves half. A layer's output
is therefore put off until it is known what becomes of it. An activation and a max-pooling are then
computed with it; whatever else is done to the output gets it as ever.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd import Function
from torch.nn import functional

from fedrec.executors.kinds import CannotGroupError, flat
from fedrec.functional.kernels._threads import share

__all__ = ["Deferrals", "Output", "WinnersFunction", "is_deferred", "kernels"]

# Entries of a kernel, channels included, up to which a convolution is computed here: few numbers
# are gathered for each output, and oneDNN, made for many channels, waits for memory.
_SMALL_KERNEL = 32
# Entries of a kernel times those of a window up to which all of a window's outputs are multiplied.
_SMALL_PRODUCTS = 128
# Bytes of outputs that oneDNN makes at a time, for pooling to find them in the cache.
_BLOCK = 1 << 20
# Of the outputs at most this share may win: a winner costs about twice as much as an output does in
# a dense pass. In the usual pooling it is a quarter. `benchmarks/winners.py` has the gain by share.
_LARGEST_SHARE = 1 / 3
_ENTRIES = 128  # of a window: what seven bits of a code can tell apart


@lru_cache(maxsize=1)
def kernels() -> Any:
    """Return the compiled functions by name; `None` if numba is absent or does not work here."""
    try:
        module = importlib.import_module("fedrec.functional.kernels._numba_winners")
        return module.compiled()
    except Exception:  # noqa: BLE001  # whatever a compiler may raise; the plan names what is used
        return None


@dataclass(frozen=True)
class Pooling:
    """The max-pooling after a convolution, and an activation before or after it.

    Args:
        size: Height and width of a window, `None` before there is any.
        stride: Of the windows.
        padding: Of the windows.
        slope: What the activation multiplies values with that are not positive; 1 for none.
        activates_first: Whether it comes before the pooling.
    """

    size: tuple[int, int] | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    slope: float = 1.0
    activates_first: bool = False

    def activated(self, slope: float) -> Pooling | None:
        """Return this with an activation after it; `None` if it cannot have that."""
        if self.slope != 1.0 or slope < 0:
            return None
        return replace(self, slope=slope, activates_first=self.size is None)

    def pooled(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        *,
        ndim: int,
    ) -> Pooling | None:
        """Return this with a max-pooling after it; `None` if that is of an unusual kind."""
        size = _pair(kernel_size, ndim, 1)
        usual = not ceil_mode and not return_indices and _pair(dilation, ndim, 1) == (1, 1)
        if self.size is not None or not usual or math.prod(size) > _ENTRIES:
            return None
        # To torch an empty list is no stride, either.
        steps = size if stride is None or stride == [] else _pair(stride, ndim, 1)
        return replace(self, size=size, stride=steps, padding=_pair(padding, ndim, 0))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for a convolution's output of this shape."""
        if self.size is None:
            return shape
        sides = (1, *shape[2:]) if len(shape) == 3 else shape[2:]
        settings = zip(sides, self.size, self.stride, self.padding, strict=True)
        windows = [(n + 2 * p - k) // s + 1 for n, k, s, p in settings]
        return *shape[:2], *windows[4 - len(shape) :]

    def apply(self, x: Tensor) -> Tensor:
        """Compute it as torch does."""
        if self.activates_first:
            x = self._activate(x)
        if self.size is not None:
            pool: Any = functional.max_pool2d if x.ndim == 4 else functional.max_pool1d
            settings = [pair[4 - x.ndim :] for pair in (self.size, self.stride, self.padding)]
            x = pool(x, *settings)
        return x if self.activates_first else self._activate(x)

    def _activate(self, x: Tensor) -> Tensor:
        if self.slope == 1.0:
            return x
        return functional.leaky_relu(x, self.slope) if self.slope else functional.relu(x)


def _pair(value: Any, ndim: int, other: int) -> tuple[int, int]:
    """Return a setting for height and width, `other` for the height where there is none."""
    sizes = [value] * ndim if isinstance(value, int) else list(value)
    sizes = sizes * (ndim // len(sizes))
    height, width = sizes if ndim == 2 else (other, *sizes)
    return height, width


def _image(x: Tensor) -> Tensor:
    """Return a batch of images; those of one dimension are of height 1."""
    return x if x.ndim == 4 else x.unsqueeze(2)


class Fused:
    """A convolution with its pooling, for images of one size, channels last.

    Args:
        layer: A `Conv1d` or `Conv2d` without groups and dilation.
        pooling: What follows.
        images: What goes in.
    """

    def __init__(self, layer: Any, pooling: Pooling, images: Tensor) -> None:
        ndim = len(layer.kernel_size)
        self.weight = _image(layer.weight.detach())
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.pooling = pooling
        self.kernel, self.stride = _pair(layer.kernel_size, ndim, 1), _pair(layer.stride, ndim, 1)
        self.padding = _pair(layer.padding, ndim, 0)
        self.channels, height, width = self.image = images.shape[1:]
        padded = height + 2 * self.padding[0], width + 2 * self.padding[1]
        self.height, self.width = (
            (n - k) // s + 1 for n, k, s in zip(padded, self.kernel, self.stride, strict=True)
        )
        self.windows = pooling.shape((0, 0, self.height, self.width))[2:]
        # What the kernels know of them: down, and across in numbers, as many as channels a pixel.
        pairs = (self.kernel, self.stride, self.padding, padded)
        self.convolution = tuple(n for a, b in pairs for n in (a, b * self.channels))
        size = pooling.size or (1, 1)
        self.geometry = (*size, *pooling.stride, *pooling.padding, self.height, self.width)

    def forward(self, x: Tensor, result: Tensor, codes: Tensor) -> None:
        """Compute the result, and which entry of its window each is.

        Args:
            x: Images.
            result: Written, shape (samples, channels, height, width).
            codes: Written, the same with channels last: the entry's number in its window, row by
                row, and 128 more where the activation had a value that is not positive.
        """
        out = result.permute(0, 2, 3, 1)
        if not out.is_contiguous():
            out = torch.empty(out.shape)
        how = (self.geometry, self._slope, self.pooling.activates_first and self._slope != 0)
        if self.weight[0].numel() <= _SMALL_KERNEL:
            self._convolve(x, how, out, codes)
        else:
            self._convolve_by_onednn(x, how, out, codes)
        if out.data_ptr() != result.data_ptr():
            result.copy_(out.permute(0, 3, 1, 2))

    def _convolve(self, x: Tensor, how: Any, out: Tensor, codes: Tensor) -> None:
        columns = -(-len(self.weight) // 16) * 16
        weight, bias = torch.zeros(*self.kernel, self.channels, columns), torch.zeros(columns)
        weight[..., : len(self.weight)] = self.weight.permute(2, 3, 1, 0)
        if self.bias is not None:
            bias[: len(self.bias)] = self.bias
        matrix = weight.view(-1, columns).numpy()
        fixed = (_rows(x), matrix, bias.numpy(), self.convolution, *how)
        call = partial(kernels()["_convolve_and_pool"], *fixed, out.numpy(), codes.numpy())
        _share(call, len(x))

    def _convolve_by_onednn(self, x: Tensor, how: Any, out: Tensor, codes: Tensor) -> None:
        weight, bias = self.weight, self.bias
        if len(weight) % 16 and len(weight) > 16:  # oneDNN takes longer for fewer
            more = -len(weight) % 16
            weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, more))
            bias = None if bias is None else functional.pad(bias, (0, more))
        weight = weight.contiguous(memory_format=torch.channels_last)
        if self.padding == (0, 0):  # without what no window sees
            windows = zip(self.windows, self.geometry[:2], self.geometry[2:4], strict=True)
            rows, columns = ((n - 1) * step + size for n, size, step in windows)
            height, width = (
                (n - 1) * s + k
                for n, s, k in zip((rows, columns), self.stride, self.kernel, strict=True)
            )
            x = x[:, :, :height, :width]
        per_image = 4 * self.height * self.width * len(weight)
        each = max(1, torch.get_num_threads() * _BLOCK // per_image)
        for some in range(0, len(x), each):
            block = slice(some, some + each)
            y = functional.conv2d(x[block], weight, bias, self.stride, self.padding)
            y = y.permute(0, 2, 3, 1).contiguous()
            targets = (out[block].numpy(), codes[block].numpy())
            _share(partial(kernels()["_pool"], y.numpy(), *how, *targets), len(y))

    def weight_gradients(
        self, x: Tensor, g: Tensor, count: int, codes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return those of weight and bias of each of so many clients."""
        x, g = _image(x), _image(g)
        if math.prod(self.geometry[:2]) * self.weight[0].numel() <= _SMALL_PRODUCTS:
            return self._small_weight_gradients(x, g, count, codes)
        tiles = _tiles(self.convolution[1])
        row = _width(tiles)
        weights = torch.empty(count, len(self.weight), self.kernel[0] * row)
        biases = torch.empty(count, len(self.weight), dtype=torch.float64)
        fixed = (_rows(x), *self._listed(g, codes), self.convolution, self._slope, tiles)
        targets = (weights.numpy(), biases.numpy())
        _share(partial(kernels()["_weight_gradients"], *fixed, *targets), count)
        weights = weights.view(count, len(self.weight), self.kernel[0], row)
        weights = weights[..., : self.convolution[1]]
        weights = weights.unflatten(-1, (self.kernel[1], self.channels))
        return weights.permute(0, 1, 4, 2, 3), biases

    def _small_weight_gradients(
        self, x: Tensor, g: Tensor, count: int, codes: Tensor
    ) -> tuple[Tensor, Tensor]:
        channels, size = len(self.weight), self.weight[0].numel()
        more = max(0, 16 - channels)  # of no consequence
        weights = torch.empty(count, channels + more, size)
        biases = torch.empty(count, channels + more, dtype=torch.float64)
        rows = functional.pad(g.permute(0, 2, 3, 1), (0, more)).contiguous()
        listed = functional.pad(codes, (0, more))
        # Where no entry of a window is, its gradient is zero, and any patch will do.
        height, row = self.convolution[6:]
        last = (height - self.kernel[0]) * row + row - self.convolution[1]
        origins = self._origins()[:, : math.prod(self.geometry[:2])].clip(0, last).copy()
        fixed = (_rows(x), rows.flatten(1, 2).numpy(), listed.flatten(1, 2).numpy(), origins)
        targets = (weights.numpy(), biases.numpy())
        call = kernels()["_small_weight_gradients"]
        _share(partial(call, *fixed, self.convolution, self._slope, *targets), count)
        weights = weights[:, :channels].unflatten(-1, (*self.kernel, self.channels))
        return weights.permute(0, 1, 4, 2, 3), biases[:, :channels]

    def input_gradient(self, g: Tensor, codes: Tensor) -> Tensor:
        """Return that of what went in, channels last in memory."""
        tiles = _tiles(self.convolution[1])
        row = _width(tiles)
        weight = torch.zeros(len(self.weight), self.kernel[0], row)
        rows = self.weight.permute(0, 2, 3, 1).flatten(2)
        weight[..., : rows.shape[-1]] = rows
        out = torch.empty(len(g), *self.image[1:], self.channels)
        fixed = (*self._listed(g, codes), self.convolution, self._slope, tiles)
        targets = (weight.flatten(1).numpy(), out.flatten(2).numpy())
        _share(partial(kernels()["_input_gradients"], *fixed, *targets), len(g))
        return out.permute(0, 3, 1, 2)

    @property
    def _slope(self) -> np.float32:
        return np.float32(self.pooling.slope)

    def _origins(self) -> Any:
        """Return where in a padded image the patch of each entry of each window begins."""
        positions, entries = np.arange(math.prod(self.windows))[:, None], np.arange(_ENTRIES)
        across, width = self.windows[1], self.geometry[1]
        down, right, top, left = self.geometry[2:6]
        rows = positions // across * down - top + entries // width
        columns = positions % across * right - left + entries % width
        return rows * self.stride[0] * self.convolution[7] + columns * self.convolution[3]

    def _listed(self, g: Tensor, codes: Tensor) -> tuple[Any, Any, Any, Any]:
        """Return gradients and codes by position, their order, and where patches begin."""
        # Down every other column, then the others: what is added to one patch is then in memory
        # when a patch that overlaps with it comes.
        numbers = np.arange(math.prod(self.windows)).reshape(self.windows)
        order = np.concatenate([numbers[:, 0::2].T.ravel(), numbers[:, 1::2].T.ravel()])
        gradients = g.flatten(2).transpose(1, 2).numpy()
        return gradients, codes.flatten(1, 2).numpy(), order, self._origins()


def _share(call: Callable[[int, int], None], size: int) -> None:
    """Call a compiled function for a range, on as many threads as torch has."""
    share(lambda part: call(*part), size, torch.get_num_threads())


def _rows(x: Tensor) -> Any:
    """Return images channels last, shape (samples, height, width * channels)."""
    return x.permute(0, 2, 3, 1).contiguous().flatten(2).numpy()


def _tiles(size: int) -> Any:
    """Return start and length of each tile of a run of so many numbers."""
    tiles, start = [], 0
    while start < size:
        left = -(-(size - start) // 16) * 16
        width = next(w for w in (96, 64, 32, 16) if w <= left)
        tiles.append((start, width))
        start += width
    return np.array(tiles, dtype=np.int64)


def _width(tiles: Any) -> int:
    return int(tiles[-1].sum())


class WinnersFunction(Function):
    """Convolution, activation and pooling in one; the weight's gradients are a sink's business."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, fused: Fused, codes: Tensor) -> Tensor:
        """Write into the result and the codes."""
        fused.forward(_image(x), _image(result), codes)
        ctx.fused, ctx.codes, ctx.shape = fused, codes, x.shape
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of what went in."""
        found = ctx.fused.input_gradient(_image(gradient), ctx.codes)
        return None, found.reshape(ctx.shape), None, None


@dataclass(eq=False)
class Output:
    """What a convolution will give.

    Args:
        sink: Where the layer's gradients go.
        x: What goes in.
        compute: Computes it as ever.
    """

    sink: Any
    x: Tensor
    compute: Callable[[], Tensor]
    is_used: bool = False

    def __post_init__(self) -> None:
        self.version = self.x._version

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        layer = self.sink.layer
        settings = zip(
            self.x.shape[2:], layer.kernel_size, layer.stride, layer.padding, strict=True
        )
        sides = ((n + 2 * p - k) // s + 1 for n, k, s, p in settings)
        return len(self.x), layer.out_channels, *sides

    def placeholder(self, pooling: Pooling) -> Tensor:
        """Return a tensor that stands for it after this pooling, without values."""
        shape = pooling.shape(self.shape)
        # As torch chooses it.
        formats = [suggest_memory_format(t) for t in (self.x, self.sink.layer.weight)]
        last = len(shape) == 4 and torch.channels_last in formats
        order = torch.channels_last if last else torch.contiguous_format
        result = torch.empty(shape, memory_format=order)
        vars(result)[_KEY] = self, pooling
        return result


class Deferrals:
    """The outputs of convolutions that are put off in one pass.

    Args:
        names: Of the layers whose outputs are put off; `None` for all.

    Attributes:
        fused: Names of the layers that were computed by their winners.
        num_bytes: Size of their results, and of what is kept for the backward pass.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names
        self.fused: list[str] = []
        self.num_bytes = 0
        self._waiting: set[str] = set()

    def put_off(self, output: Output) -> Tensor | None:
        """Return what stands for an output; `None` if it is computed at once."""
        name, layer, x = output.sink.name, output.sink.layer, output.x
        can_wait = (
            (self.names is None or name in self.names)
            and x.dtype == layer.weight.dtype == torch.float32
            and x.device.type == "cpu"
            and set(layer.dilation) == {1}
            and min(output.shape) > 0
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
        if not can_wait:
            return None
        if name in self._waiting:
            raise CannotGroupError(f"{name} is used more than once")
        self._waiting.add(name)
        return output.placeholder(Pooling())

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Take note of an activation or a pooling of an output that was put off.

        Whatever else is done to one needs its values, and gets them.

        Returns:
            What stands for the result; `None` if the function has to be called.
        """
        if function in _NEED_NO_VALUES:
            return None
        follow = _FOLLOWING.get(function)
        if follow is not None and torch.is_grad_enabled() and args and is_deferred(args[0]):
            output, pooling = vars(args[0])[_KEY]
            settings = dict(kwargs)
            in_place = settings.pop("inplace", function in _IN_PLACE)
            following = follow(pooling, *args[1:], **settings)
            if following is not None and min(following.shape(output.shape)) > 0:
                result: Tensor = args[0] if in_place else output.placeholder(following)
                vars(result)[_KEY] = output, following
                return result
        for x in flat((*args, *kwargs.values())):
            self.settle(x)
        return None

    def settle(self, x: Any) -> None:
        """Compute what a tensor stands for, if its values were put off."""
        if not is_deferred(x):
            return
        output, pooling = vars(x).pop(_KEY)
        if output.is_used:
            raise CannotGroupError(f"the output of {output.sink.name} is used twice")
        if output.x._version != output.version:
            raise CannotGroupError(f"what went into {output.sink.name} is changed in place")
        output.is_used = True
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            if pooling.size is None or not self._fuse(x, output, pooling):
                x.copy_(pooling.apply(output.compute()))
                self.num_bytes += x.nbytes

    def _fuse(self, result: Tensor, output: Output, pooling: Pooling) -> bool:
        """Compute a pooled output by its winners, if there are few and a compiler is at hand."""
        fused = Fused(output.sink.layer, pooling, _image(output.x))
        few = math.prod(fused.windows) <= _LARGEST_SHARE * fused.height * fused.width
        if not few or kernels() is None:
            return False
        codes = torch.empty(len(result), *fused.windows, result.shape[1], dtype=torch.uint8)
        x = output.sink.enter(output.x)
        WinnersFunction.apply(result, x, fused, codes)  # type: ignore[no-untyped-call]
        output.sink.leave(result, partial(fused.weight_gradients, codes=codes))
        self.fused.append(output.sink.name)
        self.num_bytes += result.nbytes + codes.nbytes
        return True


def is_deferred(x: Any) -> bool:
    """Whether it is a tensor whose values are put off."""
    return isinstance(x, Tensor) and _KEY in vars(x)


def _rectified(pooling: Pooling) -> Pooling | None:
    return pooling.activated(0.0)


def _leaky(pooling: Pooling, negative_slope: float = 0.01) -> Pooling | None:
    return pooling.activated(negative_slope)


_KEY = "_fedrec_deferred"
_IN_PLACE = (functional.relu_, torch.relu_, Tensor.relu_, functional.leaky_relu_)
_FOLLOWING: dict[Any, Callable[..., Pooling | None]] = {
    **dict.fromkeys((functional.relu, torch.relu, Tensor.relu), _rectified),
    **dict.fromkeys((functional.relu_, torch.relu_, Tensor.relu_), _rectified),
    **dict.fromkeys((functional.leaky_relu, functional.leaky_relu_), _leaky),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), partial(Pooling.pooled, ndim=2)),
    **dict.fromkeys((functional.max_pool1d, torch.max_pool1d), partial(Pooling.pooled, ndim=1)),
}
_NEED_NO_VALUES = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.__len__),
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda")
    ),
}
