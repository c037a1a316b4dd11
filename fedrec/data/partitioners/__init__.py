"""Partitioners: ways to split samples over clients."""

from fedrec.data.partitioners.base import Partitioner
from fedrec.data.partitioners.by_user import ByUser
from fedrec.data.partitioners.degree_of_non_iid import DegreeOfNonIID
from fedrec.data.partitioners.dirichlet import Dirichlet
from fedrec.data.partitioners.iid import IIDPartitioner
from fedrec.data.partitioners.partition import Partition
from fedrec.data.partitioners.quantity_skew import QuantitySkew
from fedrec.data.partitioners.shards import Shards

__all__ = [
    "ByUser",
    "DegreeOfNonIID",
    "Dirichlet",
    "IIDPartitioner",
    "Partition",
    "Partitioner",
    "QuantitySkew",
    "Shards",
]
