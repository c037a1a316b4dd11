"""Every aggregation rule of fedrec keeps the contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedrec.aggregators as rules
from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.parameters import ParameterVector
from fedrec.testing import AggregatorContract
from fedrec.types import RoundContext


class TestFedAvg(AggregatorContract):
    def make(self) -> Aggregator:
        return FedAvg()


class TestPlainMean(AggregatorContract):
    def make(self) -> Aggregator:
        return FedAvg(weighted=False)


class TestMedian(AggregatorContract):
    def make(self) -> Aggregator:
        return Median()


class TestTrimmedMeanCount(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=3)


class TestTrimmedMeanFraction(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=0.49)


class TestTrimmedMeanOfNothing(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=0)


class TestCenteredClipping(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.CenteredClipping(tau=0.5, iterations=2)


class TestFedAvgM(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.FedAvgM(TrimmedMean(trim=0.2), momentum=0.8)


class TestFedAdam(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.FedAdam(FedAvg())


class TestFedYogi(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.FedYogi(FedAvg())


class TestServerOptimizer(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.ServerOptimizer(
            rules.FedAvgM(Median()), optimizer="AdamW", optimizer_args={"betas": [0.5, 0.9]}
        )


@pytest.mark.filterwarnings("ignore:FoolsGold found a twin of each")  # one parameter has no angle
class TestFoolsGold(AggregatorContract):
    unanimous = False  # it weighs what is alike down

    def make(self) -> Aggregator:
        return rules.FoolsGold()


class TestFLTrust(AggregatorContract):
    unanimous = False  # the length is the server's

    def make(self) -> Aggregator:
        return rules.FLTrust()

    def make_context(self, num_clients: int, d: int = 7) -> RoundContext:
        ctx = super().make_context(num_clients, d)
        return rules.AggregationContext(
            round=ctx.round,
            phase=ctx.phase,
            client_ids=ctx.client_ids,
            global_weights=ctx.global_weights,
            layout=ctx.layout,
            server_update=torch.full((d,), 0.5),
        )


class TestFLAME(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.FLAME(noise_factor=0.0)


class TestFLAMEWithNoise(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.FLAME(noise_factor=0.1)


class TestSignGuard(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.SignGuard(coordinate_fraction=0.6)


class TestRLR(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.RLR(FedAvg(), threshold=0.6)


class TestNearestNeighborMixing(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.NearestNeighborMixing(TrimmedMean(trim=0.2), num_byzantine=0.2)


class TestARC(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.ARC(Median(), num_byzantine=0.3)


class TestBucketing(AggregatorContract):
    permutation_invariant = False

    def make(self) -> Aggregator:
        return rules.Bucketing(Median(), bucket_size=2)


class TestKrum(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.Krum(num_byzantine=0.3)


class TestMultiKrum(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.MultiKrum(num_byzantine=3)


class TestBulyan(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.Bulyan(num_byzantine=1)


class TestGeometricMedian(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.GeometricMedian()


class TestRFA(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.GeometricMedian(max_iterations=3)


class TestMeanAroundMedian(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.MeanAroundMedian(num_byzantine=0.4)


class TestNormClippingToANumber(AggregatorContract):
    unanimous = False

    def make(self) -> Aggregator:
        return rules.NormClipping(max_norm=1.0)


class TestNormClippingToTheMedian(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.NormClipping()


class TestDnC(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.DnC(num_byzantine=2, num_coordinates=5, iterations=2)


class TestCAF(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.CAF(num_byzantine=0.2)


class TestAlignIns(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.AlignIns(top_fraction=0.6)


class TestLASA(AggregatorContract):
    # What all agree on loses its smallest entries, too.
    unanimous = False

    def make(self) -> Aggregator:
        return rules.LASA()


class TestLASAWithoutSparsity(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.LASA(sparsity=0.0, norm_radius=2.0)


class TestMultiMetrics(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.MultiMetrics(local_lr=0.1, fraction=0.5)


class TestRFLBAT(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.RFLBAT()


# One neuron is never a part of several.
@pytest.mark.filterwarnings("ignore:DeepSight leaves out all of 10")
class TestDeepSight(AggregatorContract):
    def make(self) -> Aggregator:
        return rules.DeepSight(input_shape=(1,), local_lr=0.1, num_samples=50, num_seeds=2)

    def make_context(self, num_clients: int, d: int = 7) -> RoundContext:
        ctx = super().make_context(num_clients, d)
        return rules.AggregationContext(
            round=ctx.round,
            phase=ctx.phase,
            client_ids=ctx.client_ids,
            global_weights=ctx.global_weights,
            layout=ParameterVector(nn.Linear(1, d, bias=False)),
            outputs=lambda weights, inputs: inputs.to(weights) * weights,
        )
