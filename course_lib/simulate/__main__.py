"""The command line: ``python -m course_lib.simulate step | search | published``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_type_hints

from course_lib.simulate.cluster import CLUSTERS
from course_lib.simulate.layout import Layout
from course_lib.simulate.published import load, number_of
from course_lib.simulate.report import estimate_table, found_table, runs_table
from course_lib.simulate.search import search
from course_lib.simulate.step_time import estimate
from course_lib.simulate.transformer import Transformer

_EXAMPLES = """\
examples:
  python -m course_lib.simulate step --like "Megatron 146B, 1536"
  python -m course_lib.simulate step --like "Megatron 146B, 1536" --data 12 --batch 1152
  python -m course_lib.simulate step --layers 8 --width 2048 --heads 16 --vocabulary 50000 \\
      --cluster selene --tensor 4 --data 2 --batch 8
  python -m course_lib.simulate search --like "MPT 30b, 8 H100" --ranks 512 --batch 1024
  python -m course_lib.simulate published
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.simulate",
        description="Predict the time, memory and bytes of a training step.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step = commands.add_parser("step", help="time, memory and bytes of one step")
    _add_fields(step, Transformer)
    _add_fields(step, Layout)
    step.set_defaults(run=_step)
    searching = commands.add_parser("search", help="the ten fastest layouts that fit")
    _add_fields(searching, Transformer)
    searching.add_argument("--ranks", type=int, required=True, help="number of devices")
    searching.add_argument("--batch", type=int, required=True, help="sequences per step")
    searching.set_defaults(run=_search)
    for command in (step, searching):
        command.add_argument(
            "--like", help="start from the published run whose name begins like this"
        )
        command.add_argument(
            "--cluster", choices=CLUSTERS, help="default: the cluster of --like, else selene"
        )
    published = commands.add_parser("published", help="published runs beside predictions")
    published.set_defaults(run=_published)
    return parser


def _add_fields(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add a dataclass's fields as options, with the names in its documentation."""
    group = parser.add_argument_group(kind.__name__.lower())
    hints = get_type_hints(kind)
    for field in fields(kind):
        flag = "--" + field.name.replace("_", "-")
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            group.add_argument(flag, type=str if field.name == "recompute" else number_of)


def _chosen(options: argparse.Namespace) -> tuple[Transformer, str, Layout]:
    """Return model, cluster and layout: those of --like, changed by the other options."""
    model: dict[str, Any] = {}
    layout: dict[str, Any] = {}
    cluster = options.cluster or "selene"
    if options.like is not None:
        runs = [run for run in load() if run.name.startswith(options.like)]
        if not runs:
            names = "\n  ".join(run.name for run in load())
            raise ValueError(f"no published run begins with {options.like!r}. Runs:\n  {names}")
        model, layout = asdict(runs[0].model), asdict(runs[0].layout)
        cluster = options.cluster or runs[0].cluster
    chosen = {name: value for name, value in vars(options).items() if value is not None}
    model |= {
        field.name: chosen[field.name] for field in fields(Transformer) if field.name in chosen
    }
    layout |= {field.name: chosen[field.name] for field in fields(Layout) if field.name in chosen}
    lacking = [name for name in ("layers", "width", "heads", "vocabulary") if name not in model]
    if lacking:
        raise ValueError(f"give --{' --'.join(lacking)}, or --like with a published run")
    return Transformer(**model), cluster, Layout(**layout)


def _step(options: argparse.Namespace) -> int:
    model, name, layout = _chosen(options)
    cluster = CLUSTERS[name]
    print(estimate_table(name, cluster, layout, estimate(model, cluster, layout)))
    return 0


def _search(options: argparse.Namespace) -> int:
    options.batch, batch = None, options.batch
    model, name, like = _chosen(options)
    print(found_table(search(model, CLUSTERS[name], options.ranks, batch, like)))
    return 0


def _published(_: argparse.Namespace) -> int:
    print(runs_table(load()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
