"""What a pass consists of: which rows, in which order, and where their keys and values go.

Requests come with different numbers of rows. The linear layers take all rows at once, whatever their order; attention
takes requests of one row count per call. So rows are sorted by the row counts of their requests, and each count's rows
lie side by side. Passes of the same counts are the same work on the same buffers: they are captured once (llama.py).
"""

from typing import NamedTuple

from .cache import slots


class Piece(NamedTuple):
    """What one pass does of a part (base.py). ``last`` of its rows are wanted."""

    cache: object
    tokens: list
    last: int
    parents: list | None = None


class Span(NamedTuple):
    """Rows at consecutive positions from ``first`` on, under one page table.

    ``slots``: where their keys and values go. ``copies``: where else, once per further path of a tree; -1 = nowhere.
    """

    tokens: list
    first: int
    last: int
    table: object
    slots: list
    copies: list


def cut(parts, rows):
    """Parts as passes of at most ``rows`` rows each: lists of pieces. The nodes of a tree stay together.

    A generator: where a piece begins depends on the passes before it.
    """
    pieces, room = [], rows
    for cache, tokens, last, parents in parts:
        n, at = len(tokens), 0
        together = 0 if parents is None else n if n <= rows else 1 + len(parents)
        if together > rows:
            raise ValueError(f"parents: expected a tree of at most {rows - 1} nodes, got {len(parents)}")
        while at < n - together:
            stop = min(at + room, n - together)
            pieces.append(Piece(cache, tokens[at:stop], max(0, stop - max(at, n - last))))
            room -= stop - at
            at = stop
            if not room or (at == n - together and together):  # a tree's cache has to hold what is before it
                yield pieces
                pieces, room = [], rows
        if together:
            if together > room:
                yield pieces
                pieces, room = [], rows
            pieces.append(Piece(cache, tokens[at:], last, parents))
            room -= together
    if pieces:
        yield pieces


def spans(piece):
    cache, tokens, last, parents = piece
    start, n = cache.length, len(tokens)
    if parents is None:
        return [Span(tokens, start, last, cache.table, cache.slots(start, start + n), [])]
    chain = n - len(parents)
    tree = cache.grow_tree(chain, parents)
    place = lambda way, first, count: slots(tree.pages[way], range(first, first + count))
    others = [place(way, start, chain) for way in range(1, len(tree.pages))]
    found = [Span(tokens[:chain], start, 1, cache.table, place(0, start, chain), others)]
    for token, depth, (way, *more) in zip(tokens[chain:], tree.depths, tree.ways, strict=True):
        at = start + chain - 1 + depth
        found.append(Span([token], at, 1, tree.tables[way], place(way, at, 1), [place(w, at, 1) for w in more]))
    return found


class Layout:
    """The rows of a pass in the order in which they are computed.

    ``groups``: (rows, spans of so many rows) in that order; ``spans``: sorted likewise; ``copies``: how often keys and
    values are written besides the first time. ``wanted``: numbers of the rows whose logits are wanted, in the caller's
    order; ``in_order``: whether those are the last rows as they are. ``ends``: behind the last row of each span, in the
    caller's order.
    """

    def __init__(self, spans):
        if len(spans) == 1:  # a chain, nearly always
            ((tokens, _, last, *_, copies),) = self.spans = spans
            n = self.rows = len(tokens)
            self.groups, self.ends, self.wanted = ((n, 1),), (n,), range(n - last, n)
            self.in_order, self.copies = True, len(copies)
            self.shape = self.groups, last, True, self.copies
            return
        order = sorted(range(len(spans)), key=lambda i: len(spans[i].tokens))
        self.spans, groups, ends, at = [spans[i] for i in order], {}, [0] * len(spans), 0
        for i, span in zip(order, self.spans, strict=True):
            n = len(span.tokens)
            groups[n] = groups.get(n, 0) + 1
            ends[i] = at = at + n
        self.rows, self.groups, self.ends = at, tuple(groups.items()), ends
        self.wanted = [row for i, span in enumerate(spans) for row in range(ends[i] - span.last, ends[i])]
        self.in_order = self.wanted == list(range(at - len(self.wanted), at))
        self.copies = max(len(span.copies) for span in spans)
        self.shape = self.groups, len(self.wanted), self.in_order, self.copies

    def places(self, pieces):
        """For each of the pieces that the spans are of: (piece, rows of its chain, rows of its nodes), as slices."""
        at = 0
        for piece in pieces:
            count = len(piece.parents or ())
            end, last = self.ends[at], self.ends[at + count]
            # Nodes are spans of one row each, which lie one behind the other here as they do in their tree.
            yield piece, slice(end - len(piece.tokens) + count, end), slice(last - count, last)
            at += 1 + count

    def numbers(self):
        """[3 + copies, rows] in one list: ids, positions, slots, slots of the copies."""
        ids, positions, places, copies = [], [], [], [[] for _ in range(self.copies)]
        for span in self.spans:
            n = len(span.tokens)
            ids += span.tokens
            positions += range(span.first, span.first + n)
            places += span.slots
            for i, copy in enumerate(copies):
                copy += span.copies[i] if i < len(span.copies) else [-1] * n
        return [*ids, *positions, *places, *(slot for copy in copies for slot in copy)]
