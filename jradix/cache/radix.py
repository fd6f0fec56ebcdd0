"""The radix tree: token prefixes -> page ids. Structure only; it neither locks nor evicts.

Every edge holds a whole number of pages, but for *tails*: leaves of one page that is not full. No walk enters a tail;
its tokens can only be copied, like the head of any page.

Tokens and page ids are kept as ``bytes`` of int32, for three reasons: ``bytes.startswith(edge, offset)`` compares a
whole edge in one memcmp without a copy, dictionary keys compare exactly (a hash alone never decides), and the garbage
collector does not look inside them.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4  # int32, token ids and page ids alike
FEW_CHILDREN = 8  # so many are sooner compared one by one than kept sorted

TokenIds = npt.NDArray[np.integer] | Sequence[int]


class Node:
    """One edge of the tree and the node at its lower end.

    It covers the tokens ``[start, end)`` of its path, where ``start`` is its parent's ``end``. All its pages were
    last used at the same time: whoever uses a part of it splits it first.
    """

    __slots__ = (
        "children",
        "created",
        "end",
        "last_access",
        "order",
        "pages",
        "parent",
        "priority",
        "reach",
        "ref_count",
        "root",
        "ticket",
        "tokens",
        "uses",
    )

    def __init__(self, parent: "Node | None", tokens: bytes, pages: bytes, end: int, now: int) -> None:
        self.parent = parent  # None: a root, or detached
        self.root: Root | None = parent if isinstance(parent, Root) else parent and parent.root  # None: a root
        self.children: dict[bytes, Node] | None = None  # filed under their first page of tokens; None for a leaf
        self.order: list[bytes] | None = None  # the keys of `children`, sorted, once somebody has asked for it
        self.tokens = tokens
        self.pages = pages
        self.end = end
        self.ref_count = 0  # locks held on this node or below it
        self.last_access = now
        self.created = now
        self.uses = 0  # how often it was locked, its insertion counted as the first time
        self.priority = 0  # the highest of the requests that used it
        self.reach = end  # the longest a path through this node has been, in tokens; eviction does not lower it
        self.ticket = 0  # its valid entry in the eviction queue; 0: none

    @property
    def num_pages(self) -> int:
        return len(self.pages) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def start(self) -> int:
        return self.end - self.num_tokens


class Root(Node):
    """The root of one namespace: no tokens, no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", b"", 0, 0)
        self.namespace = namespace


class RadixTree:
    """A forest with one root for each namespace in use. All walks are loops: paths may be thousands of nodes deep."""

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[Hashable, Root] = {}

    def root(self, namespace: Hashable) -> Root:
        """The root of `namespace`, made if there is none."""
        if (root := self.roots.get(namespace)) is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def walk(self, node: Node, tokens: bytes) -> tuple[Node, int, list[bytes]]:
        """Follow `tokens` (those after `node`) downwards as far as whole pages agree.

        Returns the last node reached, how many tokens agree, and the pages passed, one item a node. The walk may end
        inside the node it returns: then that node's `end` lies beyond ``node.end + agreeing tokens``.
        """
        page_bytes = self.page_bytes
        pos = 0
        last = len(tokens) - page_bytes  # where the last whole page begins
        passed: list[bytes] = []
        while pos <= last and node.children is not None:
            child = node.children.get(tokens[pos : pos + page_bytes])
            if child is None:
                break
            node = child
            edge = node.tokens
            # The dictionary has compared the first page; only longer edges need another look.
            if len(edge) == page_bytes or tokens.startswith(edge, pos):
                passed.append(node.pages)
                pos += len(edge)
            else:
                num_pages = self._common_pages(edge, tokens, pos)
                passed.append(node.pages[: num_pages * TOKEN_BYTES])
                pos += num_pages * page_bytes
                break
        return node, pos // TOKEN_BYTES, passed

    def head(self, node: Node, end: int, tokens: bytes) -> tuple[int, int]:
        """After a walk that ended in `node` at token `end`: the cached page that begins most like `tokens`.

        Returns how many tokens agree, fewer than a page, and the page; (0, 0) if there is none.
        """
        tokens = tokens[: self.page_bytes]
        if end < node.end:
            first = (end - node.start) // self.page_size
            begins, page = node.tokens[first * self.page_bytes :], node.pages[first * TOKEN_BYTES :]
        else:
            child = self.closest(node, tokens)
            if child is None:
                return 0, 0
            begins, page = child.tokens, child.pages
        return common_tokens(begins, tokens), int.from_bytes(page[:TOKEN_BYTES], "little")

    def closest(self, node: Node, tokens: bytes) -> Node | None:
        """The child with the most leading tokens in common with `tokens`, of which there is at most a page."""
        children = node.children
        if not children or not tokens:
            return None
        # Of sorted strings those with the longest common prefix are neighbours.
        keys = list(children) if len(children) <= FEW_CHILDREN else self._neighbours(node, tokens)
        best, most = keys[0], -1
        for key in keys:
            if most < 0 or key[:TOKEN_BYTES] == tokens[:TOKEN_BYTES]:  # else not even the first token agrees
                common = common_tokens(key, tokens)
                if common > most:
                    best, most = key, common
        return children[best]

    def tail_within(self, node: Node, tokens: bytes) -> Node | None:
        """The tail below `node`, there is at most one, with which `tokens` begin, at most a page."""
        children = node.children
        if not children:
            return None
        # The strings between a prefix and `tokens` in sorted order would begin with the prefix, as no page beside does.
        keys = children if len(children) <= FEW_CHILDREN else self._neighbours(node, tokens)
        for key in keys:
            if len(key) < self.page_bytes and tokens.startswith(key):
                return children[key]
        return None

    def _neighbours(self, node: Node, tokens: bytes) -> list[bytes]:
        """The keys of `node`, of which there are some, on either side of `tokens`."""
        assert node.children
        if node.order is None:
            node.order = sorted(node.children)
        place = bisect_left(node.order, tokens)
        return node.order[max(0, place - 1) : place + 1]

    def is_tail(self, node: Node) -> bool:
        return len(node.tokens) < self.page_bytes and node.parent is not None

    def _common_pages(self, edge: bytes, tokens: bytes, pos: int) -> int:
        """Whole pages shared by `edge` and ``tokens[pos:]``, which differ or of which the second is shorter."""
        count = min(len(edge), len(tokens) - pos) // TOKEN_BYTES
        ours = np.frombuffer(edge, np.int32, count)
        theirs = np.frombuffer(tokens, np.int32, count, pos)
        differs = ours != theirs
        first = int(differs.argmax())
        return (first if differs[first] else count) // self.page_size

    def split(self, node: Node, end: int) -> Node:
        """Cut `node` at token `end` and return the new upper part. `node` stays the lower part."""
        # Locks are handles to the lower end of a node: keeping `node` there keeps them right.
        parent = node.parent
        assert parent is not None, "a root or a detached node cannot be split"
        assert node.start < end < node.end, f"cannot cut [{node.start}, {node.end}) at {end}"
        assert end % self.page_size == 0, f"{end} is not at the edge of a page"
        cut = (end - node.start) // self.page_size
        head, tail = node.tokens[: cut * self.page_bytes], node.tokens[cut * self.page_bytes :]
        upper = Node(parent, head, node.pages[: cut * TOKEN_BYTES], end, node.last_access)
        upper.created, upper.uses, upper.ref_count = node.created, node.uses, node.ref_count
        upper.priority, upper.reach = node.priority, node.reach
        self._file(parent, upper)
        node.tokens, node.pages, node.parent = tail, node.pages[cut * TOKEN_BYTES :], upper
        self._file(upper, node)
        return upper

    def add_leaf(self, parent: Node, tokens: bytes, pages: bytes, now: int) -> Node:
        """Append a new leaf or tail below `parent`, none of whose children starts with the same page."""
        leaf = Node(parent, tokens, pages, parent.end + len(tokens) // TOKEN_BYTES, now)
        self._file(parent, leaf)
        return leaf

    def trim(self, leaf: Node, num_pages: int) -> bytes:
        """Cut the last `num_pages` pages, but not all, off a leaf, and return them."""
        keep = leaf.num_pages - num_pages
        assert leaf.children is None, "only a leaf can be trimmed"
        assert keep > 0, f"{num_pages} pages are all the leaf has, or more"
        gone = leaf.pages[keep * TOKEN_BYTES :]
        leaf.pages = leaf.pages[: keep * TOKEN_BYTES]
        leaf.tokens = leaf.tokens[: keep * self.page_bytes]
        leaf.end -= num_pages * self.page_size
        return gone

    def detach(self, node: Node) -> Node:
        """Cut `node`, with all below it, off its parent, and return the parent."""
        parent = node.parent
        assert parent is not None, "a root cannot be detached, nor a node twice"
        assert parent.children is not None
        key = node.tokens[: self.page_bytes]
        del parent.children[key]
        if not parent.children:
            parent.children = parent.order = None
        elif parent.order is not None:
            del parent.order[bisect_left(parent.order, key)]
        node.parent = None
        return parent

    def subtree(self, top: Node) -> Iterator[Node]:
        """`top` and all nodes below it, parents first. A node's children may be detached once it has been yielded."""
        pending = [top]
        while pending:
            node = pending.pop()
            if node.children is not None:
                pending.extend(node.children.values())
            yield node

    def _file(self, parent: Node, child: Node) -> None:
        if parent.children is None:
            parent.children = {}
        key = child.tokens[: self.page_bytes]
        if parent.order is not None and key not in parent.children:
            insort(parent.order, key)
        parent.children[key] = child


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens are equal. As big integers, the first byte that differs is the highest bit of a xor."""
    num_bytes = min(len(a), len(b))
    differs = int.from_bytes(a[:num_bytes], "big") ^ int.from_bytes(b[:num_bytes], "big")
    return (num_bytes - (differs.bit_length() + 7) // 8) // TOKEN_BYTES


def as_page_ids(page_bytes: bytes) -> npt.NDArray[np.int32]:
    """Page ids as a read-only array, not a copy."""
    return np.frombuffer(page_bytes, np.int32)


def as_token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as the bytes of int32. ValueError for what is no integer or does not fit."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32:
        return token_ids.tobytes()
    ids = np.asarray(token_ids)
    if ids.size and ids.dtype != np.int32:
        fits = ids.dtype.kind in "iu" and int(ids.min()) >= -(2**31) and int(ids.max()) < 2**31
        if not fits:
            raise ValueError(f"token ids must be integers that fit int32, got dtype {ids.dtype}: check the tokenizer")
    return ids.astype(np.int32, copy=False).tobytes()
