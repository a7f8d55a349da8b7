"""The processes of a distributed training.

The report and the findings with ``distributed=True`` are `gathered` from all of them. The title
of the report has their number. If there are several, ``diagnosis.ranks`` compares their seeds, and
``updates`` refuses regularizers that would draw other numbers in each.
"""

from typing import Any

from torch import distributed


def world_size() -> int:
    """Return the number of processes; 0 without a process group."""
    has_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if has_group else 0


def gathered(local: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. All ranks must call this.

    Raises:
        RuntimeError: if there is no process group.
    """
    if not world_size():
        raise RuntimeError(
            "distributed=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave distributed= out"
        )
    objects: list[Any] = [None] * world_size()
    distributed.all_gather_object(objects, local)
    return objects
