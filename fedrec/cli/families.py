"""The families of components that a recipe can name. Imports nothing."""

__all__ = ["FAMILIES"]

#: By family of components: its base class, and the section of a recipe that names a component.
FAMILIES = {
    "attacks": ("fedrec.attacks.Attack", "attack"),
    "aggregators": ("fedrec.aggregators.Aggregator", "aggregator"),
    "detectors": ("fedrec.detectors.Detector", "detector"),
    "recoverers": ("fedrec.recoverers.Recoverer", "recoverers.0"),
    "estimators": ("fedrec.recoverers.Estimator", "recoverers.0.init_args.estimator"),
    "filters": ("fedrec.recoverers.UpdateFilter", "recoverers.0.init_args.update_filter"),
    "data": ("fedrec.data.FederatedDataModule", "data"),
    "partitioners": ("fedrec.data.Partitioner", "data.init_args.partitioner"),
    "models": ("pytorch_lightning.LightningModule", "model"),
    "samplers": ("fedrec.federation.ClientSampler", "record.sampler"),
    "histories": ("fedrec.history.HistoryStore", "history"),
    "metrics": ("torchmetrics.Metric", "metrics.0"),
}
