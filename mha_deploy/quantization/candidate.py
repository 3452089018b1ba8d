"""What is tried: how activations get their scales, whether they are smoothed, what stays in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.errors import InputError
from mha_deploy.quantization.products import Graph, Product, widths

INT8 = "int8"  # the artifact's name
STATIC, DYNAMIC, PER_TOKEN = "static", "dynamic", "per-token"
SCHEMES = {"auto": (STATIC, DYNAMIC, PER_TOKEN), "dynamic": (DYNAMIC, PER_TOKEN), "static": (STATIC,)}
SCALES = {
    STATIC: "one scale for each activation, calibrated",
    DYNAMIC: "one scale for each activation and batch",
    PER_TOKEN: "one scale for each token",
}
# Roles whose products stay in fp32: each half of the value path, which carries what attention reads,
# then both.
KEPT_ROLES = ((), ("output",), ("value",), ("value", "output"))

# Rough costs on x86 with VNNI, in fp32 multiply-adds. They order the search and are shown nowhere:
# what a report says of speed was measured.
_INT8_PRODUCT = 0.45
_PASS_OVER_AN_ELEMENT = 16.0
_PASSES_IN = {STATIC: 1, DYNAMIC: 2, PER_TOKEN: 4}
_PASSES_OUT = {STATIC: 0, DYNAMIC: 0, PER_TOKEN: 1}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Every product in int8, weights scaled by output channel, but for the roles in `keep`."""

    scheme: str
    smooth: bool = False
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        smoothed = ", smoothed" if self.smooth else ""
        kept = f", {' and '.join(self.keep)} in fp32" if self.keep else ""
        return f"{self.scheme}{smoothed}{kept}"

    def taken(self, products: Sequence[Product], keep_fp32: Sequence[str] = ()) -> tuple[Product, ...]:
        """The products that go to int8."""
        return tuple(p for p in products if p.role not in self.keep and p.node not in keep_fp32)


def candidates(scheme: str, graph: Graph, products: Sequence[Product]) -> list[Candidate]:
    """All that `scheme` ("auto", "dynamic" or "static") allows, cheapest first.

    Raises:
        InputError: no such scheme.
    """
    if scheme not in SCHEMES:
        raise InputError(f"scheme {scheme!r}; expected one of {', '.join(SCHEMES)}")
    found = []
    for each in SCHEMES[scheme]:
        found.append(Candidate(each))
        found += [Candidate(each, True, keep) for keep in KEPT_ROLES]
    return sorted(found, key=lambda candidate: predicted_cost(candidate, graph, products))


def predicted_cost(candidate: Candidate, graph: Graph, products: Sequence[Product]) -> float:
    """Of one token in the projections, in fp32 multiply-adds; a guess that orders the search."""
    cost = 0.0
    taken = candidate.taken(products)
    for product in products:
        rows, columns = widths(graph, product)
        cost += rows * columns * (_INT8_PRODUCT if product in taken else 1.0)
        cost += columns * _PASSES_OUT[candidate.scheme] * _PASS_OVER_AN_ELEMENT * (product in taken)
    for rows in {product.activation: widths(graph, product)[0] for product in taken}.values():
        cost += rows * (_PASSES_IN[candidate.scheme] + candidate.smooth) * _PASS_OVER_AN_ELEMENT
    return cost
