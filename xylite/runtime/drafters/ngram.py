"""Prompt lookup: what followed the last time the text ended like this.

Source: Saxena, Prompt Lookup Decoding, 2023. Texts that quote their prompt (edits, summaries, code)
repeat long runs of it, so the continuation of an earlier occurrence is a good draft.
"""

from xylite.runtime.drafters import DraftOptions
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence

MAX_CANDIDATES = 16  # earlier occurrences compared, latest first
MAX_GROWTH = 8192  # tokens indexed in one iteration: about 3 ms of the event loop


class Index:
    """The latest earlier place before each place where the same `size` tokens come before it.

    A place is the position of the token that follows, or is to follow: the text's end is one, so
    what continued it before is known as soon as it is indexed. Two runs of one hash are told apart
    when the tokens before a place are compared.

    under  index of the text's beginning, when several texts share it
    end    places up to it are indexed
    """

    __slots__ = ("_before", "_first", "_last", "end", "size", "under")

    def __init__(self, size: int, start: int = 0, under: "Index | None" = None):
        self.size = size
        self.under = under
        self._first = max(start, size)
        self.end = self._first - 1
        self._last: dict[int, int] = {}
        self._before: list[int] = []

    def grow(self, tokens: list[int], end: int) -> None:
        """Index the places up to `end`; tokens[:end] never change."""
        start, size = self.end + 1, self.size
        if end < start:
            return
        last, before, under = self._last, self._before, self.under
        runs = (tokens[start - size + i : end - size + i + 1] for i in range(size))
        for place, key in enumerate(map(hash, zip(*runs, strict=True)), start):
            latest = last.get(key, -1)
            before.append(under._latest(key) if latest < 0 and under is not None else latest)
            last[key] = place
        self.end = end

    def _latest(self, key: int) -> int:
        place = self._last.get(key, -1)
        return self.under._latest(key) if place < 0 and self.under is not None else place

    def _earlier(self, place: int) -> int:
        if place >= self._first:
            return self._before[place - self._first]
        return -1 if self.under is None else self.under._earlier(place)

    def find(self, tokens: list[int], longest: int) -> tuple[int, int]:
        """The place whose preceding tokens agree longest with the end of `tokens`, which is
        indexed, and how many.

        The latest such place; at least `size` tokens agree and no more than `longest` are
        compared. (-1, 0) if there is none.
        """
        end = len(tokens)
        place = self._earlier(end)
        best, best_length = -1, self.size - 1
        for _ in range(MAX_CANDIDATES):
            if place < 0 or best_length >= longest:
                break
            length, most = 0, min(longest, place)
            if most > best_length and tokens[place - best_length - 1] != tokens[-best_length - 1]:
                most = 0  # not longer than the best
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._earlier(place)
        return (best, best_length) if best >= 0 else (-1, 0)


class _Track:
    """One sequence's index, and what was found for its present length."""

    __slots__ = ("index", "length", "matched", "place")

    def __init__(self, index: Index):
        self.index = index
        self.length = -1
        self.place = -1
        self.matched = 0


class Ngram:
    """Looks up the longest recent match of the text's end, in prompt and output.

    The sequences of one request share the index of their prompt.
    """

    on_device = False

    def __init__(self, num_tokens: int, lookup_min: int, lookup_max: int):
        self._num_tokens = num_tokens
        self._min = lookup_min
        self._max = lookup_max
        self._tracks: dict[Sequence, _Track] = {}
        self._prompts: dict[str, tuple[Index, set[int]]] = {}
        self._growth_left = MAX_GROWTH

    def begin_iteration(self) -> None:
        self._growth_left = MAX_GROWTH

    def expects(self, seq: Sequence) -> int:
        return self._num_tokens if self._look(seq).place >= 0 else 0

    def match(self, seq: Sequence) -> int:
        return self._look(seq).matched

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        return [self._draft(seq, n) for seq, n in wanted]

    def _draft(self, seq: Sequence, n: int) -> Draft | None:
        place = self._look(seq).place
        if place < 0:
            return None
        tokens = seq.tokens
        draft = tokens[place : place + n]
        period = len(tokens) - place
        while len(draft) < n:  # the match reaches the end: the text repeats itself
            draft.append(draft[len(draft) - period])
        return Draft(tuple(draft))

    def _look(self, seq: Sequence) -> _Track:
        """Where the sequence's end was found: -1 if nowhere, or the index is not complete yet."""
        track = self._tracks.get(seq)
        if track is None:
            track = self._tracks[seq] = self._new(seq)
        length = len(seq.tokens)
        if track.length != length:
            track.length = length
            track.place, track.matched = -1, 0
            prompt = track.index.under
            assert prompt is not None
            if self._grow(prompt, seq, seq.num_prompt) and self._grow(track.index, seq, length):
                track.place, track.matched = track.index.find(seq.tokens, self._max)
        return track

    def _grow(self, index: Index, seq: Sequence, end: int) -> bool:
        """Index the places up to `end`, as far as this iteration's limit goes; whether all are."""
        num = min(max(end - index.end, 0), self._growth_left)
        index.grow(seq.tokens, index.end + num)
        self._growth_left -= num
        return index.end >= end

    def _new(self, seq: Sequence) -> _Track:
        prompt, users = self._prompts.setdefault(seq.request.id, (Index(self._min), set()))
        users.add(seq.index)
        return _Track(Index(self._min, seq.num_prompt + 1, prompt))

    def forget(self, seq: Sequence) -> None:
        if self._tracks.pop(seq, None) is None:
            return
        _, users = self._prompts[seq.request.id]
        users.discard(seq.index)
        if not users:
            del self._prompts[seq.request.id]


def make(options: DraftOptions) -> Ngram:
    return Ngram(options.num_tokens, options.lookup_min, options.lookup_max)
