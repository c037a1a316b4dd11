"""Convolutions that max-pooling follows are computed by their winners, as torch computes them."""

import itertools
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.executors import SequentialExecutor, VectorizedExecutor, choice, winners
from fedrec.executors.winners import Fused, Pooling
from fedrec.history import LMDBHistory
from fedrec.models import CNN
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

pytest.importorskip("numba")

WINNERS = "grouped (winners)"
COUNT = 3
# Convolution, pooling (size, stride, padding), slope of the activation, whether it comes first.
SETTINGS = {
    "few channels": (nn.Conv2d(1, 30, 3), (2, None, 0), 0.0, False),
    "fewer outputs than a vector": (nn.Conv2d(2, 6, 3, padding=1), (2, None, 0), 0.0, True),
    "no bias": (nn.Conv2d(3, 17, 3, bias=False), (2, None, 0), 1.0, False),
    "leaky after": (nn.Conv2d(3, 20, (3, 2), padding=(1, 0)), ((2, 3), None, 0), 0.5, False),
    "leaky before": (nn.Conv2d(3, 20, 3, stride=2, padding=2), (2, None, 1), 0.5, True),
    "many channels": (nn.Conv2d(30, 50, 3), (2, None, 0), 0.0, False),
    "tiles of all widths": (nn.Conv2d(53, 5, 4), (2, 3, 0), 0.0, True),
    "overlapping windows": (nn.Conv2d(8, 16, 3, padding=1), (3, 2, 1), 0.0, False),
    "windows with gaps": (nn.Conv2d(4, 33, 2, stride=(2, 1)), (2, 3, 0), 0.0, False),
    "one window": (nn.Conv2d(16, 16, 1), (9, None, 0), 0.0, False),
    "rows": (nn.Conv1d(3, 18, 4, stride=2, padding=3), (3, 2, 1), 0.0, False),
    "long rows": (nn.Conv1d(40, 7, 5), (2, None, 0), 0.5, True),
}


def small_integers(*shape: int, generator: torch.Generator, dense: bool = True) -> torch.Tensor:
    """Return numbers whose sums are exact, and often equal."""
    values = torch.randint(-2, 3, shape, generator=generator).float()
    return values if dense else values * torch.randint(2, shape, generator=generator)


def settings_of(name: str, order: torch.memory_format):
    """Return a layer of integers, its pooling, inputs and the gradient of the result."""
    layer, (size, stride, padding), slope, first = SETTINGS[name]
    generator = torch.Generator().manual_seed(len(name))
    for p in layer.parameters():
        p.data = small_integers(*p.shape, generator=generator)
    ndim = len(layer.kernel_size)
    x = small_integers(4 * COUNT, layer.in_channels, *(11, 10)[:ndim], generator=generator)
    pooling = Pooling().activated(slope) if first else Pooling()
    pooling = pooling.pooled(size, stride, padding, ndim=ndim)
    pooling = pooling if first else pooling.activated(slope) or pooling
    with torch.no_grad():
        shape = pooling.apply(layer(x)).shape
    gradient = small_integers(*shape, generator=generator, dense=False)
    if ndim == 2:
        x, gradient = (t.contiguous(memory_format=order) for t in (x, gradient))
    return layer, pooling, x, gradient


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernels_compute_what_autograd_does(name: str, order: torch.memory_format) -> None:
    layer, pooling, x, gradient = settings_of(name, order)
    wide = x.double().requires_grad_()
    expected = pooling.apply(layer.double()(wide))
    per_client = [
        torch.autograd.grad(e, list(layer.parameters()), g, retain_graph=True)
        for e, g in zip(expected.chunk(COUNT), gradient.double().chunk(COUNT), strict=True)
    ]
    (of_input,) = torch.autograd.grad(expected, wide, gradient.double())
    layer.float()

    fused = Fused(layer, pooling, winners._image(x))
    result = torch.empty_like(gradient)
    codes = torch.empty(len(x), *fused.windows, layer.out_channels, dtype=torch.uint8)
    fused.forward(winners._image(x), winners._image(result), codes)
    assert torch.equal(result.double(), expected)
    weights, biases = fused.weight_gradients(x, gradient, COUNT, codes)
    assert torch.equal(
        weights.reshape(COUNT, -1).double(), torch.stack([p[0].flatten() for p in per_client])
    )
    if layer.bias is not None:
        assert torch.equal(biases, torch.stack([p[1] for p in per_client]))
    found = fused.input_gradient(winners._image(gradient), codes)
    assert torch.equal(found.reshape(x.shape).double(), of_input)


def pooled_by_hand(y: np.ndarray, size: int, stride: int, padding: int):
    """Return the largest value of each window, and its number in row-major order."""
    height, width = ((n + 2 * padding - size) // stride + 1 for n in y.shape[1:3])
    best = np.full((len(y), height, width, y.shape[3]), -np.inf)
    which = np.zeros(best.shape, int)
    for i, j, q in itertools.product(range(height), range(width), range(size * size)):
        r, s = i * stride - padding + q // size, j * stride - padding + q % size
        if 0 <= r < y.shape[1] and 0 <= s < y.shape[2]:
            wins = (y[:, r, s] > best[:, i, j]) | np.isnan(y[:, r, s])
            best[:, i, j][wins], which[:, i, j][wins] = y[:, r, s][wins], q
    return best, which


@pytest.mark.parametrize("channels", [3, 16, 37])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 4, 0)])
def test_codes_are_those_of_the_first_winner(channels, size, stride, padding) -> None:
    y = np.random.default_rng(0).integers(-2, 2, (2, 9, 10, channels)).astype(np.float32)
    y[0, 3:6, 3:6, 0] = np.nan
    best, which = pooled_by_hand(y, size, stride, padding)
    out, codes = np.empty(best.shape, np.float32), np.empty(best.shape, np.uint8)
    geometry = (size, size, stride, stride, padding, padding, 9, 10)
    winners.kernels()["_pool"](y, geometry, np.float32(0), False, out, codes, 0, 2)
    assert np.array_equal(out, np.maximum(best, 0), equal_nan=True)
    assert np.array_equal(codes, which + 128 * (best <= 0))


class Net(pl.LightningModule):
    def __init__(self, body, last: bool = True):
        super().__init__()
        self.body = body
        if last:
            self.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.body(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Written(nn.Module):
    """A body written as functions."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 17, 3)
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        y = self.conv(x)
        if self.kind == "functions":
            y = functional.max_pool2d(torch.relu(y), 2)
            y = functional.leaky_relu(functional.max_pool2d(self.other(y), 2), 0.1)
        elif self.kind == "methods and in place":
            y = torch.max_pool2d(y.relu_(), 2)
            y = functional.max_pool2d(self.other(y), kernel_size=(2, 2), stride=[2, 2])
            functional.relu(y, inplace=True)
        elif self.kind == "looks at shapes":
            y = functional.max_pool2d(y.relu(), y.shape[2] // 5)
            y = functional.max_pool2d(self.other(y).relu(), y.dim() // 2)
        elif self.kind == "only one":
            y = functional.max_pool2d(y.tanh(), 2)
            y = functional.max_pool2d(self.other(y), 2)
        elif self.kind == "viewed":
            y = functional.max_pool2d(self.other(y), 2).relu()
            return self.head(y.view(len(y), -1))
        elif self.kind == "used twice":
            y = functional.max_pool2d(y, 2) + functional.avg_pool2d(y, 2)
            y = functional.max_pool2d(self.other(y), 2)
        elif self.kind == "without gradients":
            with torch.no_grad():
                z = functional.max_pool2d(y, 2)
            y = functional.max_pool2d(self.other(z), 2)
        elif self.kind == "unusual":
            y = functional.max_pool2d(y, 2, dilation=2)
            y = functional.max_pool2d(self.other(y), 2, ceil_mode=True)
        elif self.kind == "behind the watch":
            with torch._C.DisableTorchFunction():
                y = y + 1
            y = functional.max_pool2d(self.other(y), 2)
        elif self.kind == "many winners":
            y = functional.max_pool2d(self.other(y).relu(), 2, stride=1)
        return self.head(y.flatten(1))


KINDS = {
    "functions": WINNERS,
    "methods and in place": WINNERS,
    "looks at shapes": WINNERS,
    "only one": WINNERS,
    "viewed": WINNERS,
    "used twice": "grouped",
    "without gradients": WINNERS,
    "unusual": "grouped",
    "behind the watch": "grouped",
    "many winners": "grouped",
}


def clients(module, features=(2, 10, 10), batch_size=5):
    torch.manual_seed(1)
    return [
        LightningClient(
            f"client-{i}",
            module,
            TensorDataset(torch.randn(n, *features), torch.randint(3, (n,))),
            batch_size=batch_size,
        )
        for i, n in enumerate((6, 6, 4))
    ]


def both(module, executor=None):
    """Return the plan, updates of the executor, and the sequential ones."""
    made = clients(module)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=0,
        phase="record",
        client_ids=tuple(c.client_id for c in made),
        global_weights=weights,
        layout=layout,
    )
    executor = executor or VectorizedExecutor()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedrecWarning)
        plan = executor.plan(made, weights, ctx)
        fast = executor.compute(made, weights, ctx)
    return plan, fast.updates, SequentialExecutor().compute(made, weights, ctx).updates


def relative(fast, slow):
    return float(((fast - slow).norm(dim=1) / slow.norm(dim=1)).max())


def built(body, last=True, features=(2, 10, 10)):
    body(torch.zeros(2, *features))
    return Net(body, last)


@pytest.mark.parametrize(
    ("kind", "last"),  # torch itself cannot view what is channels last
    [(k, last) for k in KINDS for last in (True, False) if not last or k != "viewed"],
)
def test_it_is_found_by_what_a_module_does(kind: str, last: bool) -> None:
    torch.manual_seed(0)
    plan, fast, slow = both(built(Written(kind), last))
    assert plan["path"] == KINDS[kind]
    assert "refused" not in plan
    assert relative(fast, slow) < 1e-5


def test_layers_of_a_sequential_and_shared_work() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.MaxPool2d(2, padding=1),
        nn.Conv2d(8, 9, 2, bias=False),
        nn.Identity(),
        nn.MaxPool2d(2),
        nn.Flatten(2),
        nn.Conv1d(9, 16, 2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    plan, fast, slow = both(built(body))
    assert plan["path"] == WINNERS
    assert relative(fast, slow) < 1e-5


def test_without_numba_it_is_grouped_as_ever(monkeypatch) -> None:
    monkeypatch.setattr(winners, "kernels", lambda: None)
    torch.manual_seed(0)
    plan, fast, slow = both(built(Written("functions")))
    assert plan["path"] == "grouped"
    assert relative(fast, slow) < 1e-5


def test_large_activations_without_winners_are_computed_one_after_another(monkeypatch) -> None:
    monkeypatch.setattr(choice, "_LARGE_ACTIVATIONS", 0)
    torch.manual_seed(0)
    plan, fast, slow = both(built(Written("many winners")))
    assert plan["path"] == "loop"
    assert "refused" not in plan
    assert torch.equal(fast, slow)
    assert both(built(Written("functions")))[0]["path"] == WINNERS


def test_where_nothing_is_left_of_a_client_its_gradients_are_zero() -> None:
    torch.manual_seed(0)
    module = built(Written("functions"))
    module.body.conv.bias.data.fill_(-1e3)
    plan, fast, slow = both(module)
    assert plan["path"] == WINNERS
    rows = ParameterVector(module).unflatten(fast)
    assert not rows["body.conv.weight"].any()
    assert torch.allclose(fast, slow, rtol=1e-5, atol=1e-7)


def test_numbers_that_are_none_go_where_torch_lets_them_go() -> None:
    layer, pooling, x, _ = settings_of("many channels", torch.channels_last)
    x[1, 2, 3, 4] = torch.nan
    fused = Fused(layer, pooling, x)
    result = torch.empty(len(x), 50, *fused.windows)
    fused.forward(x, result, torch.empty(len(x), *fused.windows, 50, dtype=torch.uint8))
    with torch.no_grad():
        expected = pooling.apply(layer(x))
    assert torch.equal(result.isnan(), expected.isnan())
    assert result.isnan().any()
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kind", ["used twice", "only one"])
def test_another_use_in_a_later_round_is_right_or_seen(kind: str) -> None:
    torch.manual_seed(0)
    module = built(Written("functions"))
    executor = VectorizedExecutor(audit=0)
    plan, _, _ = both(module, executor)
    assert plan["path"] == WINNERS
    module.body.kind = kind
    made = clients(module)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ids = tuple(c.client_id for c in made)
    ctx = RoundContext(
        round=1, phase="record", client_ids=ids, global_weights=weights, layout=layout
    )
    slow = SequentialExecutor().compute(made, weights, ctx).updates
    if kind == "used twice":
        with pytest.warns(FedrecWarning, match="the output of body.conv is used twice"):
            fast = executor.compute(made, weights, ctx).updates
        assert executor.departure["reason"] == "the output of body.conv is used twice"
        assert torch.equal(fast, slow)
    else:
        fast = executor.compute(made, weights, ctx).updates
        assert executor.departure is None
        assert relative(fast, slow) < 1e-5


def test_placeholders_look_like_the_results_of_torch() -> None:
    for channels, height, last in itertools.product((1, 3), (1, 8), (True, False)):
        layer = nn.Conv2d(channels, 4, (1, 3))
        x = torch.zeros(2, channels, height, 9)
        if last:
            layer.to(memory_format=torch.channels_last)
        sink = type("Sink", (), {"layer": layer, "name": "layer"})
        output = winners.Output(sink, x, lambda: None)
        pooling = Pooling().pooled((1, 2), ndim=2)
        for followed in (Pooling(), pooling):
            found, expected = output.placeholder(followed), followed.apply(layer(x))
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()


def test_going_on_without_numba_is_refused(monkeypatch, tmp_path) -> None:
    torch.manual_seed(0)
    module = CNN(image_size=10, hidden=4, num_classes=3)
    made = [
        LightningClient(
            f"client-{i}",
            module,
            TensorDataset(torch.randn(6, 1, 10, 10), torch.randint(3, (6,))),
            batch_size=5,
        )
        for i in range(3)
    ]
    test = TensorDataset(torch.randn(6, 1, 10, 10), torch.randint(3, (6,)))
    federation = Federation(made, module, test_dataset=test)

    def record(**how):
        loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
        with LMDBHistory(tmp_path / "history") as history:
            return loop.record(federation, FedAvg(), history, max_rounds=2, server_lr=0.1, **how)

    assert record().execution["path"] == WINNERS
    assert record(resume=True).execution["path"] == WINNERS
    monkeypatch.setattr(winners, "kernels", lambda: None)
    refused = r"path: 'grouped \(winners\)' then, 'grouped' now"
    with pytest.raises(ConfigurationError, match=refused):
        record(resume=True)
