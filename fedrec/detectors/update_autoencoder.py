"""Malicious clients are those whose updates an autoencoder cannot reconstruct."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.detectors.scores import ScoreDetector
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.detection.outliers import modified_z_scores
from fedrec.functional.distances import squared_norms
from fedrec.random import key, numpy_generator
from fedrec.types import CohortUpdates, RoundRecord

if TYPE_CHECKING:
    from fedrec.detectors._autoencoder import Autoencoder

__all__ = ["UpdateAutoencoder"]

_ZERO = 1e-30
# Of what is so long, errors are still finite.
_LARGEST = 1e15


class UpdateAutoencoder(ScoreDetector):
    r"""Flags clients whose updates do not look like those an autoencoder was trained on.

    An update is represented by a surrogate: some of its coordinates, the same for all clients and
    rounds, divided by the median norm of the round's surrogates, as updates shrink in training. The
    autoencoder, a LightningModule, learns the surrogates of the `train_rounds` first rounds, of
    those half of the clients that are nearest to the coordinate-wise median. After that, a client's
    score is the modified z-score of the logarithm of its reconstruction error (mean square) among
    the round's clients.

    The paper trains on updates that the server computes itself on public data, and drops whoever
    exceeds the mean error of the round, some benign clients in every round. A recording has no such
    data and a verdict is for good, hence the benign-looking half and the rule for outliers.

    Args:
        num_features: Length of the surrogate vectors.
        hidden: Width of the autoencoder's hidden layers.
        code: Numbers it squeezes a surrogate into, fewer than `num_features`.
        train_rounds: Rounds it learns from, and nobody is scored in.
        epochs: Full-batch steps of training.
        lr: Learning rate of Adam.
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: Above this average a client is flagged, in robust standard deviations.
        start_round: Rounds before this are not looked at.
        seed: Seed of the coordinates and of the initial weights.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Li et al., Learning to Detect Malicious Clients for Robust Federated Learning, arXiv
          2002.00211, 2020.

    Examples:
        >>> UpdateAutoencoder(num_features=32, code=4).code
        4
    """

    def __init__(
        self,
        *,
        num_features: int = 64,
        hidden: int = 32,
        code: int = 8,
        train_rounds: int = 20,
        epochs: int = 300,
        lr: float = 0.005,
        window: int = 10,
        threshold: float = 3.5,
        start_round: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)
        self.num_features = check_int("num_features", num_features, minimum=2)
        self.hidden = check_int("hidden", hidden, minimum=1)
        self.code = check_int("code", code, minimum=1)
        self.train_rounds = check_int("train_rounds", train_rounds, minimum=1)
        self.epochs = check_int("epochs", epochs, minimum=1)
        self.lr = check_float("lr", lr, minimum=0.0, open_minimum=True)
        self.seed = check_int("seed", seed, minimum=0)

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed, and everything learnt.

        Args:
            truth: Not looked at.
        """
        super().reset(truth)
        self._examples: list[Tensor] = []
        self._model: Autoencoder | None = None

    def score(self, record: RoundRecord) -> Tensor:
        """Learn, or standardise the reconstruction errors."""
        nothing = torch.full((len(record.client_ids),), torch.nan)
        if record.round < self.start_round:
            return nothing
        surrogates = self._surrogates(record.sent, record.global_weights.numel())
        if self._model is None:
            away = squared_norms(surrogates, coordinate_median(surrogates))
            half = away.argsort(stable=True)[: (len(away) + 1) // 2]
            self._examples.append(surrogates[half])
            if len(self._examples) == self.train_rounds:
                self._model = self._train(torch.cat(self._examples))
                self._examples = []
            return nothing
        with torch.no_grad():
            errors = (self._model(surrogates) - surrogates).square().mean(dim=1)
        return modified_z_scores(errors.double().clamp(min=_ZERO).log())

    def _surrogates(self, sent: CohortUpdates, d: int) -> Tensor:
        if d > self.num_features:
            draw = numpy_generator(self.seed, "surrogates")
            chosen = torch.from_numpy(draw.choice(d, size=self.num_features, replace=False))
            sent = sent.narrowed(chosen)
        values = sent.updates.detach().cpu().float()
        norms = squared_norms(values).sqrt()
        unit = float(norms.quantile(0.5))
        relative = values.double() / unit if unit > 0 else values
        return relative.clamp(-_LARGEST, _LARGEST).float()

    def _train(self, examples: Tensor) -> Autoencoder:
        from fedrec.detectors._autoencoder import Autoencoder  # Lightning takes seconds to import

        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(key(self.seed, "autoencoder") % 2**63)
            model = Autoencoder(
                num_features=examples.shape[1], hidden=self.hidden, code=self.code, lr=self.lr
            )
            optimizer = model.configure_optimizers()
            for step in range(self.epochs):
                optimizer.zero_grad()
                model.training_step(examples, step).backward()
                optimizer.step()
        return model.eval()
