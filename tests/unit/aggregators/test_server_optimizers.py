"""Optimisers of the server: FedAvgM, FedAdam, FedYogi, and those of torch."""

from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import FedAdam, FedAvg, FedAvgM, FedYogi, Median, ServerOptimizer
from fedrec.exceptions import AggregationError, ConfigurationError

TWO = torch.tensor([[1.0], [3.0]])


def test_a_rule_is_wrapped() -> None:
    for cls in (FedAvgM, FedAdam, FedYogi, ServerOptimizer):
        with pytest.raises(ConfigurationError, match="Expected `rule` to be an Aggregator"):
            cls("FedAvg")


@pytest.mark.parametrize("cls", [FedAdam, FedYogi])
@pytest.mark.parametrize("kwargs", [{"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0.0}])
def test_bad_arguments_are_named(cls: type, kwargs: dict) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{next(iter(kwargs))}`"):
        cls(FedAvg(), **kwargs)
    with pytest.raises(ConfigurationError, match="Expected `momentum`"):
        FedAvgM(FedAvg(), momentum=1.0)


@pytest.mark.parametrize(
    ("optimizer", "args", "match"),
    [
        ("LBFGS", None, "Expected `optimizer`"),  # it needs a closure
        ("Rprop", None, "Expected `optimizer`"),  # its steps are not proportional to `lr`
        ("SGD", {"lr": 0.1}, "server_lr"),
        ("SGD", {"momentum": -1.0}, "momentum"),
        ("SGD", {"betas": (0.9, 0.9)}, "Expected `optimizer_args` to be arguments of torch"),
    ],
)
def test_bad_optimisers_are_named(optimizer: str, args: dict | None, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        ServerOptimizer(FedAvg(), optimizer=optimizer, optimizer_args=args)


def test_the_first_steps_by_hand() -> None:
    # A = 2: m = 0.1 * 2, v = 0.99 * 0.25 + 0.01 * 4 = 0.2875.
    step = 0.2 / (0.2875**0.5 + 0.5)
    assert FedAdam(FedAvg(), tau=0.5)(TWO).item() == pytest.approx(step, rel=1e-6)
    # v = 0.25 + 0.01 * 4, since v < A^2.
    step = 0.2 / (0.29**0.5 + 0.5)
    assert FedYogi(FedAvg(), tau=0.5)(TWO).item() == pytest.approx(step, rel=1e-6)
    rule = FedAvgM(FedAvg(), momentum=0.5)
    assert [rule(TWO).item() for _ in range(3)] == [2.0, 3.0, 3.5]


@pytest.mark.parametrize("cls", [FedAdam, FedYogi])
def test_steps_stay_finite_whatever_the_updates(cls: type) -> None:
    # A variance that overflows would be infinite for ever, or NaN.
    rule = cls(FedAvg())
    for scale in (0.0, 1e30, 1e-30, 1e38, 0.0, 1.0):
        step = rule(scale * torch.tensor([[1.0, -1.0], [1.0, 0.0]]))
        assert torch.isfinite(step).all()
        assert step.abs().max() <= 10.0  # |m| / sqrt(v) <= (1 - b1) / sqrt(1 - b2) per round


def test_what_needs_the_weights_says_so() -> None:
    with pytest.raises(AggregationError, match="AdamW decays the global weights"):
        ServerOptimizer(FedAvg(), optimizer="AdamW")(TWO)
    plain = ServerOptimizer(FedAvg(), optimizer="AdamW", optimizer_args={"weight_decay": 0})(TWO)
    torch.testing.assert_close(plain, ServerOptimizer(FedAvg(), optimizer="Adam")(TWO))


def test_wrapped_rules_keep_their_own_memory() -> None:
    rule = FedAvgM(FedAvgM(FedAvg(), momentum=0.5), momentum=0.5)
    assert [rule(TWO).item() for _ in range(3)] == [2.0, 4.0, 5.5]
    other = FedAvgM(FedAvgM(FedAvg(), momentum=0.5), momentum=0.5)
    other.load_state_dict(rule.state_dict())
    assert other(TWO).item() == rule(TWO).item()


def test_bounds_are_those_of_the_rule() -> None:
    from fedrec.aggregators import TrimmedMean

    rule = FedAvgM(TrimmedMean(trim=2))
    with pytest.raises(AggregationError, match="Cannot trim"):
        rule(torch.ones(4, 1))
    assert rule.max_byzantine(10) is None
    assert not Median().has_memory
    assert rule.has_memory
