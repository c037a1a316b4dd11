"""Data: data sets, and how they are split over clients."""

from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.digits import Digits
from fedrec.data.fashion_mnist import FashionMNIST
from fedrec.data.har import HAR
from fedrec.data.mnist import MNIST
from fedrec.data.partitioners import (
    ByUser,
    DegreeOfNonIID,
    Dirichlet,
    IIDPartitioner,
    Partition,
    Partitioner,
    QuantitySkew,
    Shards,
)
from fedrec.data.purchase import Purchase, PurchaseSynthetic

__all__ = [
    "HAR",
    "MNIST",
    "ByUser",
    "DegreeOfNonIID",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "IIDPartitioner",
    "Partition",
    "Partitioner",
    "Purchase",
    "PurchaseSynthetic",
    "QuantitySkew",
    "Shards",
]
