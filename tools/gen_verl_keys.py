"""Write ``src/crossrl/config/verl_keys.txt``: every config key that verl 0.7.1 to 0.9.1 know.

    pip download --no-deps verl==0.8.0   # and 0.7.1, 0.9.1; unzip each wheel into a folder of its own
    python tools/gen_verl_keys.py verl-0.7.1 verl-0.8.0 verl-0.9.1

Nothing of verl is imported. Keys come from the composed trees that verl ships (``_generated_ppo_*.yaml``) and from
the dataclasses that their ``_target_`` entries name, whose fields users add with ``+key=value``. A line that ends
in ``.*`` is a free-form mapping: verl takes anything below it.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).resolve().parent.parent / "src/crossrl/config/verl_keys.txt"

# Mappings that verl hands on to another library or reads with .get(): any key below them is valid.
FREE_FORM = {
    "apply_chat_template_kwargs",
    "engine_kwargs",
    "fused_kernel_options",
    "kw_args",
    "mixed_precision",
    "mm_processor_kwargs",
    "override_config",
    "override_ddp_config",
    "override_mcore_model_config",
    "override_optimizer_config",
    "override_transformer_config",
    "custom",
    "ray_init",
    "sampler_kwargs",
    "tool_config",
    "tiled_mlp",
    "wrap_policy",
    "controller_nsight_options",
    "worker_nsight_options",
    "layer_name_map",
    "reward_kwargs",
}
# Fields that verl fills in itself.
INTERNAL = {"engine", "global_batch_info", "model_config", "_target_"}
# Keys that verl's code reads but neither its YAML nor its dataclasses list.
READ_BY_CODE = {
    "actor_rollout_ref.ref.model.path",
    "actor_rollout_ref.ref.tiled_mlp.*",
    "custom_reward_function.reward_kwargs.*",
    "data.sampler.class_name",
    "data.sampler.class_path",
    "data.datagen.name",
    "data.datagen.path",
    "hydra.*",
    "model_engine",
    "reward.custom_reward_function.reward_kwargs.*",
    "reward.reward_kwargs.*",
    "reward_model.max_length",
    "reward_model.overlong_buffer.enable",
    "reward_model.overlong_buffer.len",
    "reward_model.overlong_buffer.log",
    "reward_model.overlong_buffer.penalty_factor",
    "reward_model.reward_kwargs.*",
    "trainer.remove_previous_ckpt_in_save",
}


def dataclass_fields(root: Path) -> dict[str, dict[str, str]]:
    """Class name to its annotated fields (name to annotation), inherited ones included."""
    own: dict[str, dict[str, str]] = {}
    bases: dict[str, list[str]] = {}
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "@dataclass" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef) or not any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                continue
            bases[node.name] = [ast.unparse(b).split(".")[-1] for b in node.bases]
            own[node.name] = {
                item.target.id: ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
            }

    def inherited(name: str) -> dict[str, str]:
        fields: dict[str, str] = {}
        for base in bases.get(name, []):
            fields |= inherited(base)
        return fields | own.get(name, {})

    return {name: inherited(name) for name in own}


def walk_class(name: str, prefix: str, classes: dict[str, dict[str, str]], keys: set[str]) -> None:
    """Add the fields of a dataclass, and of the dataclasses that they hold."""
    for field, annotation in classes.get(name, {}).items():
        if field in INTERNAL:
            continue
        path = f"{prefix}.{field}"
        inner = annotation.removeprefix("Optional[").rstrip("]").split("|")[0].strip().split(".")[-1]
        if field in FREE_FORM:
            keys.add(f"{path}.*")
        elif inner in classes and inner != name:
            walk_class(inner, path, classes, keys)
        else:
            keys.add(path)


def walk_tree(node: dict[str, Any], prefix: str, classes: dict[str, dict[str, str]], keys: set[str]) -> None:
    """Add the leaves of one composed tree."""
    target = node.get("_target_")
    if isinstance(target, str):
        walk_class(target.split(".")[-1], prefix, classes, keys)
    for name, value in node.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if name in INTERNAL:
            continue
        if name in FREE_FORM:
            keys.add(f"{path}.*")
        elif isinstance(value, dict) and value:
            walk_tree(value, path, classes, keys)
        else:
            keys.add(f"{path}.*" if value == {} else path)


def keys_of(root: Path) -> set[str]:
    """All keys of one unpacked version of verl."""
    trees = sorted((root / "verl/trainer/config").glob("_generated_ppo*.yaml"))
    if not trees:
        raise SystemExit(f"{root}: want an unpacked verl wheel, found no verl/trainer/config/_generated_ppo*.yaml")
    classes, keys = dataclass_fields(root / "verl"), set[str]()
    for tree in trees:
        walk_tree(yaml.safe_load(tree.read_text(encoding="utf-8")), "", classes, keys)
    return keys


def above(key: str) -> set[str]:
    """The groups that a key lies in: a, a.b for a.b.c."""
    parts = key.removesuffix(".*").split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def without_covered(keys: set[str]) -> list[str]:
    """Sorted, without keys below a free-form mapping, and without those that are the name of a group."""
    free = {k.removesuffix(".*") for k in keys if k.endswith(".*")}
    groups = free | {group for key in keys for group in above(key)}
    return sorted(k for k in keys if not above(k) & free and (k.endswith(".*") or k not in groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=Path, help="unpacked verl wheels")
    keys = set(READ_BY_CODE)
    for root in parser.parse_args().roots:
        found = keys_of(root)
        print(f"{root.name}: {len(found)} keys")
        keys |= found
    lines = without_covered(keys)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(lines)} keys")


if __name__ == "__main__":
    main()
