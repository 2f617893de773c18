"""What the verl host costs a run that asks for nothing of it. Nothing is trained.

    python benchmarks/verl_host_cost.py --python PYTHON        # of an environment with verl and crossrl

Three numbers, each of processes of its own, in turns with and without the host. Seconds are those of the processor, so
that other work on the machine does not count:

    start      seconds to import verl and its trainers, as each run does once; and, timed directly, what of it is ours:
               the plug-in, the comparison of sources and the replacing of functions, the import hook
    run        once in a run: our keys are looked for in verl's configuration (its own default one)
    step       what a call of verl's _update_actor, the one function of a step that is wrapped, costs more
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

PARTS = {"plug-in": "plug-in", "patches": "sources compared, functions wrapped", "hook": "import hook"}
TRAINERS = ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base")

WHOLE = """
import importlib, json, sys, time
began = time.process_time()
import verl
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"seconds": time.process_time() - began, "host": "crossrl.hosts.verl" in sys.modules}))
"""

OURS = """
import importlib, json, sys, time
import verl
assert "crossrl" not in sys.modules, "verl has loaded the host: it cannot be timed alone"
spent = {"hook": 0.0, "patches": 0.0}
def timed(kind, function):
    def inner(*args, **kwargs):
        began, inside = time.process_time(), spent["patches"]
        try:
            return function(*args, **kwargs)
        finally:
            if kind == "patches" or args[1] not in watched:  # a watched module's finding is that of the others
                spent[kind] += time.process_time() - began
    return inner
watched = set(sys.argv[1:])
began = time.process_time()
import crossrl.hosts.verl
spent["plug-in"] = time.process_time() - began
from crossrl.patching import hook, registry
hook.Finder.find_spec = timed("hook", hook.Finder.find_spec)
registry.apply = timed("patches", registry.apply)
for name in sys.argv[1:]:
    importlib.import_module(name)

from hydra import compose, initialize_config_module
from types import SimpleNamespace
from crossrl.hosts.verl.patches import with_session, with_settings, with_update
from crossrl.hosts.verl.settings import take_settings
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer")
trainer = SimpleNamespace(config=config)
began = time.process_time()
take_settings(trainer)
assert trainer.crossrl_settings is None
spent["run"] = time.process_time() - began

def update(self, batch): return batch
wrapped, calls = with_update(update), range(200_000)
def per_call(function):
    began = time.process_time()
    for _ in calls:
        function(trainer, None)
    return (time.process_time() - began) / len(calls)
spent["step"] = min(per_call(wrapped) for _ in range(3)) - min(per_call(update) for _ in range(3))
print(json.dumps(spent))
"""


def ran(python: str, program: str, modules: tuple[str, ...], host: bool) -> dict[str, Any]:
    """What ``program`` printed last. ``host``: whether verl loads the host."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_USE_EXTERNAL", "CROSSRL_"))}
    environment["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    if host:  # as by its entry point, also where that is not installed
        environment["VERL_USE_EXTERNAL_MODULES"] = "crossrl.hosts.verl"
    done = subprocess.run(
        [python, "-c", program, *modules], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with verl and crossrl")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement")
    parser.add_argument("--modules", nargs="+", default=list(TRAINERS), help="verl's trainers; 0.8 has the first alone")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: want at least 1")
    modules = tuple(args.modules)
    ran(args.python, WHOLE, modules, True)  # files into the cache, and compiled
    whole: dict[bool, list[float]] = {False: [], True: []}
    parts: list[dict[str, float]] = []
    for _ in range(args.rounds):
        for host in whole:
            found = ran(args.python, WHOLE, modules, host)
            if found["host"] is not host:
                raise SystemExit(f"the host is {'not ' * host}loaded by verl: is crossrl installed in {args.python}?")
            whole[host].append(found["seconds"])
        parts.append(ran(args.python, OURS, modules, False))
    for host, seconds in whole.items():
        told = f"{statistics.median(seconds):8.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"import of verl's trainers, host {'not asked' if host else 'absent':10}{told}")
    middle = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    for name, what in PARTS.items():
        print(f"of it, timed directly: {what:36}{1000 * middle[name]:8.1f} ms")
    print(f"once in a run: our keys looked for          {1000 * middle['run']:8.2f} ms")
    print(f"in each step                                {1e6 * middle['step']:8.2f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
