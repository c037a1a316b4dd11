"""The contract of clients, as tests."""

from __future__ import annotations

import torch

from fedrec.clients.base import Client
from fedrec.federation import Federation
from fedrec.types import ClientUpdate, RoundContext

__all__ = ["ClientContract"]


class ClientContract:
    """Tests for a `Client`: subclass it in a test module and write `make_federation`.

    Examples:
        >>> from fedrec.testing.problems import quadratic_federation
        >>> class TestQuadraticClient(ClientContract):
        ...     def make_federation(self):
        ...         return quadratic_federation()
        >>> TestQuadraticClient().test_update_has_the_models_size_and_is_finite()
    """

    def make_federation(self) -> Federation:
        """Return a new federation of at least two clients of the class to test."""
        raise TypeError(f"{type(self).__name__} has to define make_federation")

    def _update(self, federation: Federation, client: Client, round: int = 3) -> ClientUpdate:
        size = federation.layout.num_parameters
        weights = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0))
        ctx = RoundContext(
            round=round,
            phase="record",
            client_ids=federation.client_ids,
            global_weights=weights,
            layout=federation.layout,
        )
        before = weights.clone()
        sent = client.local_update(weights, ctx)
        assert torch.equal(weights, before), "the client changed the global weights it was given"
        return sent

    def test_update_has_the_models_size_and_is_finite(self) -> None:
        """The update is one finite vector; the client has samples."""
        federation = self.make_federation()
        for client in federation.clients:
            sent = self._update(federation, client)
            assert sent.update.shape == (federation.layout.num_parameters,)
            assert bool(torch.isfinite(sent.update).all())
            assert sent.num_samples == client.num_samples >= 1

    def test_same_seed_and_round_give_the_same_update(self) -> None:
        """Asking twice, or in a new federation, gives the same bits."""
        federation, other = self.make_federation(), self.make_federation()
        first = self._update(federation, federation.clients[0]).update.clone()
        assert torch.equal(first, self._update(federation, federation.clients[0]).update)
        assert torch.equal(first, self._update(other, other.clients[0]).update)

    def test_other_clients_and_rounds_do_not_matter(self) -> None:
        """A client's update does not depend on other clients or other rounds."""
        federation = self.make_federation()
        alone = self._update(federation, federation.clients[0]).update.clone()
        for client in reversed(federation.clients):
            self._update(federation, client, round=7)
        assert torch.equal(alone, self._update(federation, federation.clients[0]).update)
