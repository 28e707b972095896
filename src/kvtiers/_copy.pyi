from typing_extensions import Buffer

def copy_rows(
    table: Buffer, source_slots: Buffer, target_slots: Buffer, coalesce: bool, /
) -> int: ...
