"""Data of one-digit sums: ``python make_data.py DIR`` writes DIR/train.parquet (80 sums) and DIR/val.parquet (20)."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def row(a: int, b: int) -> dict:
    """One problem in the row schema of verl, which is that of CrossRL."""
    return {
        "data_source": "one_digit_sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"a": a, "b": b},
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # There are only 100 such sums: a fifth is held out, or accuracy would measure memory.
    order = np.random.Generator(np.random.Philox(1)).permutation(100)
    for name, part in (("train", order[20:]), ("val", order[:20])):
        pq.write_table(pa.Table.from_pylist([row(*divmod(int(i), 10)) for i in part]), folder / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
