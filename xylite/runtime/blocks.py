"""KV blocks: who owns them, and which beginnings they hold.

Every block is free, in the prefix tree, or private to one sequence. The tree's nodes are blocks;
the path from a root to a node spells a beginning of some sequence, so equal beginnings share
storage. Matching is by whole blocks, reuse is by tokens: where a sequence leaves the tree inside a
block, the rows it shares are copied to a block of its own (XY-Serve, section 5.1.1).

Nodes appear when the step that fills them is *planned*, and are pending until it commits: in each
layer KV is stored before attention reads it, so later chunks of the same step may use them.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from xylite.runtime.sequence import Sequence

Key = tuple[int, ...]
COMMITTED = -1


class Node:
    """One block of the tree: `key` are its tokens (fewer than a block only at a leaf).

    refs     sequences whose path goes through here
    pending  number of the step that fills it, or COMMITTED
    order    all children's keys, sorted, to find the longest partial match
    """

    __slots__ = ("block", "children", "key", "order", "parent", "pending", "refs")

    def __init__(self, key: Key, block: int, parent: "Node | None", pending: int):
        self.key = key
        self.block = block
        self.parent = parent
        self.pending = pending
        self.refs = 0
        self.children: dict[Key, Node] = {}
        self.order: list[Key] = []


class Copy(NamedTuple):
    """A block whose first rows a sequence takes over by copying: `num` tokens are valid."""

    src: int
    dst: int
    num: int


class KVBlocks:
    """The pool of KV blocks and the prefix tree over it.

    num_blocks  blocks in the pool
    block_size  tokens per block
    reuse       keep finished sequences' blocks in the tree and match new ones against it
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[Node, None] = OrderedDict()
        self._roots: dict[str, Node] = {}
        self._pending: dict[int, list[Node]] = {}
        self._poisoned: set[int] = set()
        self._to_zero: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give now: free ones and those only the tree holds."""
        return len(self._free) + len(self._lru)

    @property
    def num_cached(self) -> int:
        """Blocks that hold reusable beginnings and belong to no sequence."""
        return len(self._lru)

    def take(self, n: int) -> list[int] | None:
        """n free blocks, evicting least recently used prefixes if needed; None if too few."""
        if n > self.num_free:
            return None
        while len(self._free) < n:
            self._evict()
        taken = [self._free.pop() for _ in range(n)]
        if self._poisoned:
            bad = [b for b in taken if b in self._poisoned]
            self._poisoned.difference_update(bad)
            self._to_zero.extend(bad)
        return taken

    def taken_to_zero(self) -> list[int]:
        """Blocks taken since the last call that must be cleared before use."""
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def give(self, blocks: Iterable[int], *, poisoned: bool = False) -> None:
        """Return private blocks; poisoned ones are cleared before anyone gets them."""
        for b in blocks:
            self._free.append(b)
            if poisoned:
                self._poisoned.add(b)

    def _evict(self) -> None:
        node, _ = self._lru.popitem(last=False)
        self._drop(node)
        self._free.append(node.block)

    def _drop(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        assert not node.children, f"node {node.key[:4]}... still has children"
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        node.parent = None
        self._prune_root(parent)

    def _prune_root(self, node: Node) -> None:
        """Forget a root that nothing hangs on, so that unique salts leave nothing behind."""
        if isinstance(node, Root) and not node.children and node.refs == 0:
            self._roots.pop(node.salt, None)

    def _refer(self, node: Node) -> None:
        if node.refs == 0 and node.block >= 0:
            del self._lru[node]
        node.refs += 1

    def _unrefer(self, node: Node) -> None:
        node.refs -= 1
        assert node.refs >= 0
        if node.refs == 0 and node.block >= 0:
            self._lru[node] = None

    def attach(self, seq: Sequence) -> None:
        """Put a sequence without blocks at the root of its salt."""
        assert seq.node is None and not seq.blocks
        root = self._roots.get(seq.request.cache_salt)
        if root is None:
            root = self._roots[seq.request.cache_salt] = Root(seq.request.cache_salt)
        self._refer(root)
        seq.node = root

    def extend(self, seq: Sequence) -> int:
        """Share whole blocks of the tree that continue `seq`; how many tokens that saved.

        Only for a sequence at a block boundary whose blocks are all shared. The last known token
        is never taken from the tree: its logits are needed.
        """
        size = self.block_size
        if not self.reuse or seq.diverged or seq.num_planned != seq.num_shared * size:
            return 0
        if len(seq.blocks) != seq.num_shared:
            return 0
        start = seq.num_planned
        limit = len(seq.tokens) - 1
        position = start
        while position + size <= limit:
            child = seq.node.children.get(tuple(seq.tokens[position : position + size]))
            if child is None:
                break
            self._refer(child)
            seq.node = child
            seq.blocks.append(child.block)
            seq.num_shared += 1
            position += size
        seq.num_planned = position
        return position - start

    def is_shared(self, seq: Sequence) -> bool:
        """The sequence stands at the end of a block that other running sequences use, too."""
        at_end = seq.num_planned == seq.num_shared * self.block_size
        return at_end and seq.num_shared > 0 and seq.node.refs > 1

    def held(self, seq: Sequence) -> int:
        """Whole blocks of a waiting sequence's beginning that running sequences hold already."""
        node = self._roots.get(seq.request.cache_salt)
        if node is None or not self.reuse:
            return 0
        size = self.block_size
        num = 0
        for start in range(0, len(seq.tokens) - size, size):
            node = node.children.get(tuple(seq.tokens[start : start + size]))
            if node is None or node.refs == 0:
                break
            num += 1
        return num

    def partial(self, seq: Sequence) -> Copy | None:
        """Copy-on-write of the longest beginning of the next block that the tree holds.

        None if there is none, or no block to copy to. Blocks of uncommitted steps are no sources:
        if such a step fails, nobody would know who copied from it.
        """
        size = self.block_size
        if not self.reuse or seq.diverged or seq.num_planned != seq.num_shared * size:
            return None
        if len(seq.blocks) != seq.num_shared:
            return None
        start = seq.num_planned
        want = tuple(seq.tokens[start : min(start + size, len(seq.tokens) - 1)])
        order = seq.node.order
        if not want or not order:
            return None
        i = bisect_left(order, want)
        best, num = None, 0
        for key in order[max(i - 1, 0) : i + 1]:
            child = seq.node.children[key]
            common = _common(want, key)
            if common > num and child.pending == COMMITTED:
                best, num = child, common
        if best is None:
            return None
        # Hold the source: taking a block may evict it and hand it out as the destination.
        self._refer(best)
        taken = self.take(1)
        self._unrefer(best)
        if taken is None:
            return None
        seq.blocks.append(taken[0])
        seq.num_planned += num
        return Copy(best.block, taken[0], num)

    def publish(self, seq: Sequence, step: int) -> None:
        """Enter the sequence's full blocks of known tokens into the tree.

        Blocks that `step` or an earlier uncommitted one fills are pending.
        """
        if not self.reuse or seq.diverged or seq.poisoned:
            return
        size = self.block_size
        known = min(seq.num_planned, len(seq.tokens))
        while (end := (seq.num_shared + 1) * size) <= known:
            key = tuple(seq.tokens[end - size : end])
            if key in seq.node.children:
                seq.diverged = True
                return
            pending = step if end > seq.num_computed else COMMITTED
            node = self._insert(seq.node, key, seq.blocks[seq.num_shared], pending)
            self._refer(node)
            seq.node = node
            seq.num_shared += 1

    def _insert(self, parent: Node, key: Key, block: int, pending: int) -> Node:
        node = Node(key, block, parent, pending)
        parent.children[key] = node
        insort(parent.order, key)
        self._lru[node] = None
        if pending != COMMITTED:
            self._pending.setdefault(pending, []).append(node)
        return node

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; what is computed stays in the tree while it can."""
        private = seq.blocks[seq.num_shared :]
        if private and self.reuse and not seq.poisoned:
            private = self._keep(seq, private)
        self.give(private, poisoned=seq.poisoned)
        node = seq.node
        while node is not None:
            parent = node.parent
            self._unrefer(node)
            if parent is None:
                self._prune_root(node)
            node = parent
        seq.node = None
        seq.blocks = []
        seq.num_shared = 0
        seq.diverged = False

    def _keep(self, seq: Sequence, private: list[int]) -> list[int]:
        """Enter computed private blocks below the sequence's node; those not needed."""
        size = self.block_size
        valid = min(seq.num_computed, len(seq.tokens))
        node: Node = seq.node
        unneeded: list[int] = []
        for i, block in enumerate(private):
            start = (seq.num_shared + i) * size
            key = tuple(seq.tokens[start : min(start + size, valid)])
            if not key:
                unneeded.append(block)
                continue
            child = node.children.get(key)
            if child is None and len(key) < size and _extends(node.order, key):
                unneeded.append(block)
                continue
            if child is None:
                child = self._insert(node, key, block, COMMITTED)
                self._drop_shorter(node, key)
            else:
                unneeded.append(block)
            if len(key) < size:
                continue
            self._refer(child)
            node = child
        seq.node = node
        return unneeded

    def _drop_shorter(self, parent: Node, key: Key) -> None:
        """Remove an unused leaf beside `key` that is a beginning of it: it serves no one now."""
        i = bisect_left(parent.order, key)
        if i == 0:
            return
        before = parent.order[i - 1]
        child = parent.children[before]
        if len(before) < self.block_size and key[: len(before)] == before and child.refs == 0:
            del self._lru[child]
            self._drop(child)
            self._free.append(child.block)

    def commit(self, step: int) -> None:
        """The step ran: its blocks are valid."""
        for node in self._pending.pop(step, ()):
            node.pending = COMMITTED

    def fail(self, step: int) -> None:
        """The step did not run: its blocks leave the tree. Their users must have been released."""
        self.remove(self._pending.pop(step, []))

    def filled_by(self, seq: Sequence, step: int, start: int) -> list[Node]:
        """Nodes on the sequence's path, from token `start` on, that uncommitted `step` fills."""
        first = start // self.block_size
        path = [n for n in _path(seq.node) if n.block >= 0]
        return [n for i, n in enumerate(reversed(path)) if i >= first and n.pending == step]

    def users_of(self, nodes: Iterable[Node], sequences: Iterable[Sequence]) -> list[Sequence]:
        """Sequences whose path goes through one of the nodes."""
        wanted = set(nodes)
        return [s for s in sequences if any(n in wanted for n in _path(s.node))] if wanted else []

    def pending_of(self, step: int) -> list[Node]:
        """Nodes that the uncommitted `step` fills."""
        return list(self._pending.get(step, ()))

    def remove(self, nodes: Iterable[Node]) -> None:
        """Take nodes and all below them out of the tree; their blocks are cleared before reuse."""
        for node in nodes:
            if node.parent is not None:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._remove(child)
        assert node.refs == 0, f"block {node.block} is removed while {node.refs} sequences use it"
        waiting = self._pending.get(node.pending)
        if waiting is not None:
            waiting.remove(node)
        del self._lru[node]
        self._drop(node)
        self.give([node.block], poisoned=True)

    def clear(self) -> None:
        """Forget every beginning that no sequence uses."""
        while self._lru:
            self._evict()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every block is free, in the tree, or private to one of `sequences`."""
        nodes: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.order == sorted(node.children), "order and children disagree"
            for key, child in node.children.items():
                assert child.parent is node and child.key == key
                assert len(key) == self.block_size or not child.children
                nodes.append(child)
                stack.append(child)
        refs: dict[int, int] = {}
        private: list[int] = []
        for seq in sequences:
            path = [n for n in _path(seq.node) if n.block >= 0]
            assert [n.block for n in reversed(path)] == seq.blocks[: seq.num_shared], seq
            for node in path:
                refs[id(node)] = refs.get(id(node), 0) + 1
            private += seq.blocks[seq.num_shared :]
        for node in nodes:
            assert node.refs == refs.get(id(node), 0), f"refs of {node.key[:4]}: {node.refs}"
            assert (node in self._lru) == (node.refs == 0)
        owned = self._free + [n.block for n in nodes] + private
        assert sorted(owned) == list(range(self.num_blocks)), "a block is lost or owned twice"
        seen: set[int] = set()
        for node in self._lru:
            assert all(id(c) in seen for c in node.children.values()), "LRU holds parent first"
            seen.add(id(node))


class Root(Node):
    """Where sequences of one cache salt begin; holds no block."""

    __slots__ = ("salt",)

    def __init__(self, salt: str):
        super().__init__((), -1, None, COMMITTED)
        self.salt = salt


def _path(node: Node | None) -> Iterable[Node]:
    while node is not None:
        yield node
        node = node.parent


def _common(a: Key, b: Key) -> int:
    """How many leading tokens two keys share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _extends(order: list[Key], key: Key) -> bool:
    """Some key in `order` begins with `key`."""
    i = bisect_left(order, key)
    return i < len(order) and order[i][: len(key)] == key
