import numpy as np
from numpy.typing import NDArray

def copy_rows(
    table: NDArray[np.uint64] | bytes,
    source_slots: NDArray[np.int32],
    target_slots: NDArray[np.int32],
    coalesce: bool,
    /,
) -> int: ...
