"""Models: the papers' networks as LightningModules."""

from fedrec.models.classifier import Classifier
from fedrec.models.cnn import CNN
from fedrec.models.har_mlp import HARMLP
from fedrec.models.mlp import MLP
from fedrec.models.purchase_mlp import PurchaseMLP

__all__ = ["CNN", "HARMLP", "MLP", "Classifier", "PurchaseMLP"]
