"""Seeds and generators for one purpose each, so that no draw moves another."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, replica: int = 0) -> int:
    """Return a seed for one purpose ("split", "weights", ...), unrelated to other purposes.

    Example:
        >>> derive_seed(0, "order") == derive_seed(0, "order")
        True
        >>> len({derive_seed(0, "order"), derive_seed(0, "split"), derive_seed(0, "order", 1)})
        3
    """
    text = f"{purpose}/{seed}/{replica}"
    digest = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    return number >> 1  # 63 bits also fit into a signed integer


def own_generator(seed: int, purpose: str, replica: int = 0) -> torch.Generator:
    """Return a generator for one purpose, independent of torch's global one."""
    own_seed = derive_seed(seed, purpose, replica)
    return torch.Generator().manual_seed(own_seed)
