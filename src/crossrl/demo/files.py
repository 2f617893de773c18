"""The files of the demo, made once: model, data and reward function, as anybody else's run would have them.

data/demo/
  model/              Hugging Face folder: config, model.safetensors, tokenizer
  train.parquet       5,120 problems: 160 steps of 32
  val.parquet         256 others
  sort_reward.py      compute_score
  manifest.json       sha256 of each file above
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata, resources
from pathlib import Path

from crossrl.files import dump_json, file_digests, publish_folder, publish_text, read_json

FOLDER = Path("data/demo")
SEED = 1
TRAIN, HELD_OUT, WARM_UP_BATCHES = 5120, 256, 36


class DemoError(RuntimeError):
    """The demo's files are not what was made; the message names the file and the way out."""


def needs(paths: Iterable[str | None], folder: Path = FOLDER) -> bool:
    """Whether any of ``paths`` (of a configuration) lies in the demo's folder."""
    inside = folder.resolve()
    return any(inside in Path(path).resolve().parents for path in paths if path)


def prepare(
    say: Callable[[str], None], folder: Path = FOLDER, progress: Callable[[int, int], None] | None = None
) -> None:
    """Make the files below ``folder`` unless they are there, and as they were made. Deterministic on a machine.

    ``say`` is told what is done. Raises ``DemoError`` when a file is missing or was changed.
    """
    if not folder.exists():
        say(f"making {folder}: a small model, {TRAIN} problems to train on, {HELD_OUT} held out")
        make(folder, progress)
        say(f"made {folder}")
        return
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise DemoError(f"{folder} is there without a manifest.json: not the demo's. Move it away and start again")
    recorded: dict[str, str] = read_json(manifest)["files"]
    for name in recorded:
        if not (folder / name).is_file():
            raise DemoError(f"{folder / name} is missing; delete {folder} and start again to have it made afresh")
    for name, found in zip(recorded, file_digests(folder / name for name in recorded), strict=True):
        if found != recorded[name]:
            raise DemoError(
                f"{folder / name} was changed since it was made: sha256 {recorded[name][:12]} then, {found[:12]} now. "
                f"Keep your version elsewhere and name it in the command ({_key(name)}=FILE); "
                f"delete {folder} to have the original made afresh"
            )
    say(f"using {folder}: unchanged since it was made")


def make(
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    warm_up_batches: int = WARM_UP_BATCHES,
) -> None:
    """Write the files to ``folder``, which must not exist; complete when it appears."""
    from crossrl.demo import model, task

    train, held_out, warm = task.problems(SEED, TRAIN, HELD_OUT, warm_up_batches * model.BATCH)
    tokenizer, policy = model.make_tokenizer(), model.make_model(SEED)
    model.warm_up(policy, tokenizer, warm, progress)
    with publish_folder(folder) as new:
        model.write_model(new / "model", policy, tokenizer)
        task.write_parquet(new / "train.parquet", train, "train")
        task.write_parquet(new / "val.parquet", held_out, "val")
        (new / "sort_reward.py").write_bytes((resources.files("crossrl.demo") / "sort_reward.py").read_bytes())
        files = sorted(path for path in new.rglob("*") if path.is_file())
        digests = dict(zip((str(path.relative_to(new)) for path in files), file_digests(files), strict=True))
        made_by = f"crossrl {metadata.version('crossrl')}"
        publish_text(new / "manifest.json", dump_json({"made_by": made_by, "seed": SEED, "files": digests}))


def _key(name: str) -> str:
    """The configuration key that says which file to use in place of ``name``."""
    keys = {
        "sort_reward.py": "reward.custom_reward_function.path",
        "train.parquet": "data.train_files",
        "val.parquet": "data.val_files",
    }
    return keys.get(name, "actor_rollout_ref.model.path")
