"""Dumps of PyTorch's flight recorder: made by hand, after its format, and by gloo's."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from course_lib.ranks.flight_recorder import explain, explain_dumps, read_dump
from tests.helpers.watched_jobs import output_of, torchrun

SCRIPT = "/home/someone/train.py"


def entry(number: int, kind: str, shape: list[int], state: str, **more: Any) -> dict[str, Any]:
    """Return an entry as PyTorch's `torch.distributed.flight_recorder` reads it."""
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{kind}",
        "input_sizes": [shape],
        "input_dtypes": ["Float"],
        "output_sizes": [shape],
        "output_dtypes": ["Float"],
        "state": state,
        "is_p2p": kind.startswith(("send", "recv")),
        "retired": state == "completed",
        "timeout_ms": 600000,
        "frames": [
            {"name": "all_reduce", "filename": os.__file__, "line": 1},
            {"name": "step", "filename": SCRIPT, "line": 10 + number},
            {"name": "<module>", "filename": SCRIPT, "line": 3},
        ],
        **more,
    }


def dump(*entries: dict[str, Any], ranks: int = 3) -> dict[str, Any]:
    """Return the dump of one rank."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {},
        "entries": list(entries),
    }


def test_a_skipped_collective_is_named_with_the_line() -> None:
    both = entry(1, "all_reduce", [3], "completed"), entry(2, "broadcast", [4], "started")
    told = explain({0: dump(*both), 1: dump(*both), 2: dump(both[0])})
    assert "Ranks 0, 1 wait for rank 2, which had not taken part" in told
    assert "Ranks 0, 1 are in collective #2 of their group, which rank 2 never called" in told
    assert told.count("waits in broadcast #2  train.py, line 12") == 2
    assert "ended" not in told


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "words"),
    [
        ("all_reduce", [5], "Float", "all_reduce float32 5 elements"),
        ("all_reduce", [4], "Int", "all_reduce int32 4 elements"),
        ("broadcast", [4], "Float", "broadcast float32 4 elements"),
    ],
)
def test_a_mismatch_is_told(kind: str, shape: list[int], dtype: str, words: str) -> None:
    mine = dump(entry(1, "all_reduce", [4], "started"), ranks=2)
    other = dump(entry(1, kind, shape, "started", input_dtypes=[dtype]), ranks=2)
    told = explain({0: mine, 1: other})
    assert "The ranks disagree about collective #1" in told
    assert words in told
    assert "all_reduce float32 4 elements" in told


def test_messages_in_a_ring_are_a_deadlock() -> None:
    dumps = {}
    for rank in range(3):
        kind = f"recv {rank}<-{(rank - 1) % 3}"
        dumps[rank] = dump(entry(0, kind, [3], "started", p2p_seq_id=1))
    told = explain(dumps)
    assert "Each waits for the next: rank 0 → rank 2 → rank 1 → rank 0." in told
    assert "All of them receive first" in told


def test_a_message_that_is_never_sent_and_one_of_another_size() -> None:
    recv = entry(0, "recv 1<-0", [3], "started", p2p_seq_id=1)
    told = explain({0: dump(ranks=2), 1: dump(recv, ranks=2)})
    assert "Rank 1 receives from rank 0, which had not sent when it wrote its dump." in told
    send = entry(0, "send 0->1", [4], "started", p2p_seq_id=1)
    told = explain({0: dump(send, ranks=2), 1: dump(recv, ranks=2)})
    assert "Rank 0 sends 4 elements of float32" in told
    assert "rank 1 receives them as 3 elements" in told


def test_a_missing_dump_is_said_and_nobody_is_blamed() -> None:
    waits = dump(entry(1, "all_reduce", [3], "started"))
    told = explain({0: waits, 1: waits})
    assert "There is no dump of rank 2" in told
    assert "rank 2 never called" not in told


def test_ranks_that_are_done_wait_for_nobody() -> None:
    done = dump(entry(1, "all_reduce", [3], "completed"), ranks=2)
    assert explain({0: done, 1: done}) == "No rank waits for another in these dumps."


@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_files_are_read(kind: str, tmp_path: Path) -> None:
    for rank in range(2):
        entries = [entry(1, "all_reduce", [3], "started")] if rank == 0 else []
        whole = dump(*entries, ranks=2)
        data = pickle.dumps(whole, 2) if kind == "pickle" else json.dumps(whole).encode()
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    assert "which rank 1 never called" in explain_dumps(tmp_path)


class Runs:
    """A pickle of it calls a function when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="mkdir"):
        read_dump(tmp_path / "rank_0")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"nothing", b"\x80\x02]q\x00."])
def test_what_is_no_dump_is_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(data)
    with pytest.raises(ValueError, match="not a dump"):
        explain_dumps(tmp_path)


def test_a_folder_without_dumps_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no dumps"):
        explain_dumps(tmp_path / "nothing")


RECORDS = """
import sys, threading, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d

dist.init_process_group("gloo")
rank = dist.get_rank()

def save():
    time.sleep(2)
    name = f"trace_{rank}"
    if sys.argv[1] == "json":
        data = _distributed_c10d._dump_fr_trace_json()
    else:
        data = _distributed_c10d._dump_fr_trace()
    open(name, "wb").write(data)
    print("saved", flush=True)

threading.Thread(target=save).start()
dist.all_reduce(torch.ones(3))
if rank != 2:
    dist.all_reduce(torch.ones(5))
else:
    time.sleep(30)
"""


@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_what_gloo_records_is_explained(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECORDS)
    job = torchrun(tmp_path, "train.py", kind, ranks=3, TORCH_FR_BUFFER_SIZE="100")
    printed = output_of(job, until=lambda text: text.count("saved") == 3)
    assert printed.count("saved") == 3, printed
    told = explain_dumps(tmp_path)
    assert "Ranks 0, 1 are in collective #2 of their group, which rank 2 never called" in told
    assert "waits in all_reduce #2" in told
