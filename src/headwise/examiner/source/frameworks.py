"""Which framework a file is written for, where it is not PyTorch."""

from __future__ import annotations

import ast

from .likely_classes import candidates
from .parsed import tree_of

OTHERS = {
    "tensorflow": "TensorFlow", "tf_keras": "TensorFlow", "keras": "Keras", "jax": "JAX", "flax": "JAX",
    "haiku": "JAX", "equinox": "JAX", "mxnet": "MXNet", "paddle": "Paddle", "mindspore": "MindSpore",
    "mlx": "MLX", "tinygrad": "tinygrad",
}  # fmt: skip
SENTENCE = "headwise check judges PyTorch code; this file uses {}"


def other_framework(source: str, name: str | None = None) -> str | None:
    """The framework that what would be judged is written for; None where it is PyTorch, NumPy or none.

    Args:
        source: the file.
        name: what is to be judged; None: the likeliest, or all of it where nothing looks like it.
    """
    tree = tree_of(source)
    if tree is None:
        return None
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            each = [((one.asname or one.name).partition(".")[0], one.name) for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            each = [(one.asname or one.name, node.module or "") for one in node.names]
        else:
            continue
        bound.update((local, package.partition(".")[0]) for local, package in each)
    if "torch" in bound.values() or not set(OTHERS) & set(bound.values()):
        return None
    found = [one.name for one in candidates(source)[:1]] if name is None else [name.partition(".")[0]]
    meant: list[ast.AST] = [node for node in tree.body if getattr(node, "name", None) in found]
    used = {one.id for top in meant or [tree] for one in ast.walk(top) if isinstance(one, ast.Name)}
    packages = [bound[one] for one in sorted(used & bound.keys()) if bound[one] in OTHERS]
    return OTHERS[packages[0]] if packages else None
