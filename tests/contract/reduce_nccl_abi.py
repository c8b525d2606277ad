"""Makes nccl_abi.json from the full record of NCCL's interface: keeps what the tests compare, one fact a line.

    python tests/contract/reduce_nccl_abi.py full_record.json >tests/contract/nccl_abi.json

The full record was made from NVIDIA's headers 2.18.1 to 2.32.3 (prototypes parsed; sizes, offsets, values and the bytes
of initializers printed by C programs that were compiled with each header) and from the wheels' libraries (exported
symbols, answers on a machine without a driver). The declarations of butter_mpi were written apart from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_PROBED = "2.32.3"


def reduced(full: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the facts to keep, as lists of short rows."""
    probed = full["cpu_only_probe"][_PROBED]
    return {
        "headers": [full["meta"]["headers"]],
        "functions": [
            [f["since"].lstrip("<="), f["first_wheel_exporting"], f["returns"], f["name"]]
            + [[a["type"], a["name"], a["ctypes"].split(" ")[0]] for a in f["args"]]
            for f in full["functions"]
        ],
        "layouts": [
            [name.split()[0], layout["versions"], layout["size"], *map(_field, layout["fields"])]
            for name, layouts in full["structs"].items()
            for layout in layouts
        ],
        "initializers": [
            [version, struct, text]
            for version, structs in full["initializer_bytes_hex"].items()
            for struct, text in structs.items()
        ],
        "enums": [
            [enum, name, *([row["since"].lstrip("<="), row["value"]] for row in rows)]
            for enum, names in full["enums"].items()
            for name, rows in names.items()
        ],
        "macros": [[name, row["since"].lstrip("<="), row["value"]] for name, row in full["macros"].items()],
        "error_strings": [[int(code), text] for code, text in probed["GetErrorString"].items()],
    }


def _field(field: dict[str, Any] | list[Any]) -> list[Any]:
    return field if isinstance(field, list) else [field["name"], field["offset"], field["size"]]


def main() -> None:
    """Read the record that is named and write the rows that are kept."""
    facts = reduced(json.loads(Path(sys.argv[1]).read_text()))
    parts = (f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for key, rows in facts.items())
    print("{\n" + ",\n".join(parts) + "\n}")


if __name__ == "__main__":
    main()
