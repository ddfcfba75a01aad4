"""PyTorch's own tests of DDP, with our class or with PyTorch's, on plain gloo.

    python -m tests.helpers.pytorch_ddp_tests                      # our DDP
    python -m tests.helpers.pytorch_ddp_tests --ddp pytorch        # what can pass on a CPU at all

A line per test: passed, failed or skipped, and why. Names (or parts of them) choose some.

Plain gloo has nothing of ours but the class: K processes per test, which fork from this one.
"""

import argparse
import json
import warnings
from pathlib import Path

from tests.helpers import pytorch_source
from tests.helpers.pytorch_on_gloo import CLASSES, verdicts


def main() -> None:
    """Run what the command line chooses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--ddp", choices=list(CLASSES), default="ours")
    parser.add_argument("--json", help="a file for the verdicts")
    args = parser.parse_args()
    names = pytorch_source.test_names()
    names = [n for n in names if not args.names or any(part in n for part in args.names)]
    warnings.simplefilter("ignore")
    found = {}
    for name, verdict in verdicts(names, args.ddp):
        found[name] = verdict
        print(f"{verdict[:7]:8}{name}{verdict[7:]}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    count = {
        w: sum(v.startswith(w) for v in found.values()) for w in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{number} {word}" for word, number in count.items()))


if __name__ == "__main__":
    main()
