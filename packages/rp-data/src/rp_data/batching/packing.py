"""Pack several documents into each sequence, with little space left over."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Put documents into sequences of `size` tokens; return the documents of each, by number.

    Best fit, the longest first (Johnson et al., 1974): needs at most 11/9 of the fewest sequences, and one.
    Documents of one length are taken in the order given.

    >>> packed([3, 5, 2, 4, 1], size=6)
    [[1, 4], [3, 2], [0]]

    `lengths`: each at most `size`.
    """
    rows: list[list[int]] = []
    # The rows by the room left in them, and these amounts in order.
    with_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room, row = size, list[int]()
            rows.append(row)
        row.append(document)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return rows
