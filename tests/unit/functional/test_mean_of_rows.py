from __future__ import annotations

import torch

from fedrec.functional.aggregation.means import mean_of_rows


def test_the_others_leave_no_trace() -> None:
    x = torch.tensor([[1.0, -2.0], [3e38, -3e38], [4.0, 6.0]])
    assert mean_of_rows(x, torch.tensor([0, 2])).tolist() == [2.5, 2.0]
    assert mean_of_rows(x, torch.tensor([2])).tolist() == [4.0, 6.0]
