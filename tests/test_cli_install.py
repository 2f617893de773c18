"""The default installation stays small, and what is declared is what is pinned."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of all distributions that an installation of ``requirements`` brings, in this environment."""
    seen: dict[str, set[str]] = {}
    while requirements:
        requirement = requirements.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        if extras <= seen.get(name, set()):
            continue
        seen.setdefault(name, set()).update(extras)
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                requirements.append(needed)
    return set(seen)


def test_the_default_installation_has_fewer_than_60_packages() -> None:
    packages = closure([Requirement("crossrl")]) - {"pip", "setuptools"}  # which every environment has
    assert {"torch", "transformers", "pydantic-core"} <= packages, "direct and indirect ones are counted"
    assert "pytest" not in packages
    assert len(packages) < 60, sorted(packages)


def test_every_package_of_the_test_environment_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    wanted = closure([Requirement("crossrl[dev]")]) - {"crossrl", "setuptools", "pip"}
    assert sorted(wanted - set(pinned)) == []
    assert pinned["torch"] == "2.13.0"


def test_data_files_are_part_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["crossrl"]
    package = ROOT / "src" / "crossrl"
    for name in ("config/demo.yaml", "config/verl_keys.txt"):
        assert (package / name).is_file()
        assert any((package / name).match(pattern) for pattern in patterns), name


def test_no_script_names_a_key_that_does_not_exist() -> None:
    from crossrl.config import load_config

    script = (ROOT / "examples" / "one_digit_sums" / "train.sh").read_text()
    words = re.findall(r"^    ([a-z_.]+=\S+) \\$", script, re.MULTILINE)
    assert len(words) == script.count(" \\\n") - 1, "all settings of the command were found"
    loaded = load_config([re.sub("[\"'$]", "", word) for word in words])
    assert loaded.no_effect == ()
