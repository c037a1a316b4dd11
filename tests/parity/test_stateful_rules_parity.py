"""Rules with memory, wrappers and server optimisers against float64 NumPy written from the papers.

Client by client and coordinate by coordinate, as the papers put it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.aggregators import (
    ARC,
    FLAME,
    RLR,
    AggregationContext,
    Bucketing,
    CenteredClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    FLTrust,
    FoolsGold,
    Median,
    NearestNeighborMixing,
    ServerOptimizer,
    SignGuard,
)
from fedrec.functional import (
    adaptive_server_step,
    bucket_means,
    centered_clipping,
    cosine_similarities,
    largest_mode,
    majority_cluster,
)
from fedrec.parameters import ParameterVector


def rounds_of(m: int, d: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """Updates of several rounds: heavy tails, and zeros as unused parameters have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, size=(count, m, d)).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0.0
    return list(x)


def run(rule, rounds: list[np.ndarray]) -> list[np.ndarray]:
    return [rule(torch.from_numpy(x)).double().numpy() for x in rounds]


# -- CenteredClipping: Karimireddy et al. 2021, section 4 -----------------------------------------


def centered_clipping_by_definition(x: np.ndarray, v: np.ndarray, tau: float, times: int):
    for _ in range(times):
        total = np.zeros_like(v)
        for row in x.astype(np.float64):
            difference = row - v
            norm = np.sqrt((difference**2).sum())
            total += difference if norm <= tau else difference * (tau / norm)
        v = v + total / len(x)
    return v


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("tau", [0.1, 5.0, 1e6])
def test_centered_clipping_starts_from_the_last_result(tau: float, iterations: int) -> None:
    rounds = rounds_of(9, 40, 4)
    v = np.zeros(40)
    for x, got in zip(
        rounds, run(CenteredClipping(tau=tau, iterations=iterations), rounds), strict=True
    ):
        v = centered_clipping_by_definition(x, v, tau, iterations)
        np.testing.assert_allclose(got, v, rtol=1e-5, atol=1e-6)


def test_clipping_around_any_centre() -> None:
    # A rule of a peer refuses every centre that it is given.
    x, v = rounds_of(5, 8, 2, seed=1)
    got = centered_clipping(torch.from_numpy(x), torch.from_numpy(v[0]), tau=1.5, iterations=2)
    want = centered_clipping_by_definition(x, v[0].astype(np.float64), 1.5, 2)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


# -- FedAdam, FedYogi: Reddi et al. 2021, algorithm 2; FedAvgM: Hsu et al. 2019 -------------------


def adaptive_by_definition(rounds: list[np.ndarray], b1, b2, tau, yogi: bool) -> list[np.ndarray]:
    """Algorithm 2 on differences of weights, Delta = -update, and with x <- x + step."""
    m, v = np.zeros(rounds[0].shape[1]), np.full(rounds[0].shape[1], tau**2)
    steps = []
    for x in rounds:
        delta = -x.astype(np.float64).mean(axis=0)
        m = b1 * m + (1 - b1) * delta
        if yogi:
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        else:
            v = b2 * v + (1 - b2) * delta**2
        steps.append(-m / (np.sqrt(v) + tau))
    return steps


@pytest.mark.parametrize(("cls", "yogi"), [(FedAdam, False), (FedYogi, True)])
def test_adaptive_server_optimisers_have_no_bias_correction(cls: type, yogi: bool) -> None:
    rounds = rounds_of(6, 50, 12)
    want = adaptive_by_definition(rounds, 0.9, 0.99, 1e-3, yogi)
    got = run(cls(FedAvg()), rounds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # torch's Adam corrects, so that its first step is ten times as long.
    corrected = run(ServerOptimizer(FedAvg(), optimizer="Adam"), rounds[:1])[0]
    plain = run(FedAdam(FedAvg(), tau=1e-12, beta2=0.999), rounds[:1])[0]
    np.testing.assert_allclose(plain, corrected * 0.1 / np.sqrt(0.001), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize(("cls", "yogi"), [(FedAdam, False), (FedYogi, True)])
def test_moments_of_any_magnitude(cls: type, yogi: bool, scale: float) -> None:
    rng = np.random.default_rng(0)
    rounds = [(scale * (2 + rng.normal(size=(1, 50)))).astype(np.float32) for _ in range(300)]
    want = adaptive_by_definition(rounds, 0.9, 0.99, 1e-3, yogi)
    np.testing.assert_allclose(run(cls(FedAvg()), rounds), want, rtol=1e-6)
    momentum, variance = torch.zeros(50), torch.full((50,), 1e-6)
    for x, step in zip(rounds, want, strict=True):  # float32 in, float64 inside
        given = {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "yogi": yogi}
        got, momentum, variance = adaptive_server_step(
            torch.from_numpy(x[0]), momentum, variance, **given
        )
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got, step, rtol=1e-6)


def test_momentum_adds_up() -> None:
    rounds = rounds_of(6, 20, 6)
    velocity = np.zeros(20)
    for x, got in zip(rounds, run(FedAvgM(FedAvg(), momentum=0.7), rounds), strict=True):
        velocity = 0.7 * velocity + x.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(got, velocity, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"betas": (0.8, 0.9)}),
        ("AdamW", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.5}),
        ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
        ("Adadelta", {}),
    ],
)
def test_any_optimiser_walks_as_torch_walks_with_the_servers_learning_rate(name, args) -> None:
    lr, d = 0.03, 30
    rounds = rounds_of(5, d, 8)
    start = torch.from_numpy(np.random.default_rng(5).normal(size=d))
    theirs = start.clone()
    optimizer = getattr(torch.optim, name)([theirs], lr=lr, **args)
    rule, ours = ServerOptimizer(Median(), optimizer=name, optimizer_args=args), start.clone()
    layout = ParameterVector(torch.nn.Linear(d, 1, bias=False))
    for t, x in enumerate(rounds):
        updates = torch.from_numpy(x)
        theirs.grad = torch.from_numpy(np.median(x.astype(np.float64), axis=0))
        optimizer.step()
        ids = tuple(f"client-{i}" for i in range(len(x)))
        ctx = AggregationContext(
            round=t, phase="record", client_ids=ids, global_weights=ours, layout=layout
        )
        ours = ours - lr * rule(updates, None, ctx).double()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# -- FoolsGold: Fung et al. 2020, algorithm 1 -----------------------------------------------------


def foolsgold_by_definition(history: np.ndarray, kappa: float) -> np.ndarray:
    m = len(history)
    cs = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            if i != j:
                length = np.linalg.norm(history[i]) * np.linalg.norm(history[j])
                cs[i, j] = history[i] @ history[j] / length if length > 0 else 0.0
    v = np.array([max(cs[i].max(), 0.0) for i in range(m)])
    pardoned = cs.copy()
    for i in range(m):
        for j in range(m):
            if v[j] > v[i]:
                pardoned[i, j] = cs[i, j] * v[i] / v[j]
    alpha = np.array([min(max(1 - max(pardoned[i].max(), 0.0), 0.0), 1.0) for i in range(m)])
    alpha = alpha / alpha.max()
    weights = []
    for a in alpha:
        if a in (0.0, 1.0):
            weights.append(a)
            continue
        weights.append(min(max(kappa * (np.log(a / (1 - a)) + 0.5), 0.0), 1.0))
    return np.array(weights)


@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_foolsgold_weighs_by_the_likeness_of_all_that_was_sent(kappa: float) -> None:
    rounds = rounds_of(8, 6, 5)
    direction = np.ones(6, dtype=np.float32)
    for t, x in enumerate(rounds):  # two sybils, whose single updates look unlike
        x[0] = 3 * direction + (-1) ** t * x[2]
        x[1] = 3 * direction - (-1) ** t * x[2]
    history = np.zeros((8, 6))
    for x, got in zip(rounds, run(FoolsGold(confidence=kappa), rounds), strict=True):
        history += x
        weights = foolsgold_by_definition(history, kappa)
        np.testing.assert_allclose(got, weights @ x.astype(np.float64), rtol=1e-4, atol=1e-5)
    assert weights[0] < 0.1 > weights[1]
    assert weights[2:].sum() > 1


# -- FLTrust: Cao et al. 2021, algorithm 2 --------------------------------------------------------


def with_server_update(server_update: np.ndarray, m: int) -> AggregationContext:
    d = len(server_update)
    return AggregationContext(
        round=0,
        phase="record",
        client_ids=tuple(f"client-{i}" for i in range(m)),
        global_weights=torch.zeros(d),
        layout=ParameterVector(torch.nn.Linear(d, 1, bias=False)),
        server_update=torch.from_numpy(server_update),
    )


def test_fltrust_is_the_mean_of_rescaled_updates_weighted_by_trust() -> None:
    x, other = rounds_of(7, 5000, 2)
    g0 = (x.mean(axis=0) + other[0]).astype(np.float32)
    x[3] = 0.0
    total, trusts = np.zeros(5000), []
    for row in x.astype(np.float64):
        norm = np.linalg.norm(row)
        cosine = row @ g0 / (norm * np.linalg.norm(g0)) if norm > 0 else 0.0
        trusts.append(max(cosine, 0.0))
        if norm > 0:
            total += trusts[-1] * np.linalg.norm(g0.astype(np.float64)) / norm * row
    got = FLTrust()(torch.from_numpy(x), None, with_server_update(g0, 7))
    assert 0.0 in trusts
    np.testing.assert_allclose(got.numpy(), total / sum(trusts), rtol=1e-4, atol=1e-4)


# -- FLAME: Nguyen et al. 2022, algorithm 1 -------------------------------------------------------


def admitted_by_hdbscan(x: np.ndarray) -> np.ndarray:
    from sklearn.cluster import HDBSCAN

    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    found = HDBSCAN(
        min_cluster_size=len(x) // 2 + 1,
        min_samples=1,
        metric="precomputed",
        allow_single_cluster=True,
        copy=True,
    ).fit(np.clip(1 - unit @ unit.T, 0, 2))
    return found.labels_ == 0


@pytest.mark.parametrize("seed", range(12))
def test_flame_admits_whom_hdbscan_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(5, 25))
    x = rng.normal(size=(m, 12)) + rng.choice([0.0, 1.0, 3.0], size=(m, 1))
    x[: m // 3] = rng.normal(size=(m // 3, 12)) * 0.3 - 4.0
    x = x.astype(np.float32)
    admitted = admitted_by_hdbscan(x.astype(np.float64))
    cosines = 1 - cosine_similarities(torch.from_numpy(x))
    assert majority_cluster(cosines).tolist() == admitted.tolist()
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    bound = np.sort(norms)[[(m - 1) // 2, m // 2]].mean()
    clipped = [row * min(1.0, bound / norm) for row, norm in zip(x, norms, strict=True)]
    want = np.mean([row for row, ok in zip(clipped, admitted, strict=True) if ok], axis=0)
    got = FLAME(noise_factor=0.0)(torch.from_numpy(x))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


def test_flame_adds_noise_in_proportion_to_the_bound() -> None:
    x = torch.from_numpy(rounds_of(6, 40_000, 1)[0])
    noise = FLAME(noise_factor=0.05)(x) - FLAME(noise_factor=0.0)(x)
    bound = np.median(np.linalg.norm(x.double().numpy(), axis=1))
    assert noise.std().item() == pytest.approx(0.05 * bound, rel=0.02)
    assert abs(noise.mean().item()) < 0.05 * bound * 4 / 200  # four standard errors


# -- SignGuard: Xu et al. 2022, algorithm 1 -------------------------------------------------------


def largest_cluster_by_mean_shift(points: np.ndarray) -> np.ndarray:
    from sklearn.cluster import MeanShift, estimate_bandwidth

    width = estimate_bandwidth(points, quantile=0.5)
    labels = MeanShift(bandwidth=width, cluster_all=False).fit(points).labels_
    return labels == np.bincount(labels[labels >= 0]).argmax()


@pytest.mark.parametrize("seed", range(8))
def test_signguard_averages_ordinary_norms_of_the_largest_sign_cluster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.4, 1.0, size=(15, 400)).astype(np.float32)
    x[:3] *= -1
    x[3], x[4] = 10 * x[3], 0.01 * x[4]
    x[:, ::7] = 0.0
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    median = np.median(norms)
    shares = np.array([[(r > 0).mean(), (r == 0).mean(), (r < 0).mean()] for r in x])
    trusted = largest_cluster_by_mean_shift(shares)
    assert largest_mode(torch.from_numpy(shares)).tolist() == trusted.tolist()
    assert not trusted[:3].any()
    kept = [
        row * min(1.0, median / norm)
        for row, norm, ok in zip(x.astype(np.float64), norms, trusted, strict=True)
        if ok and 0.1 <= norm / median <= 3.0
    ]
    got = SignGuard(coordinate_fraction=1.0)(torch.from_numpy(x))
    np.testing.assert_allclose(got.numpy(), np.mean(kept, axis=0), rtol=1e-4, atol=1e-6)


# -- RLR: Ozdayi et al. 2021, equation 3 ----------------------------------------------------------


def test_rlr_turns_round_what_too_few_agree_on() -> None:
    x = rounds_of(9, 300, 1)[0]
    want = []
    for column in x.astype(np.float64).T:
        votes = abs(sum(np.sign(column)))
        want.append(column.mean() if votes >= 4 else -column.mean())
    for threshold in (4, 0.4):  # 0.4 * 9 = 3.6, and votes are whole
        got = RLR(FedAvg(), threshold=threshold)(torch.from_numpy(x))
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


# -- Pre-aggregators: Allouah et al. 2023 and 2025, Karimireddy et al. 2022 -----------------------


@pytest.mark.parametrize("f", [0, 1, 4])
def test_mixing_averages_the_nearest(f: int) -> None:
    x = rounds_of(9, 30, 1)[0].astype(np.float64)
    mixed = []
    for row in x:
        order = sorted(range(9), key=lambda j: ((x[j] - row) ** 2).sum())
        mixed.append(np.mean([x[j] for j in order[: 9 - f]], axis=0))
    got = NearestNeighborMixing(Median(), num_byzantine=f)(torch.from_numpy(x.astype(np.float32)))
    np.testing.assert_allclose(got.numpy(), np.median(mixed, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("m", "f", "k"), [(10, 2, 3), (10, 0, 0), (9, 4, 4), (100, 25, 37)])
def test_arc_clips_the_longest_to_the_next_norm(m: int, f: int, k: int) -> None:
    x = rounds_of(m, 20, 1)[0].astype(np.float64)
    norms = np.linalg.norm(x, axis=1)
    bound = sorted(norms, reverse=True)[k]
    clipped = np.array([r * min(1.0, bound / n) for r, n in zip(x, norms, strict=True)])
    got = ARC(FedAvg(), num_byzantine=f)(torch.from_numpy(x.astype(np.float32)))
    np.testing.assert_allclose(got.numpy(), clipped.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_number_to_clip_is_exact() -> None:
    # Products of floats fall short of whole numbers: 2 * (7 / 10) * 3 = 4.199..., and so on.
    from fractions import Fraction

    for m in range(1, 120):
        for f in range((m + 1) // 2):
            exact = 2 * Fraction(f, m) * (m - f)
            assert (
                ARC(FedAvg(), num_byzantine=f).num_clipped(m)
                == exact.numerator // exact.denominator
            )


def test_every_bucket_is_divided_by_its_own_size() -> None:
    x = rounds_of(8, 12, 1)[0]
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    buckets = [order[0:3], order[3:6], order[6:8]]
    want = np.array([x[b].astype(np.float64).mean(axis=0) for b in buckets])
    got = bucket_means(torch.from_numpy(x), torch.tensor(order), 3)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    # The mean of the means of 3, 3 and 2 clients, whoever they are, of a common update.
    same = np.repeat(x[:1], 8, axis=0)
    once = Bucketing(FedAvg(), bucket_size=3)(torch.from_numpy(same))
    np.testing.assert_allclose(once.numpy(), x[0], rtol=1e-6)
