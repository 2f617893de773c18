"""The program that opens pickles: ``PYTHON unpickle_child.py FOLDER FILE...``, under an interpreter that has verl.

Whatever a pickle does happens in this process. What it hands back is numbers and JSON: ``FOLDER/{i}.safetensors`` and
``FOLDER/{i}.json`` for the i-th file. It runs in other people's environments: only what verl itself needs is imported,
nothing of ours, and Python from 3.10 on will do.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # the modules beside this file are not for that environment


def main(folder, files):
    die_with_parent()
    os.environ.pop("VERL_USE_EXTERNAL_MODULES", None)  # plug-ins are for trainings
    try:
        import verl
        from verl.protocol import DataProto
    except ImportError as error:
        give_up(f"verl cannot be imported with {sys.executable} ({error})")
    for i, file in enumerate(files):
        data = DataProto.load_from_disk(file)
        if not isinstance(data, DataProto):
            give_up(f"{file} holds a {type(data).__module__}.{type(data).__qualname__}, not a DataProto of verl")
        write(f"{folder}/{i}", data, getattr(verl, "__version__", "unknown"))


def die_with_parent():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def give_up(message):
    print(f"crossrl: {message}", file=sys.stderr)
    sys.exit(3)


def write(name, data, version):
    import torch
    from safetensors.torch import save_file

    tensors, left_out = {}, {}
    for key in data.batch.keys() if data.batch is not None else ():
        value = data.batch[key]
        if not isinstance(value, torch.Tensor) or value.is_nested:
            left_out[key] = f"a {type(value).__name__} that is not a plain tensor"
            continue
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()  # NumPy has no bfloat16; float32 holds the same numbers
        tensors[key] = value.detach().cpu().contiguous().clone()
    columns = {}
    for key, values in data.non_tensor_batch.items():
        try:
            columns[key] = [plain(v) for v in values]
        except TypeError as error:
            left_out[key] = str(error)
    meta = {}
    for key, value in data.meta_info.items():
        try:
            meta[str(key)] = plain(value)
        except TypeError as error:
            left_out[f"meta_info.{key}"] = str(error)
    save_file(tensors, f"{name}.safetensors")
    about = {"columns": columns, "meta": meta, "left_out": left_out, "verl": version, "samples": len(data)}
    Path(f"{name}.json").write_text(json.dumps(about), encoding="utf-8")


def plain(value):
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars, and tensors
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain(v) for k, v in value.items()}
    raise TypeError(f"a {type(value).__name__}, which JSON has no form for")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
