"""Order statistics over clients, coordinate by coordinate."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec._checks import check_choice
from fedrec.exceptions import AggregationError, FedrecWarning, MissingDependencyError
from fedrec.functional.kernels._columns import wide_dtype

__all__ = [
    "KERNELS",
    "check_trim",
    "choose_kernel",
    "coordinate_median",
    "sorted_blocks",
    "trimmed_mean",
    "use_kernel",
]

#: What can compute order statistics, see `choose_kernel`.
KERNELS = ("numba", "numpy", "torch")

# Below, loading numba (0.7 s, and once after an installation its compiler, 7 s) costs more than a
# run gains by it; from here on a round of 20 clients gains 0.4 ms and more.
_LARGE = 2_048
# The columns that numba's kernel takes at a time.
_FEWEST_PARAMETERS = 192
# A block of columns then still fits a core's second-level cache.
_MOST_CLIENTS = 1024
# Values sorted at a time: small enough to stay in a core's cache, large enough to forget Python.
_BLOCK = 1 << 16
# The same for torch, on a GPU above all: large enough to fill it, small enough to be little memory.
_TORCH_BLOCK = 1 << 23
# Columns of 16-bit values made float32 at a time.
_WIDENED = 1 << 14

_in_use: str | None = None


def choose_kernel(
    device: torch.device, num_clients: int, num_parameters: int, dtype: torch.dtype = torch.float32
) -> str:
    """Name what computes order statistics of such updates, by a static rule.

    - `"numba"`, a compiled selection network on as many threads as torch has: on a CPU, from 2,048
      parameters on, for at most 1,024 clients, not for float64, if numba is installed.
    - `"numpy"`, its sort of a block of columns at a time, on one thread: on a CPU otherwise.
    - `"torch"`, `torch.sort`: on any other device, and always for tensors that need gradients.

    Kernels may add values in another order, so
    their results may differ in the last bit; those of one kernel do not depend on the threads.

    Args:
        device: Where the updates are.
        num_clients: $m$.
        num_parameters: $d$.
        dtype: Of the updates.

    Returns:
        One of `KERNELS`. Inside `use_kernel` it is the kernel named there, where that kernel can.

    Examples:
        >>> choose_kernel(torch.device("cpu"), num_clients=20, num_parameters=650)
        'numpy'
    """
    if _in_use == "torch" or device.type != "cpu":
        return "torch"
    able = num_clients <= _MOST_CLIENTS and num_parameters >= _FEWEST_PARAMETERS
    if able and dtype != torch.float64:
        worth_it = _in_use is None and num_parameters >= _LARGE
        if _in_use == "numba" or (worth_it and _numba_kernels() is not None):
            return "numba"
    return "numpy"


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Use this kernel wherever it is able, so that a run is repeated with the same bits.

    It holds for the whole process, as torch's number of threads does. What the kernel cannot do
    (other devices, other dtypes, few parameters) is left to `"numpy"` or `"torch"` as ever.

    Args:
        name: One of `KERNELS`.

    Raises:
        ConfigurationError: If there is no such kernel.
        MissingDependencyError: If it is not installed, or does not work here.

    Examples:
        >>> with use_kernel("torch"):
        ...     choose_kernel(torch.device("cpu"), num_clients=100, num_parameters=139_960)
        'torch'
    """
    global _in_use  # noqa: PLW0603
    check_choice("name", name, KERNELS)
    if name == "numba" and _numba_kernels() is None:
        raise MissingDependencyError(
            "Expected numba to be installed and to work here, since it is to compute the order "
            "statistics, but it is not. HINT: `pip install numba`, or start another run."
        )
    before, _in_use = _in_use, name
    try:
        yield
    finally:
        _in_use = before


@lru_cache(maxsize=1)
def _numba_kernels() -> Any:
    """Import the compiled kernels and try them once; `None` if absent, broken or wrong."""
    x = torch.randn(37, 500, generator=torch.Generator().manual_seed(0))
    try:
        kernels = importlib.import_module("fedrec.functional.kernels._numba_kernels")
        # All of them, so that no compiler runs in the middle of a round.
        for other in ("estimates", "pairs", "anchors", "sums"):
            importlib.import_module(f"fedrec.functional.kernels._numba_{other}").compiled()
        got = _by_numba(kernels, x, 5)
    except Exception:  # noqa: BLE001  # whatever a compiler may raise; the plan names what is used
        return None
    if torch.allclose(got, _by_torch(x, 5), rtol=1e-5, atol=1e-6):
        return kernels
    warnings.warn(
        "Order statistics are computed without numba, since its result is wrong here.",
        FedrecWarning,
        stacklevel=2,
    )
    return None


def _by_numba(kernels: Any, updates: Tensor, num_trim: int) -> Tensor:
    d = updates.shape[1]
    out = torch.empty(d)
    step = d if updates.dtype == torch.float32 else _WIDENED
    for start in range(0, d, step):
        # The last columns go with some of those before: a kernel wants a minimum.
        columns = slice(max(min(start, d - step), 0), start + step)
        values = updates[:, columns].float().contiguous()
        kernels.middle_mean(values.numpy(), num_trim, out[columns].numpy(), torch.get_num_threads())
    return out.to(updates.dtype)


def _mean(kept: Tensor) -> Tensor:
    if kept.shape[1] == 1:
        return kept[:, 0]
    if kept.shape[1] == 2:  # halving first cannot overflow
        return kept[:, 0] * 0.5 + kept[:, 1] * 0.5
    wide = wide_dtype(kept.device)
    return kept.mean(dim=1, dtype=wide)


def _by_torch(updates: Tensor, num_trim: int) -> Tensor:
    kept = updates.mT.sort(dim=-1).values[:, num_trim : len(updates) - num_trim]
    return _mean(kept).to(updates.dtype).contiguous()


def _sorted_by_numpy(updates: Tensor, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Sort with NumPy, several times as fast as torch on a CPU.

    It wants a column's values next to each other, hence the transposed copies.
    """
    for columns in updates.split(max(_BLOCK // len(updates), 1), dim=1):
        columns = columns if rows is None else columns[rows]
        wide = columns if columns.dtype == torch.float64 else columns.float()
        block = np.array(wide.numpy().T, order="C")
        block.sort(axis=1)
        yield torch.from_numpy(block)


def sorted_blocks(updates: Tensor, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Sort every coordinate over the clients, a block of coordinates at a time.

    Args:
        updates: Finite values, shape $(m, d)$.
        rows: Row numbers of those of the $m$ clients that count; `None` for all.

    Yields:
        The next $c$ coordinates in ascending order, shape $(c, m)$; 16-bit values as float32.

    Examples:
        >>> next(sorted_blocks(torch.tensor([[3.0, 4.0], [1.0, 5.0]])))
        tensor([[1., 3.],
                [4., 5.]])
    """
    m, d = updates.shape
    on_cpu = updates.device.type == "cpu" and not updates.requires_grad
    if on_cpu and choose_kernel(updates.device, m, d, updates.dtype) != "torch":
        yield from _sorted_by_numpy(updates, rows)
        return
    for columns in updates.split(max(_TORCH_BLOCK // m, 1), dim=1):
        columns = columns if rows is None else columns[rows]
        wide = columns if columns.dtype == torch.float64 else columns.float()
        yield wide.mT.contiguous().sort(dim=-1).values


def _by_numpy(updates: Tensor, num_trim: int) -> Tensor:
    m = len(updates)
    parts = [_mean(block[:, num_trim : m - num_trim]) for block in _sorted_by_numpy(updates)]
    return torch.cat(parts).to(updates.dtype)


def _middle_mean(updates: Tensor, num_trim: int) -> Tensor:
    m, d = updates.shape
    kernel = "torch"
    if not updates.requires_grad:
        kernel = choose_kernel(updates.device, m, d, updates.dtype)
    if kernel == "numba":
        return _by_numba(_numba_kernels(), updates, num_trim)
    return (_by_numpy if kernel == "numpy" else _by_torch)(updates, num_trim)


def coordinate_median(updates: Tensor) -> Tensor:
    r"""Take the median of every coordinate over the clients.

    For an even number of clients it is the mean of the two middle values, so that it favours
    neither side.

    Args:
        updates: Finite values, shape $(m, d)$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> coordinate_median(torch.tensor([[1.0], [2.0], [4.0], [100.0]]))
        tensor([3.])
    """
    return _middle_mean(updates, (len(updates) - 1) // 2)


def check_trim(num_trim: int, num_clients: int) -> None:
    """Raise `AggregationError` unless trimming leaves at least one of the clients.

    Args:
        num_trim: Entries removed at each end, $k$.
        num_clients: $m$.
    """
    if num_trim < 0 or 2 * num_trim >= num_clients:
        raise AggregationError(
            f"Cannot trim 2*{num_trim}={2 * num_trim} of m={num_clients} updates. "
            "HINT: lower `trim` or let more clients take part."
        )


def trimmed_mean(updates: Tensor, num_trim: int) -> Tensor:
    r"""Average every coordinate over the clients, without its largest and smallest values.

    $$\frac{1}{m - 2k} \sum_{i=k+1}^{m-k} g_{(i)j}$$

    with $g_{(1)j} \le \dots \le g_{(m)j}$ the sorted values of coordinate $j$. Values are summed in
    float64, so that the mean of equal float32 values is that value.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_trim: Entries removed at each end of every coordinate, $k$, with $2k < m$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Raises:
        AggregationError: If `num_trim` is negative or nothing would be left.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [6.0], [100.0]]), num_trim=1)
        tensor([4.])
    """
    check_trim(num_trim, len(updates))
    return _middle_mean(updates, num_trim)
