"""Ray's own watch over a node's memory, which ends Ray's processes before the kernel ends any.

It may end the actor that holds a driver. Ray then says of the job that its actor died, as where the
machine was lost; only the message tells the two apart. A rank that it ends is the driver's to tell.
"""

import re

_SAYS_SO = re.compile(
    r"killed due to the node running low on memory"
    r"|Memory on the node \(IP: [^)]*\) was \S+ used / \S+ limit"
)


def says_out_of_memory(message: str) -> bool:
    """Whether Ray says in `message` that it ended something since a node's memory ran out."""
    return _SAYS_SO.search(message) is not None
