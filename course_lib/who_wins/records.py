"""Results on disk, one line of JSON each, so that no run is repeated.

A line is written in one piece and flushed before the next run starts. If a run is killed while it
writes, the last line is broken; reading the file drops it.
"""

import json
from pathlib import Path
from typing import Any


class Records:
    """The results in one file, by key; the first result creates the file.

    Raises:
        ValueError: a line in the middle cannot be read, so this is not a file of results.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_key: dict[str, Any] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        *whole, rest = text.split("\n")
        for number, line in enumerate(whole, 1):
            try:
                record = json.loads(line)
                self._by_key[_name(record["key"])] = record["value"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number} is not a result: move the file away, or choose another "
                    "--folder"
                ) from None
        if rest:
            path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: dict[str, Any]) -> bool:
        return _name(key) in self._by_key

    def __getitem__(self, key: dict[str, Any]) -> Any:
        return self._by_key[_name(key)]

    def add(self, key: dict[str, Any], value: Any) -> None:
        """Store a result, and write it to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self._by_key[_name(key)] = value


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
