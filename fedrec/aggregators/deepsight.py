"""DeepSight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.exceptions import AggregationError, ConfigurationError, expected
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.aggregation.inspection import (
    cluster_distances,
    density_clusters,
    division_differences,
    threshold_exceedings,
    update_energies,
)
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.cosine import cosine_similarities
from fedrec.functional.distances import squared_norms
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

__all__ = ["DeepSight"]


class DeepSight(Aggregator):
    r"""Leaves out clusters of models that were trained on data of few classes.

    Models are clustered by what they were trained on, so that a backdoored model that looks
    harmless is found with those like it:

    1. *Measures.* Of every client, the energies of the output layer
       ([`update_energies`][fedrec.functional.update_energies]), the answers of its model to random
       inputs ([`division_differences`][fedrec.functional.division_differences], several times), and
       the angles between the updates of the output layer's biases.
    2. *Clusters.* Each measure is clustered (HDBSCAN), which makes a distance of 0 or 1 between any
       two clients. The mean of these distances (those of all random inputs count as one) is
       clustered again.
    3. *Labels.* A client is suspicious if it changed few output neurons
       ([`threshold_exceedings`][fedrec.functional.threshold_exceedings]): no more than half of the
       median client.
    4. *Filter.* Clusters with a share of suspicious clients of `max_suspicious` or more are left
       out. The updates of the others are clipped to the median norm of all, and averaged.

    The paper leaves the settings of HDBSCAN open. Here a single cluster is allowed, and a client
    that belongs to no cluster is one of its own. The output layer is the last parameter of two
    dimensions, with its bias if it has one (else the angles are those of its weights). Client
    weights are ignored.

    Args:
        input_shape: Shape of one input of the model, for random ones, uniform in [0, 1).
        local_lr: $\eta_{\text{local}} > 0$, by which an update makes a local model,
            $w_t - \eta_{\text{local}}\, g_i$.
        num_samples: Random inputs in a set, at least 1; 20,000 in the paper.
        num_seeds: Sets of random inputs, at least 1. They are a function of (seed, round).
        max_suspicious: $\tau$ in (0, 1].
        min_cluster_size: Clients of a cluster at least, 2 or more.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if all
          clusters are left out.

    Raises:
        ConfigurationError: If an argument is out of range.
        AggregationError: If `ctx` brings no outputs of the model, or the model has no output layer.

    References:
        - Rieger et al., DeepSight: Mitigating Backdoor Attacks in Federated Learning Through Deep
          Model Inspection, NDSS 2022.

    Examples:
        >>> DeepSight(input_shape=(1, 28, 28), local_lr=0.1).needs_outputs
        True
    """

    needs_outputs = True

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        local_lr: float,
        num_samples: int = 1000,
        num_seeds: int = 3,
        max_suspicious: float = 1 / 3,
        min_cluster_size: int = 3,
    ) -> None:
        if isinstance(input_shape, str) or len(input_shape) == 0:
            raise ConfigurationError(
                expected("input_shape", "the shape of an input, such as [1, 28, 28]", input_shape)
            )
        self.input_shape = tuple(check_int("input_shape", size, minimum=1) for size in input_shape)
        self.local_lr = check_float("local_lr", local_lr, minimum=0, open_minimum=True)
        self.num_samples = check_int("num_samples", num_samples, minimum=1)
        self.num_seeds = check_int("num_seeds", num_seeds, minimum=1)
        self.max_suspicious = check_float(
            "max_suspicious", max_suspicious, minimum=0, maximum=1, open_minimum=True
        )
        self.min_cluster_size = check_int("min_cluster_size", min_cluster_size, minimum=2)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the clients of the clusters with few suspicious ones."""
        if not isinstance(ctx, AggregationContext) or ctx.outputs is None:
            raise AggregationError(
                "DeepSight needs outputs of the model. HINT: use it in a FederatedLoop, or pass an "
                "AggregationContext with `outputs`."
            )
        weight, bias = _output_layer(updates, ctx.layout)
        energies = update_energies(weight, bias)
        size = self.min_cluster_size
        angles = 1 - cosine_similarities(weight.flatten(1) if bias is None else bias).cpu()
        answers = self._division_differences(updates, ctx, ctx.outputs)
        distances = cluster_distances(density_clusters(angles, size, are_distances=True))
        distances += cluster_distances(density_clusters(energies, size))
        for differences in answers:
            labels = density_clusters(differences, size)
            distances += cluster_distances(labels) / self.num_seeds
        clusters = density_clusters(distances / 3, size, are_distances=True)

        counts = threshold_exceedings(energies).double()
        suspicious = counts <= counts.quantile(0.5) / 2
        admitted = torch.zeros(len(updates), dtype=torch.bool)
        for label in clusters.unique():
            members = clusters == label
            admitted |= members & (suspicious[members].double().mean() < self.max_suspicious)
        if not bool(admitted.any()):
            return self._no_effect(f"leaves out all of {len(updates)} updates", updates)
        norms = squared_norms(updates).sqrt().cpu()
        factors = clip_factors(norms, coordinate_median(norms[:, None]))
        return (admitted / admitted.sum() * factors).to(updates) @ updates

    def _division_differences(
        self, updates: Tensor, ctx: RoundContext, outputs: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """Return how models answer each set of random inputs, shape (m, P) each."""
        generator, start = self.generator(ctx), ctx.global_weights.to(updates)
        found = []
        for _ in range(self.num_seeds):
            drawn = torch.rand((self.num_samples, *self.input_shape), generator=generator)
            inputs = drawn.to(updates.device)
            before = outputs(start, inputs)
            rows = [
                division_differences(outputs(start - self.local_lr * row, inputs), before)
                for row in updates
            ]
            found.append(torch.stack(rows))
        return found


def _output_layer(updates: Tensor, layout: ParameterVector) -> tuple[Tensor, Tensor | None]:
    """Return the updates of the last layer's weights, shape (m, P, H), and of its biases."""
    parts = layout.unflatten(updates)
    for name in reversed(layout.names):
        if parts[name].ndim == 3:
            return parts[name], parts.get(name.removesuffix("weight") + "bias")
    raise AggregationError(
        "DeepSight needs an output layer with a weight of two dimensions, but the model has none: "
        f"{dict(zip(layout.names, map(tuple, layout.shapes), strict=True))}."
    )
