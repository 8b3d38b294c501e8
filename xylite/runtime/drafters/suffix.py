"""Suffix decoding: what most often followed the longest known end of the text.

Suffix automata (Blumer et al. 1985) of the prompt, of the sequence's own output, and of recent
outputs of others find the longest end of the text that occurred before, in constant time per token.
Each counts what followed. Drafts grow where the next token is likeliest, so they are chains where
one continuation stands out and trees where several do. Source of the idea: Oliaro et al.,
SuffixDecoding, 2024.
"""

from collections import OrderedDict, deque
from heapq import heappop, heappush, nlargest

from xylite.runtime.drafters import DraftOptions
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence

MIN_MATCH = 1  # shortest end of the text that is continued
MAX_BRANCHES = 3  # continuations considered after one token
MAX_GROWTH = 2048  # tokens that automata learn in one iteration: about 5 ms of the event loop
MAX_ENDED_GROWTH = 256  # the same for ended outputs, which are learnt between other work
MAX_PROMPT_TOKENS = 2**15  # of a longer prompt only the end is learnt: 16 MB
MAX_PROMPTS_TOKENS = 2**18  # of all running prompts; of those that come then, nothing is learnt
GENERATION_TOKENS = 2**15  # recent outputs of one salt: one or two generations, 0.5 KB a token
MAX_RECENT_TOKENS = 2**17  # of all salts together
SEED_TOKENS = 32  # of the text's end, to find where it is in a new generation


class Automaton:
    """All substrings of the texts it learnt, as states; edges are tokens and have counts.

    A state stands for the substrings that end at the same places; `link` leads to its longest
    suffix that also ends elsewhere. A token's count is raised in the longest context that has seen
    it before, and starts at 1 in the longer ones: PPM's update exclusion (Moffat 1990), which
    predicts better than full counts and keeps learning constant time per token.
    """

    __slots__ = ("_repeats", "edges", "length", "link", "num_tokens")

    def __init__(self) -> None:
        self.length = [0]
        self.link = [-1]
        self.edges: list[dict[int, int]] = [{}]
        self.num_tokens = 0
        self._repeats: dict[tuple[int, int], int] = {}

    def learn(self, last: int, token: int) -> int:
        """Add a token to the text that ends at state `last` (0: a new text); its new end."""
        edges, link = self.edges, self.link
        self.num_tokens += 1
        if token in edges[last]:  # another text went this way
            self._count(last, token)
            return self._own(last, token)
        new = self._state(self.length[last] + 1, 0, {})
        state = last
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            state = link[state]
        if state >= 0:
            self._count(state, token)
            link[new] = self._own(state, token)
        return new

    def _state(self, length: int, link: int, edges: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.edges.append(edges)
        return len(self.edges) - 1

    def _own(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring plus token, split off from longer ones."""
        edges, length, link = self.edges, self.length, self.link
        target = edges[state][token]
        if length[target] == length[state] + 1:
            return target
        split = self._state(length[state] + 1, link[target], dict(edges[target]))
        for t in edges[target]:
            repeats = self._repeats.get((target, t))
            if repeats is not None:
                self._repeats[split, t] = repeats
        link[target] = split
        while state >= 0 and edges[state].get(token) == target:
            edges[state][token] = split
            state = link[state]
        return split

    def _count(self, state: int, token: int) -> None:
        self._repeats[state, token] = self._repeats.get((state, token), 0) + 1

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow a text by one token: (state, length) of its longest end that is known here."""
        edges, link, length = self.edges, self.link, self.length
        while state and matched <= length[link[state]]:  # was split since
            state = link[state]
        while token not in edges[state]:
            state = link[state]
            if state < 0:
                return 0, 0
            matched = length[state]
        return edges[state][token], matched + 1

    def context(self, state: int, matched: int) -> tuple[int, int]:
        """The longest end of what (state, matched) stands for after which anything followed."""
        edges, link, length = self.edges, self.link, self.length
        while state and (not edges[state] or matched <= length[link[state]]):
            state = link[state]
            matched = min(matched, length[state])
        return state, matched

    def following(self, state: int) -> list[tuple[float, int]]:
        """The likeliest next tokens with their shares, best first."""
        repeats = self._repeats
        counts = [(1 + repeats.get((state, t), 0), t) for t in self.edges[state]]
        total = sum(c for c, _ in counts)
        return [(c / total, t) for c, t in nlargest(MAX_BRANCHES, counts)]


def grow_draft(automaton: Automaton, state: int, num_tokens: int, min_prob: float) -> Draft | None:
    """The `num_tokens` likeliest continuations of a context, by the product of shares on the way.

    Likelier tokens come first, so any beginning of the draft is the best draft of its length.
    """
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int]] = []

    def offer(state: int, parent: int, prob: float) -> None:
        state, _ = automaton.context(state, automaton.length[state])
        if automaton.length[state] < MIN_MATCH:
            return
        for share, token in automaton.following(state):
            if share * prob >= min_prob:
                heappush(heap, (-share * prob, len(heap) + len(tokens), token, parent, state))

    offer(state, -1, 1.0)
    while heap and len(tokens) < num_tokens:
        prob, _, token, parent, state = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        offer(automaton.edges[state][token], len(tokens) - 1, -prob)
    if not tokens:
        return None
    is_chain = parents == list(range(-1, len(parents) - 1))
    return Draft(tuple(tokens), None if is_chain else tuple(parents))


class _Prompt:
    """The automaton of a request's prompt, shared by its sequences; it learns piece by piece."""

    __slots__ = ("automaton", "end", "last", "size", "users")

    def __init__(self, num_prompt: int, most: int) -> None:
        self.automaton = Automaton()
        self.last = 0
        self.size = min(num_prompt, most)  # tokens of its end that are learnt
        self.end = num_prompt - self.size
        self.users: set[int] = set()

    def learn(self, tokens: list[int], end: int) -> None:
        for token in tokens[self.end : end]:
            self.last = self.automaton.learn(self.last, token)
        self.end = end


class _Recent:
    """Recent outputs under one cache salt: the generation that learns, and the one before."""

    __slots__ = ("generations", "num_requests")

    def __init__(self) -> None:
        self.generations = [Automaton()]
        self.num_requests = 0

    @property
    def num_tokens(self) -> int:
        return sum(g.num_tokens for g in self.generations)

    def begin(self, max_requests: int) -> Automaton:
        """The automaton for one more output."""
        full = self.generations[0].num_tokens >= GENERATION_TOKENS
        if full or 2 * self.num_requests >= max_requests:
            self.generations = [Automaton(), self.generations[0]]
            self.num_requests = 0
        self.num_requests += 1
        return self.generations[0]


class _Ended:
    """An output that is being learnt."""

    __slots__ = ("automaton", "last", "place", "salt", "tokens")

    def __init__(self, salt: str, tokens: list[int]):
        self.salt = salt
        self.tokens = tokens
        self.automaton: Automaton | None = None  # that of its beginning
        self.last = 0
        self.place = 0


class _Follower:
    """Where the end of a sequence is in an automaton that learns from elsewhere."""

    __slots__ = ("automaton", "matched", "state")

    def __init__(self, automaton: Automaton, state: int = 0, matched: int = 0):
        self.automaton = automaton
        self.state = state
        self.matched = matched

    def follow(self, tokens: list[int]) -> None:
        for token in tokens:
            self.state, self.matched = self.automaton.step(self.state, self.matched, token)


class _Track:
    """One sequence: the automaton of its output, and where its end is in the others."""

    __slots__ = ("best", "last", "length", "output", "prompt", "recent")

    def __init__(self) -> None:
        self.output = Automaton()
        self.last = 0
        self.length = -1  # tokens of the sequence that were looked at
        self.prompt: _Follower | None = None
        self.recent: list[_Follower] = []
        self.best: tuple[Automaton, int, int] | None = None


class Suffix:
    """Finds the longest known end of each text and proposes what followed it.

    Outputs are shared between sequences of one cache salt only, for the same reason as prefixes:
    how fast an answer comes must not tell what others asked.
    """

    on_device = False

    def __init__(self, options: DraftOptions):
        self._options = options
        self._tracks: dict[Sequence, _Track] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._recent: OrderedDict[str, _Recent] = OrderedDict()
        self._ended: deque[_Ended] = deque()
        self._prompts_size = 0
        self._recent_size = 0
        self._ended_size = 0  # tokens of ended outputs that are still to be learnt
        self._growth_left = MAX_GROWTH

    def begin_iteration(self) -> None:
        self._growth_left = MAX_GROWTH
        self._learn_ended()

    def expects(self, seq: Sequence) -> int:
        best = self._best(seq)
        return 0 if best is None else self._most(best[2])

    def match(self, seq: Sequence) -> int:
        best = self._best(seq)
        return 0 if best is None else best[2]

    def _most(self, matched: int) -> int:
        return min(self._options.num_tokens, int(matched * self._options.max_spec_factor))

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        return [self._draft(seq, n) for seq, n in wanted]

    def _draft(self, seq: Sequence, n: int) -> Draft | None:
        best = self._best(seq)
        if best is None:
            return None
        automaton, state, matched = best
        n = min(n, self._most(matched))
        return grow_draft(automaton, state, n, self._options.min_token_prob)

    def _best(self, seq: Sequence) -> tuple[Automaton, int, int] | None:
        """The automaton that knows the longest end of the sequence, where, and how long."""
        track = self._tracks.get(seq)
        if track is None:
            track = self._tracks[seq] = _Track()
            prompt = self._prompts.get(seq.request.id)
            if prompt is None:
                most = min(MAX_PROMPT_TOKENS, MAX_PROMPTS_TOKENS - self._prompts_size)
                prompt = self._prompts[seq.request.id] = _Prompt(seq.num_prompt, most)
                self._prompts_size += prompt.size
            prompt.users.add(seq.index)
        if track.length != len(seq.tokens):
            track.best = self._look(seq, track)
        return track.best

    def _look(self, seq: Sequence, track: _Track) -> tuple[Automaton, int, int] | None:
        prompt = self._prompts[seq.request.id]
        if prompt.end < seq.num_prompt:
            num = min(self._growth_left, seq.num_prompt - prompt.end)
            self._growth_left -= num
            prompt.learn(seq.tokens, prompt.end + num)
            if prompt.end < seq.num_prompt:
                return None
        if track.prompt is None:
            known = prompt.automaton
            start = max(known.link[prompt.last], 0)
            track.prompt = _Follower(known, start, known.length[start])
            track.length = seq.num_prompt
        new = seq.tokens[track.length : track.length + self._growth_left]
        track.length += len(new)
        self._growth_left -= len(new)
        for token in new:
            track.last = track.output.learn(track.last, token)
        track.prompt.follow(new)
        self._follow_recent(seq, track, new)
        if track.length < len(seq.tokens):
            return None
        own = max(track.output.link[track.last], 0)
        found = [
            (track.output, own, track.output.length[own]),
            *(
                (f.automaton, *f.automaton.context(f.state, f.matched))
                for f in (track.prompt, *track.recent)
            ),
        ]
        best = max(found, key=lambda f: f[2])
        return best if best[2] >= MIN_MATCH else None

    def _follow_recent(self, seq: Sequence, track: _Track, new: list[int]) -> None:
        recent = self._recent.get(seq.request.cache_salt)
        generations = [] if recent is None else recent.generations
        known = {id(f.automaton): f for f in track.recent}
        track.recent = []
        for automaton in generations:
            follower = known.get(id(automaton))
            if follower is None:
                follower = _Follower(automaton)
                follower.follow(seq.tokens[max(track.length - SEED_TOKENS, 0) : track.length])
            else:
                follower.follow(new)
            track.recent.append(follower)

    def _learn_ended(self) -> None:
        """Learn from ended sequences, some tokens at a time."""
        left = MAX_ENDED_GROWTH
        while self._ended and left > 0:
            ended = self._ended[0]
            recent = self._recent.setdefault(ended.salt, _Recent())
            self._recent.move_to_end(ended.salt)
            before = recent.num_tokens
            if ended.automaton is None:
                ended.automaton = recent.begin(self._options.max_cached_requests)
            new = ended.tokens[ended.place : ended.place + left]
            for token in new:
                ended.last = ended.automaton.learn(ended.last, token)
            ended.place += len(new)
            left -= len(new)
            self._ended_size -= len(new)
            self._recent_size += recent.num_tokens - before
            while len(self._recent) > 1 and self._recent_size > MAX_RECENT_TOKENS:
                _, oldest = self._recent.popitem(last=False)
                self._recent_size -= oldest.num_tokens
            if ended.place == len(ended.tokens):
                self._ended.popleft()

    def forget(self, seq: Sequence) -> None:
        if self._tracks.pop(seq, None) is None:
            return
        prompt = self._prompts[seq.request.id]
        prompt.users.discard(seq.index)
        if not prompt.users:
            self._prompts_size -= prompt.size
            del self._prompts[seq.request.id]
        if self._options.max_cached_requests and seq.finish != "error":
            output = seq.tokens[seq.num_prompt :]
            # What ends faster than it can be learnt is passed over.
            if MIN_MATCH < len(output) <= MAX_RECENT_TOKENS - self._ended_size:
                self._ended_size += len(output)
                self._ended.append(_Ended(seq.request.cache_salt, output))


def make(options: DraftOptions) -> Suffix:
    return Suffix(options)
