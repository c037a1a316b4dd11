from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedrec.attacks import AttackContext, TrimAttack, _rows
from fedrec.attacks._rows import uniform_rows
from fedrec.exceptions import ConfigurationError
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

D = 40
UPDATES = torch.randn(6, D, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([True, False, False, True, True, False])


def context(*client_ids: str, **kwargs: int) -> AttackContext:
    return AttackContext(
        round=kwargs.get("round", 0),
        phase="record",
        client_ids=client_ids,
        global_weights=torch.zeros(D),
        layout=ParameterVector(nn.Linear(D, 1, bias=False)),
        seed=kwargs.get("seed", 0),
    )


def test_draws_belong_to_the_attacker_and_the_round() -> None:
    ctx = context(*"abcdef")
    crafted = TrimAttack().craft(UPDATES, MASK, ctx)
    assert not torch.equal(crafted[0], crafted[3])
    # Asking twice in a round, in another order, or drawing in between makes no difference.
    ctx.generator.manual_seed(7)
    assert torch.equal(TrimAttack().craft(UPDATES, MASK, ctx), crafted)
    order = [3, 5, 0, 1, 4, 2]
    shuffled = TrimAttack().craft(
        UPDATES[order], MASK[order], context(*(("abcdef")[i] for i in order))
    )
    torch.testing.assert_close(shuffled, crafted[order])
    for other in (replace(ctx, round=1), replace(ctx, seed=1), context(*"ghijkl")):
        assert not torch.equal(TrimAttack().craft(UPDATES, MASK, other)[MASK], crafted[MASK])


@pytest.mark.parametrize("blocks", [(0, 13, 14, 40), (25, 40), (0, 40, 5, 40)])
def test_columns_are_drawn_once_and_are_those_of_whole_rows(monkeypatch, blocks) -> None:
    whole = uniform_rows(MASK, context(*"abcdef"), D)
    begun: list[object] = []
    monkeypatch.setattr(
        _rows, "torch_generator", lambda *key: begun.append(key) or torch_generator(*key)
    )
    ctx = context(*"abcdef")
    for start, stop in pairwise(blocks):
        if start < stop:
            some = replace(ctx, columns=slice(start, stop))
            assert torch.equal(uniform_rows(MASK, some, stop - start), whole[:, start:stop])
    # Three attackers begin anew where a block is not after the one before.
    assert len(begun) == (6 if 5 in blocks else 3)


def test_an_attacker_sends_the_same_when_another_turns_honest() -> None:
    crafted = TrimAttack().craft(UPDATES, MASK, context(*"abcdef"))
    fewer = MASK.clone()
    fewer[0] = False
    assert torch.equal(TrimAttack().craft(UPDATES, fewer, context(*"abcdef"))[3], crafted[3])


def test_b_max_of_one_sends_the_extreme_itself() -> None:
    crafted = TrimAttack(b_max=1.0).craft(UPDATES, MASK, context(*"abcdef"))
    up = UPDATES.sum(dim=0) > 0
    extreme = torch.where(up, UPDATES.amin(dim=0), UPDATES.amax(dim=0))
    assert torch.equal(crafted[0], extreme)


def test_knows_everything() -> None:
    assert TrimAttack.full_knowledge
    assert TrimAttack().target_label is None


@pytest.mark.parametrize("b_max", [0.5, -2.0, float("inf"), "2", None])
def test_bad_b_max_is_named(b_max: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `b_max` to be"):
        TrimAttack(b_max=b_max)  # type: ignore[arg-type]
