from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedrec.attacks import (
    DBA,
    BackdoorAttack,
    BlendedTrigger,
    FeatureTrigger,
    FunctionTrigger,
    LabelFlip,
    PixelTrigger,
    SquareTrigger,
    Trigger,
)
from fedrec.component import Component, build
from fedrec.exceptions import ConfigurationError, ShapeError


def brighter(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5


def places(trigger: object, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Return where a trigger changes the first sample."""
    return sorted(map(tuple, (trigger(x) != x)[0].nonzero().tolist()))


def test_own_pixels_in_every_channel() -> None:
    trigger = PixelTrigger(pixels=[(0, 1), (-1, -2)], value=0.7)
    x = torch.zeros(2, 3, 4, 5)
    changed = [(c, *place) for c in range(3) for place in ((0, 1), (3, 3))]
    assert places(trigger, x) == sorted(changed)
    assert (trigger(x)[:, :, 0, 1] == 0.7).all()
    flat = PixelTrigger(pixels=[(0, 1), (-1, -2)], value=0.7, image_shape=(3, 4, 5))
    assert torch.equal(flat(x.flatten(1)).reshape(x.shape), trigger(x))


def test_default_pixels_are_the_named_pattern() -> None:
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(PixelTrigger()(x), BackdoorAttack().trigger(x))
    assert torch.equal(
        FeatureTrigger()(x[:, 0, 0]), BackdoorAttack(pattern="features").trigger(x[:, 0, 0])
    )
    flat = x.flatten(1)
    named = BackdoorAttack(image_shape=[28, 28]).trigger(flat)
    assert torch.equal(PixelTrigger(image_shape=[28, 28])(flat), named)


def test_square() -> None:
    x = torch.zeros(1, 2, 5, 6)
    changed = [(c, i, j) for c in range(2) for i in (3, 4) for j in (4, 5)]
    assert places(SquareTrigger(size=2), x) == changed
    with pytest.raises(ShapeError, match="at least 6 x 6"):
        SquareTrigger(size=6)(x)


def test_blended_by_hand() -> None:
    x = torch.rand(3, 1, 4, 4)
    trigger = BlendedTrigger(ratio=0.25, seed=3)
    pattern = (trigger(x) - 0.75 * x) / 0.25
    # The same pattern in every sample, in [0, 1), another one for another seed.
    torch.testing.assert_close(pattern, pattern[:1].expand_as(pattern), rtol=0, atol=1e-5)
    assert bool((pattern > -1e-5).all())
    assert bool((pattern < 1 + 1e-5).all())
    assert torch.equal(trigger(x), BlendedTrigger(ratio=0.25, seed=3)(x))
    assert not torch.equal(trigger(x), BlendedTrigger(ratio=0.25, seed=4)(x))
    whole = BlendedTrigger(ratio=1.0)
    torch.testing.assert_close(whole(x), whole(1 - x))
    with pytest.raises(ShapeError, match="floating-point"):
        trigger(torch.zeros(1, 4, dtype=torch.int64))


def test_a_function_of_ones_own() -> None:
    attack = BackdoorAttack(pattern=FunctionTrigger(brighter), target_label=1)
    x, y = torch.rand(3, 2), torch.tensor([0, 2, 2])
    poisoned = attack.poison_dataset(TensorDataset(x, y), "c")
    assert torch.equal(poisoned[3:][0], x + 0.5)
    # It is described by name in a manifest, and survives pickling.
    assert attack.spec()["init_args"]["pattern"]["init_args"] == {
        "function": f"{__name__}.brighter"
    }
    assert torch.equal(pickle.loads(pickle.dumps(attack)).trigger(x), x + 0.5)


def test_a_class_of_ones_own() -> None:
    class Inverted(Trigger):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 1 - x

    x = torch.rand(3, 2)
    assert torch.equal(BackdoorAttack(pattern=Inverted()).trigger(x), 1 - x)


@pytest.mark.parametrize(
    "trigger",
    [
        PixelTrigger(pixels=[(0, 0), (1, 1)], value=0.5, image_shape=[4, 4]),
        SquareTrigger(size=2),
        FeatureTrigger(k=3, value=1.5),
        BlendedTrigger(ratio=0.4, seed=7),
    ],
    ids=lambda t: type(t).__name__,
)
def test_triggers_are_rebuilt_from_their_description(trigger: Trigger) -> None:
    copy = build(BackdoorAttack(pattern=trigger).spec(), Component, "attack")
    assert repr(copy) == repr(BackdoorAttack(pattern=trigger))
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(copy.trigger(x), trigger(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PixelTrigger(pixels=[]),
        lambda: PixelTrigger(pixels=[(1, 2, 3)]),
        lambda: PixelTrigger(pixels=[(1, 2.5)]),
        lambda: SquareTrigger(size=0),
        lambda: FeatureTrigger(k=0),
        lambda: BlendedTrigger(ratio=0.0),
        lambda: BlendedTrigger(ratio=1.5),
        lambda: FunctionTrigger("my_module.brighter"),
        lambda: BackdoorAttack(pattern=brighter),
        lambda: DBA(num_parts=0),
    ],
)
def test_bad_arguments_are_named(make: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `"):
        make()


# -- the distributed trigger --------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("pattern", "x"),
    [
        ("pixels", torch.rand(2, 3, 8, 8)),
        (SquareTrigger(size=3), torch.rand(2, 1, 8, 8)),
        (FeatureTrigger(k=5), torch.rand(2, 40)),
        (SquareTrigger(size=3, image_shape=[8, 8]), torch.rand(2, 64)),
    ],
)
def test_parts_make_up_the_whole_and_do_not_overlap(
    pattern: str | Trigger, x: torch.Tensor, num_parts: int
) -> None:
    attack = DBA(num_parts=num_parts, pattern=pattern)
    ids = [f"c{i}" for i in range(num_parts)]
    attack.reset(ids)
    whole = places(attack.trigger, x)
    parts = [places(attack.local_trigger(c), x) for c in ids]
    assert sorted(place for part in parts for place in part) == whole
    channels = x.shape[1] if x.ndim == 4 else 1
    assert max(map(len, parts)) - min(map(len, parts)) <= channels
    out = x
    for client_id in ids:
        out = attack.local_trigger(client_id)(out)
    assert torch.equal(out, attack.trigger(x))


def test_each_of_four_clients_has_one_pixel_of_badnets() -> None:
    # In reading order (4, 6), (5, 5), (6, 4), (6, 6) of 8 x 8.
    attack = DBA()
    attack.reset(["a", "b", "c", "d", "e"])
    x = torch.zeros(1, 1, 8, 8)
    found = [places(attack.local_trigger(c), x) for c in "abcde"]
    assert found == [[(0, 4, 6)], [(0, 5, 5)], [(0, 6, 4)], [(0, 6, 6)], [(0, 4, 6)]]


def test_who_has_which_part_does_not_depend_on_who_is_left() -> None:
    attack, later = DBA(), DBA()
    attack.reset(["a", "b", "c", "d"])
    later.reset(["a", "b", "c", "d"])
    data = TensorDataset(torch.zeros(1, 1, 8, 8), torch.tensor([1]))
    first = {c: attack.poison_dataset(data, c)[1][0] for c in "abcd"}
    for client_id in "dc":
        assert torch.equal(later.poison_dataset(data, client_id)[1][0], first[client_id])


def test_a_trigger_that_is_too_small_to_split() -> None:
    with pytest.raises(ShapeError, match="changes 4 places"):
        DBA(num_parts=5).poison_dataset(
            TensorDataset(torch.zeros(1, 1, 8, 8), torch.tensor([1])), "a"
        )


# -- images of bytes ------------------------------------------------------------------------------


def test_white_is_255_in_images_of_bytes() -> None:
    x = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    for trigger, changed in ((PixelTrigger(), 4), (SquareTrigger(size=2), 4)):
        found = trigger(x)
        assert found.dtype == torch.uint8
        assert int((found == 255).sum()) == changed
        assert int(found.float().sum()) == 255 * changed
    assert int(PixelTrigger(value=200)(x).max()) == 200
    assert float(BackdoorAttack().trigger(x.float()).max()) == 1.0


def test_a_pattern_is_blended_into_bytes_on_their_scale() -> None:
    x = torch.full((1, 1, 4, 4), 100, dtype=torch.uint8)
    found = BlendedTrigger(ratio=0.5, seed=3)(x)
    pattern = BlendedTrigger(ratio=1.0, seed=3)(x.float())
    assert found.dtype == torch.uint8
    assert torch.equal(found, (50 + 0.5 * 255 * pattern).round().to(torch.uint8))


@pytest.mark.parametrize(
    ("trigger", "dtype", "reason"),
    [
        (PixelTrigger(), torch.int64, "nobody knows what is white"),
        (PixelTrigger(value=0.5), torch.uint8, r"an integer in 0\.\.255.*got 0.5"),
        (SquareTrigger(value=256), torch.uint8, "got 256"),
        (FeatureTrigger(k=2, value=-1), torch.uint8, "got -1"),
    ],
)
def test_values_that_inputs_cannot_hold(trigger: Trigger, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        trigger(torch.zeros(1, 1, 5, 5, dtype=dtype))


# -- samples and labels of any kind ----------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "label",
    [2, np.int32(2), np.uint8(2), torch.tensor(2), torch.tensor([2]), np.array([2]), 2.0],
)
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), lambda x, y: [x, y], Pair])
def test_poisoned_samples_are_of_the_same_kind(label: object, kind: Any) -> None:
    dataset = [kind(torch.zeros(4), label)]
    flipped = LabelFlip(num_classes=4).poison_dataset(dataset, "c")[0]
    copy = BackdoorAttack(pattern=FeatureTrigger(k=1, value=1.0)).poison_dataset(dataset, "c")[1]
    for sample, wrong in ((flipped, 1), (copy, 0)):
        assert type(sample) is type(dataset[0])
        assert type(sample[1]) is type(label)
        assert np.array_equal(sample[1], np.full_like(label, wrong))
    assert torch.equal(copy[0], torch.ones(4))


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ([{"x": torch.zeros(4), "y": 0}], "a sample is a dict of 2"),
        ([(torch.zeros(4), 0, 0)], "a sample is a tuple of 3"),
        ([(torch.zeros(4), torch.zeros(3))], r"a label has shape \(3,\)"),
        ([(torch.zeros(4), 0.5)], "numbers, such as 0.5"),
        (TensorDataset(torch.zeros(2, 4), torch.zeros(2, 3)), r"\(2, 3\)"),
        (TensorDataset(torch.zeros(2, 4), torch.full((2,), 0.5)), "numbers, such as 0.5"),
    ],
)
@pytest.mark.parametrize(
    "attack", [LabelFlip(num_classes=4), BackdoorAttack(pattern=FeatureTrigger(k=1))], ids=repr
)
def test_samples_that_cannot_be_poisoned(attack: Any, dataset: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        attack.poison_dataset(dataset, "c")[len(dataset) * (2 - isinstance(attack, LabelFlip)) - 1]
