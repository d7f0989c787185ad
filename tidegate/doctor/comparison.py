"""Compares the states of two episodes, whatever they consist of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ATOMS = (str, bytes, int, float, complex, type(None), frozenset, set)
"""Types that are compared by `==` alone."""
_Seen = dict[tuple[int, int], tuple[Any, Any]]
"""Pairs of objects that were compared, or are being compared, by their ids."""


class IncomparableError(Exception):
    """A part of a state has neither an equality of its own nor a content that can be read."""


def difference(one: Any, other: Any, place: str = "state") -> str | None:
    """Returns the first place at which two values differ, as `state['orders'][0]`; None if they are equal.

    Containers are compared by their elements, other objects by their own equality or by what they give to
    `pickle`.

    Raises:
        IncomparableError: A part of them cannot be compared.
    """
    return _difference(one, other, place, {})


def _difference(one: Any, other: Any, place: str, seen: _Seen) -> str | None:
    if one is other or (id(one), id(other)) in seen:
        return None
    seen[id(one), id(other)] = one, other
    if type(one) is not type(other):
        return place
    if isinstance(one, ATOMS):
        return None if one == other or (one != one and other != other) else place
    if _equal(one, other):
        return None
    parts, others = list(_parts(one, place)), list(_parts(other, place))
    if [at for at, _ in parts] != [at for at, _ in others]:
        return place
    found = (
        _difference(part, parallel, at, seen) for (at, part), (_, parallel) in zip(parts, others, strict=True)
    )
    return next((at for at in found if at is not None), None)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - an array's equality is an array; its parts are compared instead
        return False


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value, with their places."""
    if isinstance(value, dict):
        yield from sorted(
            ((f"{place}[{key!r}]", part) for key, part in value.items()), key=lambda part: part[0]
        )
        return
    if isinstance(value, list | tuple):
        yield from ((f"{place}[{index}]", part) for index, part in enumerate(value))
        return
    try:
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise IncomparableError(f"{place} is a {type(value).__name__}, which cannot be compared") from error
    if isinstance(reduced, str):
        yield place, reduced
        return
    make, arguments, content, items, pairs = (*reduced, None, None, None)[:5]
    yield place, getattr(make, "__qualname__", repr(make))
    yield from _contents(arguments, place)
    yield from _contents(content, place)
    yield from ((f"{place}[{index}]", part) for index, part in enumerate(items or ()))
    yield from ((f"{place}[{key!r}]", part) for key, part in pairs or ())


def _contents(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object; those in slots are the second group."""
    for group in content if isinstance(content, tuple) else (content,):
        if isinstance(group, dict) and all(isinstance(name, str) for name in group):
            yield from ((f"{place}.{name}", part) for name, part in group.items())
        elif not isinstance(group, type):
            yield place, group
