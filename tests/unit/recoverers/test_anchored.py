"""AnchoredLBFGS by hand: two clients, two parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrec.aggregators import FedAvg
from fedrec.exceptions import ConfigurationError
from fedrec.functional.aggregation.order_statistics import use_kernel
from fedrec.history import MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.recoverers import AnchoredLBFGS, FedRecover, PairedLBFGS
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, RoundRecord

NONE = torch.zeros(2)


def started(**arguments: Any) -> AnchoredLBFGS:
    estimator = AnchoredLBFGS(**arguments)
    estimator.start(SimpleNamespace(remaining=("a", "b")), range(10))  # type: ignore[arg-type]
    return estimator


def learn(estimator: AnchoredLBFGS, *observed: Any) -> None:
    """Let it learn from a round, as the only one."""
    statistics = estimator.observe(*observed)
    if statistics is not None:
        estimator.pool([statistics])


def record(t: int, updates: list[list[float]], weights: Tensor = NONE, ids: str = "ab"):
    sent = CohortUpdates(
        client_ids=tuple(ids),
        updates=torch.tensor(updates),
        num_samples=torch.ones(len(ids), dtype=torch.int64),
    )
    return RoundRecord(round=t, global_weights=weights, sent=sent, aggregate=NONE)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"gain": 0.0}, r"`gain` to be a finite number in \(0, 1\], but got 0.0"),
        (
            {"gain": "kalman"},
            r"`gain` to be a number in \(0, 1\], or a name, but got 'kalman'.*Known: spacing",
        ),
        ({"history_weight": 1.5}, r"`history_weight` to be a finite number in \[0, 1\], but got"),
        (
            {"history_weight": "pool"},
            r"`history_weight` to be a number in \[0, 1\], or a name, but got 'pool'. Did you",
        ),
        ({"curvature_weight": -0.1}, r"`curvature_weight` to be a finite number in \[0, 1\], but"),
        ({"buffer_size": 0}, "`buffer_size` to be an integer of at least 1, but got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        AnchoredLBFGS(**arguments)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 5.0), (0.5, 6.0), (1.0, 7.0)])
def test_it_adds_a_part_of_what_changed_in_the_recording(beta: float, expected: float) -> None:
    estimator = started(history_weight=beta, curvature_weight=0.0)
    estimator.observe(
        record(0, [[1.0, 0], [0, 0]]), torch.tensor([[5.0, 0], [0, 0]]), NONE, "warmup"
    )
    updates, largest, usable = estimator.estimate(record(1, [[3.0, 0], [0, 0]]), NONE)
    torch.testing.assert_close(updates, torch.tensor([[expected, 0], [0, 0]]))
    torch.testing.assert_close(largest, torch.tensor([expected, 0]))
    assert usable.tolist() == [True, True]


def test_whoever_was_never_asked_has_no_estimate() -> None:
    estimator = started()
    first = record(0, [[1.0, 2.0]], ids="b")
    assert estimator.estimate(first, NONE).usable.tolist() == [False]
    estimator.observe(first, torch.tensor([[7.0, 8.0]]), NONE, "fallback")
    updates, _, usable = estimator.estimate(record(1, [[0.0, 0], [1.0, 2.0]]), NONE)
    assert usable.tolist() == [False, True]
    torch.testing.assert_close(updates[1], torch.tensor([7.0, 8.0]))


def test_the_weight_of_history_is_a_regression_over_three_rounds() -> None:
    """Both clients change by (1, 0) in the recording; a now by 0.5 of it, b by nothing."""
    steps = torch.arange(5.0)[:, None, None] * torch.tensor([[1.0, 0], [1.0, 0]])
    now = steps * torch.tensor([[0.5], [0.0]])
    estimator = started(curvature_weight=0.0)
    for t in range(5):
        learn(estimator, record(t, steps[t].tolist()), now[t], NONE, "warmup")
    # 3 products of 0.5 and 0 each, over 3 of 1 each.
    assert estimator.diagnostics()["history_weight"] == pytest.approx(0.25)


def test_weights_are_pooled_over_estimators_of_some_clients_each() -> None:
    """As above: what a's estimator and b's say of their client makes the weight of both."""
    estimators = [AnchoredLBFGS(curvature_weight=0.0) for _ in range(3)]
    for estimator, ids in zip(estimators, ("a", "b", "c"), strict=True):
        estimator.start(SimpleNamespace(remaining=ids), range(10))  # type: ignore[arg-type]
    for t in range(5):
        said = [
            one.observe(record(t, [[t, 0.0]], ids=c), torch.tensor([[x * t, 0]]), NONE, "warmup")
            for one, c, x in zip(estimators, "ab", (0.5, 0.0), strict=False)
        ]
        for estimator in estimators:
            estimator.pool([one for one in said if one is not None])
    # Also in that of a client who was not asked.
    weights = [estimator.diagnostics()["history_weight"] for estimator in estimators]
    assert weights == [pytest.approx(0.25)] * 3


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 7.0), (0.5, 7.5)])
def test_averages_of_exact_and_of_recorded_updates_move_together(
    beta: float, expected: float
) -> None:
    estimator = started(gain=0.25, history_weight=beta, curvature_weight=0.0)
    same, moved = [[0.0, 0], [0, 0]], [[4.0, 0], [0, 0]]
    estimator.observe(record(0, same), torch.tensor([[8.0, 0], [0, 0]]), NONE, "warmup")
    # 8 + (4 - 8) / 4 = 7, and 0 + (4 - 0) / 4 = 1 in the recording, where 2 follows.
    estimator.observe(record(1, moved), torch.tensor([[4.0, 0], [0, 0]]), NONE, "correction")
    later = record(2, [[2.0, 0], [0, 0]])
    assert float(estimator.estimate(later, NONE).updates[0, 0]) == expected
    # Nothing of it is left in whoever is asked alone.
    estimator.observe(record(2, same), torch.tensor([[4.0, 0], [0, 0]]), NONE, "abnormality")
    assert float(estimator.estimate(record(3, same), NONE).updates[0, 0]) == 4.0


def test_products_start_from_the_average_of_models() -> None:
    """The Hessian is 2: updates are 2 (w - 1) for models of 0, 4 and 6."""
    whole = {"history_weight": 0.0, "curvature_weight": 1.0}
    estimator = started(gain=0.25, buffer_size=1, **whole)
    one, w = torch.tensor([[1.0, 0], [1.0, 0]]), torch.tensor([1.0, 0.0])
    recorded = [[-2.0, 0], [-2.0, 0]]
    estimator.observe(record(0, recorded), -2 * one, 0 * w, "warmup")
    # Then averages are 1 of models and 0 of updates, and the pair is (4, 6 + 2).
    estimator.observe(record(1, recorded), 6 * one, 4 * w, "correction")
    found = estimator.estimate(record(2, recorded), 6 * w).updates
    torch.testing.assert_close(found, 10 * one)


def test_the_gain_by_spacing_is_one_in_successive_rounds() -> None:
    estimator = started(gain="spacing", history_weight=0.0, curvature_weight=0.0)
    same, none = [[0.0, 0], [0, 0]], torch.zeros(2, 2)
    estimator.observe(record(0, same), none, NONE, "warmup")
    # Half of the way after three rounds.
    for t, anchor in ((1, 8.0), (4, 4.0), (7, 2.0)):
        estimator.observe(
            record(t, same), none + 8 * none.new_tensor([t == 1, 0]), NONE, "correction"
        )
        assert float(estimator.estimate(record(t + 1, same), NONE).updates[0, 0]) == anchor


def test_whoever_was_estimated_far_off_hardly_moves_others() -> None:
    estimator = started(gain=0.5, common_gain=1.0, history_weight=1.0, curvature_weight=0.0)
    exact, same = torch.tensor([[1.0, 0], [1.0, 0]]), [[0.0, 0], [0, 0]]
    learn(estimator, record(0, same), exact, NONE, "warmup")
    learn(estimator, record(1, same), exact, NONE, "correction")
    # a is estimated at 1001, since its recorded update is. An error of 1000 where updates have a
    # length of 1 counts as 1 / 1000, so b, who was estimated well, moves by 1 / 1.001 at most.
    far = [[1000.0, 0], [0, 0]]
    learn(estimator, record(2, far), exact, NONE, "correction")
    found = estimator.estimate(record(3, far), NONE).updates
    torch.testing.assert_close(found[1], torch.tensor([1 - 0.5 / 1.001, 0]))


def test_products_count_for_as_much_of_them_as_came_true() -> None:
    """The pairs say that the Hessian is 2; then updates change by 1 for a step of 2."""
    estimator = started(history_weight=0.0, buffer_size=1)
    w, none = torch.tensor([1.0, 0.0]), [[0.0, 0], [0, 0]]
    learn(estimator, record(0, none), torch.tensor([[2.0, 0], [2.0, 0]]), w, "warmup")
    assert estimator.diagnostics()["curvature_weight"] == 1.0
    learn(estimator, record(1, none), torch.tensor([[3.0, 0], [3.0, 0]]), 3 * w, "warmup")
    assert estimator.diagnostics()["curvature_weight"] == 0.25
    # From an update of 3 at 3 w, with the newest pair's Hessian of 1: a quarter of 4 more.
    found = estimator.estimate(record(2, none), 7 * w).updates
    torch.testing.assert_close(found, torch.tensor([[4.0, 0], [4.0, 0]]))


@pytest.mark.parametrize(("rest", "weight"), [(39.0, 1.0), (40.0, 0.0)])
def test_products_that_explain_less_than_a_hundredth_are_left_out(
    rest: float, weight: float
) -> None:
    """The pairs say 4 of what is (4, rest): 16 of the squares of 16 + rest^2."""
    estimator = started(history_weight=0.0, buffer_size=1)
    w, none = torch.tensor([1.0, 0.0]), [[0.0, 0], [0, 0]]
    learn(estimator, record(0, none), torch.tensor([[2.0, 0], [2.0, 0]]), w, "warmup")
    learn(estimator, record(1, none), torch.tensor([[6.0, rest], [6.0, rest]]), 3 * w, "warmup")
    assert estimator.diagnostics()["curvature_weight"] == pytest.approx(weight)


def test_a_pair_of_negative_curvature_is_not_used() -> None:
    estimator, paired = (
        started(gain=1.0, history_weight=1.0, curvature_weight=1.0, buffer_size=1),
        PairedLBFGS(buffer_size=1),
    )
    paired.start(SimpleNamespace(remaining=("a", "b")), range(10))  # type: ignore[arg-type]
    w = torch.tensor([1.0, 0.0])
    exact = torch.tensor([[2.0, 0], [-2.0, 0]])
    for one in (estimator, paired):
        one.observe(record(0, [[0.0, 0], [0, 0]]), exact, w, "warmup")
    later = record(1, [[0.0, 0], [0, 0]])
    # a: the Hessian is 2 there. b: no Hessian; it stays at its anchor, or at the recorded update.
    torch.testing.assert_close(
        estimator.estimate(later, 3 * w).updates, torch.tensor([[6.0, 0], [-2.0, 0]])
    )
    torch.testing.assert_close(
        paired.estimate(later, 3 * w).updates, torch.tensor([[6.0, 0], [0.0, 0]])
    )


@pytest.mark.parametrize("keep", [{"every": 2}, {"last": 20}, {"clients": 3}], ids=str)
def test_rounds_that_were_not_kept_move_no_anchor(keep: dict[str, int]) -> None:
    federation, history = quadratic_federation(), MemoryHistory(keep=keep)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=30, server_lr=0.3)
    method = FedRecover(warmup_rounds=6, correction_period=5, final_rounds=3, estimator="anchored")
    result = loop.recover(federation, history, method, ["q4"])
    assert isinstance(method.estimator, AnchoredLBFGS)
    kept = [t for t in range(27) if "q0" in history.index(t).kept]
    asked = {e.round for e in result.ledger.entries if e.client_id == "q0"}
    newest = max((t for t in kept if t in asked), default=-1)
    assert int(method.estimator._round[0]) == newest
    assert asked >= set(range(30)) - set(kept)
    scratch = loop.recover(federation, history, FedRecover(correction_period=1), ["q4"])
    torch.testing.assert_close(result.global_weights, scratch.global_weights, atol=1e-3, rtol=0)


def test_it_tells_what_it_keeps() -> None:
    estimator = started()
    rows = 2 * (2 + 4) + 2 + 4
    assert estimator.kept_bytes(2, 100) == rows * 100 * 4


def test_a_state_can_be_taken_over_before_anything_was_observed() -> None:
    other = AnchoredLBFGS()
    other.load_state_dict(started().state_dict())
    first = record(0, [[1.0, 0], [0, 0]])
    assert other.estimate(first, NONE).usable.tolist() == [False, False]


def replayed(
    kernel: str, threads: int = 1, reversed_from: int = 99, **arguments: Any
) -> list[Tensor]:
    """Observe and estimate four clients of 9,000 parameters; return all that comes of it."""
    ids, size = "abcd", 9000
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    estimator = AnchoredLBFGS(**arguments)
    estimator.start(SimpleNamespace(remaining=tuple(ids)), range(20))  # type: ignore[arg-type]
    hessians, found = draw(4, size).abs(), []
    rounds = {
        **dict.fromkeys((0, 1, 2, 3, 8, 12), ("correction", ids)),
        5: ("abnormality", "b"),
        6: ("fallback", "da"),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with use_kernel(kernel):
            for t in range(14):
                w, then = draw(size), 0.5 * draw(size)
                if t == reversed_from:
                    hessians = -hessians
                updates, exact = (hessians * v + 0.1 * draw(4, size) for v in (then, w))
                rows = [0, 2, 3] if t == 3 else [0, 1, 2, 3]
                reason, asked = rounds.get(t, ("", ""))
                one = record(t, updates[rows].tolist(), then, "".join(ids[i] for i in rows))
                if len(asked) < 4:
                    found += estimator.estimate(one, w)[:2]
                    found = [x.clone() for x in found]
                if asked:
                    kept = [i for i in rows if ids[i] in asked]
                    one = one.select([ids[i] for i in kept])
                    learn(estimator, one, exact[kept], w, reason)
    finally:
        torch.set_num_threads(before)
    state = estimator.state_dict()
    found += [state["anchors"], state["recorded"], torch.tensor(state["weights"])]
    return [*found, state["products"], torch.tensor(state["common"]["value"])]


@pytest.mark.parametrize("gain", ["spacing", 0.3, 1.0])
def test_what_is_compiled_gives_the_same(gain: float | str) -> None:
    pytest.importorskip("numba")
    expected, found = (replayed(kernel, gain=gain) for kernel in ("numpy", "numba"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    for one, other in zip(found, replayed("numba", threads=3, gain=gain), strict=True):
        assert torch.equal(one, other)


def test_what_is_compiled_gives_the_same_where_curvature_misleads() -> None:
    pytest.importorskip("numba")
    expected, found = (replayed(kernel, reversed_from=3) for kernel in ("numpy", "numba"))
    weights = found[-3]
    assert weights[1] == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
