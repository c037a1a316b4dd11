"""Data: data sets, and who of the clients holds what."""

from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.digits import Digits
from fedrec.data.fashion_mnist import FashionMNIST
from fedrec.data.mnist import MNIST
from fedrec.data.partitioners import DegreeOfNonIID, IIDPartitioner, Partitioner

__all__ = [
    "MNIST",
    "DegreeOfNonIID",
    "Digits",
    "FashionMNIST",
    "FederatedDataModule",
    "IIDPartitioner",
    "Partitioner",
]
