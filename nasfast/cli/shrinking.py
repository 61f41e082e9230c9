"""The command `shrink`: its flags, what it refuses, and what it does."""

from __future__ import annotations

import logging

from nasfast.cli.flags import Command, CommandLine, Parser
from nasfast.display import text_table
from nasfast.pipeline.shrinking.run import ShrinkConfig, settings_of
from nasfast.runtime.lock import check_free

_LOG = logging.getLogger(__name__)


def shrink_flags(parser: Parser) -> None:
    text = "go on in --out: what is finished is kept; the limits may be others"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "only print what is searched, and the minutes and memory of each stage"
    parser.add_argument("--dry_run", action="store_true", help=text)
    parser.add_class_arguments(ShrinkConfig)


def shrink(line: CommandLine) -> None:
    """A smaller network from a pretrained one; or only the plan."""
    values = dict(line.values)
    resume, dry_run = values.pop("resume", False), values.pop("dry_run", False)
    cfg = settings_of(values, resume=resume)
    cfg.check_begins()
    if dry_run:
        from nasfast.pipeline.shrinking.plan import plan_shrink  # imports torch

        print(plan_shrink(cfg))
        return
    check_free(cfg.out, create=True)
    if "out" not in values:
        _LOG.info("everything is written to %s, because --out gives no other folder", cfg.out)
    from nasfast.pipeline.shrinking.stages import shrink_network  # imports torch

    result = shrink_network(cfg, resume=resume)
    records = result.records()
    print("\n".join(text_table([list(records[0]), *([str(v) for v in row.values()] for row in records)])))
    print("\n".join([result.headline, *result.verdicts]))
    print(f"report: {result.report}")
    for file in result.files:
        print(f"written: {file}")


COMMANDS = {
    "shrink": Command("a smaller network from a pretrained one, your images and a limit", shrink_flags, shrink),
}
