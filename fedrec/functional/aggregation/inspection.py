"""What DeepSight reads off models: energies of the output layer, answers to random inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "cluster_distances",
    "density_clusters",
    "division_differences",
    "threshold_exceedings",
    "update_energies",
]

# Logarithms of ratios of probabilities are kept below this, so that no mean overflows.
_LARGEST = 300.0


def update_energies(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Compute the share of every output neuron in what a client changed (NEUP).

    $$\mathcal E_{i,p} = \lvert b_{i,p} \rvert + \sum_h \lvert w_{i,p,h} \rvert, \qquad
    C_{i,p} = \frac{\mathcal E_{i,p}^2}{\sum_q \mathcal E_{i,q}^2}$$

    Args:
        weight: Updates of the output layer's weights, shape $(m, P, H)$.
        bias: Updates of its biases, shape $(m, P)$, if it has any.

    Returns:
        $C$, shape $(m, P)$, float64, on the CPU; $1/P$ for a client that changed nothing there.

    References:
        - Rieger et al., DeepSight: Mitigating Backdoor Attacks in Federated Learning Through Deep
          Model Inspection, NDSS 2022.

    Examples:
        >>> update_energies(torch.tensor([[[1.0, -2.0], [0.0, 1.0]]]))
        tensor([[0.9000, 0.1000]], dtype=torch.float64)
    """
    energy = weight.detach().cpu().double().abs().sum(dim=2)
    if bias is not None:
        energy = energy + bias.detach().cpu().double().abs()
    largest = energy.amax(dim=1, keepdim=True)
    energy = torch.where(largest > 0, energy / largest, 1.0)
    squares = energy.square()
    return squares / squares.sum(dim=1, keepdim=True)


def threshold_exceedings(energies: Tensor) -> Tensor:
    r"""Count the output neurons that a client changed much.

    These are the neurons with $C_{i,p} > \max(0.01, 1/P) \max_q C_{i,q}$. Data of few classes,
    as a backdoor's are, change few neurons.

    Args:
        energies: $C$, shape $(m, P)$.

    Returns:
        Shape $(m,)$, int64.

    References:
        - Rieger et al., DeepSight, NDSS 2022.

    Examples:
        >>> threshold_exceedings(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]))
        tensor([4, 1])
    """
    share = max(0.01, 1 / energies.shape[1])
    return (energies > share * energies.amax(dim=1, keepdim=True)).sum(dim=1)


def division_differences(local: Tensor, global_: Tensor) -> Tensor:
    r"""Compare the predictions of a local and the global model on the same inputs (DDif).

    $$\frac1N \sum_{n=1}^N \frac{p_{i,p}(x_n)}{p_{t,p}(x_n)}$$

    Args:
        local: Logits of the local model, shape $(N, P)$.
        global_: Logits of the global model, shape $(N, P)$.

    Returns:
        Shape $(P,)$, float64, on the CPU.

    References:
        - Rieger et al., DeepSight, NDSS 2022.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0]])
        >>> division_differences(torch.tensor([[0.75, 0.25]]).log(), logits)
        tensor([1.5000, 0.5000], dtype=torch.float64)
    """
    ratio = local.detach().cpu().double().log_softmax(dim=1)
    ratio = ratio - global_.detach().cpu().double().log_softmax(dim=1)
    # A model with weights beyond all bounds has no finite logits; it is far from all others.
    return ratio.nan_to_num(nan=_LARGEST).clamp(max=_LARGEST).exp().mean(dim=0)


def density_clusters(points: Tensor, min_size: int, *, are_distances: bool = False) -> Tensor:
    """Cluster clients by density (HDBSCAN).

    A single cluster is allowed. A client that HDBSCAN leaves out is a cluster of its own.

    Args:
        points: Shape $(m, p)$; or distances, shape $(m, m)$, symmetric.
        min_size: Clients of a cluster at least, 2 or more. Fewer clients than that are one cluster.
        are_distances: Whether `points` are distances.

    Returns:
        Shape $(m,)$, int64: the cluster of each client.

    References:
        - Campello et al., Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD
          2013.

    Examples:
        >>> density_clusters(torch.tensor([[0.0], [0.1], [0.1], [5.0], [5.1], [5.1], [99.0]]), 3)
        tensor([0, 0, 0, 1, 1, 1, 2])
    """
    from sklearn.cluster import HDBSCAN  # takes a second to import

    m = len(points)
    if m <= min_size:
        return torch.zeros(m, dtype=torch.int64)
    found = HDBSCAN(
        min_cluster_size=min_size,
        metric="precomputed" if are_distances else "euclidean",
        allow_single_cluster=True,
        copy=True,
    ).fit(points.cpu().double().numpy())
    labels = found.labels_.astype(np.int64)
    alone = labels < 0
    labels[alone] = labels.max() + 1 + np.arange(int(alone.sum()))
    return torch.from_numpy(labels)


def cluster_distances(labels: Tensor) -> Tensor:
    """Return 0 for every two clients of the same cluster, else 1.

    Args:
        labels: Shape $(m,)$.

    Returns:
        Shape $(m, m)$, float64.

    Examples:
        >>> cluster_distances(torch.tensor([0, 0, 1]))
        tensor([[0., 0., 1.],
                [0., 0., 1.],
                [1., 1., 0.]], dtype=torch.float64)
    """
    return (labels[:, None] != labels).double()
