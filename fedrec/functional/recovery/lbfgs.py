"""Hessian-vector products from pairs of differences, in the compact L-BFGS form."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.exceptions import ShapeError

__all__ = ["condition_number", "lbfgs_hvp", "middle_inverse"]


def _middle(sy: Tensor, ss: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigma (c,), the scaled middle matrix (c, 2s, 2s) and the column scale (c, s).

    Scaling a pair (s, y) by a number, and all y by another, changes B only by the latter. Unit
    length s and sigma = 1 make the condition number say something about the pairs alone.
    """
    c, s = valid.shape
    age = torch.arange(1, s + 1, device=valid.device)
    last = (valid * age).argmax(dim=1)
    rows = torch.arange(c, device=valid.device)
    some = valid.any(dim=1)
    sigma = torch.where(some, sy[rows, last, last] / ss[rows, last, last], 0.0)
    scale = torch.where(valid, ss.diagonal(dim1=1, dim2=2).rsqrt(), 0.0)
    both = scale[:, :, None] * scale[:, None, :]
    a = torch.where(both > 0, sy * both, 0.0) / torch.where(some, sigma, 1.0)[:, None, None]
    gram = torch.where(both > 0, ss * both, 0.0)
    empty = (~valid).to(sy.dtype)
    lower = a.tril(diagonal=-1)
    top = torch.cat([-torch.diag_embed(a.diagonal(dim1=1, dim2=2) + empty), lower.mT], dim=2)
    bottom = torch.cat([lower, gram + torch.diag_embed(empty)], dim=2)
    return sigma, torch.cat([top, bottom], dim=1), scale


def condition_number(sy: Tensor, ss: Tensor, valid: Tensor) -> Tensor:
    """Return the 2-norm condition number of each scaled middle matrix, shape (c,).

    It is infinite where a dot product, or what is made of it, is not finite.

    Args:
        sy: As in `middle_inverse`.
        ss: As in `middle_inverse`.
        valid: As in `middle_inverse`.
    """
    middle = _middle(sy, ss, valid)[1]
    # LAPACK prints to the terminal, and then fails for all, if one matrix is not finite.
    finite = torch.isfinite(middle).all(dim=2).all(dim=1)
    values = torch.linalg.svdvals(torch.where(finite[:, None, None], middle, 0.0))
    return torch.where(finite, values[:, 0] / values[:, -1], torch.inf)


def middle_inverse(sy: Tensor, ss: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    r"""Invert the middle matrices of the compact form; they do not depend on the vector.

    With $A = S^\top Y$, its diagonal $D$, its strictly lower part $L$ and $\sigma$ from the last
    pair, returns $\sigma$ and the matrix $K$ that gives the coefficients
    $[p_Y; p_S] = K [Y^\top v; S^\top v]$ of $B v = \sigma v - Y p_Y - S p_S$.

    Args:
        sy: $A$ per client, shape $(c, s, s)$, float64, columns from oldest to newest.
        ss: $S^\top S$ per client, shape $(c, s, s)$, float64.
        valid: Columns to use, shape $(c, s)$, bool; a client without any gets $\sigma = 0$ and
            $K = 0$.

    Returns:
        $\sigma$ of shape $(c,)$ and $K$ of shape $(c, 2s, 2s)$. A singular middle matrix gives
        non-finite entries.

    References:
        - Byrd, Nocedal, Schnabel, Representations of quasi-Newton matrices and their use in
          limited memory methods, Mathematical Programming 1994.
        - Cao et al., FedRecover, IEEE S&P 2023, Algorithm 2.
    """
    sigma, middle, scale = _middle(sy, ss, valid)
    inverse, info = torch.linalg.inv_ex(middle)
    inverse = torch.where((info == 0)[:, None, None], inverse, torch.nan)
    safe = torch.where(sigma != 0, sigma, 1.0)[:, None]
    left = torch.cat([scale, sigma[:, None] * scale], dim=1)
    right = torch.cat([scale / safe, scale], dim=1)
    return sigma, left[:, :, None] * inverse * right[:, None, :]


def lbfgs_hvp(delta_w: Tensor, delta_g: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Multiply each client's approximate Hessian with a vector.

    $$\tilde H v = \sigma v - \begin{bmatrix} Y & \sigma S \end{bmatrix}
    \begin{bmatrix} -D & L^\top \\ L & \sigma S^\top S \end{bmatrix}^{-1}
    \begin{bmatrix} Y^\top v \\ \sigma S^\top v \end{bmatrix}$$

    with $S$ the global-model differences, $Y$ the model-update differences, $D$ the diagonal and
    $L$ the strictly lower part of $S^\top Y$, and $\sigma$ from the last pair. It equals the matrix
    of the BFGS recursion started at $\sigma I$; in particular the last pair satisfies
    $\tilde H s = y$. Dot products are taken in the dtype and on the device of the input, the
    $2s \times 2s$ systems are always solved in float64 on the CPU. (The paper prints $\sigma$ with
    index $b_{s-1}$ and does not say that $L$ leaves the diagonal out; the secant equation holds
    only as stated here.)

    Args:
        delta_w: Global-model differences from oldest to newest, shape $(s, d)$, or $(c, s, d)$ if
            they differ between clients.
        delta_g: Model-update differences, shape $(c, s, d)$.
        v: Vector to multiply with, shape $(d,)$.
        valid: Pairs to use, shape $(c, s)$, bool; `None` for all. A client without a valid pair
            gets zeros.

    Returns:
        Shape $(c, d)$. Rows with a singular system, or with dot products that overflow, are
        non-finite.

    Raises:
        ShapeError: If the shapes do not fit together.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, Algorithm 2.

    Examples:
        >>> s, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0, 0.5]]])
        >>> lbfgs_hvp(s, y, torch.tensor([1.0, 0.0]))
        tensor([[2.0000, 0.5000]])
    """
    c, s, d = delta_g.shape
    if delta_w.shape not in {(s, d), (c, s, d)} or v.shape != (d,):
        raise ShapeError(
            f"Expected `delta_w` of shape {(s, d)} or {(c, s, d)} and `v` of shape {(d,)} for "
            f"`delta_g` of shape {(c, s, d)}, but got {tuple(delta_w.shape)} and {tuple(v.shape)}."
        )
    if valid is None:
        valid = torch.ones(c, s, dtype=torch.bool)
    # To the CPU first: some devices have no float64.
    sy = (delta_w @ delta_g.mT).cpu().double()
    ss = (delta_w @ delta_w.mT).cpu().double().expand(c, s, s)
    sigma, inverse = middle_inverse(sy, ss, valid.cpu())
    sv = (delta_w @ v).cpu().double().expand(c, s)
    rhs = torch.cat([(delta_g @ v).cpu().double(), sv], dim=1)
    p = (inverse @ rhs[:, :, None]).to(v.dtype).to(v.device)
    product = sigma.to(v.dtype).to(v.device)[:, None] * v
    product = product - (p[:, :s].mT @ delta_g)[:, 0]
    return product - (p[:, s:].mT @ delta_w)[:, 0]
