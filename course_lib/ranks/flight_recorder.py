"""Explain the dumps of PyTorch's flight recorder in the same words as the hangs of ranks.

With ``TORCH_FR_BUFFER_SIZE=2000`` (before PyTorch 2.9: ``TORCH_NCCL_TRACE_BUFFER_SIZE``) every rank
remembers its latest operations. When NCCL's watchdog finds a hang, each rank writes them into a
file whose name ends in the rank. The file is a pickle that holds only numbers, text, lists and
dictionaries. ``torch._C._distributed_c10d._dump_fr_trace_json()`` returns the same as JSON.

A dump does not show whether a rank has ended. If a rank has no operation under way, its dump shows
only that the rank had not called what others wait for. Single messages that a full buffer has
dropped are not counted.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.explain.lines import innermost, named
from course_lib.ranks.explain.waiting import Absence, waits_in
from course_lib.ranks.explain.words import counted, names, one_or_many
from course_lib.ranks.processes.board_diagnosis import find_deadlock, find_mismatch
from course_lib.ranks.processes.board_views import (
    GroupView,
    Message,
    MessageChannel,
    RankPhase,
    RankView,
    Wait,
)

_NAMES = {
    "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
}
"""The recorder's name of a collective → its name in ``torch.distributed``."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}
_NOT_YET = Absence(
    *(f"had not {what} when it wrote its dump" for what in ("taken part", "sent", "received"))
)


class _PlainUnpickler(pickle.Unpickler):
    """Reads only numbers, text, lists and dictionaries: a foreign file must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it contains {module}.{name}, but a dump contains only numbers and text"
        )


def read_dump(path: Path) -> dict[str, Any]:
    """Return one rank's dump.

    Raises:
        ValueError: the file is not a dump of a flight recorder.

    """
    data = path.read_bytes()
    try:
        dump = json.loads(data) if data[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a dump of a flight recorder: {error}") from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise ValueError(f"{path} is not a dump of a flight recorder: it has no list of entries")
    return dump


def explain_dumps(folder: Path) -> str:
    """Return, in words, why the ranks hung whose dumps are in `folder`.

    The name of each file ends in its rank, as in ``nccl_trace_rank_3`` or ``rank_3.json``.

    Raises:
        ValueError: the folder has no dump, or a file is not a dump.

    """
    paths = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = re.search(r"(\d+)(\.\w+)?$", path.name)
        if found and path.is_file():
            paths[int(found[1])] = path
    if not paths:
        raise ValueError(
            f"{folder} has no dumps: the name of a dump ends in the number of its rank, as in "
            "nccl_trace_rank_3"
        )
    return explain({rank: read_dump(path) for rank, path in sorted(paths.items())})


def explain(dumps: Mapping[int, Mapping[str, Any]]) -> str:
    """Return, in words, why the ranks of these dumps hung. `dumps`: rank → its dump."""
    last = max(dumps)
    for dump in dumps.values():
        last = max(last, *(member for group in _members(dump).values() for member in group), 0)
    missing = sorted(set(range(last + 1)) - dumps.keys())
    views = [_view(rank, dumps.get(rank, {}), dumps) for rank in range(last + 1)]
    error: RanksError | None = find_mismatch(views) or find_deadlock(views, absence=_NOT_YET)
    report = "No rank waits for another in these dumps." if error is None else str(error)
    if missing:
        there = one_or_many(missing, "is no dump", "are no dumps")
        report += (
            f"\n\nThere {there} of {names(missing).lower()}: did the process end before it could "
            "write one?"
        )
    return report


def _members(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the members of a dump's process groups, by name."""
    return {
        name: tuple(map(int, re.findall(r"\d+", str(group.get("ranks", "")))))
        for name, group in dump.get("pg_config", {}).items()
    }


def _view(rank: int, dump: Mapping[str, Any], dumps: Mapping[int, Mapping[str, Any]]) -> RankView:
    """Return a rank's dump in the form in which a rank writes its state to a board."""
    members = _members(dump)
    entered: dict[str, dict[int, tuple[str, str]]] = defaultdict(dict)
    messages: dict[MessageChannel, dict[int, Message]] = defaultdict(dict)
    keys = _keys(dumps)
    waits: dict[str, Any] | None = None
    pending = 0
    for entry in dump.get("entries", ()):
        name = str(entry["process_group"][0])
        group = members.get(name) or tuple(sorted(dumps))
        kind, _, ends = str(entry["profiling_name"]).partition(":")[2].partition(" ")
        kind = _NAMES.get(kind, kind)
        where = _where(entry.get("frames", ()))
        puts = not (kind in KINDS and KINDS[kind].sized_by_what_it_gets) and kind != "recv"
        side = "input" if puts else "output"
        numel = sum(math.prod(size) for size in entry[f"{side}_sizes"])
        dtype = next(iter(entry[f"{side}_dtypes"]), "")
        dtype = _DTYPES.get(dtype, dtype)
        channel = None
        if kind in ("send", "recv"):
            peer = group[int(re.split("->|<-", ends)[1])]
            channel = MessageChannel(kind == "send", peer, 0, keys[name])
            seq = len(messages[channel]) + 1
            messages[channel][seq] = Message(numel, dtype)
        elif kind == "coalesced":
            continue  # the messages in it have entries of their own
        else:
            peer, seq = None, int(entry["collective_seq_id"])
            size = "" if kind not in KINDS or KINDS[kind].uneven else counted(numel, "element")
            signature = " ".join(filter(None, [kind, dtype, size if dtype else ""]))
            entered[name][seq] = signature, where
        # Operations of gloo are never "completed". They are "retired": no longer watched.
        if entry["state"] == "completed" or entry.get("retired"):
            continue
        pending += 1
        if waits is None:
            waits = {
                "wait": {"send": Wait.SEND, "recv": Wait.RECV}.get(kind, Wait.COLLECTIVE),
                "group": keys[name],
                "seq": seq,
                "channel": channel,
                "text": waits_in(
                    kind, seq=seq, peer=peer, members=group, world_size=len(group),
                    group_name="" if entry["process_group"][1] == "default_pg" else name,
                ),
                "where": where,
            }  # fmt: skip
    nothing = {"wait": Wait.NOTHING, "group": 0, "seq": 0, "channel": None, "where": ""}
    return RankView(
        rank=rank,
        state=RankPhase.FINISHED if waits is None else RankPhase.BLOCKED,
        changes=0,
        since=0.0,
        pending=pending,
        channels={channel: len(shown) for channel, shown in messages.items()},
        groups={
            keys[name]: GroupView(
                tuple(m for m in members.get(name) or sorted(dumps) if m in dumps),
                max(shown),
                partial(dict, shown),
            )
            for name, shown in entered.items()
        },
        read_messages=messages.__getitem__,
        **(waits or {**nothing, "text": ""}),
    )


def _keys(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Return a number for every group, as the dumps name groups by text."""
    entries = [entry for dump in dumps.values() for entry in dump.get("entries", ())]
    group_names = sorted({str(entry["process_group"][0]) for entry in entries})
    return {name: number for number, name in enumerate(group_names, 1)}


def _where(frames: Any) -> str:
    """Return the innermost line of the user's code in a dump's frames (innermost frame first)."""
    found = innermost(((str(f["filename"]), int(f["line"])) for f in frames), {})
    return named(*found, {}) if found else ""
