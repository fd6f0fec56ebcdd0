"""Calls that are told to other processes: once, in order, and no launching method of the runner without it."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jradix.features import Features
from jradix.mirror import Mirror, MirroredCall, mirrored
from jradix.runner import Runner
from tests.tiny_engine import start

LAUNCHES = {"launch", "compile"}
"""Methods of `Programs` that run or make programs."""
HARMLESS_FEATURES = {"is_new", "logits"}
"""Methods of `Features` that launch and change nothing; the others do."""
ON_DEVICES = {"_pool", "_next_tokens", "parameters"}
"""What programs work on, and donate."""
OF_THIS_PROCESS = {"__init__", "close", "replace_pool"}
"""May change it without a word to others: at the beginning, at the end, and in tests."""


class Adder:
    """A sum, and a list of the calls that were told."""

    def __init__(self) -> None:
        self.total = 0
        self.told: list[MirroredCall] = []
        self.mirror = Mirror(self.told.append)

    @mirrored
    def add(self, number: int) -> int:
        assert self.mirror.depth, "it is being made, and it says so"
        self.total += number
        return self.total

    @mirrored
    def add_twice(self, number: int) -> int:
        self.add(number)
        return self.add(number)

    @mirrored
    def break_down(self) -> None:
        raise RuntimeError("broken")


def test_the_outermost_call_is_told_before_it_is_made_and_its_parts_are_not() -> None:
    adder, other = Adder(), Adder()
    assert adder.add_twice(3) == 6
    assert adder.add(1) == 7
    with pytest.raises(RuntimeError, match="broken"):
        adder.break_down()
    assert adder.mirror.depth == 0
    assert adder.told == [("add_twice", (3,)), ("add", (1,)), ("break_down", ())]
    for name, arguments in adder.told[:2]:
        getattr(other, name)(*arguments)
    assert other.total == adder.total


def methods(cls: type) -> dict[str, ast.FunctionDef]:
    """The syntax trees of the methods that this class defines, properties among them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_mirrored(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "mirrored" for decorator in method.decorator_list)


def device_work(method: ast.FunctionDef) -> Iterator[str]:
    """What of LAUNCHES it names, and what of ON_DEVICES it changes or hands to somebody who may."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="programs"), attr=name) if name in LAUNCHES:
                yield name
            case ast.Attribute(value=ast.Attribute(attr="features"), attr=name):
                if name in methods(Features).keys() - HARMLESS_FEATURES:
                    yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store() | ast.Del()):
                if name in ON_DEVICES:
                    yield name
            case ast.Call(args=[ast.Attribute(attr="parameters"), *_]):
                yield "parameters"


def calls_of_self(method: ast.FunctionDef) -> set[str]:
    return {
        node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }


def unmirrored_work(cls: type) -> dict[str, list[str]]:
    """What the public methods that are not mirrored do on devices, by themselves or through others that are not."""
    all_methods = methods(cls)
    found: dict[str, list[str]] = {}
    for name in all_methods:
        seen: set[str] = set()
        queue = [name] if not name.startswith("_") and name not in OF_THIS_PROCESS else []
        while queue:
            current = queue.pop()
            if current in seen or current not in all_methods or is_mirrored(all_methods[current]):
                continue
            seen.add(current)
            queue += calls_of_self(all_methods[current])
            found.setdefault(name, []).extend(device_work(all_methods[current]))
    return {name: work for name, work in found.items() if work}


def test_every_method_of_the_runner_that_launches_is_mirrored() -> None:
    assert unmirrored_work(Runner) == {}
    told = {name for name, method in methods(Runner).items() if is_mirrored(method)}
    assert {"launch_forward", "launch_sampling", "add_processor", "copy_pages", "write_pages", "reset"} < told


def test_a_launching_method_that_is_not_mirrored_is_found() -> None:
    class Careless(Runner):
        def _first_page(self) -> None:
            self.programs.launch(("first",), self._copy_pages, self._pool)

        def show(self) -> None:
            self._first_page()

        def forget(self) -> None:
            self._pool = None
            self.features.forget_counts()

        def look(self) -> int:
            return self.pool.size

    assert unmirrored_work(Careless) == {"show": ["launch"], "forget": ["_pool", "forget_counts"]}


def test_nothing_is_compiled_or_launched_outside_of_a_mirrored_call(tiny_path: Callable[[str], Path]) -> None:
    with start(tiny_path("llama")) as engine:
        runner, copies = engine.runner, np.zeros((2, engine.runner.max_copies), np.int32)
        with pytest.raises(AssertionError, match=r"'copy of pages',.* is not compiled and launched by a mirrored call"):
            runner.programs.launch(("copy of pages",), runner._copy_pages, runner.pool, copies)
        assert runner.num_compiled == 0
        runner.copy_pages(copies)
        assert runner.num_compiled == 1
