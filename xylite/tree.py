"""Trees of tensors, in JAX's sense: frozen dataclasses, tuples, lists and dicts with leaves below.

A dataclass becomes a tree node with `@tree.node`; fields marked `tree.static()` are carried along
unchanged. Everything that is not a node, a container or None is a leaf.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def node(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are subtrees (or static, see `static`)."""
    made = dataclasses.dataclass(frozen=True, eq=False)(cls)
    node: Any = made  # a checker does not see that it is a dataclass now
    node.__tree_node__ = tuple(
        f.name for f in dataclasses.fields(node) if not f.metadata.get("static")
    )
    return made


def static(**kwargs: Any) -> Any:
    """A field of a node that is data about the tree, not part of it."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def _children(x: Any) -> list[tuple[str, Any]] | None:
    names = getattr(x, "__tree_node__", None)
    if names is not None:
        return [(name, getattr(x, name)) for name in names]
    if isinstance(x, tuple | list):
        return [(str(i), v) for i, v in enumerate(x)]
    if isinstance(x, dict):
        return [(str(k), v) for k, v in x.items()]
    return None


def map(f: Callable[..., Any], tree: T, *others: Any) -> T:
    """The tree with `f` applied to each leaf (and to the leaves of `others` beside it)."""
    if tree is None:
        return tree
    children = _children(tree)
    if children is None:
        return f(tree, *others)
    sides = [dict(_children(o) or ()) for o in others]
    new = {k: map(f, v, *(s[k] for s in sides)) for k, v in children}
    # A checker cannot know that a container made anew is of the type T that it was.
    if isinstance(tree, dict):
        return dict(zip(tree, new.values(), strict=True))  # pyright: ignore[reportReturnType]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(new.values())  # pyright: ignore[reportReturnType]
    if isinstance(tree, list):
        return list(new.values())  # pyright: ignore[reportReturnType]
    if isinstance(tree, tuple):
        return type(tree)(*new.values())
    return dataclasses.replace(tree, **new)  # pyright: ignore[reportArgumentType]


def named_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) of every leaf, in field order."""
    if tree is None:
        return
    children = _children(tree)
    if children is None:
        yield prefix, tree
        return
    for name, child in children:
        yield from named_leaves(child, f"{prefix}.{name}" if prefix else name)


def leaves(tree: Any) -> list[Any]:
    """All leaves, in field order."""
    return [leaf for _, leaf in named_leaves(tree)]
