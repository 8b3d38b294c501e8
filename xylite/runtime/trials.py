"""Who makes iterations fail: those who were in a failed one are tried in ever smaller groups.

An iteration fails as a whole, and says nothing about whose data it was. So its sequences start over
in two halves, one after the other and with nobody else, and a half that fails is halved again. A
sequence whose iteration fails while it is alone in it is the one; a sequence that gained a token
meanwhile is cleared, and goes on with the others.
"""

from xylite.runtime.sequence import Sequence

MAX_FAILURES = 32  # a sequence that was in so many failed iterations ends, cleared or not

Group = dict[Sequence, int]  # with the number of output tokens when it was accused


class Trials:
    """Groups of accused sequences; the last one is tried next."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def accuse(self, members: list[Sequence]) -> list[Sequence]:
        """An iteration of these sequences failed: those of them that have to end."""
        guilty = [s for s in members if len(members) == 1 or s.num_failures >= MAX_FAILURES]
        left = [s for s in members if s not in guilty]
        for group in self._groups:
            for seq in members:
                group.pop(seq, None)
        half = len(left) // 2
        for part in (left[half:], left[:half]):
            if part:
                self._groups.append({s: s.num_output for s in part})
        for seq in left:
            seq.num_failures += 1
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
