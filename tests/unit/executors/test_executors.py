"""Every path gives the updates of the SequentialExecutor, and says that it was taken."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, LightningClient
from fedrec.clients import LocalWork
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.executors import SequentialExecutor, VectorizedExecutor
from fedrec.models import CNN, MLP
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext


class Net(pl.LightningModule):
    """A small network with a choice of optimiser, of an extra layer and of what a step does."""

    def __init__(self, optimizer="sgd", extra=None, kind=None, body=None):
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(4, 6), extra or nn.Tanh(), nn.Linear(6, 3))
        self.choice, self.kind = optimizer, kind

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.body(x)
        loss = functional.cross_entropy(logits, y)
        weights = torch.tensor([1.0, 2.0, 5.0])
        if self.kind == "noise":
            loss = loss * (1 + 0.01 * torch.rand(()))
        if self.kind == "item":
            loss = loss if loss.item() > -1 else None
        if self.kind == "tenth":
            loss = functional.cross_entropy(logits, y, reduction="sum") / 10
        if self.kind == "ignored":
            loss = functional.cross_entropy(logits, y, ignore_index=-1)
        if self.kind == "square":
            loss = loss**2
        if self.kind == "sum":
            loss = functional.cross_entropy(logits, y, reduction="sum")
        if self.kind == "weights":
            loss = functional.cross_entropy(logits, y, weight=weights)
        if self.kind == "own weights":
            each = functional.cross_entropy(logits, y, reduction="none")
            loss = (weights[y] * each).sum() / weights[y].sum()
        if self.kind == "penalty":
            loss = loss + 0.1 * self.body[0].weight.square().sum()
        if self.kind == "none":
            loss = None
        self.log("error", (logits.argmax(1) != y).float().mean())
        self.log("spread", logits.std() if self.kind == "spread" else 1.5)
        if loss is not None:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.choice == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-2)
        if self.choice == "groups":
            return torch.optim.SGD(
                [
                    {"params": [self.body[0].weight], "lr": 0.1},
                    {"params": [self.body[2].weight], "lr": 0.3},
                ]
            )
        return torch.optim.SGD(
            self.parameters(),
            lr=1e-2,
            momentum=0.9 if self.choice == "momentum" else 0.0,
            weight_decay=0.1 if self.choice == "decay" else 0.0,
        )


class Raw(nn.Module):
    """Uses a parameter without a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return functional.linear(x, self.weight)


class Outside(nn.Linear):
    """A layer with a forward pass of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Tokens(nn.Module):
    """A layer over (samples, tokens, features)."""

    def forward(self, x):
        return x.reshape(len(x), 2, -1)


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Unheard(nn.Module):
    """Adds what a layer says, and lets no gradient through it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            said = self.layer(x)
        return x + said


def repeated():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def clients(module, sizes=(20, 20, 20), seed=0, features=(4,), classes=3, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, size in enumerate(sizes):
        x = torch.randn(size, *features, generator=generator)
        y = torch.randint(classes, (size,), generator=generator)
        made.append(LightningClient(f"c{i}", module, TensorDataset(x, y), **kwargs))
    return made


def clip(optimizer, *args) -> None:
    """Clip all gradients of an optimiser by one norm: those of stacked clients, by theirs."""
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 20.0)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure and closure()
        clip(self)
        super().step()
        return loss


def clipped_by_a_hook(parameters):
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def clipped_by_its_step(parameters):
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    optimizer.step = ClippedSGD.step.__get__(ClippedSGD(optimizer.param_groups, lr=1e-2))
    return optimizer


def both(module, made, executor=None, **kwargs):
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=1,
        phase="record",
        client_ids=tuple(c.client_id for c in made),
        global_weights=weights,
        layout=layout,
        **kwargs,
    )
    executor = executor or VectorizedExecutor(warn=False)
    plan = executor.plan(made, weights, ctx)
    fast = executor.compute(made, weights, ctx)
    slow = SequentialExecutor().compute(made, weights, ctx)
    assert fast.client_ids == slow.client_ids
    assert torch.equal(fast.num_samples, slow.num_samples)
    assert fast.metrics == pytest.approx(slow.metrics, rel=1e-4 if not kwargs else 5e-2)
    return plan, fast, slow


def relative(fast, slow) -> float:
    rows = (fast.updates - slow.updates).norm(dim=1) / slow.updates.norm(dim=1)
    return float(rows.max())


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "path"),
    [
        ("sgd", {"batch_size": 5}, "grouped"),
        ("sgd", {"batch_size": None}, "grouped"),
        ("groups", {"batch_size": 5, "local_lr": 0.1}, "grouped"),
        ("decay", {"batch_size": 5}, "vmap"),
        ("sgd", {"batch_size": 5, "local_steps": 4}, "vmap"),
        ("sgd", {"batch_size": 8, "local_epochs": 2}, "vmap"),
        ("momentum", {"batch_size": 5, "local_steps": 3}, "vmap"),
        ("adam", {"batch_size": 5}, "vmap"),
        ("adam", {"batch_size": 5, "local_steps": 3}, "vmap"),
    ],
)
@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 3, 7, 20)])
def test_fast_paths_equal_the_sequential_one(optimizer, kwargs, path, sizes) -> None:
    torch.manual_seed(0)  # Adam divides by gradients, of which some weights make nearly nothing
    module = Net(optimizer)
    plan, fast, slow = both(module, clients(module, sizes, **kwargs))
    assert plan["path"] == path
    assert "refused" not in plan
    assert relative(fast, slow) < 1e-5


@pytest.mark.parametrize(
    "make", [lambda p: ClippedSGD(p, lr=1e-2), clipped_by_a_hook, clipped_by_its_step]
)
@pytest.mark.parametrize("steps", [1, 2])
def test_what_an_optimizer_adds_to_torchs_is_not_stacked(make, steps: int) -> None:
    module = Net()
    module.configure_optimizers = lambda: make(module.parameters())
    made = clients(module, batch_size=5, local_steps=steps)
    plan, fast, slow = both(module, made)  # no client reaches the limit; many together would
    assert plan["path"] == "sequential"
    assert "vmap: the optimizer does not work elementwise" in plan["refused"]
    assert torch.equal(fast.updates, slow.updates)


@pytest.mark.parametrize("path", ["grouped", "vmap", "loop"])
@pytest.mark.parametrize(
    ("make", "features"),
    [
        (lambda: MLP(in_features=16, hidden=(8,)), (1, 4, 4)),
        (lambda: CNN(hidden=10), (1, 28, 28)),
    ],
    ids=["mlp", "cnn"],
)
def test_every_path_is_right_for_the_shipped_models(make, features: tuple, path: str) -> None:
    torch.manual_seed(0)  # one in a hundred has a maximum that is nearly tied
    module = make()
    made = clients(module, (6, 6, 4), features=features, classes=10, batch_size=5)
    plan, fast, slow = both(module, made, VectorizedExecutor(path=path))
    assert plan["path"].removesuffix(" (winners)") == path
    assert relative(fast, slow) < 1e-5
    assert path != "loop" or torch.equal(fast.updates, slow.updates)


LAYERS = {
    "linear over tokens": lambda: nn.Sequential(Tokens(), nn.Linear(6, 5), nn.Flatten()),
    "layer norm": lambda: nn.LayerNorm((3, 4)),
    "layer norm without bias": lambda: nn.LayerNorm(4, bias=False),
    "group norm": lambda: nn.GroupNorm(3, 3),
    "group norm of images, channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv2d(1, 6, 1).to(memory_format=torch.channels_last),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
    ),
    "group norm after flattening": lambda: nn.Sequential(nn.Flatten(), nn.GroupNorm(4, 12)),
    "conv1d": lambda: nn.Conv1d(3, 5, 3, stride=2, padding=2, dilation=2),
    "conv2d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv2d(1, 4, (2, 3), stride=(1, 2), padding=(1, 2)),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, bias=False),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_every_supported_layer(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    body = nn.Sequential(nn.Linear(4, 4), layer, nn.Flatten(), nn.LazyLinear(3))
    body(torch.zeros(2, 3, 4))
    with torch.no_grad():
        for p in body.parameters():
            p.add_(0.1 * torch.randn_like(p))
    module = Net(body=body)
    made = clients(module, (9, 9, 7), features=(3, 4), batch_size=8)
    plan, fast, slow = both(module, made, VectorizedExecutor(path="grouped"))
    assert plan["path"] == "grouped"
    assert relative(fast, slow) < 1e-5
    assert not any("forward" in vars(m) for m in module.modules()), "layers are left as they were"


@pytest.mark.parametrize("extra", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), Unheard()])
def test_what_is_done_in_place_or_without_gradients_stays_grouped(extra: nn.Module) -> None:
    torch.manual_seed(0)
    module = Net(extra=extra)
    plan, fast, slow = both(module, clients(module, batch_size=5), VectorizedExecutor())
    assert plan["path"] == "grouped"
    assert "refused" not in plan
    assert relative(fast, slow) < 1e-5
    if isinstance(extra, Unheard):
        rows = ParameterVector(module).unflatten(fast.updates)
        assert not rows["body.1.layer.weight"].any()
        assert not rows["body.1.layer.bias"].any()


def test_convolutions_on_a_cpu_are_not_stacked() -> None:
    body = nn.Sequential(nn.Conv1d(3, 2, 2), nn.Flatten(), nn.Linear(6, 3))
    for kind, steps, path in [(None, 1, "grouped"), ("square", 1, "loop"), (None, 2, "sequential")]:
        module = Net(body=body, kind=kind)
        made = clients(module, features=(3, 4), batch_size=5, local_steps=steps)
        plan, fast, slow = both(module, made)
        assert plan["path"] == path
        assert relative(fast, slow) < 1e-5
        assert path == "grouped" or torch.equal(fast.updates, slow.updates)


@pytest.mark.parametrize(
    ("module", "reason", "path"),
    [
        (Net(extra=Twice()), "body.1.layer is used more than once", "vmap"),
        (Net(extra=repeated()), "layers share a parameter", "vmap"),
        (Net(extra=tied()), "layers share a parameter", "vmap"),
        (Net(extra=Raw()), "body.1 is a Raw of an unsupported kind", "vmap"),
        (Net(extra=Outside(6, 6)), "body.1 is a Outside of an unsupported kind", "vmap"),
        (Net(extra=nn.PReLU()), "body.1 is a PReLU of an unsupported kind", "vmap"),
        (Net(kind="square"), "`pow` of a value of the whole batch is not linear", "vmap"),
        (Net(kind="weights"), "its loss divides by the weights of the classes", "vmap"),
        (Net(kind="own weights"), "its loss is no mean over samples", "vmap"),
        (Net(kind="penalty"), r"body\.0\.weight is used outside of its layer", "vmap"),
        (Net(kind="spread"), "what it logs as 'spread' is no mean", "vmap"),
        (Net(kind="none"), "training_step returned None", "loop"),
        (Net(kind="item"), "it reads the value of a tensor.*vmap: .*fails there", "loop"),
        (Net(kind="noise"), "it draws random numbers.*vmap: .*fails there", "loop"),
        (Net(extra=nn.Dropout(0.5)), "it draws random numbers.*vmap: .*fails there", "loop"),
    ],
    ids=str,
)
def test_what_one_pass_cannot_do_falls_to_the_next_path(module, reason: str, path: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan, fast, slow = both(module, clients(module, batch_size=5), VectorizedExecutor())
    assert plan["path"] == path
    assert len(caught) == (path == "loop")
    for warning in caught:
        assert warning.category is FedrecWarning
        assert plan["refused"] in str(warning.message)
    assert pytest.approx(0, abs=1e-5) == float((fast.updates - slow.updates).norm())
    assert path != "loop" or torch.equal(fast.updates, slow.updates)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(plan["refused"])


def test_a_loss_that_weights_a_rare_sample_is_found_by_repeating_samples() -> None:
    """All batches have one sample of each class, so their weights have the same sum."""
    module = Net(kind="own weights")
    made = clients(module, (3, 3, 3))
    for shift, client in enumerate(made):
        x, y = client.dataset.tensors
        client.dataset = TensorDataset(x, (torch.arange(3) + shift) % 3)
    plan, fast, slow = both(module, made)
    assert plan["refused"].startswith("grouped: its loss is no mean over samples")
    assert plan["path"] == "vmap"
    assert relative(fast, slow) < 1e-5


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: clients(Net(extra=nn.BatchNorm1d(6)), batch_size=5),
            "BatchNorm1d changes its buffers",
        ),
        (lambda: [clients(Net())[i] for i in range(3)], "do not share a module"),
        (lambda: clients(Net(body=Counting()), batch_size=5), "grouped: it changes body.calls"),
    ],
    ids=["batchnorm", "modules", "counter"],
)
def test_the_rest_is_sequential_with_one_warning(make, reason: str) -> None:
    made = make()
    with pytest.warns(FedrecWarning, match=reason) as caught:
        plan, fast, slow = both(made[0].module, made, VectorizedExecutor())
    assert len(caught) == 1
    assert plan["path"] == "sequential"
    assert torch.equal(fast.updates, slow.updates)


class Counting(nn.Sequential):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__(nn.Linear(4, 3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_frozen_parameters_and_unused_layers() -> None:
    module = Net()
    module.body[0].bias.requires_grad_(False)
    module.body[2].weight.requires_grad_(False)
    module.spare = nn.Linear(2, 2)
    plan, fast, slow = both(module, clients(module, batch_size=5))
    assert plan["path"] == "grouped"
    assert relative(fast, slow) < 1e-5
    assert not fast.updates[:, -6:].any(), "the spare layer stays as it is"


def test_parameters_without_an_optimizer_stay() -> None:
    module = Net("groups")
    plan, fast, slow = both(module, clients(module, batch_size=5, local_lr=0.1))
    assert plan["path"] == "grouped"
    rows = ParameterVector(module).unflatten(fast.updates)
    assert not rows["body.0.bias"].any()
    assert not rows["body.2.bias"].any()


@pytest.mark.parametrize("path", ["grouped", "vmap"])
def test_chunks_do_not_matter_and_give_the_same_bits_again(path: str) -> None:
    module = Net()
    made = clients(module, (20, 20, 3, 20, 20), batch_size=4)
    executor = VectorizedExecutor(path=path, chunk_size=2)
    plan, fast, slow = both(module, made, executor)
    assert (plan["path"], plan["chunk_size"]) == (path, 2)
    assert relative(fast, slow) < 1e-5
    again = both(module, made, VectorizedExecutor(path=path, chunk_size=2))[1]
    assert torch.equal(fast.updates, again.updates)


def test_the_default_chunk_keeps_activations_within_256_mib() -> None:
    """Results of one forward pass, views among them, are counted in float32."""
    module = Net(body=nn.Sequential(nn.Linear(4, 1 << 16, bias=False), nn.Linear(1 << 16, 3)))
    plan, _, _ = both(module, clients(module, batch_size=16))
    activations = 16 * 4 * (1 << 16)
    assert 1 <= plan["chunk_size"] <= (256 << 20) // activations
    assert plan["chunk_size"] > (256 << 20) // (3 * activations) - 1


def test_clients_of_two_kinds_take_two_paths() -> None:
    """One pass is a single step for a client whose data are one batch."""
    module = Net()
    made = clients(module, (5, 12, 5), batch_size=5, local_epochs=1)
    plan, fast, slow = both(module, made)
    assert plan["path"] == "grouped and vmap"
    assert relative(fast, slow) < 1e-5


def test_other_work_takes_its_own_path() -> None:
    module = Net()
    made = clients(module, batch_size=5)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=1, phase="recover", client_ids=(), global_weights=weights, layout=layout
    )
    executor = VectorizedExecutor()
    assert executor.plan(made, weights, ctx)["path"] == "grouped"
    more = RoundContext(
        round=1,
        phase="recover",
        client_ids=(),
        global_weights=weights,
        layout=layout,
        work=LocalWork(local_steps=3),
    )
    fast, slow = (e.compute(made, weights, more) for e in (executor, SequentialExecutor()))
    assert relative(fast, slow) < 1e-5
    assert not torch.equal(fast.updates, executor.compute(made, weights, ctx).updates)


def test_data_sets_of_any_kind_draw_the_same_on_every_path() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn_like(x), y

    module = Net()
    for path, steps in [("grouped", 1), ("vmap", 2), ("loop", 1)]:
        made = clients(module, batch_size=5, local_steps=steps)
        for client in made[:2]:
            client.dataset = Noisy(*client.dataset.tensors)
        plan, fast, slow = both(module, made, VectorizedExecutor(path=path))
        assert plan["path"] == path
        assert relative(fast, slow) < 1e-5


def test_clients_with_other_data_than_planned_for_are_read_too() -> None:
    module = Net()
    made = clients(module, batch_size=5)
    executor = VectorizedExecutor()
    both(module, made, executor)
    other = clients(module, seed=1, batch_size=5)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=1, phase="record", client_ids=(), global_weights=weights, layout=layout
    )
    mixed = [made[0], other[1], made[2]]
    fast, slow = (e.compute(mixed, weights, ctx) for e in (executor, SequentialExecutor()))
    assert relative(fast, slow) < 1e-5


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [("grouped", {}), ("vmap", {"local_steps": 2}), ("loop", {})],
)
def test_bfloat16_is_near_float32_on_every_path(path: str, kwargs: dict) -> None:
    # vmap has no mixed-precision rule for a LayerNorm.
    extra = nn.Sequential(nn.Linear(6, 6), nn.Tanh() if path == "vmap" else nn.LayerNorm(6))
    module = Net(extra=extra)
    made = clients(module, batch_size=8, **kwargs)
    executor = VectorizedExecutor(path=path)
    plan, exact, _ = both(module, made, executor)
    assert plan["path"] == path
    plan, rounded, slow = both(
        module, made, executor, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    assert plan["path"] == path
    assert 1e-4 < relative(rounded, exact) < 5e-2
    assert relative(rounded, slow) < 5e-2


def test_frozen_batchnorm_and_dropout_can_be_vectorised() -> None:
    module = Net(extra=nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Dropout(0.5)))
    module.body[1].eval()
    plan, fast, slow = both(module, clients(module, batch_size=5))
    assert plan["path"] == "grouped"
    assert relative(fast, slow) < 1e-5


def test_only_asking_for_vectorised_warns() -> None:
    module = Net(extra=nn.Dropout(0.5))
    made = clients(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(module, made, FederatedLoop(executor="auto").runtime.choose_executor(None))
    with pytest.warns(FedrecWarning, match="one client after another"):
        both(module, made, FederatedLoop(executor="vectorized").runtime.choose_executor(None))


def test_unknown_paths_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="path"):
        VectorizedExecutor(path="fast")


def test_a_path_that_is_refused_is_sequential() -> None:
    module = Net("adam")
    with pytest.warns(FedrecWarning, match="grouped: it is for one step of plain SGD"):
        plan, _, _ = both(module, clients(module), VectorizedExecutor(path="grouped"))
    assert plan["path"] == "sequential"


@pytest.mark.parametrize("make", [SequentialExecutor, lambda: VectorizedExecutor(path="loop")])
def test_an_error_in_a_client_names_it(make) -> None:
    class Broken(Net):
        broken = False

        def training_step(self, batch, batch_idx):
            if self.broken:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    module = Broken()
    made = clients(module)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=4, phase="record", client_ids=(), global_weights=weights, layout=layout
    )
    executor = make()
    executor.plan(made, weights, ctx)
    module.broken = True
    with pytest.raises(RuntimeError) as caught:
        executor.compute(made, weights, ctx)
    assert caught.value.__notes__ == ["while client 'c0' trained in round 4"]
    assert "log" not in vars(module)


def test_labels_that_a_loss_leaves_out_are_looked_for_in_all_data() -> None:
    """One sample of one client has such a label, and is not in the first batches."""
    module = Net(kind="ignored")
    made = clients(module, (20, 20, 20), batch_size=5)
    x, y = made[1].dataset.tensors
    ctx = RoundContext(
        round=0,
        phase="record",
        client_ids=(),
        global_weights=torch.zeros(0),
        layout=ParameterVector(module),
    )
    late = next(i for i in range(20) if i not in made[1].batches(ctx)[0])
    y = y.clone()
    y[late] = -1
    made[1] = made[1].with_dataset(TensorDataset(x, y))
    plan, fast, slow = both(module, made)
    assert plan["path"] == "vmap"
    assert plan["refused"] == "grouped: its loss leaves out samples with label -1, as 'c1' has"
    assert relative(fast, slow) < 1e-5


def test_a_divisor_that_is_the_number_of_samples_by_chance_makes_no_mean() -> None:
    """Two clients have ten samples together; all four, which are tried, have twenty."""
    module = Net(kind="tenth")
    made = clients(module, (20, 20, 20, 20), batch_size=5)
    executor = VectorizedExecutor(chunk_size=2)
    with pytest.warns(FedrecWarning, match="a sum over samples once, and a mean another time"):
        plan, fast, slow = both(module, made, executor)
    assert plan["path"] == "grouped"
    assert relative(fast, slow) < 1e-5
    assert executor.departure is not None
    plan, fast, slow = both(module, made, VectorizedExecutor(chunk_size=4))
    assert relative(fast, slow) < 1e-5
