import pytest
import torch

from fedrec.recoverers.estimators import pairs
from fedrec.recoverers.estimators.pairs import ClientPairs
from fedrec.recoverers.estimators.paper_pairs import PaperPairs

CPU = torch.device("cpu")


def filled(num_clients: int = 4, size: int = 5) -> tuple[ClientPairs, torch.Tensor]:
    """Two pairs each; client i has the Hessian (i + 1) I."""
    kept = ClientPairs(num_clients, 2, size, CPU)
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1.0, num_clients + 1)[:, None]
    for t in range(2):
        delta_w = torch.randn(size, generator=generator)
        historical = torch.randn(num_clients, size, generator=generator)
        exact = historical + scale * delta_w
        kept.push(torch.arange(num_clients), delta_w, exact, historical, t, False)
    return kept, scale


@pytest.mark.parametrize("kind", [ClientPairs, PaperPairs])
def test_a_pair_is_what_was_sent_less_what_had_been_sent(kind) -> None:
    kept = kind(2, 1, 2, CPU)
    exact = torch.tensor([[5.0, 3.0], [7.0, 4.0]])
    historical = torch.tensor([[3.0, 2.0], [3.0, 4.0]])
    before = exact.clone(), historical.clone()
    w = torch.tensor([1.0, 0.0])
    kept.push(torch.arange(2), w, exact, historical, 0, False)
    assert torch.equal(exact, before[0])
    assert torch.equal(historical, before[1])
    # One pair: B s = y.
    found, largest, usable = kept.estimate(torch.zeros(2, 2), w, torch.arange(2))
    torch.testing.assert_close(found, torch.tensor([[2.0, 1.0], [4.0, 0.0]]))
    assert torch.equal(largest, found.abs().amax(dim=1))
    assert usable.tolist() == [True, True]


@pytest.mark.parametrize("block_bytes", [1, 2 * 5 * 4 * 3, 1 << 23])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 2], [3, 0, 1], [2]])
def test_estimates_of_any_clients_in_blocks_of_any_size(
    rows: list[int], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "BLOCK_BYTES", block_bytes)
    kept, scale = filled()
    v = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    updates = torch.linspace(-1, 1, 5 * len(rows)).view(-1, 5)
    before = updates.clone()
    found, largest, _ = kept.estimate(updates, v, torch.tensor(rows))
    torch.testing.assert_close(found, before + scale[rows] * v, rtol=1e-4, atol=1e-4)
    assert torch.equal(updates, before)
    assert torch.equal(largest, found.abs().amax(dim=1))


def test_estimates_go_to_the_same_memory_round_after_round() -> None:
    kept, _ = filled()
    v = torch.ones(5)
    first = kept.estimate(torch.zeros(4, 5), v, torch.arange(4))[0]
    second = kept.estimate(torch.ones(4, 5), v, torch.arange(4))[0]
    assert first.data_ptr() == second.data_ptr()
    torch.testing.assert_close(first, second)


def test_an_update_that_is_not_finite_shows_in_its_own_magnitude_alone() -> None:
    kept, _ = filled()
    updates = torch.zeros(4, 5)
    updates[1, 2] = float("nan")
    updates[2, 0] = float("-inf")
    largest = kept.estimate(updates, torch.ones(5), torch.arange(4))[1]
    assert torch.isfinite(largest).tolist() == [True, False, False, True]


@pytest.mark.parametrize("block_bytes", [1, 1 << 23])
def test_a_pair_that_is_refused_leaves_the_old_ones(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "BLOCK_BYTES", block_bytes)
    kept, _ = filled()
    v = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    before = kept.estimate(torch.zeros(4, 5), v, torch.arange(4))[0].clone()
    sign = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    w = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    kept.push(torch.arange(4), w, 3 * sign * w, torch.zeros(4, 5), 2, False)
    after = kept.estimate(torch.zeros(4, 5), v, torch.arange(4))[0]
    assert kept.skipped == 2
    assert torch.equal(after[0::2], before[0::2])
    # The new pair is used where it was taken: B w = 3 w.
    along = kept.estimate(torch.zeros(4, 5), w, torch.arange(4))[0]
    torch.testing.assert_close(along[1::2], 3 * w.expand(2, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_bytes", [1, 1 << 23])
def test_a_pair_of_a_client_asked_alone_is_its_only_one_whatever_its_curvature(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "BLOCK_BYTES", block_bytes)
    kept, scale = filled()
    rows, w = torch.tensor([2, 1]), torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0])
    delta_g = torch.tensor([[-1.0, 3.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 1.0]])
    historical = torch.ones(2, 5)
    kept.push(rows, w, historical + delta_g, historical, 2, True)
    # One pair (s, y): B v = sigma (v - s s.v / s.s) + y y.v / s.y with sigma = s.y / s.s.
    v = torch.tensor([0.5, -2.0, 1.0, 3.0, 0.25], dtype=torch.float64)
    s = w.double()
    found = kept.estimate(torch.zeros(4, 5), v.float(), torch.arange(4))[0]
    for row, y in zip(rows.tolist(), delta_g.double(), strict=True):
        of_s = s.dot(y) / s.dot(s) * (v - s * s.dot(v) / s.dot(s))
        expected = of_s + y * y.dot(v) / s.dot(y)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)
    others = [0, 3]
    torch.testing.assert_close(found[others], scale[others] * v.float(), rtol=1e-4, atol=1e-4)
    # A positive pair joins it.
    kept.push(torch.arange(4), torch.ones(5), torch.ones(4, 5), torch.zeros(4, 5), 3, False)
    assert kept.stamp.sort(dim=1).values.tolist() == [[1, 3], [2, 3], [2, 3], [1, 3]]


def test_a_pair_without_curvature_takes_no_place() -> None:
    kept, _ = filled()
    w, y = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    kept.push(torch.tensor([1]), w, y, torch.zeros(1, 5), 2, True)
    assert kept.stamp.tolist() == [[0, 1]] * 4
    assert kept.skipped == 1


def test_model_differences_are_kept_once_for_each_round_that_is_in_use() -> None:
    kept, _ = filled()
    generator = torch.Generator().manual_seed(1)

    def push(rows: list[int], t: int) -> None:
        w = torch.randn(5, generator=generator)
        kept.push(torch.tensor(rows), w, w.expand(len(rows), 5), torch.zeros(len(rows), 5), t, 0)

    for t in range(2, 8):
        push([0, 1, 2, 3], t)
    assert len(kept.pool) == 2
    push([1], 8)
    push([2], 9)
    assert len(kept.pool) == 4
    for t in range(10, 14):
        push([3, 2, 1, 0], t)
    used = set(kept.slot[kept.stamp >= 0].tolist())
    assert len(used) == 2
    assert len(kept.pool) == 4
