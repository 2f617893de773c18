"""Patches are verified before, put in place once, read back after, and refused otherwise (case C16)."""

from __future__ import annotations

import ast
import doctest
import importlib
import itertools
import sys
import threading
from pathlib import Path

import pytest
from patching_cases import ENGINE, engine, print_of, write_engine

from crossrl.patching import (
    Patch,
    PatchConflict,
    PatchError,
    PatchFailed,
    PatchNotLive,
    PatchRefused,
    from_version,
    source_has,
)
from crossrl.patching.fingerprint import definitions, difference, fingerprint
from crossrl.patching.registry import Registry

NUMBERS = itertools.count()


def halved(original):
    def scale(x):
        return original(x) / 2

    return scale


@pytest.fixture
def name(tmp_path, monkeypatch):
    """An engine package with a name of its own, importable, not imported."""
    name = f"engine{next(NUMBERS)}"
    write_engine(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture
def registry():
    registry = Registry()
    yield registry
    registry.revert()
    assert not registry._finder.installed


def patch_of(name: str, qualname: str = "scale", called: str = "engine.scale", text: str = ENGINE, **more) -> Patch:
    fields = {"wrapper": halved, "why": "doubles", "fingerprints": {"1.0": print_of(text, qualname)}, **more}
    return Patch(name=called, target=f"{name}.worker:{qualname}", **fields)


def state(registry: Registry) -> dict[str, str]:
    return {s.name: s.state for s in registry.live()}


# Fingerprints

SAME = [
    "def f(x):\n    return x + 1",
    'def f(x):\n    """Adds."""\n    # one\n    return (x +\n            1)',
    "def f( x ) : return x+1",
    "def f(x):\n    return x + 0x1",
]
OTHER = [
    "def f(x):\n    return x + 2",
    "def f(x):\n    return x - 1",
    "def f(y):\n    return y + 1",
    "def f(x=None):\n    return x + 1",
    "def f(x: int):\n    return x + 1",
    "async def f(x):\n    return x + 1",
    "@g\ndef f(x):\n    return x + 1",
    "def f(x):\n    return x + 1.0",
    "def f(x):\n    return x + True",
    "def f(x):\n    'Adds.'\n    'Not a docstring.'\n    return x + 1",
]


def test_a_fingerprint_sees_no_comments_formatting_or_docstrings():
    assert len({print_of(text, "f") for text in SAME}) == 1


def test_a_fingerprint_sees_everything_else():
    assert len({print_of(text, "f") for text in [SAME[0], *OTHER]}) == len(OTHER) + 1


def test_a_fingerprint_sees_what_belongs_to_which_block():
    texts = [
        "def f(x):\n if x:\n  a()\n b()",
        "def f(x):\n if x:\n  a()\n  b()",
        "def f(x):\n if x:\n  a()\n else:\n  b()",
        "def f(x):\n try:\n  a()\n finally:\n  b()",
        "def f(x):\n try:\n  a()\n except E:\n  b()",
        "def f(x):\n try:\n  a()\n except E as e:\n  b()",
        "def f(x):\n match x:\n  case 1:\n   a()\n  case _:\n   b()",
        "def f(x):\n match x:\n  case 2:\n   a()\n  case _:\n   b()",
    ]
    assert len({print_of(text, "f") for text in texts}) == len(texts)


def test_the_hint_names_the_statements_that_changed():
    old = "def f(x):\n    a = 1\n    if x:\n        b = 2\n    c = 3\n    return a"
    expected = print_of(old, "f")

    def hint(new: str) -> list[str]:
        return difference(expected, definitions(ast.parse(new), "f")[0])

    assert hint(old) == []
    assert hint(old.replace("b = 2", "b = 5")) == ["line 4 is changed: `b = 5`"]
    assert hint(old.replace("    c = 3\n", "")) == ["1 statement is gone after line 4, `b = 2`"]
    assert hint(old.replace("c = 3", "c = 3\n    d = 4")) == ["line 6 is new: `d = 4`"]
    assert hint(old.replace("f(x)", "f(x, y)")) == ["line 1 is changed: `def f(x, y):`"]


@pytest.mark.parametrize("module", ["fingerprint", "patch"])
def test_the_examples_in_docstrings_are_true(module):
    """Fingerprints are kept in patches for years: the same source must give the same one in every version of Python."""
    failed, tried = doctest.testmod(importlib.import_module(f"crossrl.patching.{module}"))
    assert (failed, tried > 0) == (0, True)


# C16 (i): one character in the source


def test_changed_source_is_refused_with_expected_and_found(name, registry, tmp_path):
    changed = ENGINE.replace("y = x * 2", "y = x * 3")
    write_engine(tmp_path, name, changed)
    patch = patch_of(name)
    registry.install(patch)
    with pytest.raises(PatchRefused) as refused:
        engine(name)
    message = str(refused.value)
    assert patch.fingerprints["1.0"][:32] in message
    assert print_of(changed, "scale")[:32] in message
    assert "line 8 is changed: `y = x * 3`" in message
    assert f"{name}.worker" not in sys.modules, "the import failed, so the start does"


def test_only_comments_changed_is_not_refused(name, registry, tmp_path):
    write_engine(tmp_path, name, ENGINE.replace("# the fault", "# known").replace('"""Twice', '"""Three times'))
    registry.install(patch_of(name))
    assert engine(name).scale(3) == 3


def test_warn_mode_leaves_changed_source_alone_and_says_so(name, registry, tmp_path, caplog):
    write_engine(tmp_path, name, ENGINE.replace("y = x * 2", "y = x * 3"))
    registry.install(patch_of(name, mode="warn"))
    assert engine(name).scale(3) == 9
    assert "line 8 is changed" in caplog.text
    assert state(registry) == {"engine.scale": "refused"}
    with pytest.raises(PatchNotLive, match=r"MainProcess.*engine\.scale .*is refused"):
        registry.require()


def test_without_the_check_the_changed_source_would_be_patched(name, registry, tmp_path):
    """The control: with the changed source's fingerprint, the same patch goes in."""
    changed = ENGINE.replace("y = x * 2", "y = x * 3")
    write_engine(tmp_path, name, changed)
    registry.install(patch_of(name, text=changed))
    assert engine(name).scale(2) == 3


# C16 (ii): twice


def test_a_patch_is_applied_once(name, registry):
    patch = patch_of(name)
    registry.install(patch)
    worker = engine(name)
    first = worker.scale
    registry.install(patch)
    registry.sweep()
    Registry().install(patch)  # another registry finds the mark
    assert worker.scale is first
    assert worker.scale(4) == 4, "halved twice it would be 2"


def test_a_reloaded_module_is_patched_again(name, registry):
    registry.install(patch_of(name))
    worker = importlib.reload(engine(name))
    assert worker.scale(4) == 4
    assert state(registry) == {"engine.scale": "applied"}


# C16 (iii): two patches on one target


def test_two_patches_on_one_target_are_a_conflict(name, registry):
    with pytest.raises(PatchConflict, match=r"one and two are both for engine\d+\.worker:scale.*CROSSRL_PATCH_ONE=0"):
        registry.install(patch_of(name, called="one"), patch_of(name, called="two"))


def test_a_conflict_with_another_registry_s_patch_is_found_on_the_object(name, registry):
    other = Registry()
    other.install(patch_of(name, called="one"))
    engine(name)
    with pytest.raises(PatchConflict, match="one and two are both for"):
        registry.install(patch_of(name, called="two"))
    other.revert()


def test_an_explicit_order_is_kept(name, registry):
    def minus_one(original):
        return lambda x: original(x) - 1

    second = patch_of(name, called="second", wrapper=minus_one, after=("first",))
    registry.install(second, patch_of(name, called="first"))
    assert engine(name).scale(10) == 9, "halved first; the other way round 9.5"
    assert state(registry) == {"second": "applied", "first": "applied"}
    registry.revert()
    assert engine(name).scale(10) == 20


def test_a_circle_of_orders_is_a_conflict(name, registry):
    with pytest.raises(PatchConflict, match="one, two each want to come after"):
        registry.install(patch_of(name, called="one", after=("two",)), patch_of(name, called="two", after=("one",)))


def test_a_replacement_does_not_remove_another_patch(name, registry):
    whole = {"wrapper": None, "replacement": lambda x: x}
    registry.install(patch_of(name, called="one"), patch_of(name, called="two", after=("one",), **whole))
    with pytest.raises(PatchConflict, match=r"two would replace .* remove one"):
        engine(name)


def test_a_replacement_does_not_remove_other_people_s_wrapper(name, registry):
    worker = engine(name)
    worker.scale = worker.traced(worker.scale)
    with pytest.raises(PatchConflict, match="other code has put a function of its own"):
        registry.install(patch_of(name, wrapper=None, replacement=lambda x: x))
    registry.revert()
    registry.install(patch_of(name, wrapper=lambda original: lambda x: original(x)))
    assert worker.scale(2) == ("traced", 4), "a wrapper keeps it"


def test_two_patches_of_one_name_are_a_conflict(name, registry):
    registry.install(patch_of(name))
    with pytest.raises(PatchConflict, match=r"two patches have the name engine\.scale"):
        registry.install(patch_of(name))


def test_a_patch_that_needs_another_is_refused_without_it(name, registry, monkeypatch):
    monkeypatch.setenv("CROSSRL_PATCH_ONE", "0")
    registry.install(
        patch_of(name, called="one"),
        patch_of(name, "Worker.wake_up", called="two", wrapper=lambda original: lambda self: None, needs=("one",)),
    )
    with pytest.raises(PatchError, match="needs patch one, which is off"):
        engine(name)


# C16 (v): mended upstream


@pytest.mark.parametrize("mended", [True, False])
def test_a_version_with_the_fix_is_skipped_with_a_note(name, registry, tmp_path, mended):
    text = ENGINE.replace("y = x * 2", "y = mended(x)") if mended else ENGINE
    write_engine(tmp_path, name, text.replace("import functools", "import functools\nmended = float", 1))
    registry.install(patch_of(name, obsolete=source_has("mended(x)", "mended by engine#9")))
    assert engine(name).scale(3) == 3, "by the fix or by the patch"
    (status,) = registry.require()
    assert (status.state, status.note) == (("not needed", "mended by engine#9") if mended else ("applied", "as in 1.0"))


def test_a_version_predicate_asks_the_installed_distribution(name, registry):
    old, new = from_version("1", "long ago"), from_version("10000", "one day")
    registry.install(patch_of(name, distribution="pytest", obsolete=old))
    worker = engine(name)
    assert worker.scale(3) == 6
    registry.install(patch_of(name, called="two", distribution="pytest", obsolete=new, after=("engine.scale",)))
    assert worker.scale(3) == 3
    assert [s.state for s in registry.live()] == ["not needed", "applied"]


def test_a_predicate_that_raises_is_a_failure(name, registry):
    registry.install(patch_of(name, obsolete=lambda installed: 1 / 0))
    with pytest.raises(PatchFailed, match="obsolete raised ZeroDivisionError"):
        engine(name)


# What can be a target


def doubled(original):
    return lambda *args: [original(*args)] * 2


@pytest.mark.parametrize(
    ("qualname", "call", "result"),
    [
        ("decorated", lambda w: w.decorated(1), [("traced", 1)] * 2),
        ("Worker.wake_up", lambda w: w.Worker().wake_up(1), [["woken", 1]] * 2),
        ("Worker.wake_up", lambda w: w.Child().wake_up(1), [["woken", 1]] * 2),
        ("Worker.static", lambda w: w.Worker().static(1), [1, 1]),
        ("Worker.made", lambda w: w.Child.made(1), [("Child", 1)] * 2),
        ("Worker.Inner.depth", lambda w: w.Worker.Inner().depth(), [2, 2]),
    ],
)
def test_kinds_of_functions_that_can_be_patched(name, registry, qualname, call, result):
    text = ENGINE.replace("    again = wake_up\n", "")
    Path(importlib.util.find_spec(name).origin).with_name("worker.py").write_text(text)
    registry.install(patch_of(name, qualname, wrapper=doubled))
    assert call(engine(name)) == result
    registry.require()
    registry.revert()
    assert call(engine(name)) == result[0]


def test_a_property_keeps_its_setter_and_docstring(name, registry):
    text = ENGINE
    getter = next(n for n in definitions(ast.parse(text), "Worker.state") if len(n.args.args) == 1)
    registry.install(patch_of(name, "Worker.static", called="x", wrapper=doubled), Patch(
        name="state", target=f"{name}.worker:Worker.state", fingerprints={"1": fingerprint(getter)}, wrapper=doubled,
        why="test",
    ))  # fmt: skip
    worker = engine(name).Worker()
    worker.state = "awake"
    assert worker.state == ["awake", "awake"]
    assert type(worker).state.__doc__ == "Asleep or awake."


@pytest.mark.parametrize(
    ("qualname", "why"),
    [
        ("length", r"is a builtin_function_or_method: supported are Python functions"),
        ("cached", r"is a _lru_cache_wrapper: supported are"),
        ("masked", r"a decorator without functools\.wraps made it"),
        ("Worker", r"is a type: supported are"),
        ("Child.wake_up", r"Child inherits wake_up; name it where it is defined: .*worker:Worker"),
        ("Worker.Outer.depth", r"Worker\.Outer is not there"),
        ("scale.inner", r"worker\.scale is a function, not a class"),
        ("nothing", r"worker has no nothing"),
        ("Worker.nothing", r"class Worker has no nothing"),
    ],
)
def test_what_cannot_be_patched_is_refused_with_the_reason(name, registry, qualname, why):
    registry.install(Patch(name="p", target=f"{name}.worker:{qualname}", fingerprints={"1": print_of(ENGINE, "scale")},
                           wrapper=halved, why="test"))  # fmt: skip
    with pytest.raises(PatchRefused, match=why):
        engine(name)


def test_a_function_of_another_module_is_refused(name, registry):
    registry.install(Patch(name="p", target=f"{name}.user:scale", fingerprints={"1": print_of(ENGINE, "scale")},
                           wrapper=halved, why="test"))  # fmt: skip
    with pytest.raises(PatchRefused, match=rf"is {name}\.worker\.scale of .*worker\.py, not of {name}\.user"):
        engine(name, "user")


def test_a_c_function_is_refused(registry):
    found = {"1": print_of(ENGINE, "scale")}
    with pytest.raises(PatchRefused, match=r"datetime:datetime\.now is a \w*method\w*: supported are"):
        registry.install(Patch(name="c", target="datetime:datetime.now", fingerprints=found, wrapper=halved, why="t"))


def test_source_that_changed_after_the_import_is_refused(name, registry, tmp_path):
    engine(name)
    write_engine(tmp_path, name, "# a line more\n" + ENGINE)
    with pytest.raises(PatchRefused, match=r"the file was changed after it was imported"):
        registry.install(patch_of(name))


def test_source_that_is_not_there_is_refused(name, registry, tmp_path):
    engine(name)
    (tmp_path / name / "worker.py").unlink()
    with pytest.raises(PatchRefused, match="is not available, so it cannot be compared"):
        registry.install(patch_of(name))


# Failing, reverting, reading back


def test_a_patch_whose_module_is_gone_again_is_not_live(name, registry):
    """The second patch of the module is refused, so the import fails, and what the first one changed is gone."""
    found = {"1.0": "0" * 32 + ":abc"}
    registry.install(patch_of(name), patch_of(name, "Worker.static", called="other", fingerprints=found))
    for _ in range(2):
        with pytest.raises(PatchRefused, match="patch other refuses"):
            engine(name)
        assert state(registry) == {"engine.scale": "waiting", "other": "refused"}


def test_a_file_that_is_no_python_any_more_is_refused(name, registry, tmp_path):
    engine(name)
    write_engine(tmp_path, name, "def scale(x) return")
    with pytest.raises(PatchRefused, match=r"was changed after it was imported: expected ':'"):
        registry.install(patch_of(name))


@pytest.mark.parametrize("wrapper", [lambda original: 1 / 0, lambda original: None, lambda original: original])
def test_a_patch_that_fails_leaves_its_target_as_it_was(name, registry, wrapper):
    worker = engine(name)
    before = worker.scale
    with pytest.raises(PatchError, match=r"engine\.scale"):
        registry.install(patch_of(name, wrapper=wrapper))
    assert worker.scale is before
    assert not hasattr(before, "__crossrl_patch__")


def test_a_target_that_does_not_take_it_is_as_it_was(name, registry):
    """Read back: an owner that swallows what is set."""
    worker = engine(name)

    class Swallows(type(worker)):
        def __setattr__(self, key, value):
            pass

    before = worker.scale
    worker.__class__ = Swallows
    with pytest.raises(PatchRefused, match=r"what can be read there is not it: .*scale now, without the patch"):
        registry.install(patch_of(name))
    assert worker.scale is before


def test_reverting_brings_back_the_very_object(name, registry):
    worker = engine(name)
    before, raw = worker.scale, vars(worker.Worker)["static"]
    registry.install(patch_of(name), patch_of(name, "Worker.static", called="static", wrapper=doubled))
    assert worker.scale is not before
    registry.revert()
    assert worker.scale is before
    assert vars(worker.Worker)["static"] is raw


def test_reverting_does_not_remove_what_others_put_on_top(name, registry):
    registry.install(patch_of(name))
    worker = engine(name)
    ours = worker.scale
    worker.scale = worker.traced(ours)
    with pytest.raises(PatchRefused, match="take back what was put there later first"):
        registry.revert()
    assert registry.live()[0].note == "wrapped by other code since"
    registry.require()
    worker.scale = ours


def test_a_patch_that_was_overwritten_since_is_lost(name, registry):
    registry.install(patch_of(name))
    worker = engine(name)
    registry.require()
    ours, worker.scale = worker.scale, lambda x: x
    with pytest.raises(PatchNotLive, match=r"engine\.scale .* is lost: .*without the patch"):
        registry.require()
    worker.scale = ours


def test_introspection_sees_the_original(name, registry):
    import inspect
    import pickle

    registry.install(patch_of(name))
    worker = engine(name)
    assert worker.scale.__name__ == "scale"
    assert worker.scale.__module__ == f"{name}.worker"
    assert list(inspect.signature(worker.scale).parameters) == ["x"]
    assert pickle.loads(pickle.dumps(worker.scale)) is worker.scale


# Stale references


def test_names_that_hold_the_original_are_found(name, registry):
    user = engine(name, "user")
    registry.install(patch_of(name))
    assert user.use(3) == 6, "this is why it matters"
    (status,) = registry.live()
    assert status.stale == (f"{name}.user.scale",)
    with pytest.raises(PatchNotLive, match=rf"applied but passed by: {name}\.user\.scale still hold the original"):
        registry.require()


def test_a_patch_before_the_imports_has_no_stale_names(name, registry):
    registry.install(patch_of(name))
    assert engine(name, "user").use(3) == 3
    assert registry.require()[0].live


def test_another_name_of_a_method_is_found(name, registry):
    registry.install(patch_of(name, "Worker.wake_up", wrapper=doubled))
    engine(name)
    assert registry.live()[0].stale == (f"{name}.worker.Worker.again",)


# The import hook


def test_nothing_is_imported_for_a_patch(name, registry):
    registry.install(patch_of(name))
    assert f"{name}.worker" not in sys.modules
    assert state(registry) == {"engine.scale": "waiting"}
    with pytest.raises(PatchNotLive, match="is waiting: not imported yet"):
        registry.require()
    registry.require(waiting_ok=True)


def test_a_hook_that_was_removed_is_noticed(name, registry, monkeypatch):
    registry.install(patch_of(name))
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not registry._finder])
    with pytest.raises(PatchNotLive, match="the import hook was removed"):
        registry.require(waiting_ok=True)


def test_the_module_keeps_its_own_loader(name, registry):
    registry.install(patch_of(name))
    worker, user = engine(name), engine(name, "user")
    assert type(worker.__loader__) is type(user.__loader__)
    assert type(worker.__spec__.loader) is type(user.__loader__)


def test_the_hook_is_asked_before_other_finders(name, registry):
    """A finder that others put first later would hide the target; installing again puts ours first."""
    registry.install(patch_of(name))
    finder = sys.meta_path[0]
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
    try:
        registry.install()
        assert sys.meta_path[0] is finder
        assert engine(name).scale(3) == 3
    finally:
        sys.meta_path.remove(importlib.machinery.PathFinder)
        assert importlib.machinery.PathFinder in sys.meta_path


def test_a_module_that_came_around_the_hook_is_swept_up(name, registry):
    registry.install(patch_of(name))
    registry._finder.remove()
    worker = engine(name)
    assert worker.scale(3) == 6
    registry.require()
    assert worker.scale(3) == 3


def test_importing_from_many_threads_applies_once_and_shows_nobody_the_original(name, registry, tmp_path):
    slow = "import time\ntime.sleep(0.05)\n" + ENGINE
    write_engine(tmp_path, name, slow)
    calls = []

    def wrapper(original):
        calls.append(original)
        return lambda x: original(x) / 2

    registry.install(patch_of(name, text=slow, wrapper=wrapper))
    got: list[float] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait(10)
        if i % 2:
            registry.live()
        got.append(engine(name).scale(4))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [4] * 8
    assert len(calls) == 1


def test_installing_while_another_thread_imports_waits_for_it(name, registry, tmp_path):
    """The import began before the hook was there, so it is the installation that has to wait and apply."""
    go, on = tmp_path / "go", tmp_path / "on"
    wait = (
        f"import pathlib, time\npathlib.Path({str(on)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
    )
    write_engine(tmp_path, name, wait + ENGINE)
    importer = threading.Thread(target=engine, args=(name,))
    importer.start()
    while not on.exists():
        threading.Event().wait(0.01)
    installer = threading.Thread(target=registry.install, args=(patch_of(name, text=wait + ENGINE),))
    installer.start()
    installer.join(0.1)
    assert installer.is_alive(), "it waits"
    go.touch()
    importer.join(10)
    installer.join(10)
    assert engine(name).scale(3) == 3


# Switches and definitions


def test_the_environment_goes_before_the_configuration(name, registry, monkeypatch):
    patch = patch_of(name)
    assert patch.switch == "CROSSRL_PATCH_ENGINE_SCALE"
    monkeypatch.setenv(patch.switch, "0")
    registry.install(patch, switches={"engine.scale": True})
    assert engine(name).scale(3) == 6
    assert state(registry) == {"engine.scale": "off"}
    registry.require()


@pytest.mark.parametrize(("on", "switch", "result"), [(True, False, 6), (False, True, 3), (False, None, 6)])
def test_the_configuration_goes_before_the_default(name, registry, on, switch, result):
    registry.install(patch_of(name, on=on), switches={} if switch is None else {"engine.scale": switch})
    assert engine(name).scale(3) == result


def test_switching_what_is_not_there_is_an_error(name, registry, monkeypatch):
    with pytest.raises(PatchError, match=r"no patch 'engine\.scall' to switch; there are: engine\.scale"):
        registry.install(patch_of(name), switches={"engine.scall": False})
    monkeypatch.setenv("CROSSRL_PATCH_ENGINE_SCALE", "maybe")
    with pytest.raises(PatchError, match="CROSSRL_PATCH_ENGINE_SCALE is 'maybe'"):
        registry.install(patch_of(name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "A b"}, "name must be"),
        ({"target": "engine.worker.scale"}, "want 'module:qualname'"),
        ({"wrapper": None}, "one of wrapper and replacement"),
        ({"replacement": len}, "one of wrapper and replacement"),
        ({"fingerprints": {}}, "hold 'nothing'"),
        ({"fingerprints": {"1": "abc"}}, "hold 'abc'"),
        ({"why": " "}, "why is empty"),
        ({"mode": "loud"}, "mode is 'loud'"),
    ],
)
def test_a_patch_that_says_too_little_is_an_error(fields, message):
    good = {"name": "p", "target": "a.b:c", "wrapper": halved, "why": "w", "fingerprints": {"1": "0" * 32 + ":abc"}}
    Patch(**good)
    with pytest.raises(PatchError, match=message):
        Patch(**{**good, **fields})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json", "want 'module:NAME'"),
        ("__main__:PATCHES", "other processes have another __main__"),
        ("no_such_module:PATCHES", "No module named"),
        ("json:PATCHES", "has no attribute"),
        ("json:__all__", "is a list: want a Patch"),
    ],
)
def test_a_reference_to_no_patches_is_an_error(registry, reference, message):
    with pytest.raises(PatchError, match=message):
        registry.install(reference)
