"""Which input of a foreign file is which of a bundle's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha_deploy.errors import InputError
from mha_deploy.signature import TensorSpec

BY_NAME, AS_NAMED, BY_SHAPE = "by name", "as named", "by shape and dtype"


@dataclass(frozen=True, slots=True)
class Pair:
    """`theirs` takes what `ours` is fed; `how` they were found to be one."""

    ours: TensorSpec
    theirs: TensorSpec
    how: str

    def __str__(self) -> str:
        return f"{self.theirs.name} = {self.ours.name} ({self.how})"


def parse_names(texts: Sequence[str]) -> list[tuple[str, str]]:
    """`ours=theirs`, each.

    Raises:
        InputError: a text is no such pair.
    """
    pairs = [tuple(part.strip() for part in text.split("=")) for text in texts]
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2 or not all(pair):
            raise InputError(
                f"--input-name {text!r}; expected the bundle's name and the file's, as ours=theirs"
            )
    return [(pair[0], pair[1]) for pair in pairs]


def match_inputs(
    ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec], named: Sequence[tuple[str, str]] = ()
) -> tuple[Pair, ...]:
    """A pair for every input of the file: as `named`, else by name, else by shape where only one fits.

    An input of ours may feed several of theirs, where `named` says so. A mask of ours that the file
    does not take is left out.

    Raises:
        InputError: an input of the file fits none or several of ours, or one of ours that is no mask
            is taken by none of theirs.
    """
    left = {tensor.name: tensor for tensor in theirs}
    ours_by_name = {tensor.name: tensor for tensor in ours}
    pairs = []
    for our_name, their_name in named:
        if our_name not in ours_by_name or their_name not in left:
            raise InputError(
                f"--input-name {our_name}={their_name}: the bundle has {_listed(ours)}; the file has "
                f"{_listed(theirs)}, each to be named once"
            )
        pairs.append(Pair(ours_by_name[our_name], left.pop(their_name), AS_NAMED))
    for name in [name for name in left if name in ours_by_name]:
        if all(pair.ours.name != name for pair in pairs):
            pairs.append(Pair(ours_by_name[name], left.pop(name), BY_NAME))
    pairs += _by_shape(ours, left, {pair.ours.name for pair in pairs})
    _check_widths(pairs)
    missing = [t for t in ours if t.is_float and all(pair.ours.name != t.name for pair in pairs)]
    if left or missing:
        raise InputError(_unmatched(list(left.values()), missing, ours))
    return tuple(pairs)


def _by_shape(ours: Sequence[TensorSpec], left: dict[str, TensorSpec], taken: set[str]) -> list[Pair]:
    """Pairs of which neither half fits anything else; what is paired is taken out of `left`."""
    pairs: list[Pair] = []
    free = [tensor for tensor in ours if tensor.name not in taken]
    while True:
        fits = {t.name: [o for o in free if _fits(o, t)] for t in left.values()}
        single = [
            (fit[0], left[name])
            for name, fit in fits.items()
            if len(fit) == 1 and sum(fit[0] in other for other in fits.values()) == 1
        ]
        if not single:
            return pairs
        our, their = single[0]
        pairs.append(Pair(our, left.pop(their.name), BY_SHAPE))
        free.remove(our)


def _fits(ours: TensorSpec, theirs: TensorSpec) -> bool:
    if not ours.is_float:
        return looks_like_mask(theirs)
    return theirs.is_float and len(theirs.shape) == 3 and theirs.shape[-1] == ours.shape[-1]


def looks_like_mask(tensor: TensorSpec) -> bool:
    """Boolean, or called a mask, or floating point whose last axis moves, as that of keys does."""
    moves = tensor.is_float and isinstance(tensor.shape[-1] if tensor.shape else 0, str)
    return len(tensor.shape) in (2, 3, 4) and (
        tensor.dtype == "bool" or "mask" in tensor.name.lower() or moves
    )


def _check_widths(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        ours, theirs = pair.ours, pair.theirs
        if ours.is_float and (
            not theirs.is_float
            or len(theirs.shape) != len(ours.shape)
            or (isinstance(theirs.shape[-1], int) and theirs.shape[-1] != ours.shape[-1])
        ):
            raise InputError(
                f"the file's input {theirs} does not take the bundle's {ours}; it is another block's"
            )


def _unmatched(
    theirs: Sequence[TensorSpec], missing: Sequence[TensorSpec], ours: Sequence[TensorSpec]
) -> str:
    names = [tensor.name for tensor in theirs]
    if theirs:
        what = f"which of the bundle's inputs the file's {_listed(theirs)} takes cannot be told"
    else:
        what = f"the file takes nothing for the bundle's {_listed(missing)}"
    example = f"{(missing or ours)[0].name}={names[0] if names else 'THEIRS'}"
    return f"{what}; the bundle has {_listed(ours)}. Say it with --input-name {example}"


def _listed(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(str(tensor) for tensor in tensors)


def describe(pairs: Sequence[Pair]) -> Mapping[str, str]:
    return {pair.theirs.name: f"{pair.ours.name}, {pair.how}" for pair in pairs}
