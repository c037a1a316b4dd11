"""Partitioners: which client holds which sample."""

from fedrec.data.partitioners.base import Partitioner
from fedrec.data.partitioners.degree_of_non_iid import DegreeOfNonIID
from fedrec.data.partitioners.iid import IIDPartitioner

__all__ = ["DegreeOfNonIID", "IIDPartitioner", "Partitioner"]
