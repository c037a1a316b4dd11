from __future__ import annotations

import math

import pytest
import torch

from fedrec.exceptions import AggregationError
from fedrec.functional import coordinate_median, trimmed_mean
from fedrec.functional.aggregation.order_statistics import check_trim


def test_large_values_do_not_overflow() -> None:
    big = torch.full((4, 2), 3e38)
    assert torch.equal(coordinate_median(big), big[0])
    assert torch.equal(trimmed_mean(big, 1), big[0])


def test_mean_of_equal_values_is_that_value_exactly() -> None:
    x = torch.tensor([0.1, 1 / 3, -7e-20]).repeat(97, 1)
    assert torch.equal(trimmed_mean(x, 11), x[0])


def test_order_of_rows_does_not_change_a_bit() -> None:
    x = torch.randn(21, 700, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1))
    assert torch.equal(trimmed_mean(x[order], 4), trimmed_mean(x, 4))
    assert torch.equal(coordinate_median(x[order]), coordinate_median(x))


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(10, 333, generator=torch.Generator().manual_seed(0))
    whole = trimmed_mean(x, 2), coordinate_median(x)
    for block in (1, 70, 10 * 333 - 1):
        monkeypatch.setattr("fedrec.functional.aggregation.order_statistics._BLOCK", block)
        assert torch.equal(trimmed_mean(x, 2), whole[0])
        assert torch.equal(coordinate_median(x), whole[1])


def test_strided_input_is_read_right_and_left_alone() -> None:
    x = torch.arange(24.0).reshape(4, 6)[:, ::2]
    before = x.clone()
    assert coordinate_median(x).tolist() == [9.0, 11.0, 13.0]
    assert trimmed_mean(x.T.contiguous().T, 1).tolist() == [9.0, 11.0, 13.0]
    assert torch.equal(x, before)


def test_gradients_flow_to_the_values_kept() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [9.0]], requires_grad=True)
    trimmed_mean(x, 1).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0.0, 0.5, 0.5, 0.0]


def test_results_are_contiguous_and_do_not_share_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(6.0, dtype=dtype).reshape(3, 2)
        for result in (coordinate_median(x), trimmed_mean(x, 1)):
            assert result.is_contiguous()
            result.zero_()
        assert x.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(("k", "m"), [(5, 8), (4, 8), (1, 2), (1, 1), (-1, 5)])
def test_trimming_everything_is_refused(k: int, m: int) -> None:
    with pytest.raises(
        AggregationError, match=rf"Cannot trim 2\*{k}={2 * k} of m={m} updates\. HINT"
    ):
        trimmed_mean(torch.zeros(m, 1), k)


def test_trimming_all_but_one_is_the_median() -> None:
    check_trim(2, 5)
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trimmed_mean(x, 2), coordinate_median(x))
    assert not math.isnan(trimmed_mean(x, 2).sum().item())
