"""The compact L-BFGS form against the dense BFGS recursion, and the estimates against both."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from fedrec.exceptions import ShapeError
from fedrec.functional import lbfgs_hvp
from fedrec.recoverers.estimators import pairs
from fedrec.recoverers.estimators.pairs import ClientPairs
from fedrec.recoverers.estimators.paper_pairs import PaperPairs

CPU = torch.device("cpu")


def push(kept, rows, delta_w, delta_g, round, everyone) -> None:
    """Push a pair whose update difference is `delta_g`."""
    kept.push(rows, delta_w, delta_g, torch.zeros_like(delta_g), round, not everyone)


def dense_bfgs(s: np.ndarray, y: np.ndarray) -> np.ndarray:
    """B_k from the BFGS recursion, pairs from oldest to newest, B_0 = sigma I of the last pair."""
    sigma = (y[-1] @ s[-1]) / (s[-1] @ s[-1])
    b = sigma * np.eye(s.shape[1])
    for sk, yk in zip(s, y, strict=True):
        bs = b @ sk
        b = b - np.outer(bs, bs) / (sk @ bs) + np.outer(yk, yk) / (yk @ sk)
    return b


def problem(num_clients: int, num_pairs: int, size: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(num_clients, num_pairs, size))
    y = np.empty_like(s)
    for i in range(num_clients):
        root = rng.normal(size=(size, size))
        y[i] = s[i] @ (root @ root.T / size + 0.5 * np.eye(size))
    return s, y, rng.normal(size=size)


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 5])
def test_hvp_is_the_dense_bfgs_recursion(num_pairs: int) -> None:
    s, y, v = problem(3, num_pairs, 12)
    found = lbfgs_hvp(torch.from_numpy(s), torch.from_numpy(y), torch.from_numpy(v)).numpy()
    for i in range(3):
        np.testing.assert_allclose(found[i], dense_bfgs(s[i], y[i]) @ v, rtol=1e-9)


def test_hvp_of_an_indefinite_hessian_is_the_dense_recursion_too() -> None:
    s, _, v = problem(1, 3, 12)
    y = s @ np.diag(np.linspace(-2.0, 3.0, 12))
    assert (np.einsum("cij,cij->ci", s, y) < 0).any()
    found = lbfgs_hvp(torch.from_numpy(s), torch.from_numpy(y), torch.from_numpy(v)).numpy()
    np.testing.assert_allclose(found[0], dense_bfgs(s[0], y[0]) @ v, rtol=1e-9)


def test_hvp_of_the_last_model_difference_is_the_last_update_difference() -> None:
    s, y, _ = problem(1, 3, 10)
    found = lbfgs_hvp(torch.from_numpy(s), torch.from_numpy(y), torch.from_numpy(s[0, -1]))
    np.testing.assert_allclose(found[0].numpy(), y[0, -1], rtol=1e-10)


def test_lower_part_with_the_diagonal_would_violate_the_secant_equation() -> None:
    """The paper's `tril` has to be strict: with the diagonal the last pair is not reproduced."""
    s, y, _ = problem(1, 2, 10)
    s, y = s[0], y[0]
    a = s @ y.T
    sigma = a[-1, -1] / (s[-1] @ s[-1])
    errors = []
    for lower in (np.tril(a, -1), np.tril(a)):
        middle = np.block([[-np.diag(np.diag(a)), lower.T], [lower, sigma * s @ s.T]])
        p = np.linalg.solve(middle, np.concatenate([y @ s[-1], sigma * (s @ s[-1])]))
        product = sigma * s[-1] - p[:2] @ y - sigma * p[2:] @ s
        errors.append(np.linalg.norm(product - y[-1]) / np.linalg.norm(y[-1]))
    assert errors[0] < 1e-12
    assert errors[1] > 0.1


def test_shared_model_differences_equal_repeated_ones() -> None:
    s, y, v = (torch.from_numpy(a) for a in problem(3, 2, 8))
    shared = s[0]
    torch.testing.assert_close(lbfgs_hvp(shared, y, v), lbfgs_hvp(shared.expand(3, 2, 8), y, v))


def test_masked_pairs_count_as_absent() -> None:
    s, y, v = (torch.from_numpy(a) for a in problem(3, 3, 9))
    valid = torch.tensor([[False, True, True], [True, False, False], [False] * 3])
    found = lbfgs_hvp(s, y, v, valid)
    torch.testing.assert_close(found[:1], lbfgs_hvp(s[:1, 1:], y[:1, 1:], v))
    torch.testing.assert_close(found[1:2], lbfgs_hvp(s[1:2, :1], y[1:2, :1], v))
    assert torch.equal(found[2], torch.zeros(9, dtype=torch.float64))


def test_hvp_is_equivariant_in_the_unit_of_the_updates() -> None:
    """Sums over a batch of 32 instead of means scale the product by 32, nothing else."""
    s, y, v = (torch.from_numpy(a) for a in problem(2, 2, 9))
    torch.testing.assert_close(lbfgs_hvp(s, 32 * y, v), 32 * lbfgs_hvp(s, y, v))


class OnlyTheCPUHasFloat64(TorchFunctionMode):
    """Takes every tensor for one on a device without float64, unless it was moved to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.double and not any(x is args[0] for x in self.on_cpu):
            raise TypeError("this device has no float64")
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            self.on_cpu.append(result)
        return result


def test_devices_without_float64_are_enough() -> None:
    exact = problem(1, 2, 6)
    s, y, v = (torch.from_numpy(a).float() for a in exact)
    products = []
    with OnlyTheCPUHasFloat64():
        products.append(lbfgs_hvp(s, y, v))
        for kind in (ClientPairs, PaperPairs):
            kept = kind(1, 2, 6, CPU)
            for t in range(2):
                push(kept, torch.arange(1), s[0, t], y[:, t], t, True)
            products.append(kept.estimate(torch.zeros(1, 6), v, torch.arange(1))[0])
    for product in products:
        expected = dense_bfgs(exact[0][0], exact[1][0]) @ exact[2]
        np.testing.assert_allclose(product[0].numpy(), expected, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hvp_on_a_gpu(dtype: torch.dtype) -> None:
    s, y, v = (torch.from_numpy(a).to("cuda", dtype) for a in problem(3, 2, 12))
    valid = torch.tensor([[True, True], [False, True], [False, False]])
    for mask in (None, valid, valid.cuda()):
        found = lbfgs_hvp(s, y, v, mask)
        assert (found.device, found.dtype) == (v.device, dtype)
        there = lbfgs_hvp(s.cpu(), y.cpu(), v.cpu(), None if mask is None else valid)
        torch.testing.assert_close(found.cpu(), there, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("large", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["s", "y", "v"])
def test_products_that_overflow_concern_one_client_and_print_nothing(
    where: str, large: float, capfd: pytest.CaptureFixture[str]
) -> None:
    s, y, v = (torch.from_numpy(a).float() for a in problem(2, 3, 6))
    good = lbfgs_hvp(s, y, v)
    {"s": s[0, 0], "y": y[0, 0], "v": v}[where][:2] = large
    found = lbfgs_hvp(s, y, v)
    assert found.shape == (2, 6)
    if where != "v":
        assert torch.equal(found[1], good[1])
    assert capfd.readouterr() == ("", "")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 9\)"):
        lbfgs_hvp(torch.ones(3, 9), torch.ones(1, 2, 9), torch.ones(9))


def pushes(num_clients: int, size: int, seed: int = 0):
    """A history of pushes: everyone, then some clients alone, then everyone again."""
    s, y, v = problem(num_clients, 6, size, seed)
    who = [range(num_clients), range(num_clients), [1], [0, 2], range(num_clients), [2]]
    return s[0], y, v, [torch.tensor(list(w)) for w in who]


@pytest.mark.parametrize(
    ("block_bytes", "kernel"), [(1, "numpy"), (1 << 23, "numpy"), (1 << 23, "numba")]
)
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6])
def test_estimates_are_from_the_newest_pairs_of_each_client(
    after: int, block_bytes: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(pairs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(pairs, "choose_kernel", lambda *shape: kernel)
    w, _, v, who = pushes(3, 10)
    # One shared model difference per round, and a Hessian per client.
    g = np.stack([w @ np.diag(1 + np.arange(10.0) * (i + 1)) for i in range(3)])
    kept = ClientPairs(3, 2, 10, CPU)
    taken: list[list[int]] = [[], [], []]
    for t in range(after):
        rows = who[t]
        push(
            kept,
            rows,
            torch.from_numpy(w[t]).float(),
            torch.from_numpy(g[rows.numpy(), t]).float(),
            t,
            len(rows) == 3,
        )
        for i in rows.tolist():
            # Whoever is asked alone has that pair and no other.
            taken[i] = [*taken[i], t] if len(rows) == 3 else [t]
    historical = np.ones((3, 10))
    found, _, usable = kept.estimate(
        torch.from_numpy(historical).float(), torch.from_numpy(v).float(), torch.arange(3)
    )
    assert usable.tolist() == [True] * 3
    found = found.clone()  # the next estimate goes to the same memory
    for i in range(3):
        last = taken[i][-2:]
        expected = historical[i] + dense_bfgs(w[last], g[i, last]) @ v
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=2e-4, atol=2e-4)
    some, _, _ = kept.estimate(
        torch.from_numpy(historical[[2, 0]]).float(),
        torch.from_numpy(v).float(),
        torch.tensor([2, 0]),
    )
    torch.testing.assert_close(some, found[[2, 0]])


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kernel", ["numpy", "numba"])
def test_pairs_without_curvature_are_skipped_and_negative_ones_used_on_request(
    kernel: str, negative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(pairs, "choose_kernel", lambda *shape: kernel)
    kept = ClientPairs(3, 2, 2, CPU, negative=negative)
    w = torch.tensor([1.0, 0.0])
    g = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [0.0, 3.0]])
    push(kept, torch.arange(3), w, g, 0, True)
    assert kept.skipped == 2 - negative
    estimates, _, usable = kept.estimate(torch.zeros(3, 2), w, torch.arange(3))
    assert usable.tolist() == [True, negative, False]
    # The secant equation: the pair's own model difference gives its update difference.
    expected = torch.tensor([[2.0, 1.0], [-float(negative), 0.0], [0.0, 0.0]])
    torch.testing.assert_close(estimates, expected)


def test_zero_model_difference_is_skipped() -> None:
    kept = ClientPairs(1, 2, 2, CPU)
    push(kept, torch.arange(1), torch.zeros(2), torch.ones(1, 2), 0, True)
    assert kept.skipped == 1
    assert not bool(kept.estimate(torch.zeros(1, 2), torch.ones(2), torch.arange(1))[2])


def test_parallel_pairs_drop_the_oldest_and_stay_finite() -> None:
    """Two equal pairs make the system singular; one of them says all there is."""
    kept = ClientPairs(1, 2, 3, CPU)
    w, g = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([[2.0, 3.0, 1.0]])
    push(kept, torch.arange(1), w, g, 0, True)
    push(kept, torch.arange(1), w, g, 1, True)
    estimates, _, usable = kept.estimate(torch.zeros(1, 3), w, torch.arange(1))
    assert bool(usable)
    torch.testing.assert_close(estimates, g)


@pytest.mark.parametrize("first", [True, False])
def test_pairs_whose_products_overflow_are_not_used_together(
    first: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each pair is fine, but the huge update difference and the other model difference are not."""
    w = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1e10, 0.0])]
    g = [torch.tensor([2.0, 1e30, 0.0]), torch.tensor([0.0, 3e10, 0.0])]
    tame = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1e10, 0.0]])
    order = [0, 1] if first else [1, 0]
    kept = ClientPairs(2, 2, 3, CPU)
    for t, pair in enumerate(order):
        push(kept, torch.arange(2), w[pair], torch.stack([g[pair], tame[pair]]), t, True)
    assert kept.skipped == 0
    v = w[order[-1]]
    found, _, usable = kept.estimate(torch.zeros(2, 3), v, torch.arange(2))
    assert usable.tolist() == [True, True]
    torch.testing.assert_close(found[0], g[order[-1]])  # the newest alone
    torch.testing.assert_close(found[1], tame[order[-1]])
    assert capfd.readouterr() == ("", "")


def test_a_pair_left_out_does_no_harm_when_its_product_with_the_vector_overflows() -> None:
    kept = ClientPairs(1, 2, 3, CPU)
    huge = torch.tensor([[2.0, 1e30, 0.0]])
    push(kept, torch.arange(1), torch.tensor([1.0, 0.0, 0.0]), huge, 0, True)
    w, g = torch.tensor([0.0, 1e10, 0.0]), torch.tensor([[0.0, 3e10, 0.0]])
    push(kept, torch.arange(1), w, g, 1, True)
    estimates, _, usable = kept.estimate(torch.ones(1, 3), -w, torch.arange(1))
    assert usable.tolist() == [True]
    torch.testing.assert_close(estimates, 1.0 - g)


def test_a_single_pair_that_cannot_be_solved_is_no_pair() -> None:
    kept = ClientPairs(1, 2, 2, CPU)
    w, g = torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 3.0]])
    push(kept, torch.arange(1), w, g, 0, True)
    kept.sy[0, 0, 0] = float("inf")
    estimates, _, usable = kept.estimate(torch.ones(1, 2), w, torch.arange(1))
    assert usable.tolist() == [False]
    assert estimates.tolist() == [[1.0, 1.0]]


def test_pairs_survive_saving() -> None:
    w, _, v, who = pushes(3, 6)
    g = np.stack([w @ np.diag(1 + np.arange(6.0) * (i + 1)) for i in range(3)])
    first, second = ClientPairs(3, 2, 6, CPU), ClientPairs(3, 2, 6, CPU)
    for t in range(6):
        if t == 4:
            second.load_state_dict(
                {k: x.clone() if hasattr(x, "clone") else x for k, x in first.state_dict().items()}
            )
        for kept in (first, second) if t >= 4 else (first,):
            rows = who[t]
            push(
                kept,
                rows,
                torch.from_numpy(w[t]).float(),
                torch.from_numpy(g[rows.numpy(), t]).float(),
                t,
                True,
            )
    vector = torch.from_numpy(v).float()
    one = first.estimate(torch.zeros(3, 6), vector, torch.arange(3))[0]
    assert torch.equal(one, second.estimate(torch.zeros(3, 6), vector, torch.arange(3))[0])


def test_the_papers_pairs_are_paired_by_position() -> None:
    """After client 0 alone was asked, its newest column meets the newest all-client column."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 5))
    g = np.stack([w * (i + 1.5) for i in range(2)])
    extra = rng.normal(size=5)
    kept = PaperPairs(2, 2, 5, CPU)
    for t in range(2):
        push(
            kept,
            torch.arange(2),
            torch.from_numpy(w[t]).float(),
            torch.from_numpy(g[:, t]).float(),
            t,
            True,
        )
    push(
        kept,
        torch.tensor([0]),
        torch.from_numpy(w[2]).float(),
        torch.from_numpy(extra[None]).float(),
        2,
        False,
    )
    v = rng.normal(size=5)
    found, _, _ = kept.estimate(torch.zeros(2, 5), torch.from_numpy(v).float(), torch.arange(2))
    literal = lbfgs_hvp(
        torch.from_numpy(w[:2]),
        torch.from_numpy(np.stack([np.stack([g[0, 1], extra]), g[1, :2]])),
        torch.from_numpy(v),
    )
    np.testing.assert_allclose(found.numpy(), literal.numpy(), rtol=1e-3, atol=1e-3)
