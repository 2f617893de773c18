"""Children have the patches of their parent, however they are started, and say so; or they do not start (C16 iv)."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from patching_cases import ENGINE, print_of, run_program, write_engine, write_fixes

from crossrl.patching.children import BOOTSTRAP

pytestmark = pytest.mark.timeout(120)

START = """
    import json, multiprocessing, subprocess, sys
    from pathlib import Path
    from crossrl import patching

    def work(answer):
        from engine.user import use            # as an engine does: from ... import
        answer.put((use(3), [s.as_json() for s in patching.require()]))

    def main(method, carry=True):
        patching.install("fixes:PATCHES")
        if carry:
            patching.carry(Path("reports"))
        context = multiprocessing.get_context(method)
        answer = context.SimpleQueue()
        child = context.Process(target=work, args=(answer,), name="engine-0")
        child.start()
        if carry:
            report = patching.wait_until_live(Path("reports"), [child.pid], 60)[child.pid]
            print(json.dumps(report.process))
        child.join(60)
        print(json.dumps([child.exitcode, None if answer.empty() else answer.get()]))

    if __name__ == "__main__":
        main(*{args})
"""


@pytest.fixture
def folder(tmp_path):
    """With a package ``engine`` and a module ``fixes`` for it; programs run there."""
    write_engine(tmp_path, "engine")
    write_fixes(tmp_path, "fixes", "engine", print_of(ENGINE, "scale"))
    return tmp_path


def answers(done) -> list:
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_has_the_patches_and_reports_them(folder, method):
    process, (exitcode, (result, statuses)) = answers(run_program(folder, START.replace("{args}", f"({method!r},)")))
    assert process.startswith("engine-0 (process ")
    assert (exitcode, result) == (0, 3)
    assert [(s["name"], s["state"], s["live"]) for s in statuses] == [("engine.scale", "applied", True)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_to_which_nothing_was_carried_does_not_start_where_a_patch_is_required(folder, method):
    program = START.replace("{args}", f"({method!r}, False)")
    ((exitcode, answer),) = answers(run_program(folder, program.replace("require()", "live()")))
    assert (exitcode, answer) == (0, [6, []]), "the control: the original, and nobody says anything"
    done = run_program(folder, program.replace("require()", "require('engine.scale')"))
    assert answers(done) == [[1, None]]
    assert "PatchNotLive: engine-0 (process " in done.stderr
    assert "patch engine.scale is not known here: carry() was not called in the parent" in done.stderr


def test_a_child_that_left_the_environment_behind_is_named(folder):
    done = run_program(
        folder,
        """
        import subprocess, sys
        from pathlib import Path
        from crossrl import patching
        patching.install("fixes:PATCHES")
        patching.carry(Path("reports"))
        child = subprocess.Popen([sys.executable, "-E", "-c", "import time; time.sleep(30)"])
        try:
            patching.wait_until_live(Path("reports"), [child.pid], 1.5)
        except patching.PatchNotLive as error:
            print(str(error).replace(str(child.pid), "PID"))
        child.kill()
        """,
    )
    assert done.stdout.startswith(
        "process PID did not report its patches in reports within 1.5 s: it was started without"
    )


def test_a_required_patch_that_is_refused_stops_the_child(folder):
    """The source changes on the child's side (another node, say): its import fails, the parent is told at once."""
    program = START.replace("{args}", "('spawn',)").replace(
        "patching.install(",
        "Path('engine/worker.py').write_text(Path('changed.py').read_text())\n        patching.install(",
    )
    (folder / "changed.py").write_text(ENGINE.replace("x * 2", "x * 4"))
    done = run_program(folder, program)
    assert done.returncode == 1
    assert "PatchRefused: patch engine.scale refuses engine.worker:scale: expected fingerprint" in done.stderr
    (last,) = [line for line in done.stderr.splitlines() if "PatchNotLive: " in line]
    assert "(process " in last
    assert "engine.scale (engine.worker:scale) is refused" in last


@pytest.mark.parametrize("how", ["module", "target"])
def test_a_child_that_cannot_have_the_patches_does_not_start(folder, how):
    """Python itself only prints an error in ``sitecustomize`` and goes on; here the process ends."""
    if how == "target":  # loaded before the child's own code, so refused at once
        write_fixes(folder, "fixes", "engine", "0" * 32 + ":abc", more="mode='warn'")
        (folder / "fixes.py").write_text("import engine.worker\n" + (folder / "fixes.py").read_text())
    done = run_program(
        folder,
        """
        import os, subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        environment = {**os.environ, **patching.child_environment()}
        if HOW == "module":
            os.rename("fixes.py", "elsewhere.py")
        command = [sys.executable, "-c", "print('started')"]
        child = subprocess.run(command, env=environment, capture_output=True, text=True)
        print(child.returncode, child.stdout, child.stderr)
        """.replace("HOW", repr(how)),
    )
    assert done.stdout.startswith("1 "), done.stderr
    assert "started\n" not in done.stdout
    assert "This process was not started." in done.stdout
    assert (
        "No module named 'fixes'" if how == "module" else "engine.scale (engine.worker:scale) is refused"
    ) in done.stdout


def test_guarded_needs_no_environment(folder):
    """An engine that starts its workers with an environment of its own."""
    program = """
        import multiprocessing, os
        from crossrl import patching
        from work import work

        if __name__ == "__main__":
            patching.install("fixes:PATCHES")
            context = multiprocessing.get_context("spawn")
            for target in (patching.guarded(work), work):
                child = context.Process(target=target)
                child.start()
                child.join(60)
    """
    (folder / "work.py").write_text("def work():\n    from engine.user import use\n    print(use(3), flush=True)\n")
    done = run_program(folder, program)
    assert done.stdout == "3.0\n6\n", done.stderr


def test_guarded_installs_before_the_target_s_module_is_imported(folder):
    program = """
        import multiprocessing, sys
        from crossrl import patching

        if __name__ == "__main__":
            patching.install("fixes:PATCHES")
            sys.path.insert(0, "late")
            from work import work
            child = multiprocessing.get_context("spawn").Process(target=patching.guarded(work))
            child.start()
            child.join(60)
            print(child.exitcode)
    """
    (folder / "late").mkdir()
    (folder / "late" / "work.py").write_text(
        "from engine.worker import scale\nfrom crossrl import patching\n"
        "def work():\n    patching.require()\n    print(scale(3), flush=True)\n"
    )
    done = run_program(folder, program)
    assert done.stdout == "3.0\n0\n", done.stderr


def test_switches_go_along(folder):
    program = START.replace("{args}", "('spawn',)").replace(
        '"fixes:PATCHES")', '"fixes:PATCHES", switches={"engine.scale": False})'
    )
    _, (exitcode, (result, statuses)) = answers(run_program(folder, program))
    assert (exitcode, result, statuses[0]["state"]) == (0, 6, "off")


def test_a_patch_that_cannot_be_carried_and_is_off_stands_in_no_child_s_way(folder):
    prints = "{'1': '0' * 32 + ':abc'}"
    own = f"patching.Patch(name='own', target='a.b:c', fingerprints={prints}, wrapper=half, why='w', on=False)"
    program = START.replace("{args}", "('spawn',)").replace(
        'patching.install("fixes:PATCHES")\n',
        f'patching.install("fixes:PATCHES")\n        from fixes import half; patching.install({own})\n',
    )
    _, (exitcode, (_, statuses)) = answers(run_program(folder, program))
    assert (exitcode, [s["name"] for s in statuses]) == (0, ["engine.scale"])


def test_a_subprocess_of_a_subprocess_has_them(folder):
    done = run_program(
        folder,
        """
        import subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        patching.carry()
        inner = "import engine.worker; print(engine.worker.scale(3))"
        outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
        subprocess.run([sys.executable, "-c", outer], cwd=".")
        """,
    )
    assert done.stdout == "3.0\n", done.stderr


def test_other_people_s_sitecustomize_still_runs(folder):
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('theirs', __name__)\n")
    program = """
        import subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        patching.carry()
        subprocess.run([sys.executable, "-c", "import engine.worker; print(engine.worker.scale(3))"])
    """
    done = run_program(folder, program, PYTHONPATH=str(site))
    assert done.stdout.splitlines() == ["theirs sitecustomize"] * 2 + ["3.0"], done.stderr
    (site / "sitecustomize.py").write_text("import os\nif 'CROSSRL_PATCHES' in os.environ:\n    1 / 0\n")
    done = run_program(folder, program, PYTHONPATH=str(site))
    assert done.stdout == "3.0\n", done.stderr
    assert "sitecustomize.py: ZeroDivisionError" in done.stderr


def test_the_bootstrap_is_part_of_the_package():
    """It lies in a folder that is no package, so it has to be named as data."""
    root = Path(__file__).resolve().parents[1]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["crossrl"]
    file = BOOTSTRAP / "sitecustomize.py"
    assert file.is_file()
    assert any(file.relative_to(root / "src/crossrl").match(pattern) for pattern in data)


def test_another_interpreter_that_inherits_the_environment_is_left_alone(folder):
    done = run_program(
        folder,
        """
        import os, subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        environment = {**os.environ, **patching.child_environment(), "CROSSRL_PATCHES_PREFIX": "/opt/another"}
        code = "import sys; print('crossrl.patching' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], env=environment)
        """,
    )
    assert done.stdout == "False\n", done.stderr


def test_ray_s_set_up_hook_installs_them(folder):
    """Ray sets the variables, then calls the function that the hook names; here without Ray."""
    done = run_program(
        folder,
        """
        import importlib, json, os, subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        env = patching.ray_runtime_env()
        module, _, name = env["worker_process_setup_hook"].rpartition(".")
        env["env_vars"].pop("PYTHONPATH")      # an interpreter that Ray had started before
        code = f"import {module} as m; m.{name}(); m.{name}(); import engine.worker; print(engine.worker.scale(3))"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **env["env_vars"]})
        """,
    )
    assert done.stdout == "3.0\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["carry", "runtime_env", "nothing"])
def test_workers_of_ray_have_them(folder, how):
    pytest.importorskip("ray")
    done = run_program(
        folder,
        """
        import ray
        from crossrl import patching
        patching.install("fixes:PATCHES")
        if HOW == "carry":
            patching.carry()
        environment = patching.ray_runtime_env() if HOW == "runtime_env" else None
        ray.init(num_cpus=1, include_dashboard=False, runtime_env=environment)

        @ray.remote
        class Worker:
            def ask(self):
                from crossrl import patching
                from engine.user import use
                try:
                    return use(3), patching.require("engine.scale")[0].state
                except patching.PatchNotLive as error:
                    return use(3), str(error).partition(" is not known")[1]

        print(ray.get(Worker.remote().ask.remote(), timeout=90))
        """.replace("HOW", repr(how)),
        RAY_USAGE_STATS_ENABLED="0",
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )
    expected = "(6, ' is not known')" if how == "nothing" else "(3.0, 'applied')"
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr


def test_a_child_s_import_path_is_as_before_but_for_what_is_added(folder):
    done = run_program(
        folder,
        """
        import json, os, subprocess, sys
        from crossrl import patching
        patching.install("fixes:PATCHES")
        with_patches = {**os.environ, **patching.child_environment()}
        code = "import json, sys; print(json.dumps(sys.path))"
        for environment in (os.environ, with_patches):
            subprocess.run([sys.executable, "-c", code], env=environment)
        """,
    )
    before, after = (json.loads(line) for line in done.stdout.splitlines())
    assert after == ["", str(BOOTSTRAP), *before[1:], str(folder)]


def test_a_child_imports_nothing_heavy_for_it(folder):
    done = run_program(
        folder,
        """
        import subprocess, sys
        from crossrl import patching
        patching.install("crossrl.patching.known:PATCHES")
        patching.carry()
        code = "import sys; m = set(sys.modules); print('crossrl.patching' in m, {'torch', 'numpy', 'rich'} & m)"
        subprocess.run([sys.executable, "-c", code])
        """,
    )
    assert done.stdout == "True set()\n", done.stderr


def test_carrying_too_late_or_nothing_is_an_error(folder):
    done = run_program(
        folder,
        """
        import multiprocessing
        from crossrl import patching
        from crossrl.patching import Patch

        def attempt(what):
            try:
                what()
            except patching.PatchError as error:
                print(error)

        def nothing():
            pass

        if __name__ == "__main__":
            attempt(patching.carry)
            attempt(patching.boot)
            patching.install("fixes:PATCHES")
            child = multiprocessing.get_context("forkserver").Process(target=nothing)
            child.start()
            child.join()
            attempt(patching.carry)
            from fixes import half
            found = {"1": "0" * 32 + ":abc"}
            patching.install(Patch(name="own", target="a.b:c", fingerprints=found, wrapper=half, why="w"))
            attempt(patching.child_environment)
        """,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "no patches are installed, so there are none to carry: call install() first"
    assert "CROSSRL_PATCHES names no patches" in lines[1]
    assert lines[2].startswith("multiprocessing's fork server was started before the patches were carried")
    assert lines[3].startswith("patch own was installed as an object, so other processes cannot find it")


def test_waiting_for_named_patches_and_for_nothing(folder):
    done = run_program(
        folder,
        """
        import os
        from pathlib import Path
        from crossrl import patching
        patching.install("fixes:PATCHES")
        patching.carry(Path("reports"))
        me = [os.getpid()]

        def attempt(pids, names=None):
            try:
                print(len(patching.wait_until_live(Path("reports"), pids, 0.2, names)))
            except patching.PatchError as error:
                print(str(error).replace(str(me[0]), "PID"))

        attempt([])
        attempt(me, ["engine.scall"])
        attempt(me)
        import engine.worker
        attempt(me)
        attempt(me, ["engine.scale"])
        engine.worker.scale = None
        patching.report()
        attempt(me)
        """,
    )
    lines = done.stdout.splitlines()
    not_live = "MainProcess (process PID): required patches are not live: engine.scale (engine.worker:scale) is "
    assert lines[:2] == [
        "wait_until_live was asked about no process",
        "MainProcess (process PID): patch engine.scall is not known there; known are: engine.scale",
    ]
    assert lines[2] == f"{not_live}waiting: not imported yet"
    assert lines[3:5] == ["1", "1"]
    assert lines[5].startswith(f"{not_live}lost: engine.worker:scale is a NoneType")
