"""The cases of `verify`."""

from __future__ import annotations

from collections.abc import Sequence

from mha_deploy.cases.case import Case
from mha_deploy.cases.draw import drawn, drawn_often, scaled
from mha_deploy.cases.masks import fully_masked, garbage, ragged
from mha_deploy.cases.real import real_case
from mha_deploy.cases.sizes import Sizing
from mha_deploy.ragged import Request
from mha_deploy.spec import AttentionSpec


def standard_cases(spec: AttentionSpec, requests: Sequence[Request] = (), seed: int = 0) -> list[Case]:
    """The cases of `verify`: sizes, masks, garbage, magnitudes, and real inputs where there are some."""
    sizing = Sizing(spec)
    small = sizing.small()
    cases = [
        drawn_often(spec, "min", {dim.name: dim.min for dim in spec.dims}, seed),
        drawn(spec, "opt", {dim.name: dim.opt for dim in spec.dims}, seed),
    ]
    cases += [drawn(spec, name, sizes, seed) for name, sizes in sizing.largest()]
    cases.append(drawn(spec, "odd", {dim.name: sizing.odd(dim.name) for dim in spec.dims}, seed))
    if spec.mask != "none":
        cases += [
            ragged(spec, drawn(spec, "ragged-padding", small, seed), seed),
            ragged(spec, drawn(spec, "ragged-long", sizing.long(), seed), seed),
            fully_masked(spec, ragged(spec, drawn(spec, "fully-masked-row", small, seed), seed)),
            garbage(spec, ragged(spec, drawn(spec, "padding-garbage", small, seed), seed), seed),
        ]
    cases.append(scaled(drawn(spec, "large-values", small, seed), 1000.0))
    cases.append(scaled(drawn(spec, "sharp-softmax", small, seed), 4.0))
    if requests:
        cases.append(real_case(spec, "real-inputs", requests))
    return cases
