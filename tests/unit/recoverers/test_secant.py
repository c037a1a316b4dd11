"""AnchoredSecant by hand: two or three clients, two parameters."""

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
from fedrec.recoverers import AnchoredSecant, FedRecover
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, RoundRecord

NONE = torch.zeros(2)


def started(**arguments: Any) -> AnchoredSecant:
    estimator = AnchoredSecant(**arguments)
    estimator.start(SimpleNamespace(remaining=("a", "b")), range(10))  # type: ignore[arg-type]
    return estimator


def learn(estimator: AnchoredSecant, *observed: Any) -> None:
    """Let it learn from a round, as the only one."""
    changes = estimator.observe(*observed)
    if changes is not None:
        estimator.pool([changes])


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
        ({"common_gain": 0}, r"`common_gain` to be a finite number in \(0, 1\], but got 0"),
        (
            {"common_gain": "spacing"},
            r"`common_gain` to be a number in \(0, 1\], or a name, but got.*Known: adaptive",
        ),
        ({"history_weight": 1.5}, r"`history_weight` to be a finite number in \[0, 1\], but got"),
        (
            {"history_weight": "pool"},
            r"`history_weight` to be a number in \[0, 1\], or a name, but got 'pool'. Did you",
        ),
        ({"curvature_weight": -0.1}, r"`curvature_weight` to be a finite number in \[0, 1\], but"),
        ({"num_secants": 0}, "`num_secants` to be an integer of at least 1, but got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        AnchoredSecant(**arguments)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 5.0), (0.5, 6.0), (1.0, 7.0)])
def test_it_adds_a_part_of_what_changed_in_the_recording(beta: float, expected: float) -> None:
    estimator = started(history_weight=beta, curvature_weight=0.0)
    learn(
        estimator, record(0, [[1.0, 0], [0, 0]]), torch.tensor([[5.0, 0], [0, 0]]), NONE, "warmup"
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
    # 3 products of the mean changes, 0.25 and 1.
    assert estimator.diagnostics()["history_weight"] == pytest.approx(0.25)


def test_weights_are_pooled_over_estimators_of_some_clients_each() -> None:
    """As above: what a's estimator and b's say of their client makes the weight of both."""
    estimators = [AnchoredSecant(curvature_weight=0.0) for _ in range(3)]
    for estimator, ids in zip(estimators, ("a", "b", "c"), strict=True):
        estimator.start(SimpleNamespace(remaining=ids), range(10))  # type: ignore[arg-type]
    for t in range(5):
        said = [
            one.observe(record(t, [[t, 0.0]], ids=c), torch.tensor([[x * t, 0]]), NONE, "warmup")
            for one, c, x in zip(estimators, "ab", (0.5, 0.0), strict=False)
        ]
        for estimator in estimators:
            if any(one is not None for one in said):
                estimator.pool([one for one in said if one is not None])
    # Also in that of a client who was not asked.
    weights = [estimator.diagnostics()["history_weight"] for estimator in estimators]
    assert weights == [pytest.approx(0.25)] * 3


def test_the_anchor_is_between_prediction_and_exact_update() -> None:
    estimator = started(gain=0.25, common_gain=0.5, history_weight=0.0, curvature_weight=0.0)
    same = [[0.0, 0], [0, 0]]
    learn(estimator, record(0, same), torch.tensor([[8.0, 0], [-8.0, 0]]), NONE, "warmup")
    # Predictions are 8 and -8; a quarter of the way to 4 and -4. On average nothing changes.
    learn(estimator, record(1, same), torch.tensor([[4.0, 0], [-4.0, 0]]), NONE, "correction")
    found = estimator.estimate(record(2, same), NONE).updates
    torch.testing.assert_close(found, torch.tensor([[7.0, 0], [-7.0, 0]]))
    # Both are 4 more than predicted: half of the way.
    learn(estimator, record(2, same), torch.tensor([[11.0, 0], [-3.0, 0]]), NONE, "correction")
    found = estimator.estimate(record(3, same), NONE).updates
    torch.testing.assert_close(found, torch.tensor([[9.0, 0], [-5.0, 0]]))
    # Whoever is asked alone had no prediction of use.
    learn(estimator, record(3, same), torch.tensor([[4.0, 0], [0, 0]]), NONE, "abnormality")
    assert float(estimator.estimate(record(4, same), NONE).updates[0, 0]) == 4.0


def test_the_gain_by_spacing_is_one_in_successive_rounds() -> None:
    estimator = started(common_gain=0.1, history_weight=0.0, curvature_weight=0.0)
    same, none = [[0.0, 0], [0, 0]], torch.zeros(2, 2)
    learn(estimator, record(0, same), none, NONE, "warmup")
    # Half of the way after three rounds.
    for t, anchor in ((1, 8.0), (4, 4.0), (7, 2.0)):
        learn(estimator, record(t, same), 8 * (t == 1) + none, NONE, "correction")
        assert float(estimator.estimate(record(t + 1, same), NONE).updates[0, 0]) == anchor


@pytest.mark.parametrize(
    ("errors", "gain"),
    [
        # Nothing is known after one.
        ([8.0], 0.5),
        # 8 again: 0.5 (1 + 1 / 2).
        ([8.0, 8.0], 0.75),
        # Then -8: of 64 - 64 there is nothing left.
        ([8.0, 8.0, -8.0], 0.75),
        # Back and forth: 0.5 / 2, and not below the gain of what is a client's own.
        ([8.0, -8.0], 0.25),
        ([8.0, -8.0, 8.0], 0.2),
        ([8.0, 80.0], 1.0),
    ],
)
def test_the_common_gain_grows_as_errors_go_on(errors: list[float], gain: float) -> None:
    estimator = started(gain=0.2, history_weight=0.0, curvature_weight=0.0)
    same = [[0.0, 0], [0, 0]]
    learn(estimator, record(0, same), torch.zeros(2, 2), NONE, "warmup")
    for t, error in enumerate(errors, 1):
        exact = estimator.estimate(record(t, same), NONE).updates + torch.tensor([error, 0])
        learn(estimator, record(t, same), exact, NONE, "correction")
    assert estimator.diagnostics()["common_gain"] == pytest.approx(gain)


def test_the_gain_in_common_does_not_move_those_whose_own_is_larger() -> None:
    """a was asked two rounds before, so 2 / 3; b and c eleven rounds before, so 1 / 6."""
    estimator = AnchoredSecant(common_gain=0.5, history_weight=0.0, curvature_weight=0.0)
    estimator.start(SimpleNamespace(remaining=tuple("abc")), range(20))  # type: ignore[arg-type]
    none = [[0.0, 0]] * 3
    learn(estimator, record(0, none, ids="abc"), torch.zeros(3, 2), NONE, "warmup")
    learn(estimator, record(9, none[:1], ids="a"), torch.zeros(1, 2), NONE, "fallback")
    exact = torch.tensor([[6.0, 0], [6.0, 0], [0.0, 0]])
    learn(estimator, record(11, none, ids="abc"), exact, NONE, "correction")
    found = estimator.estimate(record(12, none, ids="abc"), NONE).updates[:, 0]
    # b: 6 / 6, and a third of the mean error of 4 more; c: as much more.
    torch.testing.assert_close(found, torch.tensor([4.0, 1 + 4 / 3, 4 / 3]))


def test_a_long_update_counts_as_one_of_median_length() -> None:
    """Lengths 1, 1, 100 now; once the median is known, their changes are 1, 1 and 1."""
    estimator = AnchoredSecant(common_gain=1.0, history_weight=0.0, curvature_weight=0.0)
    estimator.start(SimpleNamespace(remaining=tuple("abc")), range(20))  # type: ignore[arg-type]
    none = [[0.0, 0]] * 3
    exact = torch.tensor([[1.0, 0], [1.0, 0], [100.0, 0]])
    learn(estimator, record(0, none, ids="abc"), exact, NONE, "warmup")
    changes = estimator.observe(record(1, none, ids="abc"), exact, NONE, "warmup")
    assert changes is not None
    assert (changes.weight, changes.length) == (3.0, 1.0)
    estimator.pool([changes])
    later = estimator.observe(record(2, none, ids="abc"), 2 * exact, NONE, "warmup")
    assert later is not None
    # Of lengths 2, 2, 200: 1/2, 1/2 and 1/200 of 1, 1 and 100.
    assert later.weight == pytest.approx(1.005)
    torch.testing.assert_close(later.exact, torch.tensor([1.5 / 1.005, 0]))


def test_what_curvature_predicts_counts_for_as_much_of_it_as_came_true() -> None:
    """One secant says that updates change by 2 for a step of 1; then they change by half of it."""
    estimator = started(history_weight=0.0)
    w, none = torch.tensor([1.0, 0.0]), [[0.0, 0], [0, 0]]
    ridge = 2 / 2.1  # see the tests of parity
    for t, x in ((0, 0.0), (1, 2.0)):
        learn(estimator, record(t, none), torch.tensor([[x, 0], [x, 0]]), t * w, "warmup")
    assert estimator.diagnostics()["curvature_weight"] == 1.0
    found = estimator.estimate(record(2, none), 3 * w).updates
    torch.testing.assert_close(found, torch.full((2, 2), 2 + 2 * 2 * ridge) * w)
    learn(estimator, record(2, none), torch.tensor([[3.0, 0], [3.0, 0]]), 2 * w, "warmup")
    assert estimator.diagnostics()["curvature_weight"] == pytest.approx(1 / (2 * ridge))


@pytest.mark.parametrize("keep", [{"every": 2}, {"last": 20}, {"clients": 3}], ids=str)
def test_rounds_that_were_not_kept_move_no_anchor(keep: dict[str, int]) -> None:
    federation, history = quadratic_federation(), MemoryHistory(keep=keep)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=30, server_lr=0.3)
    method = FedRecover(warmup_rounds=6, correction_period=5, final_rounds=3, estimator="secant")
    result = loop.recover(federation, history, method, ["q4"])
    assert isinstance(method.estimator, AnchoredSecant)
    kept = [t for t in range(27) if "q0" in history.index(t).kept]
    asked = {e.round for e in result.ledger.entries if e.client_id == "q0"}
    newest = max((t for t in kept if t in asked), default=-1)
    assert int(method.estimator._round[0]) == newest
    assert asked >= set(range(30)) - set(kept)
    scratch = loop.recover(federation, history, FedRecover(correction_period=1), ["q4"])
    torch.testing.assert_close(result.global_weights, scratch.global_weights, atol=3e-3, rtol=0)


def test_it_tells_what_it_keeps() -> None:
    estimator = started()
    rows = 2 * 5 + 2 * 5 + 3
    assert estimator.kept_bytes(2, 100) == rows * 100 * 4


def test_a_state_can_be_taken_over_before_anything_was_observed() -> None:
    other = AnchoredSecant()
    other.load_state_dict(started().state_dict())
    first = record(0, [[1.0, 0], [0, 0]])
    assert other.estimate(first, NONE).usable.tolist() == [False, False]


def replayed(kernel: str, threads: int = 1, **arguments: Any) -> list[Tensor]:
    """Observe and estimate four clients of 9,000 parameters; return all that comes of it."""
    ids, size = "abcd", 9000
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    estimator = AnchoredSecant(**arguments)
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
    names = ("anchors", "exact", "recorded", "products", "successive", "moves", "turns")
    return [*found, *(state[name] for name in names), torch.tensor(state["weights"])]


@pytest.mark.parametrize("gain", ["spacing", 0.3, 1.0])
def test_what_is_compiled_gives_the_same(gain: float | str) -> None:
    pytest.importorskip("numba")
    expected, found = (replayed(kernel, gain=gain) for kernel in ("numpy", "numba"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    for one, other in zip(found, replayed("numba", threads=3, gain=gain), strict=True):
        assert torch.equal(one, other)
