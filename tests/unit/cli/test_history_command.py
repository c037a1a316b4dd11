"""`fedrec history`: exit codes, what is printed, and a recovery after a repair."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import TrimmedMean
from fedrec.cli import history as command
from fedrec.cli.main import main
from fedrec.data import Digits
from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover

ROUNDS = 12


def federation() -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(8,))
    data = Digits(num_clients=6)
    clients = [
        LightningClient(client_id, module, samples, batch_size=8)
        for client_id, samples in data.client_datasets().items()
    ]
    return Federation(clients, module, test_dataset=data.test_dataset)


def loop() -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, seed=3)


def recover(history: HistoryStore) -> torch.Tensor:
    recoverer = FedRecover(
        warmup_rounds=3, correction_period=3, final_rounds=2, tolerance_rate=1e-3
    )
    return loop().recover(federation(), history, recoverer, ["client-0"]).global_weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a recording."""
    with LMDBHistory(tmp_path / "history") as history:
        loop().record(federation(), TrimmedMean(trim=1), history, max_rounds=ROUNDS, server_lr=0.2)
    return tmp_path


def damage_update(run: Path, t: int, index: int) -> None:
    file = run / "history" / "data.mdb"
    data = bytearray(file.read_bytes())
    head = b"FREC.{4}" + re.escape(struct.pack("<II", t, index))
    for match in list(re.finditer(head, bytes(data), re.DOTALL)):
        data[match.start() + 100] ^= 4
    file.write_bytes(data)


def test_a_recovery_goes_on_without_what_a_repair_dropped(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clean = MemoryHistory()
    with LMDBHistory(run / "history") as history:
        clean.begin(history.manifest)
        for t in history.rounds():
            record = history.read_round(t)
            if t == 4:  # a warm-up is over, and the round is one of estimates
                left = record.sent.select([c for c in record.client_ids if c != "client-2"])
                refused = {"client-2": "damaged, dropped by a repair"}
                left = dataclasses.replace(left, refused=refused)
                record = dataclasses.replace(record, sent=left, cohort=record.cohort)
            clean.write_round(record)
        unharmed = recover(history)

    assert main(["history", "verify", str(run)]) == 0
    assert "All 12 rounds" in capfd.readouterr().out
    damage_update(run, 4, 2)
    assert main(["history", "verify", str(run)]) == 1
    out, _ = capfd.readouterr()
    assert re.findall(r"round \d+, [^:]*", out) == ["round 4, client `client-2`"]
    assert main(["history", "repair", str(run)]) == 0
    assert "Dropped the update of `client-2` in round 4." in capfd.readouterr().out
    assert main(["history", "verify", str(run)]) == 0
    capfd.readouterr()
    assert main(["history", "info", str(run), "--json"]) == 0
    repairs = json.loads(capfd.readouterr().out)["repairs"]
    assert repairs == [{"rounds_before": 12, "rounds": 12, "dropped": [[4, "client-2"]]}]

    with LMDBHistory(run / "history") as history:
        recovered = recover(history)
    assert torch.equal(recovered, recover(clean))
    assert not torch.equal(recovered, unharmed)


def test_json_of_every_command(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(run / "history")

    def result(action: str, code: int = 0) -> dict[str, object]:
        assert main(["history", action, folder, "--json"]) == code
        value: dict[str, object] = json.loads(capfd.readouterr().out)
        return value

    about = result("info")
    assert (about["num_rounds"], about["num_updates"]) == (ROUNDS, 6 * ROUNDS)
    assert about["clients"] == [f"client-{k}" for k in range(6)]
    assert "fedrec" in about["versions"]  # type: ignore[operator]
    whole = {"path": folder, "whole": True, "damage": [], "checksums_only": False}
    assert result("verify") == whole
    assert result("compact")["bytes_after"] == os.stat(folder + "/data.mdb").st_size  # noqa: PTH116
    assert result("repair") == {
        "damage": [],
        "rounds_before": ROUNDS,
        "rounds": ROUNDS,
        "dropped": [],
        "mended": [],
        "backups": [],
    }
    damage_update(run, 7, 5)
    (one,) = result("verify", code=1)["damage"]  # type: ignore[misc]
    assert (one["round"], one["client_id"]) == (7, "client-5")
    done = result("repair")
    assert done["dropped"] == [[7, "client-5"]]
    assert done["backups"] == [folder + "/data.mdb.damaged"]


def test_text_of_info(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "info", str(run)]) == 0
    out = capfd.readouterr().out
    assert "  rounds      12 of 12\n" in out
    names = ", ".join(f"client-{k}" for k in range(6))
    assert f"  clients     6: {names}\n" in out
    assert "  codec       float32, exact\n" in out


def test_text_of_info_names_ten_clients() -> None:
    assert command._some([f"c{k}" for k in range(10)]) == "c0, c1, c2, c3, c4, c5, c6, c7, c8, c9"
    assert (
        command._some([f"c{k}" for k in range(11)]) == "c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, ..."
    )


def test_damaged_beyond_repair(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "history" / "data.mdb", 20480)
    for action in ("info", "repair", "compact"):
        assert main(["history", action, str(run)]) == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert "`data.mdb` has 20480 bytes" in err
        assert "Traceback" not in err
    assert main(["history", "verify", str(run), "--json"]) == 1
    (one,) = json.loads(capfd.readouterr().out)["damage"]
    assert one["part"] == "the file"
    assert "has 20480 bytes" in one["reason"]


def test_no_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.mdb").write_bytes(b"hello" * 5000)
    for action in ("info", "verify", "repair", "compact"):
        assert main(["history", action, str(tmp_path / "none")]) == 2
        assert "Nothing has been recorded in" in capfd.readouterr().err
        assert main(["history", action, str(tmp_path / "other")]) == 2
        assert "does not hold a fedrec history" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


def test_being_recorded(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LMDBHistory(run / "history") as history:
        assert len(history.rounds()) == ROUNDS
        for action in ("repair", "compact"):
            assert main(["history", action, str(run)]) == 2
            assert "is used by another store or process" in capfd.readouterr().err
        assert main(["history", "info", str(run)]) == 0
        assert main(["history", "verify", str(run)]) == 0


def test_pages_that_kill_the_process_are_an_error(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    die = "import os, signal; signal.signal(signal.SIGBUS, 0); os.kill(os.getpid(), signal.SIGBUS)"
    monkeypatch.setattr(command, "_CHILD", die)
    assert main(["history", "info", str(run)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "reading it ended in SIGBUS" in err
    assert main(["history", "verify", str(run), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["damage"][0]["part"] == "the file"


def test_a_killed_process_is_no_damage(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_CHILD", "import os; os.kill(os.getpid(), 9)")
    assert main(["history", "verify", str(run), "--json"]) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["type"] == "HistoryError"
    assert "was ended by SIGKILL, as the system does when memory runs out" in err
    assert "damaged" not in err


def test_sigterm_ends_what_was_begun(run: Path) -> None:
    """Supervisors send it to the command alone, which works in a process of its own."""
    slow = (
        "import os, pathlib, signal, sys, time\n"
        "from fedrec.cli import history\n"
        "def verify(args, progress):\n"
        "    try:\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        pathlib.Path(args.target, 'tidied').touch()\n"
        "history._ACTIONS['verify'] = verify\n"
        "sys.argv.pop()\n"
        "sys.exit(history.main(*sys.argv[1:]))\n"
    )
    code = (
        "import sys; from fedrec.cli import history, main\n"
        f"history._CHILD = {slow!r}\n"
        "sys.exit(main.main(['history', 'verify', sys.argv[1]]))\n"
    )
    words = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "go on with:\n  fedrec history verify" in done.stderr
    assert (run / "tidied").exists()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["history"], ["history", "fly", "x"], ["history", "info"]):
        assert main(words) == 2
    assert "Missing argument 'PATH'" in capsys.readouterr().err
    assert main(["history", "info", "x", "key=1"]) == 2
    assert "unexpected extra argument (key=1)" in capsys.readouterr().err


def test_the_tools_need_no_torch(run: Path) -> None:
    code = (
        "import json, sys; from fedrec.cli.history import main\n"
        "args = dict(target=sys.argv[1], allow=[], key_file=None, json=False, quiet=True)\n"
        "args.update(no_progress=True, debug=True)\n"
        "for action in ('info', 'verify', 'repair', 'compact'):\n"
        "    assert main(json.dumps({**args, 'action': action})) == 0\n"
        "assert not {'torch', 'pytorch_lightning', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
