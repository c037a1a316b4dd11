"""What computes order statistics: which one is taken, and that all of them agree."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.exceptions import ConfigurationError, FedrecWarning, MissingDependencyError
from fedrec.functional import choose_kernel, coordinate_median, trimmed_mean, use_kernel
from fedrec.functional.aggregation import order_statistics as module

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Try numba's kernels anew, and forget what came out."""
    module._numba_kernels.cache_clear()
    yield monkeypatch
    module._numba_kernels.cache_clear()


def updates_of(m: int, d: int) -> torch.Tensor:
    """Ties, zeros of both signs, and values of all sizes."""
    x = torch.randn(m, d, generator=torch.Generator().manual_seed(m))
    x = x * 10.0 ** torch.randint(-3, 4, (m, d), generator=torch.Generator().manual_seed(d))
    x[:, ::3] = x[:, ::3].round()
    x[m // 2 :, 1::5] = -0.0
    return x


def expected(x: torch.Tensor, k: int) -> np.ndarray:
    return np.sort(x.double().numpy(), axis=0)[k : len(x) - k].mean(axis=0)


def close(got: torch.Tensor, x: torch.Tensor, k: int) -> None:
    # A sum in float64, rounded once: half a unit in the last place, or what cancels in float64.
    np.testing.assert_allclose(got.double().numpy(), expected(x, k), rtol=1.2e-7, atol=1e-12)


@needs_numba
@pytest.mark.parametrize("m", [*range(1, 41), 80, 99, 100, 130])
def test_numba_equals_the_definition(m: int) -> None:
    x = updates_of(m, 389)  # two blocks of columns and a part of one
    with use_kernel("numba"):
        assert choose_kernel(CPU, *x.shape) == "numba"
        close(coordinate_median(x), x, (m - 1) // 2)
        for k in {0, (m - 1) // 5, (m - 1) // 4, (m - 1) // 2}:
            close(trimmed_mean(x, k), x, k)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numba_takes_16_bit_values_in_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WIDENED", 250)
    x = torch.randn(10, 773, generator=torch.Generator().manual_seed(0)).to(dtype)
    with use_kernel("numba"):
        got = coordinate_median(x), trimmed_mean(x, 2)
    with use_kernel("numpy"):
        assert torch.equal(coordinate_median(x), got[0])
        assert torch.equal(trimmed_mean(x, 2), got[1])
    assert got[0].dtype == dtype


@needs_numba
def test_threads_do_not_change_a_bit() -> None:
    x = updates_of(30, 5000)
    threads = torch.get_num_threads()
    results = []
    try:
        with use_kernel("numba"):
            for number in (1, 2, 3, 7):
                torch.set_num_threads(number)
                results.append((coordinate_median(x), trimmed_mean(x, 6)))
            # Nor do several callers at a time.
            with ThreadPoolExecutor(3) as pool:
                results += list(
                    pool.map(lambda _: (coordinate_median(x), trimmed_mean(x, 6)), range(6))
                )
    finally:
        torch.set_num_threads(threads)
    for median, mean in results:
        assert torch.equal(median, results[0][0])
        assert torch.equal(mean, results[0][1])


@needs_numba
def test_numba_keeps_the_contract() -> None:
    with use_kernel("numba"):
        equal = torch.tensor([0.1, 1 / 3, -7e-20, 3e38]).repeat(60).repeat(97, 1)
        assert torch.equal(trimmed_mean(equal, 11), equal[0])
        assert torch.equal(coordinate_median(equal), equal[0])
        x = updates_of(20, 800)
        before = x.clone()
        strided = torch.stack([x, x + 1], dim=2)[:, :, 0]
        assert torch.equal(trimmed_mean(strided, 4), trimmed_mean(x, 4))
        assert torch.equal(trimmed_mean(x.T.contiguous().T, 4), trimmed_mean(x, 4))
        assert torch.equal(x, before)


@needs_numba
def test_numba_is_taken_for_large_updates_on_a_cpu_alone() -> None:
    assert choose_kernel(CPU, 100, 139_960) == "numba"
    assert choose_kernel(CPU, 100, 139_960, torch.bfloat16) == "numba"
    assert choose_kernel(CPU, 100, 139_960, torch.float64) == "numpy"
    assert choose_kernel(CPU, 1025, 139_960) == "numpy"
    assert choose_kernel(CPU, 20, 2_048) == "numba"
    assert choose_kernel(CPU, 20, 2_047) == "numpy"
    assert choose_kernel(torch.device("meta"), 100, 139_960) == "torch"


@needs_numba
def test_numba_is_not_imported_for_a_small_model() -> None:
    code = (
        "import sys, torch; from fedrec.aggregators import Median\n"
        "Median()(torch.ones(20, 2000)); assert 'numba' not in sys.modules\n"
        "Median()(torch.ones(3, 40000)); assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_numba
def test_numba_without_a_place_for_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedrec.functional.kernels import _numba_kernels

    asked = []

    def njit(signature: str, *, cache: bool = False, **_: object) -> object:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return "compiled"

    monkeypatch.setattr(_numba_kernels.numba, "njit", lambda *a, **k: lambda f: njit(*a, **k))
    assert _numba_kernels._compiled.__wrapped__() == "compiled"
    assert asked == [True, False]


def test_without_numba_numpy_does_the_work(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "fedrec.functional.kernels._numba_kernels", None)
    x = updates_of(9, 40_000)
    assert choose_kernel(CPU, *x.shape) == "numpy"
    close(trimmed_mean(x, 2), x, 2)
    close(coordinate_median(x), x, 4)
    with (
        pytest.raises(MissingDependencyError, match=r"Expected numba to be installed.*HINT: `pip"),
        use_kernel("numba"),
    ):
        pass


def test_a_compiled_kernel_that_is_wrong_is_not_used(fresh: pytest.MonkeyPatch) -> None:
    wrong = types.SimpleNamespace(
        compiled=lambda: None, middle_mean=lambda values, k, out, threads: out.fill(0)
    )
    fresh.setattr(module.importlib, "import_module", lambda _: wrong)
    with pytest.warns(FedrecWarning, match="without numba, since its result is wrong"):
        assert choose_kernel(CPU, 100, 139_960) == "numpy"


def test_a_compiler_that_fails(fresh: pytest.MonkeyPatch) -> None:
    def middle_mean(*_: object) -> None:
        raise RuntimeError("no compiler")

    broken = types.SimpleNamespace(compiled=lambda: None, middle_mean=middle_mean)
    fresh.setattr(module.importlib, "import_module", lambda _: broken)
    assert choose_kernel(CPU, 100, 139_960) == "numpy"


def test_use_kernel_says_which_and_ends() -> None:
    for name in ("numpy", "torch"):
        with use_kernel(name):
            assert choose_kernel(CPU, 100, 139_960) == name
            assert choose_kernel(CUDA, 100, 139_960) == "torch"
    outside = choose_kernel(CPU, 100, 139_960)
    with pytest.raises(ZeroDivisionError), use_kernel("torch"):
        _ = 1 / 0
    assert choose_kernel(CPU, 100, 139_960) == outside
    with pytest.raises(ConfigurationError, match=r"Did you mean `numba`"), use_kernel("numbe"):
        pass


def test_all_kernels_agree() -> None:
    x = updates_of(30, 3000)
    for name in ("numpy", "torch"):
        with use_kernel(name):
            close(coordinate_median(x), x, 14)
            close(trimmed_mean(x, 6), x, 6)
            assert torch.equal(
                coordinate_median(x.double()), x.double().sort(0).values[14:16].mean(0)
            )


def test_compiling_is_said_once_and_loading_is_not(tmp_path, caplog, monkeypatch):
    kernels = pytest.importorskip("fedrec.functional.kernels._numba_kernels")
    (tmp_path / "doubling.py").write_text("def double(x):\n    x[0] *= 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="fedrec")
    said = []
    for _ in range(2):
        kernels._say_once.cache_clear()
        sys.modules.pop("doubling", None)
        kernel = kernels.compile_kernel(importlib.import_module("doubling").double, "void(f4[::1])")
        values = np.ones(1, np.float32)
        kernel(values)
        assert values[0] == 2
        said.append(len(caplog.records))
    assert said == [1, 1]


def test_a_cached_kernel_is_not_used_after_what_it_calls_has_changed(tmp_path, monkeypatch):
    kernels = pytest.importorskip("fedrec.functional.kernels._numba_kernels")
    (tmp_path / "scaling.py").write_text(
        "from factors import FACTOR\n\n\ndef scale(x):\n    x[0] *= FACTOR\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # numba itself looks at the file of `scale` alone, which is the same in all three.
    for factor, sources, scaled in ((2, "old", 2), (3, "old", 2), (3, "new", 3)):
        # Of another size, or Python may take the old one for it.
        (tmp_path / "factors.py").write_text(f"FACTOR = {factor}" + factor * "\n", encoding="utf-8")
        importlib.invalidate_caches()
        for name in ("factors", "scaling"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(kernels, "_digest", lambda sources=sources: sources)
        values = np.ones(1, np.float32)
        function = importlib.import_module("scaling").scale
        kernels.compile_kernel(function, "void(f4[::1])")(values)
        assert values[0] == scaled


def test_the_digest_is_of_all_kernels(tmp_path, monkeypatch):
    kernels = pytest.importorskip("fedrec.functional.kernels._numba_kernels")
    for path in Path(kernels.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "_numba_kernels.py"))
    digest = kernels._digest.__wrapped__
    before = digest()
    assert before == kernels._digest()
    with (tmp_path / "selection_network.py").open("a", encoding="utf-8") as source:
        source.write("# of another version\n")
    assert digest() != before
