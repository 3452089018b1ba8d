"""--keep-fp32: nodes named on the command line, or in the file that `verify --locate` writes."""

from __future__ import annotations

from collections.abc import Sequence

import click

keep_fp32_option = click.option(
    "--keep-fp32",
    multiple=True,
    metavar="FILE|NODE,...",
    help="Nodes to compute in fp32: names, or the file of `verify --locate`.",
)


def keep_fp32_names(texts: Sequence[str]) -> list[str]:
    """The names of all, in the order given.

    Raises:
        InputError: a file holds no list of nodes.
    """
    if not texts:
        return []
    from mha_deploy.islands import read_keep_fp32

    return [name for text in texts for name in read_keep_fp32(text)]
