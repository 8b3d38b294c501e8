"""Who makes iterations fail: those who were in a failed one are tried in ever smaller groups.

An iteration fails as a whole, and says nothing about whose data it was. So its sequences start over
in two halves, one after the other and with nobody else, and a half that fails is halved again. A
sequence whose iteration fails while it is alone in it is the one; a sequence that gained a token
meanwhile is cleared, and goes on with the others.

Some faults need two sequences together, and nobody is ever found. Therefore a sequence also ends
after many failures none of which could be laid to anybody.
"""

from xylite.runtime.sequence import Sequence

MAX_FAILURES = 32  # failed iterations that a sequence may have been in since anybody was found

Group = dict[Sequence, int]  # with the number of output tokens when it was accused


class Trials:
    """Groups of accused sequences; the last one is tried next."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._failures: dict[Sequence, int] = {}  # since anybody was found

    def accuse(self, members: list[Sequence], *, alone: bool) -> list[Sequence]:
        """An iteration of these sequences failed: those of them that have to end.

        alone  there was nobody else in it, not even one that has ended meanwhile
        """
        if alone:
            self._failures.clear()
            guilty = members
        else:
            known = self._failures
            self._failures = {s: n for s, n in known.items() if s.finish is None}
            self._failures.update((s, known.get(s, 0) + 1) for s in members)
            guilty = [s for s in members if self._failures[s] > MAX_FAILURES]
        left = [s for s in members if s not in guilty]
        for group in self._groups:
            for seq in members:
                group.pop(seq, None)
        half = len(left) // 2
        for part in (left[half:], left[:half]):
            if part:
                self._groups.append({s: s.num_output for s in part})
        return guilty

    def current(self) -> Group | None:
        """The group to try now; None if nobody is accused any more."""
        while self._groups:
            group = self._groups[-1]
            for seq, num in list(group.items()):
                if seq.finish is not None or seq.num_output > num:
                    del group[seq]
            if group:
                return group
            self._groups.pop()
        return None

    def drop(self) -> None:
        """Clear everybody."""
        self._groups.clear()
